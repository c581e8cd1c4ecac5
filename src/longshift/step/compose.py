"""What a layout inserts into the model, in order, and the process groups that it needs."""

from collections.abc import Mapping
from functools import lru_cache

from longshift.dist.world import World
from longshift.layout import axes
from longshift.layout.layout import Layout
from longshift.layout.placement import buckets
from longshift.model.kernels import Kernel
from longshift.parallel.ring import RingSeams
from longshift.parallel.seams import LayoutOps
from longshift.parallel.tensor import TensorSeams
from longshift.parallel.ulysses import UlyssesSeams
from longshift.spec.model import ModelSpec

SEAMS: Mapping[str, type[LayoutOps]] = {
    "tp": TensorSeams,
    "ulysses": UlyssesSeams,
    "ring": RingSeams,
}


def prepare(world: World, spec: ModelSpec, layout: Layout) -> None:
    """Make every communicator that the layout needs, in one order on all ranks. [Note:
    communicators] Each purpose has its own: on NCCL one communicator is one queue, in which tokens
    of attention would wait behind the next unit's weights."""
    holders = sorted({bucket.holders for bucket in buckets(spec, layout)})
    for axis in axes.token_axes():
        world.prepare(layout.groups(axis.name), axis.name)
    world.prepare(holders, "gather")
    world.prepare(holders, "reduce")
    stages = layout.ranks("pp", of=world.rank)
    for direction in ("rising", "falling"):
        world.prepare(layout.groups("pp"), direction)
        # Pairs of stages meet now: see [Note: first contact] in `dist.collectives`.
        world.group(stages, direction).meet(world.device)


def layout_ops(spec: ModelSpec, layout: Layout, world: World, kernel: Kernel) -> LayoutOps:
    """The seams of a rank, with what each axis of more than one rank inserts. Outermost first, as
    `layout.axes` orders them: tensor parallelism around whole halves of a block, then Ulysses, then
    the ring."""
    used = tuple(axis.name for axis in axes.token_axes() if layout.degree(axis.name) > 1)
    return _composed(used)(spec, layout, world, kernel)


@lru_cache(maxsize=64)
def _composed(used: tuple[str, ...]) -> type[LayoutOps]:
    # The classes replace different methods, so one class can have all of theirs.
    return type("ComposedSeams", tuple(SEAMS[axis] for axis in used) or (LayoutOps,), {})
