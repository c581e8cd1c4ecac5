"""Streaming moves no bit: where chunks wait, how far ahead they come and how late they arrive are not seen in what is computed."""

import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from forked import DEADLINE_S, Worlds
from parity import FAMILIES
from streams import foreseen
from test_precision import bits, state_bits
from torch import Tensor
from trial import Trial, build

from longshift.dist.world import World
from longshift.documents.batch import StepBatch
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.schedule.event import Event, dependencies
from longshift.spec.formats import PrecisionName
from longshift.state.home import Home
from longshift.step.chunk_runner import ChunkedPacks, ChunkPlayer
from longshift.step.player import Player
from longshift.step.runner import Runner
from longshift.step.update import State, train_step
from longshift.stream.tiers import DiskTier

LENGTHS = ((41, 2), (23, 1, 2, 6), (17,))
OTHERS = ("disk", "disk.every1", "host.kv-offload", "disk.kv-offload", "disk.every1.kv-offload", "every2", "every2.disk.kv-offload")
RUNS = 100


def trial_of(precision: PrecisionName, layers: int = 2, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Trial:
    return Trial(replace(FAMILIES["llama"], layers=layers), lengths, precision, 48)


def gradient_bits(home: Home) -> dict[str, str]:
    return {f"grad {number}": bits(shard.grad) for number, shard in enumerate(home.shards) if shard.grad is not None}


def trained_bits(world: World, trial: dict, layout: str) -> dict[str, str]:
    """This rank's gradient sums of every step, its home after all of them, and the losses."""
    what, found = Trial.from_json(trial), {}
    state, player = build(what, [Layout.parse(layout)], world)
    for step, batch in enumerate(what.batches()):

        def after(op: Op, step: int = step) -> None:
            if op.kind == "norm":
                found.update({f"{step} {name}": value for name, value in gradient_bits(state.home).items()})

        player.after = after
        found[f"{step} loss"] = train_step(state, batch, player).loss.hex()
    return found | state_bits(state)


@pytest.mark.parametrize(("where", "precision"), [("dp1", "bf16"), ("u2", "float32")])
def test_tiers_prefetch_and_recomputation_move_no_bit(worlds: Worlds, where: str, precision: PrecisionName):
    def run(how: str) -> list[dict[str, str]]:
        layout, trial = Layout.parse(f"{where}.chunk5{how}"), trial_of(precision, layers=3).to_json()
        return worlds(layout.world).call("test_streaming:trained_bits", DEADLINE_S, trial=trial, layout=str(layout))

    first = {}
    for schedule in ("", ".fpdt"):
        first[schedule] = run(schedule)
        for place in OTHERS:
            assert run(f"{schedule}.{place}") == first[schedule], (schedule, place)
    assert first[""] != first[".fpdt"], "sums in another order are other bits"


# Slow and irregular memory


class Irregular(DiskTier):
    """One move in ten takes up to 3 ms. `forgets`: every way out takes 2 ms, and memory is filled again meanwhile."""

    def __init__(self, seed: int, forgets: bool):
        super().__init__(Path(tempfile.gettempdir()), checked=not forgets)
        self.chance, self.forgets = random.Random(seed), forgets

    def _late(self) -> None:
        if self.chance.random() < 0.1:
            time.sleep(self.chance.random() * 0.003)

    def recycle(self, tensors: tuple[Tensor, ...]) -> None:
        if self.forgets:
            self.leaving.clear()
        super().recycle(tensors)

    def _write(self, start: int, tensors: tuple[Tensor, ...]) -> int:
        if self.forgets:
            time.sleep(0.002)
        self._late()
        return super()._write(start, tensors)

    def _read(self, stored, tensors: tuple[Tensor, ...]) -> None:
        self._late()
        super()._read(stored, tensors)


def use(runner: Runner, tier: DiskTier) -> None:
    """In place of the runner's tier."""
    assert runner.tier is not None
    runner.tier.close()
    runner.tier = tier


def once(state: State, player: Player, batch: StepBatch) -> dict[str, str]:
    """Forward and backward of a batch that is one pack, without an update."""
    (group,), (runner,) = player.groups([len(d.ids) for d in batch.documents]), player.runners.values()
    program = player.take(player.ready(batch.documents, [group]), 1 / batch.target_tokens)
    player.play(tuple(op for op in program if op.kind not in ("norm", "update")))
    found = gradient_bits(state.home) | {"loss": float(runner.loss).hex()}
    state.home.drop_gradients()
    return found


def irregular(world: World, trial: dict, layout: str, runs: int, forgets: bool) -> dict[str, int]:
    """How often each result came, the first one without delays."""
    what = Trial.from_json(trial)
    state, player = build(what, [Layout.parse(layout)], world)
    (runner,), (batch,) = player.runners.values(), what.batches()
    found = Counter([str(once(state, player, batch))])
    tier = Irregular(world.rank, forgets)
    use(runner, tier)
    found.update(str(once(state, player, batch)) for _ in range(runs))
    tier.close()
    return found


@pytest.mark.parametrize("schedule", ["stream", "fpdt"])
def test_delays_move_no_bit(worlds: Worlds, schedule: str):
    layout = str(replace(Layout.parse("chunk4.disk.kv-offload"), schedule=schedule))

    def results(length: int, **how) -> dict[str, int]:
        trial = trial_of("float32", 1, ((length, 7),)).to_json()
        return worlds(1).call("test_streaming:irregular", DEADLINE_S, trial=trial, layout=layout, **how)[0]

    assert list(results(15, runs=RUNS, forgets=False).values()) == [1 + RUNS]
    assert len(results(38, runs=4, forgets=True)) > 1, "a tier that fills memory too early is not noticed"


# What is played


class Recorder(DiskTier):
    """When each fetch and store ended, by key, in order."""

    def __init__(self):
        super().__init__(Path(tempfile.gettempdir()), checked=True)
        self.ended: dict[tuple, list[float]] = {}
        self.lock = threading.Lock()
        self.names: dict[int, tuple] = {}

    def put(self, key: tuple, *tensors: Tensor) -> None:
        self.watch = lambda copy: copy.add_done_callback(lambda _: self._note("store", key))
        super().put(key, *tensors)

    def fetch(self, key: tuple):
        self.watch = lambda copy: copy.add_done_callback(lambda _: self._note("fetch", key))
        return super().fetch(key)

    def _note(self, kind: str, key: tuple) -> None:
        with self.lock:
            self.ended.setdefault((kind, *key), []).append(time.perf_counter())


def played(world: World, trial: dict, layout: str) -> dict:
    """Of one pack: lists whose events did not come in their order, moves that had not ended when what depends on them began, and bytes that
    the tier counted beside those foreseen."""
    what, text = Trial.from_json(trial), Layout.parse(layout)
    state, player = build(what, [text], world)
    (runner,), (batch,) = player.runners.values(), what.batches()
    tier = Recorder()
    use(runner, tier)
    assert isinstance(runner, ChunkedPacks)
    plays: list[tuple[tuple[Event, ...], list[Event], list[float], ChunkPlayer]] = []
    run = ChunkPlayer.run

    def recorded(self: ChunkPlayer, events: tuple[Event, ...]) -> None:
        plays.append((events, [], [], self))
        run(self, events)

    def began(name: str):
        right = getattr(ChunkPlayer, name)

        def wrapped(self: ChunkPlayer, event: Event) -> None:
            plays[-1][2][-1] = time.perf_counter()
            right(self, event)

        return wrapped

    play = ChunkPlayer._play

    def watched(self: ChunkPlayer, event: Event) -> None:
        plays[-1][1].append(event)
        plays[-1][2].append(time.perf_counter())
        play(self, event)

    with pytest.MonkeyPatch.context() as patch:
        operations = ("qkv", "to_heads", "attend", "to_tokens", "tail", "tail_back", "to_tokens_back", "attend_back")
        for name in (*operations, "to_heads_back", "qkv_back", "embed", "embed_back", "loss"):
            patch.setattr(ChunkPlayer, name, began(name))
        patch.setattr(ChunkPlayer, "run", recorded)
        patch.setattr(ChunkPlayer, "_play", watched)
        once(state, player, batch)
    disordered = sum(list(events) != seen for events, seen, _, _ in plays)
    early = checked = 0
    moves = Counter()
    for events, _, starts, play in plays:
        ended: list[float] = []
        for event, start in zip(events, starts):
            key = (event.kind, *play.key(event.object))
            if event.kind in ("fetch", "store"):
                ended.append(tier.ended[key][moves[key]])
                moves[key] += 1
            else:
                ended.append(start)
        for number, (event, after) in enumerate(zip(events, dependencies(events), strict=True)):
            for before in (events[n] for n in after if n < number):
                moved = ended[events.index(before)]
                computes = event.kind in ("compute", "send") and before.kind == "fetch" and set(before.writes) & set(event.reads)
                follows = event.kind == "fetch" and before.kind == "store" and before.object == event.object
                if computes or follows:
                    checked += 1
                    early += moved > (starts[number] if computes else ended[number])
    told = foreseen(player, what, [len(d.ids) for d in batch.documents])
    counted = tier.moved
    tier.close()
    return {
        "plays": sum(bool(events) for events, *_ in plays),
        "disordered": disordered,
        "checked": checked,
        "early": early,
        "counted": [counted.peak_bytes, counted.put_bytes, counted.fetched_bytes, counted.held_bytes],
        "foreseen": [told["peak_bytes"], told["put_bytes"], told["fetched_bytes"], 0],
    }


@pytest.mark.parametrize("schedule", ["stream", "fpdt"])
@pytest.mark.parametrize("layout", ["chunk7.disk", "u2.chunk6.disk.kv-offload", "u2.chunk7.disk.every1.kv-offload"])
def test_lists_are_played_as_they_stand_and_move_the_bytes_foreseen(worlds: Worlds, layout: str, schedule: str):
    layout_ = replace(Layout.parse(layout), schedule=schedule)
    trial = trial_of("float32", 2, ((30, 11, 2),)).to_json()
    for found in worlds(layout_.world).call("test_streaming:played", DEADLINE_S, trial=trial, layout=str(layout_)):
        assert found["plays"] == 2 + 4 + 1  # embedding and two blocks both ways, head once
        assert (found["disordered"], found["early"]) == (0, 0)
        assert found["checked"] > 40
        assert found["counted"] == found["foreseen"]
