"""What ranks do for `ledger.py`: two steps under a mode that counts the bytes of all tensors, and what the ledger predicts of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from longshift.dist import collectives
from longshift.dist.held import HeldBytes, prompt_release
from longshift.dist.world import World
from longshift.program.ledger import Ledger
from longshift.program.operations import Program
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import train_step
from longshift.train.check import Trial, build, parse_layouts


def weigh(world: World, trial: dict, layout: str, per_node: int | None = None, trace: bool = False) -> dict[str, Any]:
    """Bytes on the device at the most in the second of two equal steps, measured and predicted, and bytes sent by communicator. `trace`:
    with the first operations after which the two differ by more than scalars."""
    what, layouts = Trial.from_json(trial), parse_layouts(layout)
    world.per_node = per_node or world.size
    first, batch = what.batches()
    after: list[int] = []
    with prompt_release(), HeldBytes() as held, Counted(world) as counted:
        state, player = build(what, layouts, world)
        train_step(state, first, player)
        held.restart()
        counted.restart()
        if trace:
            player.play = traced(player, lambda: after.append(held.now["cpu"]))
        train_step(state, batch, player)
        measured = held.most["cpu"]
        sent = {name: size for name, size in counted.sent.items() if size}
    weighed, said = predict(player, what, [len(d.ids) for d in batch.documents], trace=trace)
    found = {
        "measured": measured,
        "predicted": weighed.device,
        "op": weighed.peaks["device"].op,
        "sent": sent,
        "expected": {name: size for name, size in weighed.sent.items() if size},
    }
    if trace:
        found |= {"alive": weighed.peaks["device"].alive[:12], "apart": apart(after, said)}
    for runner in player.runners.values():
        if runner.tier is not None:
            runner.tier.close()
    world.forget()
    return found


def predict(player: Player, trial: Trial, lengths: list[int], transport: Any = "gloo", host_is_device: bool = True, trace: bool = False):
    """What the ledger says of a step with documents of these lengths, on the player's rank. `trace`: after each operation, too."""
    precision = Precision.of(trial.precision)
    ledger = Ledger(player.steps, transport, precision.compute == precision.home, host_is_device)
    visits, packs = player.steps.visits(player.groups(lengths), lengths)
    said: list[tuple[str, int]] = []
    if trace:
        settle = ledger.book.settle

        def settled(op: Any) -> None:
            settle(op)
            said.append((str(op), ledger.book.now["device"]))

        ledger.book.settle = settled
    weighed = ledger.play(visits, [[[lengths[d] for d in pack] for pack in some] for some in packs])
    return weighed, said[len(said) // 2 :]


def traced(player: Player, seen: Callable[[], object]) -> Callable[[Program], None]:
    """`Player.play` that says when an operation has ended."""

    def play(program: Program) -> None:
        for op in program:
            player.table[op.kind](op)
            seen()

    return play


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
