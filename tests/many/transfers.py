"""What tests/many/test_transfer.py runs in forked worlds."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from trial import Trial

from longshift.dist.world import World
from longshift.errors import PeerError
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.placement import moving_unit
from longshift.program.operations import Op, Program
from longshift.program.step import Steps
from longshift.program.turns import Visit
from longshift.spec.model import ModelSpec
from longshift.state.copies import Copies
from longshift.state.home import Home
from longshift.state.precision import Precision
from longshift.state.transfer import SwitchTransfer
from longshift.state.visit import RowCopies, Switches, copies_of
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import Links
from longshift.switch.options import SwitchOptions
from longshift.switch.plan import Plan
from longshift.switch.spread import BoxesByWeight, Spread, spread_weights
from longshift.workload.groups import Edge


def numbered(spec: ModelSpec, name: str, box: Box, salt: int) -> Tensor:
    """float64 integers below 113, a function of weight, position and `salt`: exact in bfloat16, and sums of them in float32."""
    positions = torch.arange(spec.by_name[name].elements).view(spec.by_name[name].shape)[box.within(Box.whole(spec.by_name[name].shape))]
    return ((positions * 7 + 31 * len(name) + 13 * salt * (positions + 1)) % 113).double()


def go_round(
    world: World, trial: dict, home: str, stops: list[str], precision: str, per_node: int, planner: str, bucket_bytes: int
) -> dict[str, int]:
    """From home to each stop in turn, then its sums home: is every bit where it belongs? Counts what was looked at, and the elements that
    ranks had already and must not have been sent."""
    spec, how = Trial.from_json(trial).spec, Precision.of(precision)  # pyright: ignore[reportArgumentType]
    everyone = tuple(range(world.size))
    for purpose in ("weights", "sums"):
        world.prepare([everyone], purpose)
    cut = Layout.parse(home)
    here = Home(spec, cut, world, how, lambda n, b: numbered(spec, n, b, 0))
    options = SwitchOptions(planner, bucket_bytes, ahead_bytes=0)  # pyright: ignore[reportArgumentType]
    edges = [Edge(number + 1, Layout.parse(text)) for number, text in enumerate(stops)]
    way = Itinerary(spec, edges, Links(per_node, 8.0, 1.0), how.compute.itemsize, how.home.itemsize, options, cut)
    switches, steps = Switches(way, here, world, everyone, how), Steps(way, world.rank, how.compute.itemsize, how.home.itemsize)
    seen = {"arrived": 0, "returned": 0, "exchanges": 0}
    before, made = None, {}
    for number, text in enumerate(stops):
        cut = way.cuts[Layout.parse(text)]
        stop = made[cut] = made.get(cut) or copies_of(spec, cut, world, here, how)
        if stop is before:
            before = None
        stop.close(-1)
        transfer, held = switches.bring(before, stop), []
        program = steps.program([*([Visit(before.cut.layout, 0)] if before else []), Visit(stop.cut.layout, 0)])
        coming, leaving = program_of_switch(program, last=int(before is not None))
        for op in coming:
            if op.kind == "open":
                stop.open(op.unit)
            elif op.kind == "exchange":
                transfer.post(op.number)
                watch(held, transfer, before, stop)
            elif op.kind == "await exchange":
                transfer.take_in(op.number)
            else:
                assert before is not None
                before.close(op.unit)
        seen["exchanges"] += len(held)
        source = spread_weights(spec, before.cut.layout, before.cut.side) if before and not isinstance(before, RowCopies) else {}
        if not isinstance(stop, RowCopies):
            units = {param.name: moving_unit(spec, param) for param in spec.params}
            assert max(held, default=0) <= most_bytes(transfer.plan, source, units)[world.rank], (text, max(held))
        for name, boxes in boxes_of(stop).items():
            for box in boxes:
                there = stop.part(name, box)
                assert there is not None
                assert torch.equal(there, numbered(spec, name, box, 0).to(how.compute)), (text, name, box)
                seen["arrived"] += box.elements
        before = stop
        fill_sums(stop, how.home, world.rank + 1 + 10 * number)
        here.drop_gradients()
        switches.total(-1)
        back = switches.take_home(stop)
        for op in leaving:
            (back.post if op.kind == "exchange" else back.take_in)(op.number)
        contributions = world.gather_text(" ".join(f"{n}{b}" for n, some in boxes_of(stop).items() for b in some))
        parsed = [[(w.split("[")[0], Box.parse("[" + w.split("[")[1])) for w in text.replace(", ", ",").split()] for text in contributions]
        for shard in here.shards:
            assert shard.grad is not None
            for name, box, view in shard.views(shard.grad):
                expected = torch.zeros(box.shape, dtype=torch.float64)
                for rank, held in enumerate(parsed):
                    for other, part in held:
                        if other == name and (common := box & part):
                            expected[common.within(box)] += numbered(spec, name, common, rank + 1 + 10 * number)
                assert torch.equal(view.double(), expected), (text, name, box)
                seen["returned"] += box.elements
    world.forget()
    return seen


def program_of_switch(program: Program, last: int) -> tuple[list[Op], list[Op]]:
    """What a program does to bring the weights of visit `last`, and to bring its sums home."""
    coming = [op for op in program if op.kind in ("open", "close") or op.way == "weights"]
    coming = [op for op in coming if op.visit == (last if op.kind != "close" else last - 1)]
    return coming, [op for op in program if op.visit == last and op.way == "sums"]


def watch(held: list[int], transfer: SwitchTransfer, leaving: Copies | None, target: Copies) -> None:
    """Note the bytes of copies, buffers and passing slices that are held now; home's own tensors are not counted."""
    copies = [unit.memory.flat for stop in (leaving, target) if stop and not isinstance(stop, RowCopies) for unit in stop.units.values()]
    buffers = [r.flat for r in (transfer.fused, *transfer.passing.values()) if r is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*copies, *buffers)}
    held.append(sum(size for at, size in storages.items() if at))


def boxes_of(stop: Copies) -> dict[str, list[Box]]:
    """What a switch brings this rank."""
    if not isinstance(stop, RowCopies):
        return {name: list(boxes) for name, boxes in stop.boxes.items()}
    found: dict[str, list[Box]] = {}
    for shard in stop.home.shards:
        for placed in shard.boxes:
            if placed.box:
                found.setdefault(placed.name, []).append(placed.box)
    return found


def fill_sums(stop: Copies, dtype: torch.dtype, salt: int) -> None:
    """As if micro-batches had left these gradients."""
    if not isinstance(stop, RowCopies):
        for unit in stop.units:
            stop.accumulate(unit)
    else:
        for shard in stop.home.shards:
            shard.grad = torch.zeros(shard.master.shape, dtype=dtype)
    for name, boxes in boxes_of(stop).items():
        for box in boxes:
            total = stop.total(name, box)
            assert total is not None
            total.copy_(numbered(stop.spec, name, box, salt))


def disagree(world: World, trial: dict) -> dict[str, object]:
    """Rank 1 plans with another planner: what each rank is told, and whether anything moved."""
    spec, how = Trial.from_json(trial).spec, Precision.of("float64")
    everyone = tuple(range(world.size))
    world.prepare([everyone], "weights")
    cut = Layout.parse("dp4.z1")
    here = Home(spec, cut, world, how, lambda n, b: numbered(spec, n, b, 0))
    options = SwitchOptions("algorithm1" if world.rank == 1 else "fan_out")
    edges = [Edge(1, Layout.parse("tp4")), Edge(2, cut)]
    way = Itinerary(spec, edges, Links(2, 8.0, 1.0), 8, 8, options)
    switches = Switches(way, here, world, everyone, how)
    stop = copies_of(spec, way.cuts[Layout.parse("tp4")], world, here, how)
    for copies in stop.units.values():
        copies.memory.hold()
        copies.memory.flat.zero_()
    try:
        switches.bring(None, stop)
        said = ""
    except PeerError as fault:
        said = str(fault)
    untouched = all(not copies.memory.flat.any() for copies in stop.units.values())
    world.forget()
    return {"said": said, "untouched": untouched}


def most_bytes(plan: Plan, leaving: BoxesByWeight, units: Mapping[str, int]) -> np.ndarray:
    """Upper bound of what a switch takes on each rank, int64 [world]: the boxes that leave, the wanted ones, and the buffers.

    A weight's wanted boxes are made before the first bucket that fills them; its leaving boxes, in the plan's format, are dropped
    after its last bucket; weights of one of `units` are made and dropped together. Home, which stays, is not counted.
    With two rounds an exchange carries parts of two buckets, and slices that pass through a rank lie there besides."""
    before, after = np.zeros((2, plan.buckets + 1, plan.world), np.int64)
    spans: dict[int, tuple[int, int]] = {}
    for w in plan.weights:
        unit = units[w.name]
        first, last = (int(w.bucket[0]), int(w.bucket[-1])) if len(w.bucket) else (0, 0)
        known = spans.get(unit, (first, last))
        spans[unit] = min(first, known[0]), max(last, known[1])
    sizes: dict[Spread, np.ndarray] = {}
    for w in plan.weights:
        first, last = spans[units[w.name]]
        after[first] += w.slices.size_bytes @ w.slices.wants
        if (spread := leaving.get(w.name)) is not None:
            if spread not in sizes:
                sizes[spread] = held_bytes(spread, plan.world, plan.itemsize)
            before[0] += sizes[spread]
            before[last + 1] -= sizes[spread]
    return (before + after).cumsum(0)[: plan.buckets].max(0) + (1 if plan.rounds == 1 else 3) * plan.buffer_bytes


def held_bytes(spread: Spread, world: int, itemsize: int) -> np.ndarray:
    total = np.zeros(world, np.int64)
    for box, ranks in spread.boxes:
        total[list(ranks)] += box.elements * itemsize
    return total
