"""What forked ranks do for test_explained.py."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch.distributed as dist

from longshift.dist import collectives
from longshift.dist.world import World
from longshift.layout.layout import Layout
from longshift.parallel import ring, ulysses
from longshift.step.update import train_step
from longshift.train.check import Trial, build

MOVES = {"tp": (collectives, "gather_tokens"), "tp again": (collectives, "scatter_tokens"), "ulysses": (ulysses, "exchange")}
MOVES |= {"ring": (ring, "_pass_on")}  # by axis: what nothing but activations goes through


def sent_by_axis(world: World, trial: dict, layout: str) -> dict[str, int]:
    """Bytes of activations and their gradients that this rank sends to others in a step, over each axis of the layout."""
    what, native = Trial.from_json(trial), dist.all_to_all_single
    sent, moving = Counter(), []

    def counted(out, x, out_sizes=None, in_sizes=None, group=None, async_op=False):
        peers = dist.get_world_size(group)
        elements = sum(in_sizes) if in_sizes is not None else x.numel() * (peers - 1) // peers
        if moving:
            sent[moving[-1]] += elements * x.element_size()
        return native(out, x, out_sizes, in_sizes, group=group, async_op=async_op)

    def along(axis: str, move: Callable) -> Callable:
        def wrapped(*arguments):
            moving.append(axis)
            try:
                return move(*arguments)
            finally:
                moving.pop()

        return wrapped

    state, player = build(what, [Layout.parse(layout)], world)
    (batch,) = what.batches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        for axis, (module, name) in MOVES.items():
            patch.setattr(module, name, along(axis.split()[0], getattr(module, name)))
        train_step(state, batch, player)
    world.forget()
    return dict(sent)
