"""A layout visits a home that is cut otherwise: what moves is bitwise what it was, and training is that of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from longshift.dist.fork import ForkedWorld
from longshift.spec.model import ModelSpec
from longshift.train.check import Trial, uneven_lengths

SPEC = ModelSpec("llama", 257, 40, 5, 6, 2, 10, 37, 128, tied=True)
PAIRS = [
    ("dp4", "tp2.pp2"),
    ("dp4.z1", "tp4"),
    ("tp4.z1", "dp2.pp2.z3"),
    ("pp4", "dp2.u2.z3"),
    ("dp2.tp2.z2", "tp2.dp2.z1"),
    ("dp2.tp2.z1", "pp2.tp2"),
    ("ring4.z1", "pp2.v2.dp2"),
    ("dp2.tp2", "dp4.z3"),
]
NOTHING_MOVES = {"dp4", "dp2.tp2.z2"}  # every rank holds all; the guest is cut alike


@pytest.fixture(scope="module")
def four() -> Iterator[ForkedWorld]:
    with ForkedWorld(4) as world:
        yield world


@pytest.mark.parametrize(("home", "guest"), PAIRS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_moved_state_is_bitwise_the_same(four: ForkedWorld, home: str, guest: str, dtype: str) -> None:
    trial = Trial(SPEC, ()).to_json()
    answers = four.call("transfers:there_and_back", 120, trial=trial, home=home, guest=guest, dtype=dtype)
    assert all(answer["lent"] and answer["returned"] and answer["emptied"] for answer in answers), answers
    assert any(answer["moved"] for answer in answers) == (home not in NOTHING_MOVES)


def test_training_away_from_home_is_that_of_one_process(four: ForkedWorld, tmp_path: Path) -> None:
    trial, truth = Trial(SPEC, uneven_lengths(12, seed=3, documents=(2, 3))).to_json(), str(tmp_path / "truth.safetensors")
    with ForkedWorld(1) as alone:
        alone.call("longshift.train.check:write_reference", 120, trial=trial, path=truth)
    for home, guest in PAIRS[2:4]:
        answers = four.call("longshift.train.check:compare", 120, trial=trial, layout=guest, path=truth, home_layout=home)
        worst = {kind: max(answer[kind] for answer in answers) for kind in answers[0]}
        assert max(worst.values()) <= 1e-12, (home, guest, worst)
