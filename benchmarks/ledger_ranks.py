"""What ranks do for `ledger.py`: two steps under a mode that counts the bytes of all tensors, and what the ledger predicts of them."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from trial import Trial, build, parse_layouts

from longshift.dist import collectives
from longshift.dist.live_bytes import HeldBytes, prompt_release
from longshift.dist.world import World
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout
from longshift.spec.formats import formats_of
from longshift.step.update import train_step
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import assumed
from longshift.switch.options import SwitchOptions
from longshift.weigh.ledger import StepEstimate
from longshift.weigh.needs import StepShape
from longshift.weigh.recorder import Transport


def weigh(world: World, trial: dict, layout: str, per_node: int | None = None, trace: bool = False) -> dict[str, Any]:
    """Bytes on the device at the most in the second of two equal steps, and bytes sent by communicator. Where units are updated early, no
    step clips, the second has late updates too, and bytes that move are those of a third. `trace`: with the first operations
    after which bytes differ from what the ledger says by another number than before."""
    what, layouts = Trial.from_json(trial), parse_layouts(layout)
    world.per_node = per_node or world.size
    first, batch = what.batches()
    after: list[int] = []
    with prompt_release(), HeldBytes() as held, Counted(world) as counted:
        state, player = build(what, layouts, world)
        # A stage whose state fits the device updates nothing early, and still takes as many steps as the others.
        has_early = "early" in world.gather_text("early" if player.steps.early else "")
        state.clip = None if has_early else state.clip
        train_step(state, first, player, leave=True)
        held.restart()
        if has_early:
            train_step(state, first, player, leave=True)
        counted.restart()
        records = state.home.records
        if records:
            records.moved.restart()
        if trace:
            player.after = lambda op: after.append(held.now["cpu"])
        train_step(state, batch, player, leave=True)
        found: dict[str, Any] = {"measured": held.most["cpu"], "sent": counted.told()}
        found["records"] = {"home in": records.moved.fetched_bytes, "home out": records.moved.put_bytes} if records else {}
    player.close()
    state.home.close()
    world.forget()
    if trace:
        weighed, said = predict(replace(what, given=()), tuple(layouts), world.rank, per_node=per_node)
        found |= {"alive": weighed.peaks["device"].alive[:12], "apart": apart(after, said)}
    return found


@lru_cache(maxsize=4)
def shape_of(trial: Trial, layouts: tuple[Layout, ...], per_node: int | None = None) -> StepShape:
    """What of a trial decides how large its steps are. As `trial.build` makes it."""
    formats, edges = formats_of(trial.precision, len(trial.rule.moments), trial.packed, trial.wire), tuple(trial.groups(layouts))
    formats = replace(formats, float8=trial.formats.float8)
    options = SwitchOptions(trial.planner, trial.bucket_bytes, trial.ahead_bytes)
    links = assumed(per_node or layouts[0].world)
    itinerary = Itinerary(trial.spec, edges, links, formats.compute_bytes, formats.home_bytes, options)
    return StepShape(itinerary, edges, formats, 0, trial.capacity, home_in=HomeTiers.parse(trial.home))


def predict(
    trial: Trial,
    layouts: tuple[Layout, ...],
    rank: int,
    transport: Transport = "gloo",
    per_node: int | None = None,
) -> tuple[StepEstimate, list[tuple[str, int]]]:
    """What the ledger says of a trial's last step on a rank, and of the device after each of its operations."""
    shape, lengths = shape_of(trial, layouts, per_node), trial.lengths[-1]
    ledger = shape.ledger(rank, transport)
    visits, packs = ledger.steps.visits(shape.itinerary.groups(lengths, shape.edges), lengths)
    said = list[tuple[str, int]]()
    weighed = ledger.play(
        visits,
        [[[lengths[d] for d in pack] for pack in some] for some in packs],
        lambda op: said.append((str(op), ledger.allocations.now["device"])),
    )
    return weighed, said


def from_few(trial: Trial, layouts: tuple[Layout, ...], rank: int) -> StepEstimate:
    """What admission says of a trial whose steps have one full pack of each group, from packs of few chunks."""
    shape = shape_of(trial, layouts)
    order = shape.itinerary.order(layouts)
    return shape.estimate([shape.edges[i] for i in order], rank, "gloo")


def row_of(name: dict[str, Any], found: dict[str, Any], weighed: StepEstimate) -> dict[str, Any]:
    """A row of the benchmark: measured beside predicted."""
    peak, expected = weighed.peaks["device"], {axis: size for axis, size in weighed.sent.items() if size}
    row = {"measured": found["measured"], "predicted": peak.total, "ratio": found["measured"] / peak.total}
    records = {way: size for way, size in weighed.moved.items() if way.startswith("home")}
    row |= {"records": {way: size for way, size in found["records"].items() if size}, "records_predicted": records}
    return name | row | {"sent": found["sent"], "sent_predicted": expected, "peak_at": peak.op}


def apart(measured: Sequence[int], said: Sequence[tuple[str, int]], few: int = 1024, most: int = 12) -> list[tuple[int, str, int]]:
    """Operations after which the difference of measured and predicted bytes is another than before: number, operation, by how much."""
    found, before = [], None
    for number, (size, (op, predicted)) in enumerate(zip(measured, said)):
        if before is not None and abs(size - predicted - before) > few:
            found.append((number, op, size - predicted - before))
        before = size - predicted
    return [(len(measured) - len(said), "operations more", 0), *found][:most]


class Counted(ExitStack):
    """Counts what this rank sends to others while it is entered, by the purpose of the process group. Mutable."""

    def __init__(self, world: World):
        super().__init__()
        self.world, self.sent = world, Counter[str]()

    def restart(self) -> None:
        self.sent.clear()

    def told(self) -> dict[str, int]:
        """By purpose, where there is something."""
        return {name: size for name, size in self.sent.items() if size}

    def __enter__(self) -> "Counted":
        for name in ("all_to_all_single", "all_reduce", "isend"):
            self.enter_context(patch.object(dist, name, self._counted(name, getattr(dist, name))))
        for name in ("_all_gather", "_reduce_scatter"):
            self.enter_context(patch.object(collectives, name, self._counted(name, getattr(collectives, name))))
        return self

    def _purpose(self, handle: Any) -> str:
        found = [purpose for (_, purpose), group in self.world._groups.items() if group is not None and group.handle is handle]
        return found[0] if found else "everyone"

    def _counted(self, name: str, native: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            group = named.get("group")
            peers = dist.get_world_size(group)
            x = given[0] if name in ("all_reduce", "isend") else given[1]
            size = x.numel() * x.element_size()
            if name == "all_to_all_single":
                in_sizes = given[3] if len(given) > 3 else None
                moved = size if in_sizes is not None else size * (peers - 1) // peers
            elif name == "_all_gather":
                moved = size * (peers - 1)
            elif name == "_reduce_scatter":
                moved = size * (peers - 1) // peers
            else:
                moved = 2 * size * (peers - 1) // peers if name == "all_reduce" else size
            self.sent[self._purpose(group)] += moved
            return native(*given, **named)

        return call
