"""Layouts that are cut otherwise than home: what moves is bitwise what it was, sums are exact, and training is that of one process."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import DEADLINE_S, Worlds
from parity import uneven_lengths
from trial import Trial

from longshift.dist.fork import ForkedWorld
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.spec.model import ModelSpec

SPEC = ModelSpec("llama", 31, 8, 3, 4, 2, 2, 7, 128, tied=True)
FOUR = ("dp4", "tp4", "pp3", "dp2.tp2", "pp2.tp2", "pp2.dp2", "dp2.u2", "u4", "ring2.tp2", "pp2:1-2.ring2", "dp2.pp2.v1", "tp2.pp2:2-1")
ROUNDS, STOPS = 24, 10  # 240 switches, and as many ways home
HOMES = ("dp4.z1", "tp4.z1", "pp2.dp2.z1", "dp2.tp2.z2")


def ways() -> Iterator:
    """Homes, random stops and ways to plan, all from one seed."""
    draw = random.Random(4)
    legal = [text for text in FOUR if Layout.parse(text).world == 4 and not faults(SPEC, Layout.parse(text), None)]
    for number in range(ROUNDS):
        home = HOMES[number % len(HOMES)]
        cut = Layout.parse(home)
        visits: list[str] = []
        while len(visits) < STOPS:
            text = f"{draw.choice(legal)}.z{draw.choice((1, 1, 2, 3))}"
            same = Layout.parse(text)
            if (same.dp * same.ulysses * same.ring, same.tp, same.pp) != (cut.dp * cut.ulysses * cut.ring, cut.tp, cut.pp):
                visits.append(text)
        how = (("float64", "float32", "bf16")[number % 3], (1, 2, 4)[number % 3], ("fan_out", "algorithm1")[number // 3 % 2])
        yield pytest.param(home, visits, *how, draw.choice((1000, 4000, 1 << 20)), id=f"{number}-{home}-{how[2]}-{how[1]}-{how[0]}")


@pytest.mark.parametrize(("home", "stops", "precision", "per_node", "planner", "bucket_bytes"), list(ways()))
def test_what_moves_is_bitwise_the_same(
    worlds: Worlds, home: str, stops: list[str], precision: str, per_node: int, planner: str, bucket_bytes: int
):
    arguments = {"home": home, "stops": stops, "precision": precision, "per_node": per_node, "planner": planner}
    seen = worlds(4).call("transfers:go_round", DEADLINE_S, trial=Trial(SPEC, ()).to_json(), bucket_bytes=bucket_bytes, **arguments)
    assert sum(rank["returned"] for rank in seen) == STOPS * SPEC.parameters
    assert sum(rank["arrived"] for rank in seen) >= STOPS * SPEC.parameters
    if bucket_bytes == 1000 and precision == "float64":
        assert min(rank["exchanges"] for rank in seen) > STOPS


def test_ranks_that_plan_differently_move_nothing(worlds: Worlds):
    for answer in worlds(4).call("transfers:disagree", DEADLINE_S, trial=Trial(SPEC, ()).to_json()):
        assert "rank 1 plans another switch" in answer["said"]
        assert answer["untouched"]


def test_training_away_from_home_is_that_of_one_process(worlds: Worlds, tmp_path: Path):
    trial, truth = Trial(SPEC, uneven_lengths(6, seed=3, documents=(2, 3))).to_json(), str(tmp_path / "truth.safetensors")
    with ForkedWorld(1) as alone:
        alone.call("trial:write_reference", 120, trial=trial, path=truth)
    for home, guest in (("tp4.z1", "dp2.pp2.z3"), ("pp2.dp2.z1", "dp2.u2.z3"), ("dp4.z1", "tp4")):
        answers = worlds(4).call("trial:compare", DEADLINE_S, trial=trial, layout=guest, path=truth, home_cut=home)
        worst = {kind: max(answer[kind] for answer in answers) for kind in answers[0]}
        assert max(worst.values()) <= 1e-12, (home, guest, worst)
