"""Why a layout is not possible for a model, a world and a longest document: every reason at once, with the arithmetic and the
nearest values that work.

Uneven is possible: heads, feed-forward columns, vocabulary rows and blocks are shared in whole pieces, some ranks taking one more.
What is refused leaves a rank without any, contradicts itself, or asks the model for something it does not compute.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import NamedTuple

from longshift.errors import UsageError
from longshift.layout import axes
from longshift.layout.blocks import BLOCK
from longshift.layout.layout import AUTO, Layout
from longshift.layout.placement import local_boxes
from longshift.spec.model import ModelSpec, share

MOST_CHUNKS = 1024  # of a document alone in its pack: the events of their pairs, half a million at this many, are lists in every rank


class Fault(NamedTuple):
    """What is wrong with a layout. `rule`: the same for every layout that it refuses, as plans count them; `reason`: with this one's
    arithmetic, for people."""

    rule: str
    reason: str


def faults(
    spec: ModelSpec,
    layout: Layout,
    world: int | None,
    max_tokens: int | None = None,
    pack_tokens: int | None = None,
    float8: bool = False,
) -> tuple[str, ...]:
    """All reasons, one line each; empty where the layout is possible.

    `world`: ranks that are here, None where that is not known yet; `max_tokens`: the longest document after the over-length policy;
    `pack_tokens`: capacity of a pack, which is one such document where not given; `float8`: whether matmuls take factors of eight bits.
    """
    broken = tuple(_degrees(layout))
    if broken:
        return broken  # no arithmetic holds below
    return (
        *_world(spec, layout, world, float8),
        *(fault.reason for fault in mesh_faults(spec, layout, float8)),
        *(fault.reason for fault in pipeline_faults(spec, layout)),
        *_streaming(layout),
        *_chunks(layout, max_tokens, pack_tokens),
        *_length(spec, max_tokens),
    )


def check(
    spec: ModelSpec,
    layout: Layout,
    world: int | None,
    max_tokens: int | None = None,
    pack_tokens: int | None = None,
    float8: bool = False,
) -> None:
    """Raise UsageError with all faults, if any."""
    found = faults(spec, layout, world, max_tokens, pack_tokens, float8)
    if found:
        raise UsageError("\n  ".join((f"layout {layout} is not possible here:", *found)))


def _degrees(layout: Layout) -> Iterator[str]:
    degrees = {name: layout.degree(name) for name in axes.names()} | {"virtual": layout.virtual}
    for name, degree in degrees.items():
        if degree < 1:
            yield f"{name} is {degree}: a degree is at least 1"
    if not 0 <= layout.zero <= 3:
        yield f"zero is {layout.zero}: it is 0, 1, 2 or 3"


def _world(spec: ModelSpec, layout: Layout, world: int | None, float8: bool) -> Iterator[str]:
    if world is None or world == layout.world:
        return
    degrees = [str(layout.degree(name)) for name in axes.names()[::-1] if layout.degree(name) > 1]
    product = f"{' x '.join(degrees)} = {layout.world}" if len(degrees) > 1 else f"{layout.world}"
    near = [str(other) for other in nearest_layouts(layout, world) if not faults(spec, other, world, float8=float8)][:2]
    hint = f": try {' or '.join(near)}" if near else ""
    yield f"{layout} needs {_count(product, 'rank')}, {world} {'is' if world == 1 else 'are'} here{hint}"


def nearest_layouts(layout: Layout, world: int) -> list[Layout]:
    """Layouts of `world` ranks over dp and the axes in use, those whose degrees change least first."""
    used = [axis.name for axis in reversed(axes.AXES) if axis.shares == "packs" or layout.degree(axis.name) > 1]

    def change(degrees: tuple[int, ...]) -> tuple[float, int]:
        """In doublings; between equals, one that changes dp alone."""
        changes = [abs(log2(degree / layout.degree(name))) for name, degree in zip(used, degrees)]
        return sum(changes), sum(change > 0 for name, change in zip(used, changes) if name != "dp")

    layouts = []
    for degrees in sorted(_factors(world, len(used)), key=change):
        other = layout.with_degrees(dict(zip(used, degrees)))
        if other.pp != layout.pp:
            other = replace(other, stages=(), virtual=layout.virtual if other.pp > 1 else 1)
        layouts.append(other)
    return layouts


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as an ordered product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factors(number // first, count - 1))


def mesh_faults(spec: ModelSpec, layout: Layout, float8: bool) -> Iterator[Fault]:
    """Of the degrees that share weights and tokens."""
    yield from _tensor(spec, layout)
    if float8:
        yield from _scaled(spec, layout)
    yield from _ulysses(spec, layout)


def _tensor(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    for count, what in ((spec.heads, "query heads"), (spec.ffn, "feed-forward columns"), (spec.vocab, "vocabulary rows")):
        if layout.tp > count:
            reason = f"tp{layout.tp} shares {count} {what} among {layout.tp} ranks, which leaves some none: at most tp{count}"
            yield Fault(f"tp above {count} {what}", reason)
    keys = spec.kv_heads
    if spec.keys_stay_whole and layout.tp <= spec.heads and keys % layout.tp:
        works = max(tp for tp in range(1, layout.tp) if keys % tp == 0)
        reason = (
            f"tp{layout.tp} gives some of {keys} key/value heads to two ranks, and the norm over all keys counts each once: try tp{works}"
        )
        yield Fault(f"tp that does not divide {keys} key/value heads", reason)


def _scaled(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    cut = cut_inside_a_block(spec, layout.tp)
    if layout.tp <= spec.heads and cut:
        works = max(tp for tp in range(1, layout.tp) if not cut_inside_a_block(spec, tp))
        reason = f"tp{layout.tp} cuts {cut} inside a block of {BLOCK} that shares a scale under precision float8: try tp{works}"
        yield Fault("tp that cuts blocks of a scale of float8", reason)


@lru_cache(maxsize=1024)
def cut_inside_a_block(spec: ModelSpec, tp: int) -> str | None:
    """The first weight of a block of the model that so many tensor-parallel ranks cut elsewhere than at multiples of BLOCK, or give in
    part to two of them; None where there is none."""
    layout, seen = Layout(tp=tp), set[tuple]()
    coords = [layout.coord(rank) for rank in range(tp)]
    for p in spec.params:
        key = p.shape, p.dim, p.parts
        if p.dim is None or len(p.shape) != 2 or not 0 < p.unit <= spec.layers or key in seen or p.role.endswith(("_lora_a", "_lora_b")):
            continue
        seen.add(key)
        size, boxes = p.shape[p.dim], [box for coord in coords for box in local_boxes(p, layout, coord)]
        edges = {edge for box in boxes for edge in (box.start[p.dim], box.stop[p.dim])}
        if any(edge % BLOCK and edge != size for edge in edges) or sum(box.shape[p.dim] for box in boxes) > size:
            return p.name
    return None


def _ulysses(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    """Ulysses shares a tensor-parallel rank's query heads; fewer key/value heads are replicated."""
    least, largest_tp = spec.heads // layout.tp, spec.heads // layout.ulysses
    if 1 <= least < layout.ulysses:
        after = f" after tp{layout.tp} (of {spec.heads})" if layout.tp > 1 else ""
        other = f", or tp{largest_tp} with u{layout.ulysses}" if 1 <= largest_tp < layout.tp else ""
        shares = f"u{layout.ulysses} shares {_count(least, 'query head')}{after} among {layout.ulysses} ranks"
        rule = "ulysses above the query heads of a tensor-parallel rank"
        yield Fault(rule, f"{shares}: at most u{least}{other}; ring has no such limit")


def pipeline_faults(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    """Of the stages, their order and their sizes."""
    pp, virtual, layers = layout.pp, layout.virtual, spec.layers
    if layout.order == "vertical" and pp * virtual > 1:
        yield Fault(
            "vertical in stages",
            "vertical takes all micro-batches through a block before the next, and stages wait for each: drop vertical, or pp and v",
        )
    if layout.order == "vertical" and layout.chunk:
        yield Fault("vertical in chunks", "vertical is said of packs that are computed whole, and this layout has chunks: drop it")
    if virtual > 1 and layout.order == "gpipe":
        reason = f"gpipe and v{virtual} contradict: model chunks are what 1F1B interleaves; drop gpipe or v{virtual}"
        yield Fault("virtual stages under gpipe", reason)
    if virtual > 1 and pp == 1:
        reason = f"v{virtual} interleaves the model chunks of several pipeline ranks, and pp is 1: drop v{virtual} or add pp2"
        yield Fault("virtual stages without a pipeline", reason)
    elif pp * virtual > layers:
        made = f"pp{pp}.v{virtual} makes {pp} x {virtual} = {pp * virtual}" if virtual > 1 else f"pp{pp} makes {pp}"
        works = [f"pp{p}.v{v}" for p, v in ((layers // virtual, virtual), (pp, layers // pp)) if p > 1 and v > 1]
        most = " or ".join(works) or f"pp{min(pp, layers)}"
        reason = f"{made} stages of at least one block, the model has {layers}: at most {most}"
        yield Fault(f"stages without one of {layers} blocks", reason)
    if layout.stages:
        yield from (Fault("stages of other sizes", reason) for reason in _stages(layout, layers))


def _stages(layout: Layout, layers: int) -> Iterator[str]:
    """Explicit stage sizes: as many as virtual stages, each at least one block, together the model."""
    given, count = "-".join(map(str, layout.stages)), layout.pp * layout.virtual
    wrong = []
    if len(layout.stages) != count:
        wrong.append(f"{_count(len(layout.stages), 'stage')}, {count} are needed")
    if sum(layout.stages) != layers:
        wrong.append(f"{given.replace('-', ' + ')} = {sum(layout.stages)} blocks, the model has {layers}")
    if min(layout.stages) < 1:
        wrong.append("a stage without a block")
    if wrong:
        sizes = [share(layers, count, i) for i in range(count if count <= layers else 0)]
        equal = "-".join(str(stop - start) for start, stop in sizes)
        yield f"pp{layout.pp}:{given} has {' and '.join(wrong)}" + (f": try pp{layout.pp}:{equal}" if equal else "")


def _streaming(layout: Layout) -> Iterator[str]:
    """What is said of chunks needs them, and what is moved must be kept apart from the rest."""
    yield from _kept(layout)
    words = {"kv-offload": layout.kv == "offload", "fpdt": layout.schedule == "fpdt", f"every{layout.every}": layout.every > 0}
    chunked = [word for word, said in words.items() if said]
    if not layout.chunk:
        if chunked:
            yield f"{' and '.join(chunked)} is said of a layout in chunks, and this one has none: add chunk64K, say"
        if layout.offload != "device" and layout.recompute not in ("full", "auto"):
            yield f"{layout.offload} takes what recompute-full or a chunked layout keeps: add recompute-full, or chunk64K"
        return
    if layout.chunk != AUTO and layout.chunk < layout.sequence:
        yield f"chunk{layout.chunk} has fewer tokens than the {layout.sequence} ranks that share it: at least chunk{layout.sequence}"
    if layout.recompute != "none":
        yield f"recompute-{layout.recompute}: chunks are computed again from a block's input anyway; drop it, or say every1"
    if layout.kv == "offload" and layout.offload == "device":
        yield "kv-offload has nowhere to go: add host or disk"


def _kept(layout: Layout) -> Iterator[str]:
    """Blocks that keep all are said of a layout whose others do not."""
    if not layout.kept_blocks:
        return
    word = f"keep{layout.kept_blocks}"
    if layout.chunk:
        yield f"{word} is said of blocks that are computed whole, and this layout has chunks: drop it"
    elif layout.recompute == "auto":
        yield f"recompute-auto chooses how many blocks keep all: drop {word}"
    elif layout.recompute in ("none", "selective"):
        what = "keep all" if layout.recompute == "none" else "keep all but attention's inside"
        yield f"{word}: the blocks of this layout {what} anyway; drop it, or add recompute-full"


def least_chunk(max_tokens: int, pack_tokens: int) -> int:
    """The smallest power of two for which a pack of such documents has no more pairs of chunks than one document of MOST_CHUNKS."""
    chunk = 1
    while -(-max_tokens // chunk) * -(-pack_tokens // chunk) > MOST_CHUNKS**2:
        chunk *= 2
    return chunk


def _chunks(layout: Layout, max_tokens: int | None, pack_tokens: int | None) -> Iterator[str]:
    if layout.chunk <= 0 or max_tokens is None:
        return
    pack_tokens = max(max_tokens, pack_tokens or 0)
    of_document, of_pack = -(-max_tokens // layout.chunk), -(-pack_tokens // layout.chunk)
    if of_document * of_pack > MOST_CHUNKS**2:
        text = replace(layout, chunk=least_chunk(max_tokens, pack_tokens))
        many = f", in packs of {pack_tokens} of {of_pack}" if of_pack > of_document else ""
        made = f"documents of {max_tokens} tokens are {of_document} chunks of {layout.chunk}{many}"
        yield f"{made}, whose pairs are too many: at most {MOST_CHUNKS}{' x ' + str(MOST_CHUNKS) if many else ''}, as in {text}"


def _length(spec: ModelSpec, max_tokens: int | None) -> Iterator[str]:
    if max_tokens is None:
        return
    limit = spec.max_positions
    if spec.learned_positions and max_tokens > limit:
        yield f"documents are up to {max_tokens} tokens long, the model has learned {limit} positions: data.max_len at most {limit}"


def _count(number: int | str, noun: str) -> str:
    return f"{number} {noun}" if number in (1, "1") else f"{number} {noun}s"
