"""Layout: one way to compute, as one line of text; and where each rank stands in it.

Words are joined by dots, in any order: `dp2.tp2`, `pp2.dp2.tp2.z3`, `u4.chunk64K.host`. The product
of the degrees is the number of ranks. `layout.axes` has the word of each axis, such as dp, and this
list has the others; `docs/reference/layout.md` is made from both:

    pp2:3-2              the same with the layers of each stage given
    v2                   interleaved 1F1B with two model chunks a rank, beside pp
    1f1b                 the default order of a pipeline: one forward, one backward
    gpipe                all forwards of a pipeline before all backwards
    vertical             all micro-batches through a block before the next block: weights are
                         gathered twice a step, gradients reduced once; for z3 with several packs,
                         and for home: disk (`program.turns`)
    z0                   no ZeRO: every replica keeps the whole training state; the default
    z1                   ZeRO-1: optimizer state sharded over the replicas
    z2                   ZeRO-2: gradients sharded too
    z3                   ZeRO-3, as FSDP: weights sharded too
    recompute-full       gradient checkpointing: a block keeps its input and the output of
                         attention; the backward computes the rest again
    recompute-selective  gradient checkpointing of attention alone, from q, k and v (arXiv
                         2205.05198); with flash kernels this saves only the log-sum-exp, and with u
                         the output of attention
    recompute-auto       the fastest of these that fits this machine, and how many blocks
                         keep all (`planner.activations`)
    keep8                beside recompute-full: the last 8 blocks of each stage keep all that their
                         backward needs
    chunk64K             64K tokens of a pack at one time: all layers are streamed chunk
                         by chunk (`schedule.chunks`)
    chunk-auto           the same, with a chunk chosen from this
                         machine's profile (`planner.chunk_size`)
    host                 CPU offload of activations: what recompute-full keeps, or a chunked layout,
                         waits in host memory
    disk                 the same in a private file
    kv-offload           of a chunked layout: keys and values wait outside the device too
    fpdt                 of a chunked layout: the order of the FPDT paper, in which attention is
                         computed again
    every4               of a chunked layout: of every four blocks only the first one's input waits,
                         and the forward of the others is computed again; every1: the input of each
                         block waits, and attention is computed again (`schedule.unit_events`)

The axes, `layout.axes`, vary over ranks in their order there: those that move most bytes sit
closest together.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from longshift.errors import UsageError, nearest, shown
from longshift.layout import axes
from longshift.layout.axes import Axis, Degrees
from longshift.layout.fields import (
    AUTO,
    ZERO_MEANING,
    Order,
    Recompute,
    Schedule,
    Tier,
    Where,
    check_fields,
)
from longshift.other_tools import layout_hint
from longshift.spec.param import share

# Fields of words with a number, besides the axes.
_NUMBERS = {"z": "zero", "v": "virtual", "every": "every", "keep": "kept_blocks"}
_FLAGS = {
    "gpipe": ("order", "gpipe"),
    "1f1b": ("order", "1f1b"),
    "vertical": ("order", "vertical"),
    "recompute-selective": ("recompute", "selective"),
    "recompute-full": ("recompute", "full"),
    "recompute-auto": ("recompute", "auto"),
    "host": ("offload", "host"),
    "disk": ("offload", "disk"),
    "kv-offload": ("kv", "offload"),
    "fpdt": ("schedule", "fpdt"),
}
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_RANKS = 1 << 20  # ten times the largest cluster
# Tokens, bytes or steps that a person writes are at most this many: more than any corpus, memory or
# run has, and exact as a float.
MOST_SIZE = 1 << 40


@dataclass(frozen=True)
class Coord:
    """A rank's position along each axis. `extra`: along axes without a field, by name."""

    tp: int = 0
    ulysses: int = 0
    ring: int = 0
    dp: int = 0
    pp: int = 0
    extra: tuple[tuple[str, int], ...] = ()

    def along(self, axis: str) -> int:
        """The position along one axis."""
        return getattr(self, axis) if axis in _AXIS_FIELDS else dict(self.extra)[axis]


@dataclass(frozen=True)
class Layout(Degrees[int]):
    """Degrees and policies of one way to compute: Layout("dp2.tp2"), or Layout(dp=2, tp=2).

    `zero` 0..3; `virtual` model chunks per pipeline rank (interleaved 1F1B when above 1); `stages`
    blocks in each of the `pp * virtual` virtual stages, nearly equal when empty; `recompute` none,
    selective (attention from queries, keys and values), full (a block keeps its input and the
    output of attention, and computes the rest again), auto: see AUTO; `kept_blocks`: so many of
    each virtual stage, the last ones, or all where there are fewer, keep all, whatever the others
    compute again.

    `chunk` tokens of a pack, on all ranks that share it, are computed at one time; 0: the whole
    pack, AUTO: see there. `offload`: the memory where what a backward needs waits, under recompute
    full or in chunks; `kv` and `schedule` of a chunked one: see `schedule.block_events`;
    `every`: see `schedule.unit_events`, 0: all blocks keep what their backward needs. `extra`:
    degrees of axes without a field, by name.

    Raises UsageError for text that is no layout, for text with other fields beside it, and for
    values that a field cannot have.
    """

    # Not `text`: the default of such a field is an attribute of the class, as the property is.
    _text: InitVar[str] = "dp1"
    _: KW_ONLY
    dp: int = 1
    pp: int = 1
    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    # Policies, in the order in which they are written.
    virtual: int = 1
    order: Order = "1f1b"
    recompute: Recompute = "none"
    kept_blocks: int = 0
    zero: int = 0
    chunk: int = 0
    every: int = 0
    offload: Tier = "device"
    kv: Where = "device"
    schedule: Schedule = "stream"
    # Written with pp, and with their axes.
    stages: tuple[int, ...] = ()
    extra: tuple[tuple[str, int], ...] = ()

    def __post_init__(self, _text: str) -> None:
        text = _text
        if text == "dp1":
            check_fields(vars(self))
            return
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"Layout({text!r}): a layout is read from text, as in Layout('dp2.tp2'), or"
                " built, as in Layout(dp=2, tp=2)",
            )
        if any(getattr(self, field.name) != field.default for field in fields(self)):
            raise UsageError(
                f"Layout({text!r}, ...): the text is the whole layout; write what else there"
                " is as words of it",
            )
        for name, value in vars(Layout.parse(text)).items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read the text form. Raises UsageError that names the bad word
        and the nearest good one."""
        # 1. Refuse what is too long for a message, or for arithmetic.
        too_long = ""
        if len(text) > 1000:
            too_long = f"{len(text)} characters"
        elif digits := re.search(r"\d{14}", text):
            too_long = f"{shown(digits[0])}... is more than any degree or number of tokens"
        if too_long:
            raise UsageError(f"layout {shown(text)}: {too_long}; write one such as dp2.tp2")

        # 2. Each word sets one field, and pp maybe the stages.
        values: dict[str, Any] = {}
        for word in text.strip().split("."):
            for field, value in _parse_word(text, word).items():
                if field in values:
                    raise UsageError(f"layout {text!r}: {word!r} sets {field} a second time")
                values[field] = value

        # 3. Refuse numbers beyond any cluster.
        degrees = {name: values.pop(name) for name in axes.names() if name in values}
        layout = cls(**values).with_degrees(degrees)
        largest = max(layout.world, layout.virtual, layout.every, layout.kept_blocks)
        if largest > MOST_RANKS or layout.chunk > MOST_SIZE:
            raise UsageError(
                f"layout {text!r}: at most {MOST_RANKS} ranks, model chunks and blocks of every or"
                f" keep, and {MOST_SIZE} tokens of a chunk",
            )
        return layout

    def with_degrees(self, degrees: Mapping[str, int]) -> "Layout":
        """The layout with these degrees, by axis."""
        by_field: dict[str, Any] = {}
        extra = dict(self.extra)
        for name, degree in degrees.items():
            values = by_field if hasattr(self, name) else extra
            values[name] = degree

        # Equal layouts have equal `extra`: sorted, and without what 1 says anyway.
        kept = [(name, degree) for name, degree in extra.items() if degree != 1]
        return replace(self, **by_field, extra=tuple(sorted(kept)))

    def __str__(self) -> str:
        words = []
        for axis in reversed(axes.AXES):
            degree = self.degree(axis.name)
            if axis.shares == "blocks" and self.stages:
                sizes = "-".join(map(str, self.stages))
                words.append(f"{axis.word}{degree}:{sizes}")
            elif degree != 1:
                words.append(f"{axis.word}{degree}")

        numbers = {field: word for word, field in _NUMBERS.items()}
        flags = {setting: word for word, setting in _FLAGS.items()}
        for field in fields(self):
            name = field.name
            value = getattr(self, name)
            if value == field.default or name in _AXIS_FIELDS or name in ("stages", "extra"):
                continue
            if name == "chunk":
                words.append("chunk-auto" if value == AUTO else f"chunk{format_size(value)}")
            elif name in numbers:
                words.append(f"{numbers[name]}{value}")
            else:
                words.append(flags[name, value])
        return ".".join(words) or "dp1"

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return str(self)

    @property
    def open(self) -> bool:
        """Whether it leaves something to be chosen."""
        return self.chunk == AUTO or self.recompute == "auto"

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees of the axes that share the tokens of a pack, fastest first."""
        return tuple(self.degree(axis.name) for axis in axes.token_axes())

    @property
    def two_ended_ranks(self) -> int:
        """Ranks that have a piece from each end of every document."""
        return self.ranks_along(axes.deal_axes("two-ended"))

    @property
    def contiguous_ranks(self) -> int:
        """Ranks that have neighboring tokens of what `two_ended_ranks` deal."""
        return self.ranks_along(axes.deal_axes("contiguous"))

    @property
    def neighbor_ranks(self) -> int:
        """Those of `contiguous_ranks` among which the weights see different tokens."""
        return self.ranks_along(axes.neighbor_axes())

    def degree(self, axis: str) -> int:
        """The degree of an axis, by its name."""
        return getattr(self, axis) if axis in _AXIS_FIELDS else dict(self.extra).get(axis, 1)

    def coord(self, rank: int) -> Coord:
        """Where a rank stands. Raises UsageError outside the layout's world."""
        if not 0 <= rank < self.world:
            raise UsageError(
                f"rank {rank} is outside layout {self}, which has ranks 0 to {self.world - 1}",
            )

        places = {}
        for axis in axes.names():  # the first varies fastest over ranks
            rank, places[axis] = divmod(rank, self.degree(axis))

        extra = {axis: places.pop(axis) for axis in axes.names() if axis not in _AXIS_FIELDS}
        return Coord(**places, extra=tuple(extra.items()))

    def rank(self, coord: Coord) -> int:
        """Inverse of `coord`."""
        return self.place(coord, axes.AXES)

    def place(self, coord: Coord, along: Sequence[Axis]) -> int:
        """Number of a coordinate among the ranks that differ along these axes only."""
        place = 0
        for axis in reversed(along):
            place = place * self.degree(axis.name) + coord.along(axis.name)
        return place

    def ranks(self, *along: str, of: int) -> tuple[int, ...]:
        """The ranks that differ from rank `of` along these axes only, ascending;
        `of` among them."""
        ranks = [0]
        stride = 1
        for axis in axes.names():  # the first varies fastest over ranks
            degree = self.degree(axis)
            places = range(degree) if axis in along else [of // stride % degree]
            ranks = [stride * place + rank for place in places for rank in ranks]
            stride *= degree

        return tuple(ranks)

    def groups(self, *along: str) -> tuple[tuple[int, ...], ...]:
        """All such groups; they partition the world."""
        groups = (self.ranks(*along, of=rank) for rank in range(self.world))
        return tuple(dict.fromkeys(groups))

    def layers_of(self, layers: int) -> tuple[tuple[int, int], ...]:
        """Half-open block range of every virtual stage, in model order.

        Virtual stage s runs on pipeline coordinate s % pp as its model chunk s // pp.
        Raises UsageError for sizes of stages that are not these layers.
        """
        num_stages = self.pp * self.virtual
        sizes = self.stages
        if not sizes:
            return tuple(share(layers, num_stages, i) for i in range(num_stages))

        if len(sizes) != num_stages or sum(sizes) != layers:
            raise UsageError(
                f"layout {self}: stages {sizes} must be {num_stages} numbers that add up to"
                f" {layers} layers",
            )
        return tuple(pairwise(accumulate(sizes, initial=0)))

    def units_of(self, layers: int, pp: int) -> tuple[tuple[int, ...], ...]:
        """For each model chunk of pipeline coordinate `pp`: the units (see `spec.model`) it
        computes, in order."""
        spans = self.layers_of(layers)
        chunks = []
        for stage in range(pp, len(spans), self.pp):
            start, stop = spans[stage]

            # Unit 0 is the embeddings, so that block n is unit n + 1.
            units = list(range(start + 1, stop + 1))
            if stage == 0:
                units.insert(0, 0)  # the embeddings
            if stage == len(spans) - 1:
                units.append(layers + 1)  # the head
            chunks.append(tuple(units))
        return tuple(chunks)


# Axes that have a field in `Layout`; others are in `extra`.
_AXIS_FIELDS = frozenset(field.name for field in fields(Layout)) & frozenset(axes.names())


def parse_size(value: object) -> object:
    """`"4K"` to 4096; K, M and G are binary. What is not text passes through, for the type check
    that follows.

    Raises ValueError for text that is no whole number.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    unit = UNITS.get(text[-1:].upper(), 0)
    try:
        size = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        size = 0.5  # refused below, as other fractions are
    if not size.is_integer():
        raise ValueError(
            f"{shown(value)} is not a whole number; write one such as 4096, 4K, 1M (K, M, G are"
            " binary)",
        )
    return int(size)


def format_size(size: int) -> str:
    """`4096` to `"4K"`, where that loses nothing."""
    for letter, unit in reversed(UNITS.items()):
        if size and size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def number_fields() -> dict[str, str]:
    """Fields, or axes, by the word that has a number."""
    return {axis.word: axis.name for axis in reversed(axes.AXES)} | _NUMBERS


def _parse_word(text: str, word: str) -> dict[str, Any]:
    """The fields that a word of the layout `text` sets. Raises UsageError."""
    if word in _FLAGS:
        field, value = _FLAGS[word]
        return {field: value}

    if match := re.fullmatch(r"chunk(?:-auto|(\d+)([KMG]?))", word):
        tokens = int(match[1]) * UNITS.get(match[2], 1) if match[1] else AUTO
        if not tokens:
            raise UsageError(f"layout {text!r}: {word!r}: a chunk has at least one token")
        return {"chunk": tokens}

    match = re.fullmatch(r"([a-z]+)(\d+)(?::(\d+(?:-\d+)*))?", word)
    field = number_fields().get(match[1]) if match else None
    if not match or field is None:
        raise UsageError(f"layout {text!r}: {word!r} is not a layout word{_nearest_word(word)}")
    number = int(match[2])
    if match[3] and field != "pp":
        raise UsageError(
            f"layout {text!r}: only pp takes a list of layers per stage, as in pp2:3-2",
        )
    if field == "zero" and number > 3:
        raise UsageError(f"layout {text!r}: z{number} does not exist; {ZERO_MEANING}")
    if field != "zero" and number < 1:
        raise UsageError(f"layout {text!r}: {word!r}: a degree is at least 1")
    if match[3]:
        return {field: number, "stages": tuple(map(int, match[3].split("-")))}
    return {field: number}


def _nearest_word(word: str) -> str:
    """The end of a sentence about an unknown word of a layout."""
    # 1. What other tools call it.
    letters = re.sub(r"\d.*", "", word)
    if hint := layout_hint(letters.lower()):
        return hint

    # 2. An example for each word, and for each field that a person may take for its word.
    examples = {"chunk": "chunk64K", "stages": "pp2:3-1"}
    for flag, (name, _) in reversed(_FLAGS.items()):
        examples[name] = examples[flag] = flag
    numbers = number_fields()
    for short, name in numbers.items():
        examples[name] = examples[short] = f"{short}2"
    close = nearest(letters, examples) or nearest(word, examples)
    if not close:
        return f"; known: {', '.join((*numbers, *_FLAGS, 'chunk64K', 'chunk-auto'))}"

    # 3. The nearest, with the number of the word.
    example = examples[close[0]]
    number = re.search(r"\d+", word)
    if number and example.endswith("2"):
        example = example[:-1] + number[0]
    return f"; did you mean {example!r}?"
