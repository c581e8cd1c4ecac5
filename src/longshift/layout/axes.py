"""The table of axes: the ways to share a step among ranks. What is true of every axis is written
once, and iterates over the table.

`parallel` has a file for each axis whose ranks send inside a turn, with its paper, picture and
bytes. `step.compose` inserts these at the seams of the model. `layout.legal` says why a degree is
impossible.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Degree = TypeVar("Degree")


@dataclass(frozen=True)
class Axis:
    """One way to share a step among ranks.

    name      of its degree in a `Layout`
    word      in the text of a layout
    shares    what each rank has a part of
    meaning   of the word with 2 ranks, for people (`docs/reference/layout.md`)
    deal      how the tokens of a pack are dealt: "two-ended", a piece from each end of every
              document, so that causal attention is balanced; "contiguous", neighboring tokens of
              those; None: every rank has them all
    traffic   what its ranks send inside a turn, for people
    overlaps  whether that traffic goes on under attention
    """

    name: str
    word: str
    shares: Literal["weights", "tokens", "packs", "blocks"]
    meaning: str
    deal: Literal["two-ended", "contiguous"] | None = None
    traffic: str = ""
    overlaps: bool = False


# Fastest over ranks first: the ranks of axes that move most bytes are neighbors.
AXES: tuple[Axis, ...] = (
    Axis(
        name="tp",
        word="tp",
        shares="weights",
        meaning="tensor parallelism: every matrix over two ranks, with the tokens between matrices"
        " sharded too (Megatron sequence parallelism)",
        deal="contiguous",
        traffic="tensor: all-gather and reduce-scatter of tokens",
    ),
    Axis(
        name="ulysses",
        word="u",
        shares="tokens",
        meaning="Ulysses sequence parallelism: tokens of a sequence over two ranks, which trade"
        " them for heads in attention",
        deal="contiguous",
        traffic="Ulysses: all-to-all of tokens and heads",
    ),
    Axis(
        name="ring",
        word="ring",
        shares="tokens",
        meaning="context parallelism (ring attention): tokens of a sequence over two ranks, keys"
        " and values go round; causal work is balanced",
        deal="two-ended",
        traffic="ring: keys and values, and their gradients",
        overlaps=True,
    ),
    Axis(
        name="dp",
        word="dp",
        shares="packs",
        meaning="data parallelism: two replicas, which share the step's packs; shares may be"
        " uneven",
    ),
    Axis(
        name="pp",
        word="pp",
        shares="blocks",
        meaning="pipeline parallelism: two stages of nearly equal numbers of layers, in 1F1B order",
    ),
)


def names() -> tuple[str, ...]:
    """Fastest first."""
    return tuple(axis.name for axis in AXES)


def token_axes() -> tuple[Axis, ...]:
    """Axes that share the tokens of a pack, fastest first."""
    return tuple(axis for axis in AXES if axis.deal)


def deal_axes(deal: str) -> tuple[Axis, ...]:
    """Axes that deal the tokens of a pack in this way, fastest first."""
    return tuple(axis for axis in AXES if axis.deal == deal)


def neighbor_axes() -> tuple[Axis, ...]:
    """Axes that deal neighboring tokens, of those that the weights see."""
    return tuple(axis for axis in AXES if axis.deal == "contiguous" and axis.shares == "tokens")


def holder_axes() -> tuple[Axis, ...]:
    """Axes whose ranks compute with the same weights."""
    return tuple(axis for axis in AXES if axis.shares in ("tokens", "packs"))


def weight_axes() -> tuple[Axis, ...]:
    """Axes that cut weights."""
    return tuple(axis for axis in AXES if axis.shares == "weights")


def cut_axes() -> tuple[Axis, ...]:
    """Axes by whose degrees ranks have different weights: they cut each, or share the blocks."""
    return tuple(axis for axis in AXES if axis.shares in ("weights", "blocks"))


class Degrees(Generic[Degree]):
    """What follows from a degree for each axis: numbers of one layout, or arrays of many."""

    def degree(self, axis: str) -> Degree:
        """The degree of an axis, by its name. Raises NotImplementedError: subclasses know it."""
        raise NotImplementedError

    def ranks_along(self, along: Iterable[Axis]) -> Degree:
        """The product of degrees."""
        ranks: Any = 1
        for axis in along:
            ranks = ranks * self.degree(axis.name)
        return ranks

    @property
    def world(self) -> Degree:
        """Number of ranks."""
        return self.ranks_along(AXES)

    @property
    def sequence(self) -> Degree:
        """Ranks that hold different tokens of one pack between attention and linear layers."""
        return self.ranks_along(token_axes())

    @property
    def weight_ranks(self) -> Degree:
        """Ranks that a weight is cut for."""
        return self.ranks_along(weight_axes())

    @property
    def holders(self) -> Degree:
        """Ranks that compute with the same weights."""
        return self.ranks_along(holder_axes())

    def state_holders(self, has_experts: bool) -> Degree:
        """Ranks over which ZeRO shards most weights: experts, which no axis cuts, over all ranks of
        a stage."""
        cut = weight_axes() if has_experts else ()
        return self.ranks_along((*holder_axes(), *cut))
