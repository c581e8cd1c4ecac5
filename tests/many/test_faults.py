"""Numbers that are not finite, steps without targets, ranks that die, and the forked world that the tests stand on."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from checkpoints import SPEC
from trial import Trial

from longshift.config_file import parse_config
from longshift.dist.fork import ForkedWorld
from longshift.dist.world import World
from longshift.errors import DataError, OutOfMemoryError, PeerError
from longshift.layout.layout import Layout
from longshift.trainer import admission, loop
from longshift.trainer.launch import rank_error

DEADLINE_S = 60.0  # for a case of a second: the machine may be busy
Call = Callable[..., list]


@pytest.fixture(scope="session")
def call(worlds) -> Call:
    """call(size, function, **arguments): on every rank of a forked world."""

    def run(size: int, function: str, **arguments: object) -> list:
        return worlds(size).call(f"checkpoints:{function}", DEADLINE_S, **arguments)

    return run


# ------------------------------------------------------------------------------------------------------------ not finite

Q1, DOWN, NORM = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("layout", "rank", "weight", "precision"),
    [
        ("dp1", 0, Q1, "float32"),
        ("dp2", 1, DOWN, "float32"),
        ("dp2.z2", 1, Q1, "bf16"),
        ("tp2", 1, DOWN, "float32"),
        ("pp2", 1, NORM, "float32"),
        ("u2.z3", 0, NORM, "float32"),
        ("dp3.z1", 2, Q1, "float32"),
        ("u2.z3", 1, Q1, "fp16"),
    ],
)
def test_a_nan_in_a_weight_stops_all_ranks_and_touches_nothing(call, layout, rank, weight, precision):
    size = Layout.parse(layout).world
    answers = call(size, "poison", layout=layout, rank=rank, weight=weight, precision=precision)
    assert [answer["put"] for answer in answers] == [int(r == rank) for r in range(size)]
    assert len({answer["said"] for answer in answers}) == 1
    said = answers[0]["said"]
    assert re.match(r"loss ([0-9.]+|nan); not finite: ", said)  # torch's attention on CPU gives 0 for a query that is NaN
    assert f"not finite: {weight} at home on rank {rank}. Documents 0 to 2 of the shuffled order. Nothing was updated." in said
    assert all(answer["same"] for answer in answers)
    good = call(size, "third_loss", layout=layout, precision=precision)
    assert [answer["third"] for answer in answers] == good  # nothing of the bad step is left


@pytest.mark.parametrize("layout", ["dp1", "dp2.z1", "tp2", "pp2", "u2.z3"])
def test_a_loss_that_overflows_names_a_gradient(call, layout):
    """The weights are finite: one row of the head is so large that its logit is not."""
    answers = call(Layout.parse(layout).world, "poison", layout=layout, rank=0, weight="", head_row=SPEC.vocab - 1)
    assert sum(answer["put"] for answer in answers) >= 1
    assert len({answer["said"] for answer in answers}) == 1
    assert "; not finite: the gradient of model.embed_tokens.weight at home on rank 0. " in answers[0]["said"]
    assert "loss nan" in answers[0]["said"] or "loss inf" in answers[0]["said"]
    assert all(answer["same"] for answer in answers)


# ------------------------------------------------------------------------------------------------------------ no targets

FEW = ((1, 13), (1, 1, 12), (16, 1), (1, 2, 1, 1), (1, 1, 9, 1))


FEW_TRIAL = Trial(SPEC, FEW, capacity=16)


@pytest.mark.parametrize("layout", ["dp1", "dp2.z1", "dp3", "dp3.z2", "tp2", "pp2", "u2.z3", "ring2", "dp2.tp2.z3"])
def test_a_replica_or_a_shard_without_a_target_contributes_zero(worlds, truth, layout):
    """Documents of one token, beside longer ones in other packs or in the same; capacity makes them packs of their own."""
    arguments = {"trial": FEW_TRIAL.to_json(), "layout": layout, "path": truth(FEW_TRIAL)}
    found = worlds(Layout.parse(layout).world).call("trial:compare", DEADLINE_S, **arguments)
    assert all(value <= 1e-12 for answer in found for value in answer.values()), found


@pytest.mark.parametrize("layout", ["dp1", "dp2.z1", "dp3", "tp2", "pp2", "u2.z3", "ring2"])
def test_a_step_without_any_target_is_zero(call, layout):
    answers = call(Layout.parse(layout).world, "no_targets", layout=layout, lengths=[[5, 1], [1], [1, 1, 1], [4]])
    assert all(answer == answers[0] for answer in answers)
    first, one, three, last, finite = answers[0]
    assert one == three == [0.0, 0.0]
    assert first[0] > 1
    assert last[0] > 1
    assert finite == [1.0]


# ---------------------------------------------------------------------------------------------------------------- deaths


@pytest.mark.usefixtures("worlds")  # so that it runs while this process may fork
@pytest.mark.parametrize("layout", ["dp3", "dp3.z3", "pp3", "tp3", "dp3 > tp3"])
def test_peers_of_a_rank_that_dies_fail_at_once(tmp_path, layout):
    """The call is made by hand: ForkedWorld.call would end the others as soon as it sees the death."""
    with ForkedWorld(3) as world:
        world.call("checkpoints:pid")
        line = {"function": "checkpoints:die_in_step", "arguments": {"layout": layout, "rank": 1, "folder": str(tmp_path)}}
        for pipe in world._pipes:
            pipe.send_bytes(json.dumps(line).encode())
        until = time.monotonic() + DEADLINE_S
        while len(list(tmp_path.glob("[0-9]"))) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    told = {rank: json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)}
    assert told[1][1] == "gone"
    for rank in (0, 2):
        assert type(rank_error(RuntimeError(told[rank][1]), rank)) is PeerError, told
        assert told[rank][0] - told[1][0] < 5


def fail_alone(world: World) -> str:
    """Rank 0 fails while the others do not come back; taking the world down would wait for them, as NCCL does."""
    if world.rank:
        return ""

    def steps(*how: object) -> Iterator[Mock]:
        yield Mock(step=1)
        raise OutOfMemoryError("no more")

    def together(world: World) -> None:
        world.everyone.all_reduce(torch.zeros(1))

    with (
        patch.object(World, "from_environment", lambda *_: world),
        patch.object(World, "close", together),
        patch.object(loop, "train_stage", steps),
        patch.object(loop, "undecided_plan", lambda *_: None),  # ranks ask together
    ):
        try:
            list(loop.train(parse_config(SMALL_RUN), Mock(), False, lambda: False, None, Mock(), Mock(), None))
        except OutOfMemoryError as fault:
            return str(fault)
    return "none"


def test_a_rank_that_fails_does_not_wait_for_the_others(worlds):
    assert worlds(2).call("test_faults:fail_alone", 10.0) == ["no more", ""]


SMALL_RUN = """
model: {preset: tiny-llama}
data: {train: [{corpus: python}], max_len: 1K, overlong: split}
train: {tokens_per_step: 2K, steps: 1, lr: 1e-3}
layout: dp2
save: {dir: run}
"""


def admitted(world: World, config: str, crowded: int) -> str:
    """What admission says on this rank when only rank `crowded` has no room."""
    room = 0 if world.rank == crowded else 1 << 40
    with patch.object(admission, "_room", lambda _: (room, 0)):
        try:
            admission.admit(parse_config(config), world, Path())
        except OutOfMemoryError as fault:
            return str(fault)
    return ""


@pytest.mark.parametrize("crowded", [0, 1])
def test_a_run_without_room_on_one_rank_is_refused_on_all(worlds, crowded):
    said = worlds(2).call("test_faults:admitted", DEADLINE_S, config=SMALL_RUN, crowded=crowded)
    assert said[0] == said[1]
    assert re.match(r"rank \d needs \S+ GiB for tensors, .* and there are 0\.00 GiB for it", said[0])
    assert worlds(2).call("test_faults:admitted", DEADLINE_S, config=SMALL_RUN, crowded=-1) == ["", ""]


# ---------------------------------------------------------------------------------------------------------- forked world


def alive(pid: int) -> bool:
    """Whether there is such a process; a zombie is one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("worlds")  # so that it runs while this process may fork
def test_a_failing_call_tells_rank_and_traceback_and_the_next_one_works():
    with ForkedWorld(2) as world:
        before = world.call("checkpoints:pid")
        with pytest.raises(PeerError, match=r"checkpoints:fail: rank 1 failed: Traceback") as caught:
            world.call("checkpoints:fail", rank=1)
        assert "ZeroDivisionError: the reason" in str(caught.value)
        assert "in fail\n" in str(caught.value)
        after = world.call("checkpoints:pid")
    assert len({*before, *after, os.getpid()}) == 5
    assert not any(map(alive, (*before, *after)))


def refuse(world: World) -> None:
    raise DataError("line 7 is bad")


@pytest.mark.usefixtures("worlds")  # so that it runs while this process may fork
def test_a_persons_fault_keeps_its_class():
    with ForkedWorld(1) as world, pytest.raises(DataError, match=r"^line 7 is bad$"):
        world.call("test_faults:refuse")


@pytest.mark.usefixtures("worlds")  # so that it runs while this process may fork
def test_a_late_call_is_ended_by_its_deadline_and_the_next_one_works():
    with ForkedWorld(2) as world:
        before = world.call("checkpoints:pid")
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"checkpoints:sleep: no answer from ranks \[1\] in 0\.5 s"):
            world.call("checkpoints:sleep", 0.5, rank=1, seconds=60.0)
        assert time.monotonic() - start < 50
        assert not any(map(alive, before))
        assert len(world.call("checkpoints:sleep", rank=1, seconds=0.0)) == 2


@pytest.mark.usefixtures("worlds")  # so that it runs while this process may fork
def test_a_death_in_a_call_is_told_and_leaving_ends_all():
    with ForkedWorld(3) as world:
        pids = world.call("checkpoints:pid")
        with pytest.raises(PeerError, match="checkpoints:leave: rank 1 died"):
            world.call("checkpoints:leave", rank=1)
        assert not any(map(alive, pids))
        pids = world.call("checkpoints:pid")
        assert all(map(alive, pids))
    assert not any(map(alive, pids))
