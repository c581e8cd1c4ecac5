"""What ranks do for `ledger.py`: two steps under a mode that counts the bytes of all tensors, and what the ledger predicts of them."""

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from longshift.dist.held import HeldBytes
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.program.ledger import Ledger
from longshift.state.precision import Precision
from longshift.step.player import Player
from longshift.step.update import train_step
from longshift.train.check import Trial, build, parse_layouts


def weigh(world: World, trial: dict, layout: str, per_node: int | None = None) -> dict[str, Any]:
    """Bytes on the device at the most in the second of two equal steps, measured and predicted, and bytes sent by communicator."""
    what, layouts = Trial.from_json(trial), parse_layouts(layout)
    world.per_node = per_node or world.size
    first, batch = what.batches()
    with HeldBytes() as held, Counted(world) as counted:
        state, player = build(what, layouts, world)
        again = {kind: refreshed(player, kind, held) for kind in ("gather", "open", "release", "close")}
        player.table |= again
        train_step(state, first, player)
        held.restart()
        counted.restart()
        train_step(state, batch, player)
        held.refresh()
        measured = held.most["cpu"]
        sent = {name: size for name, size in counted.sent.items() if size}
    weighed = predict(player, what, [len(d.ids) for d in batch.documents])
    world.forget()
    return {
        "measured": measured,
        "predicted": weighed.device,
        "op": weighed.peaks["device"].op,
        "alive": weighed.peaks["device"].alive[:12],
        "sent": sent,
        "expected": {name: size for name, size in weighed.sent.items() if size},
    }


def predict(player: Player, trial: Trial, lengths: list[int], transport: Any = "gloo"):
    """What the ledger says of a step with documents of these lengths, on the player's rank."""
    precision = Precision.of(trial.precision)
    ledger = Ledger(player.steps, transport, precision.compute == precision.home, host_is_device=True)
    groups = player.groups(lengths)
    visits, packs = player.steps.visits(groups, lengths)
    return ledger.play(visits, [[[lengths[d] for d in pack] for pack in some] for some in packs])


def refreshed(player: Player, kind: str, held: HeldBytes) -> Any:
    """An operation after which the mode looks again at every storage: storages that are resized are not seen otherwise."""
    native = player.table[kind]

    def run(op: Any) -> None:
        native(op)
        held.refresh()

    return run


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
        return self

    def _purpose(self, handle: Any) -> str:
        found = [purpose for (_, purpose), group in self.world._groups.items() if group is not None and group.handle is handle]
        return found[0] if found else "everyone"

    def _counted(self, name: str, native: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            group = named.get("group")
            peers = dist.get_world_size(group)
            x = given[1] if name == "all_to_all_single" else given[0]
            size = x.numel() * x.element_size()
            if name == "all_to_all_single":
                in_sizes = given[3] if len(given) > 3 else None
                moved = size if in_sizes is not None else size * (peers - 1) // peers
            else:
                moved = 2 * size * (peers - 1) // peers if name == "all_reduce" else size
            self.sent[self._purpose(group)] += moved
            return native(*given, **named)

        return call


def layouts_of(text: str) -> list[Layout]:
    return parse_layouts(text)
