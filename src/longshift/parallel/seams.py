"""The seams of one rank, with the process groups of its axes. Each technique's file replaces those
that it changes."""

from longshift.dist.collectives import Group
from longshift.dist.world import World
from longshift.layout import axes
from longshift.layout.layout import Layout
from longshift.layout.placement import tensor_heads
from longshift.model.decoder import Ops
from longshift.model.kernels import Kernel
from longshift.spec.model import ModelSpec
from longshift.spec.param import share


class LayoutOps(Ops):
    """The seams of one process, for the heads and vocabulary rows of a rank.

    `groups`: by axis that shares tokens.
    """

    def __init__(self, spec: ModelSpec, layout: Layout, world: World, kernel: Kernel):
        super().__init__(spec, kernel, again=layout.recompute == "selective")
        coord = layout.coord(world.rank)
        self.layout = layout

        # 1. Whom this rank shares tokens with.
        self.groups: dict[str, Group] = {}
        for axis in axes.token_axes():
            ranks = layout.ranks(axis.name, of=world.rank)
            self.groups[axis.name] = world.group(ranks, axis.name)

        # 2. What it holds of the weights.
        place = layout.place(coord, axes.weight_axes())
        self.heads, self.kv_heads = tensor_heads(spec, layout, coord)
        self.vocab_first = share(spec.vocab, layout.weight_ranks, place)[0]
