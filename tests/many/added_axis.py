"""An axis that the package has not: context parallelism that gathers queries, keys and values of all ranks, `cp` in a layout.

    x[T_c, D] ─ q, k, v[T_c, N, H] ─ all-gather ─ [T, N, H] ─ attention ─ this rank's o[T_c, N, H]

All that the package has to know of an axis is here: its entry, and what it inserts at a seam of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import trial
from torch import Tensor

from longshift.dist.collectives import GatherTokens
from longshift.dist.world import World
from longshift.layout import axes
from longshift.layout.axes import Axis
from longshift.model.attention import PackedAttention
from longshift.model.decoder import MicroBatch
from longshift.parallel.seams import LayoutOps
from longshift.step import compose

CONTEXT = Axis(
    name="context",
    word="cp",
    shares="tokens",
    meaning="context parallelism: tokens of a sequence over two ranks, which gather those of all",
    deal="contiguous",
    traffic="context: all-gather of queries, keys and values",
)


class ContextSeams(LayoutOps):
    """Attention of all ranks' tokens, of which each takes its own."""

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, micro: MicroBatch, window: int | None = None) -> Tensor:
        group = self.groups[CONTEXT.name]
        q, k, v = (GatherTokens.apply(x, group) for x in self.to_heads(q_TNH, k_TKH, v_TKH))
        lengths = tuple(run.length for run in micro.order.runs[0])
        o = PackedAttention.apply(q, k, v, lengths, window, self.attention, micro.ends)
        return self.to_tokens(o.chunk(group.size)[group.index])  # pyright: ignore


@contextmanager
def added(axis: Axis = CONTEXT) -> Iterator[None]:
    """The package with one more axis, between Ulysses and the ring."""
    table = (*axes.AXES[:2], axis, *axes.AXES[2:])
    with patch.object(axes, "AXES", table), patch.object(compose, "SEAMS", {**compose.SEAMS, axis.name: ContextSeams}):
        yield


def compare(world: World, trial_json: dict, layout: str, path: str) -> dict[str, float]:
    """As `trial.compare`, with the axis."""
    with added():
        return trial.compare(world, trial_json, layout, path)
