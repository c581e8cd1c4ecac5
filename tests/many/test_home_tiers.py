"""Home in host memory and on disk: the same bits as on the device, in every layout, stream and switch; resumed from tier to tier."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from forked import DEADLINE_S, Worlds
from home_ranks import half_of_home, in_memory, made, state_bits, trained
from parity import EDGES, trial_of
from torch import Tensor
from trial import Trial, build, parse_layouts

from longshift.dist.world import World
from longshift.errors import NonFiniteError
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.spec.formats import PrecisionName
from longshift.spec.model import ModelSpec
from longshift.state.checkpoint import Checkpoint, save
from longshift.state.home import Home, Shard, Source
from longshift.state.optimizer import Optimizer
from longshift.state.records import DiskVector, Records
from longshift.step.update import train_step

LAYOUTS: tuple[tuple[str, str, PrecisionName], ...] = (
    ("dp1", "llama", "float32"),
    ("dp2.z0", "gpt2", "bf16"),
    ("dp2.z1", "lora", "bf16"),
    ("dp2.z2", "llama-tied", "fp16"),
    ("dp2.z3", "lora-gpt2", "float32"),
    ("dp3.z3", "gpt2", "bf16"),
    ("tp2", "qwen3", "float32"),
    ("pp2.dp2.z3", "llama-tied", "bf16"),
    ("pp2.v2", "llama", "float32"),
    ("u2.z1", "llama", "bf16"),
    ("ring2.z2", "gemma3", "float32"),
    ("u2.chunk16.disk.kv-offload", "llama-tied", "bf16"),
    ("dp2.z3 > u2.chunk16.disk", "lora", "float32"),
    ("tp2 > dp2.z0", "llama-tied", "bf16"),
    ("dp2.z3 > tp2", "sgd", "bf16"),
    ("pp2 > dp2.z3 > tp2.chunk16.disk.kv-offload", "llama", "float32"),
    ("dp4.z2 > dp2.tp2.z3 > pp2.u2", "gpt2", "bf16"),
)


@pytest.fixture(scope="module")
def run(worlds: Worlds) -> Callable[..., list]:
    """run(function, layout, trial, **more): its answers on all ranks."""

    def ask(function: str, layout: str, trial: Trial, **more: object) -> list:
        size, module = Layout.parse(layout.split(" > ")[0]).world, "home_ranks" if function == "trained" else "test_home_tiers"
        return worlds(size).call(f"{module}:{function}", DEADLINE_S, layout=layout, trial=trial.to_json(), **more)

    return ask


def trial(family: str, precision: PrecisionName, layout: str, steps: int = 3, **more: object) -> Trial:
    return trial_of(family, steps, precision=precision, edges=EDGES[: layout.count(" > ")], **more)


@pytest.mark.parametrize(("number", "case"), list(enumerate(LAYOUTS)))
def test_a_home_in_several_memories_moves_no_bit(run: Callable[..., list], number: int, case: tuple[str, str, PrecisionName]):
    layout, family, precision = case
    what = trial(family, precision, layout)
    size = half_of_home(what, layout)
    split = (f"device {size}, disk rest", f"device {size // 2}, host {size // 2}, disk rest", f"host {size}, disk rest")[number % 3]
    device, parts = (run("trained", layout, replace(what, home=home)) for home in ("device", split))
    assert [rank["bits"] for rank in parts] == [rank["bits"] for rank in device]
    assert all(rank["left"] == 0 for rank in parts)
    tiers = [set(rank["tiers"].values()) for rank in parts]
    assert all("disk" in some and len(some) > 1 for some in tiers), tiers


@pytest.mark.parametrize(("layout", "family", "precision"), LAYOUTS)
def test_where_home_lies_moves_no_bit(run: Callable[..., list], layout: str, family: str, precision: PrecisionName):
    what = trial(family, precision, layout)
    device, host, disk = (run("trained", layout, replace(what, home=home)) for home in ("device", "host", "disk"))
    for found in (host, disk):
        assert [rank["bits"] for rank in found] == [rank["bits"] for rank in device]
    assert all(rank["left"] == 0 and min(rank["moved"]) > 0 for rank in disk)


CLIPS = (None, 1e-3, None, None, 1e-3, None)  # by step; the norm is far above the small one
EARLY = (False, True, False, True, True, False)  # whether units are updated before the norm: where that of the step before did not clip


def alternating(world: World, trial: dict, layout: str, mutant: str = "", room: bool = True) -> dict:
    """What home has after steps that clip and steps that do not; by step, the units that were updated before the norm; those that can be.
    `room`: whether the disk has any for second places."""
    with pytest.MonkeyPatch.context() as patch:
        if not room:
            patch.setattr(Records, "double", lambda records, vectors, ranks: False)
        if mutant:
            MUTANTS[mutant](patch)
        state, player = made(world, what := Trial.from_json(trial), layout)
        early: list[list[int]] = []
        player.after = lambda op: early[-1].append(op.unit) if op.part == "early" else None
        norms, left = [], 0
        for clip, batch in zip(CLIPS, what.batches(), strict=True):
            early.append([])
            state.clip = clip
            norms.append(train_step(state, batch, player, leave=True).grad_norm)
            left = max(left, in_memory(state.home))
        player.finish()
        found = state_bits(state) | {"norms": str([norm.hex() for norm in norms])}
        can = sorted(player.steps.early)
        state.home.close()
    return {"bits": found, "early": [sorted(units) for units in early], "can": can, "left": left, "norms": norms}


@pytest.mark.parametrize(("layout", "family", "precision"), [case for case in LAYOUTS if case[0].count(" > ") < 2 and case[0] != "tp2"])
def test_updates_before_the_norm_move_no_bit(run: Callable[..., list], layout: str, family: str, precision: PrecisionName):
    what = trial(family, precision, layout, len(CLIPS))
    parts = f"host {half_of_home(what, layout)}, disk rest"
    device, disk, split = (run("alternating", layout, replace(what, home=home)) for home in ("device", "disk", parts))
    for found in (disk, split):
        assert [rank["bits"] for rank in found] == [rank["bits"] for rank in device]
        for rank in found:
            assert rank["left"] == 0
            assert min(rank["norms"]) > 1e-2
            most = next(filter(None, rank["early"]), []) if precision != "fp16" else []
            assert set(most) <= set(rank["can"])
            right = [most if early else [] for early in EARLY]
            some = " > " in layout  # the last group has home's layout, in some steps or in none
            assert all(own == units or (some and not own) for own, units in zip(rank["early"], right, strict=True))
    assert some or precision == "fp16" or any(any(rank["early"]) for rank in disk)


def test_a_disk_without_room_for_second_places_trains_as_well(run: Callable[..., list]):
    what = trial("llama", "float32", "dp2.z2", len(CLIPS))
    device = run("alternating", "dp2.z2", what)
    disk = run("alternating", "dp2.z2", replace(what, home="disk"), room=False)
    assert [rank["bits"] for rank in disk] == [rank["bits"] for rank in device]
    assert not any(rank["can"] or any(rank["early"]) for rank in disk)


def overflowing(world: World, trial: dict, layout: str) -> dict:
    """A step in which the last rank's gradients are not finite, between two good ones."""
    state, player = made(world, what := Trial.from_json(trial), layout)
    first, second, third = what.batches()
    train_step(state, first, player)
    before, early = state_bits(state), set[int]()

    def spoil(op: Op) -> None:
        early.update({op.unit} if op.part == "early" else ())
        if world.rank == world.size - 1 and op.kind == "await reduce":
            shard = next(s for s in state.home.learning if s.bucket.unit == op.unit and s.grad is not None)
            assert shard.grad is not None
            shard.grad[0] = math.inf

    player.after = spoil
    said = ""
    try:
        skipped = train_step(state, second, player).skipped
    except NonFiniteError as fault:
        skipped, said = False, str(fault)
    player.after = None
    same, left = state_bits(state) == before, in_memory(state.home)
    train_step(state, third, player)
    state.home.close()
    return {"skipped": skipped, "same": same, "left": left, "said": said, "early": len(early)}


@pytest.mark.parametrize(("precision", "clip"), [("fp16", 1e-3), ("bf16", 1e-3), ("bf16", None)])
def test_a_gradient_that_is_not_finite_leaves_what_is_on_disk_alone(run: Callable[..., list], precision: PrecisionName, clip: float | None):
    what = trial("llama", precision, "dp2.z2", home="disk", clip=clip)
    for rank in run("overflowing", "dp2.z2", what):
        assert rank["same"]
        assert rank["left"] == 0
        assert rank["skipped"] == (precision == "fp16")
        assert (rank["early"] > 0) == (clip is None)
        assert ("at home on rank 1" in rank["said"]) == (precision == "bf16"), rank["said"]


def read_one(spec: ModelSpec, sources: dict[bool, Source], name: str, box: Box) -> Tensor:
    return sources[spec.by_name[name].frozen](name, box)


def resumed(world: World, trial: dict, layout: str, homes: list[str], folder: str) -> dict[str, str]:
    """Steps one by one, each in a home of its own that the one before has left as a checkpoint."""
    what = Trial.from_json(trial)
    state, player = made(world, replace(what, home=homes[0]), layout)
    for number, batch in enumerate(what.batches()):
        if number:
            run = Path(folder)
            save(run, number, state.optimizer.state(), {}, world, keep=1)
            state.home.close()
            saved = Checkpoint.latest(run, world)
            read = {True: what.source(), False: saved.source()}  # by whether a weight is frozen
            source = partial(read_one, what.spec, read)
            world.per_node = min(2, world.size)
            state, player = build(replace(what, home=homes[number % len(homes)]), parse_layouts(layout), world, source=source)
            state.optimizer.restore(saved.read, "float32", number)
        train_step(state, batch, player)
    found = state_bits(state)
    state.home.close()
    return found


@pytest.mark.parametrize(("layout", "family"), [("dp2.z3", "llama"), ("tp2 > dp2.z1", "lora")])
def test_a_run_goes_on_from_tier_to_tier(run: Callable[..., list], tmp_path: Path, layout: str, family: str):
    what = trial(family, "float32", layout, 5)
    whole = run("trained", layout, what)
    found = run(
        "resumed", layout, what, homes=["disk", f"device {half_of_home(what, layout)}, disk rest", "host", "device"], folder=str(tmp_path)
    )
    assert found == [{key: value for key, value in rank["bits"].items() if key != "steps"} for rank in whole]


# Mistakes


def forgotten_write(patch: pytest.MonkeyPatch) -> None:
    """What was updated is not written."""
    patch.setattr(Records, "write_piece", lambda records, piece: None)


def stale_norms(patch: pytest.MonkeyPatch) -> None:
    """The norm is of the gradient sums as they were first written."""
    native = Home.write

    def write(home: Home, unit: int, part: str) -> None:
        before = {id(shard): shard.norms for shard in home.learning if shard.bucket.unit == unit and shard.norms}
        native(home, unit, part)
        for shard in home.learning:
            shard.norms = before.get(id(shard), shard.norms)

    patch.setattr(Home, "write", write)


def sums_begun_again(patch: pytest.MonkeyPatch) -> None:
    """Every reduction takes the place of the sum before."""

    def receive(shard: Shard, total: Tensor) -> None:
        (shard.begin() if shard.grad is None else shard.grad).copy_(total)

    patch.setattr(Shard, "receive", receive)


def stands_though_the_norm_clips(patch: pytest.MonkeyPatch) -> None:
    """What was written to second places counts, and is updated again."""
    native = Optimizer.take_back

    def take_back(optimizer: Optimizer) -> None:
        for shard in optimizer.home.learning:
            if shard.bucket.unit in optimizer._early:
                shard.take_second_places()
        native(optimizer)

    patch.setattr(Optimizer, "take_back", take_back)


def forgotten_second_places(patch: pytest.MonkeyPatch) -> None:
    """What was written to second places never counts."""
    patch.setattr(Shard, "take_second_places", lambda shard: None)


def one_place(patch: pytest.MonkeyPatch) -> None:
    """Early updates are written over what they would be taken back to."""
    native = DiskVector.write
    patch.setattr(DiskVector, "write", lambda vector, second=False: native(vector))
    patch.setattr(Shard, "take_second_places", lambda shard: None)


OF_EARLY = (stands_though_the_norm_clips, forgotten_second_places, one_place)
MUTANTS = {mutant.__name__: mutant for mutant in (forgotten_write, stale_norms, sums_begun_again, *OF_EARLY)}


def mutated(world: World, trial: dict, layout: str, mutant: str) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        return trained(world, trial, layout)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_shows(run: Callable[..., list], mutant: str):
    early = MUTANTS[mutant] in OF_EARLY
    what = trial("llama", "float32", "dp2.z2", len(CLIPS) if early else 3)
    right = run("alternating" if early else "trained", "dp2.z2", what)
    wrong = run("alternating" if early else "mutated", "dp2.z2", replace(what, home="disk"), mutant=mutant)
    assert [rank["bits"] for rank in wrong] != [rank["bits"] for rank in right]
