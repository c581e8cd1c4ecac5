"""Layout: one way to compute, as one line of text; and where each rank stands in it.

Words are joined by dots, in any order: `dp2.tp2`, `pp2.dp2.tp2.z3`, `u4.chunk64K.host`. The product of the degrees is the number of ranks.
`docs/reference/layout.md` is made from this list:

    dp2                  data parallelism: two replicas, which share the step's packs; shares may be uneven
    tp2                  tensor parallelism: every matrix over two ranks, with the tokens between matrices sharded too (Megatron sequence
                         parallelism)
    u2                   Ulysses sequence parallelism: tokens of a sequence over two ranks, which trade them for heads in attention
    ring2                context parallelism (ring attention): tokens of a sequence over two ranks, keys and values go round; causal work
                         is balanced
    pp2                  pipeline parallelism: two stages of nearly equal numbers of layers, in 1F1B order
    pp2:3-2              the same with the layers of each stage given
    v2                   interleaved 1F1B with two model chunks a rank, beside pp
    1f1b                 the default order of a pipeline: one forward, one backward
    gpipe                all forwards of a pipeline before all backwards
    vertical             all micro-batches through a block before the next block: weights are gathered twice a step, gradients reduced once;
                         for z3 with several packs, and for home: disk (`program.turns`)
    z0                   no ZeRO: every replica keeps the whole training state; the default
    z1                   ZeRO-1: optimizer state sharded over the replicas
    z2                   ZeRO-2: gradients sharded too
    z3                   ZeRO-3, as FSDP: weights sharded too
    recompute-full       gradient checkpointing: a block keeps its input and the output of attention; the backward computes the rest again
    recompute-selective  gradient checkpointing of attention alone, from q, k and v (arXiv 2205.05198); with flash kernels this saves only
                         the log-sum-exp, and with u the output of attention
    recompute-auto       the fastest of these that fits this machine, and how many blocks keep all (`planner.activations`)
    keep8                beside recompute-full: the last 8 blocks of each stage keep all that their backward needs
    chunk64K             64K tokens of a pack at one time: all layers are streamed chunk by chunk (`schedule.chunks`)
    chunk-auto           the same, with a chunk chosen from this machine's profile (`planner.chunk_size`)
    host                 CPU offload of activations: what recompute-full keeps, or a chunked layout, waits in host memory
    disk                 the same in a private file
    kv-offload           of a chunked layout: keys and values wait outside the device too
    fpdt                 of a chunked layout: the order of the FPDT paper, in which attention is computed again
    every4               of a chunked layout: of every four blocks only the first one's input waits, and the forward of the others is
                         computed again; every1: the input of each block waits, and attention is computed again (`schedule.unit_events`)

The axes, `layout.axes`, vary over ranks in their order there: those that move most bytes sit closest together.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Literal

from longshift.errors import UsageError, did_you_mean, nearest, shown
from longshift.layout import axes
from longshift.layout.axes import Axis
from longshift.other_tools import layout_hint
from longshift.spec.model import share

AUTO = -1  # a chunk chosen before the ranks start, from what the machine can do, as the recomputation "auto" is
ZERO_MEANING = "z0 replicated state, z1 sharded optimizer, z2 and gradients, z3 and weights"

Order = Literal["gpipe", "1f1b", "vertical"]
Recompute = Literal["none", "selective", "full", "auto"]
Tier = Literal["device", "host", "disk"]
Where = Literal["device", "offload"]
Schedule = Literal["stream", "fpdt"]

_NUMBERS = {"z": "zero", "v": "virtual", "every": "every", "keep": "kept_blocks"}  # fields of words with a number, besides the axes
# Policies in the order in which they are written, after the axes.
_POLICIES = ("virtual", "order", "recompute", "kept_blocks", "zero", "chunk", "every", "offload", "kv", "schedule")
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
MOST_SIZE = 1 << 40  # tokens, bytes or steps that a person writes: more than any corpus, memory or run has, and exact as a float


@dataclass(frozen=True)
class Coord:
    """A rank's position along each axis. `others`: along axes without a field, by name."""

    tp: int = 0
    ulysses: int = 0
    ring: int = 0
    dp: int = 0
    pp: int = 0
    others: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, places: Mapping[str, int]) -> "Coord":
        """From the position along every axis, by name."""
        others = tuple(item for item in places.items() if not hasattr(cls, item[0]))
        return cls(**{name: place for name, place in places.items() if hasattr(cls, name)}, others=others)

    def along(self, axis: str) -> int:
        """The position along one axis."""
        return getattr(self, axis) if hasattr(self, axis) else dict(self.others)[axis]


@dataclass(frozen=True)
class Layout:
    """Degrees and policies of one way to compute.

    `zero` 0..3; `virtual` model chunks per pipeline rank (interleaved 1F1B when above 1); `stages` blocks in each of the
    `pp * virtual` virtual stages, nearly equal when empty; `recompute` none, selective (attention from queries, keys and values), full
    (a block keeps its input and the output of attention, and computes the rest again), auto: see AUTO; `kept_blocks`: so many of each
    virtual stage, the last ones, or all where there are fewer, keep all, whatever the others compute again.

    `chunk` tokens of a pack, on all ranks that share it, are computed at one time; 0: the whole pack, AUTO: see there. `offload`: the
    memory where what a backward needs waits, under recompute full or in chunks; `kv` and `schedule` of a chunked one: see
    `schedule.chunks`; `every`: see `schedule.unit_events`, 0: all blocks keep what their backward needs. `others`: degrees of axes without
    a field, by name.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    zero: int = 0
    virtual: int = 1
    order: Order = "1f1b"
    recompute: Recompute = "none"
    stages: tuple[int, ...] = ()
    chunk: int = 0
    offload: Tier = "device"
    kv: Where = "device"
    schedule: Schedule = "stream"
    every: int = 0
    kept_blocks: int = 0
    others: tuple[tuple[str, int], ...] = ()

    if TYPE_CHECKING:  # what dataclass makes, and the text form

        def __init__(
            self,
            dp: int | str = 1,
            pp: int = 1,
            tp: int = 1,
            ulysses: int = 1,
            ring: int = 1,
            zero: int = 0,
            virtual: int = 1,
            order: Order = "1f1b",
            recompute: Recompute = "none",
            stages: tuple[int, ...] = (),
            chunk: int = 0,
            offload: Tier = "device",
            kv: Where = "device",
            schedule: Schedule = "stream",
            every: int = 0,
            kept_blocks: int = 0,
            others: tuple[tuple[str, int], ...] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        """Layout("dp2.tp2") is Layout.parse("dp2.tp2"). Raises UsageError for anything else that is no number of replicas."""
        if isinstance(self.dp, str):
            if any(getattr(self, field.name) != field.default for field in fields(self)[1:]):
                raise UsageError(f"Layout({self.dp!r}, ...): the text is the whole layout; write what else there is as words of it")
            for name, value in vars(Layout.parse(self.dp)).items():
                object.__setattr__(self, name, value)
        elif not isinstance(self.dp, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"Layout({self.dp!r}): a layout is read from text, as in Layout('dp2.tp2'), or built, as in Layout(dp=2, tp=2)"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read the text form. Raises UsageError that names the bad word and the nearest good one."""
        if len(text) > 1000 or (digits := re.search(r"\d{14}", text)):
            what = f"{shown(digits[0])}... is more than any degree or number of tokens" if len(text) <= 1000 else f"{len(text)} characters"
            raise UsageError(f"layout {shown(text)}: {what}; write one such as dp2.tp2")
        values: dict[str, object] = {}
        numbers = number_fields()
        for word in text.strip().split("."):
            match = re.fullmatch(r"([a-z]+)(\d+)(?::(\d+(?:-\d+)*))?", word)
            if match and match[1] in numbers:
                name, number = numbers[match[1]], int(match[2])
                if match[3]:
                    if name != "pp":
                        raise UsageError(f"layout {text!r}: only pp takes a list of layers per stage, as in pp2:3-2")
                    values["stages"] = tuple(int(n) for n in match[3].split("-"))
                if name == "zero" and number > 3:
                    raise UsageError(f"layout {text!r}: z{number} does not exist; {ZERO_MEANING}")
                if name != "zero" and number < 1:
                    raise UsageError(f"layout {text!r}: {word!r}: a degree is at least 1")
                value: object = number
            elif word in _FLAGS:
                name, value = _FLAGS[word]
            elif match := re.fullmatch(r"chunk(?:-auto|(\d+)([KMG]?))", word):
                name, value = "chunk", int(match[1]) * UNITS.get(match[2], 1) if match[1] else AUTO
                if not value:
                    raise UsageError(f"layout {text!r}: {word!r}: a chunk has at least one token")
            else:
                raise UsageError(f"layout {text!r}: {word!r} is not a layout word{_nearest(word)}")
            if name in values:
                raise UsageError(f"layout {text!r}: {word!r} sets {name} a second time")
            values[name] = value
        degrees = {name: values.pop(name) for name in axes.names() if name in values}
        layout = cls(**values).with_degrees(degrees)  # pyright: ignore[reportArgumentType]
        if max(layout.world, layout.virtual, layout.every, layout.kept_blocks) > MOST_RANKS or layout.chunk > MOST_SIZE:
            raise UsageError(
                f"layout {text!r}: at most {MOST_RANKS} ranks, model chunks and blocks of every or keep, and {MOST_SIZE} tokens of a chunk"
            )
        return layout

    def with_degrees(self, degrees: Mapping[str, int]) -> "Layout":
        """The same with these degrees, by axis."""
        named = {name: degree for name, degree in degrees.items() if hasattr(self, name)}
        others = {**dict(self.others), **{name: degree for name, degree in degrees.items() if name not in named}}
        return replace(self, **named, others=tuple(others.items()))  # pyright: ignore[reportArgumentType]

    def __str__(self) -> str:
        words = []
        for axis in reversed(axes.AXES):
            degree = self._degree(axis.name)
            if axis.shares == "blocks" and self.stages:
                words.append(f"{axis.word}{degree}:{'-'.join(map(str, self.stages))}")
            elif degree != 1:
                words.append(f"{axis.word}{degree}")

        numbers = {field: word for word, field in _NUMBERS.items()}
        flags = {setting: word for word, setting in _FLAGS.items()}
        for field in _POLICIES:
            value = getattr(self, field)
            if value == getattr(Layout, field):
                continue
            if field == "chunk":
                words.append("chunk-auto" if value == AUTO else f"chunk{format_size(value)}")
            else:
                words.append(f"{numbers[field]}{value}" if field in numbers else flags[field, value])
        return ".".join(words) or "dp1"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.ranks_along(axes.AXES)

    @property
    def open(self) -> bool:
        """Whether it leaves something to be chosen."""
        return self.chunk == AUTO or self.recompute == "auto"

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees of the axes that share the tokens of a pack, fastest first."""
        return tuple(self._degree(axis.name) for axis in axes.token_axes())

    @property
    def sequence(self) -> int:
        """Ranks that hold different tokens of one pack between attention and linear layers."""
        return self.ranks_along(axes.token_axes())

    @property
    def weight_ranks(self) -> int:
        """Ranks that a weight is cut for."""
        return self.ranks_along(axes.weight_axes())

    @property
    def two_ended_ranks(self) -> int:
        """Ranks that have a piece from each end of every document."""
        return self.ranks_along(axes.dealt("two-ended"))

    @property
    def contiguous_ranks(self) -> int:
        """Ranks that have neighboring tokens of what `two_ended_ranks` deal."""
        return self.ranks_along(axes.dealt("contiguous"))

    @property
    def neighbor_ranks(self) -> int:
        """Those of `contiguous_ranks` among which the weights see different tokens."""
        return self.ranks_along(axes.neighbor_axes())

    def ranks_along(self, along: Sequence[Axis]) -> int:
        """The product of degrees."""
        return prod(self._degree(axis.name) for axis in along)

    def degree(self, axis: str) -> int:
        """Raises UsageError for a name that is no axis's."""
        if axis not in axes.names():
            raise UsageError(f"{axis!r} is not an axis{did_you_mean(axis, axes.names())}")
        return self._degree(axis)

    def _degree(self, axis: str) -> int:
        return getattr(self, axis) if hasattr(self, axis) else dict(self.others).get(axis, 1)

    def coord(self, rank: int) -> Coord:
        """Where a rank stands. Raises UsageError outside the layout's world."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is outside layout {self}, which has ranks 0 to {self.world - 1}")
        places = {}
        for axis in axes.names():
            rank, places[axis] = divmod(rank, self._degree(axis))
        return Coord.of(places)

    def rank(self, coord: Coord) -> int:
        """Inverse of `coord`."""
        return self.place(coord, axes.AXES)

    def place(self, coord: Coord, along: Sequence[Axis]) -> int:
        """Number of a coordinate among the ranks that differ along these axes only."""
        place = 0
        for axis in reversed(along):
            place = place * self._degree(axis.name) + coord.along(axis.name)
        return place

    def ranks(self, *along: str, of: int) -> tuple[int, ...]:
        """The ranks that differ from rank `of` along these axes only, ascending; `of` among them."""
        for axis in along:
            self.degree(axis)
        coord = self.coord(of)
        slowest_first = axes.names()[::-1]
        varied = (range(self.degree(axis)) if axis in along else (coord.along(axis),) for axis in slowest_first)
        return tuple(self.rank(Coord.of(dict(zip(slowest_first, places)))) for places in product(*varied))

    def groups(self, *along: str) -> tuple[tuple[int, ...], ...]:
        """All such groups; they partition the world."""
        for axis in along:
            self.degree(axis)
        others = [axis for axis in axes.AXES if axis.name not in along]
        groups: dict[int, list[int]] = {}
        for rank in range(self.world):
            groups.setdefault(self.place(self.coord(rank), others), []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def layers_of(self, layers: int) -> tuple[tuple[int, int], ...]:
        """Half-open block range of every virtual stage, in model order. Virtual stage s runs on pipeline coordinate s % pp as its
        model chunk s // pp."""
        count = self.pp * self.virtual
        sizes = self.stages
        if not sizes:
            return tuple(share(layers, count, i) for i in range(count))
        if len(sizes) != count or sum(sizes) != layers:
            raise UsageError(f"layout {self}: stages {sizes} must be {count} numbers that add up to {layers} layers")
        ends = [sum(sizes[: i + 1]) for i in range(count)]
        return tuple((end - size, end) for size, end in zip(sizes, ends))

    def units_of(self, layers: int, pp: int) -> tuple[tuple[int, ...], ...]:
        """For each model chunk of pipeline coordinate `pp`: the units (see `spec.model`) it computes, in order."""
        spans, last = self.layers_of(layers), self.pp * self.virtual - 1
        chunks = []
        for stage in range(pp, self.pp * self.virtual, self.pp):
            start, stop = spans[stage]
            blocks = tuple(range(start + 1, stop + 1))
            chunks.append((0,) * (stage == 0) + blocks + (layers + 1,) * (stage == last))
        return tuple(chunks)


def parse_size(value: object) -> object:
    """`"4K"` to 4096; K, M and G are binary. What is not text passes through, for the type check that follows."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    unit = UNITS.get(text[-1:].upper(), 0)
    try:
        size = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        size = 0.5
    if not size.is_integer():
        raise ValueError(f"{shown(value)} is not a whole number; write one such as 4096, 4K, 1M (K, M, G are binary)")
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


def _nearest(word: str) -> str:
    """The end of a sentence about an unknown word of a layout. A field's name stands for its word; a number is taken over."""
    examples = {name: flag for flag, (name, _) in reversed(_FLAGS.items())} | {flag: flag for flag in _FLAGS}
    numbers = number_fields()
    examples |= {name: f"{short}2" for short, name in numbers.items()} | {short: f"{short}2" for short in numbers}
    examples |= {"chunk": "chunk64K", "stages": "pp2:3-1"}
    letters, number = re.sub(r"\d.*", "", word), "".join(re.findall(r"\d+", word)[:1])
    if told := layout_hint(letters.lower()):
        return told
    close = nearest(letters, examples) or nearest(word, examples)
    if not close:
        return f"; known: {', '.join((*numbers, *_FLAGS, 'chunk64K', 'chunk-auto'))}"
    example = examples[close[0]]
    return f"; did you mean {example[:-1] + number if number and example.endswith('2') else example!r}?"
