"""Why a layout is not possible for a model, a world and a longest document: every reason at once,
with the arithmetic and the nearest values that work.

Uneven is possible: heads, feed-forward columns, vocabulary rows and blocks are shared in whole
pieces, some ranks taking one more. What is refused leaves a rank without any, contradicts itself,
or asks the model for something it does not compute.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import NamedTuple

from longshift.errors import UsageError
from longshift.layout import axes
from longshift.layout.blocks import BLOCK
from longshift.layout.layout import AUTO, Layout
from longshift.layout.placement import local_boxes
from longshift.spec.model import ModelSpec
from longshift.spec.param import share

# Of a document alone in its pack: the events of their pairs, half a million at this many, are lists
# in every rank.
MAX_CHUNKS = 1024


class Fault(NamedTuple):
    """What is wrong with a layout.

    `rule`: the same for every layout that it refuses, as plans count them.
    `reason`: with this one's arithmetic, for people.
    """

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
    """All reasons, one line each; empty if the layout is possible.

    `world`: number of ranks; None if that is not known yet.
    `max_tokens`: the longest document after the over-length policy.
    `pack_tokens`: capacity of a pack; one such document if None.
    `float8`: whether matmuls take factors of eight bits.
    """
    return (
        *_world_faults(spec, layout, world, float8),
        *(fault.reason for fault in mesh_faults(spec, layout, float8)),
        *(fault.reason for fault in pipeline_faults(spec, layout)),
        *_streaming_faults(layout),
        *_chunk_faults(layout, max_tokens, pack_tokens),
        *_length_faults(spec, max_tokens),
    )


def refuse(layout: Layout, reasons: Sequence[str]) -> None:
    """Raise UsageError with reasons why a layout is not possible, if there are any."""
    if reasons:
        raise UsageError("\n  ".join((f"layout {layout} is not possible here:", *reasons)))


def _world_faults(
    spec: ModelSpec,
    layout: Layout,
    world: int | None,
    float8: bool,
) -> Iterator[str]:
    if world is None or world == layout.world:
        return
    degrees = [str(layout.degree(name)) for name in axes.names()[::-1] if layout.degree(name) > 1]
    product = f"{' x '.join(degrees)} = {layout.world}" if len(degrees) > 1 else f"{layout.world}"
    possible = [
        str(candidate)
        for candidate in nearest_layouts(layout, world)
        if not faults(spec, candidate, world, float8=float8)
    ]
    hint = f": try {' or '.join(possible[:2])}" if possible else ""
    yield (
        f"{layout} needs {_count(product, 'rank')},"
        f" {world} {'is' if world == 1 else 'are'} here{hint}"
    )


def nearest_layouts(layout: Layout, world: int) -> list[Layout]:
    """Layouts of `world` ranks over dp and the axes in use, those whose degrees change least
    first."""
    names = [
        axis.name
        for axis in reversed(axes.AXES)
        if axis.shares == "packs" or layout.degree(axis.name) > 1
    ]

    def change(degrees: tuple[int, ...]) -> tuple[float, int]:
        # In doublings; of equal ones that which changes dp alone.
        changes = {name: log2(new / layout.degree(name)) for name, new in zip(names, degrees)}
        doublings = sum(abs(changes[name]) for name in names)
        return doublings, sum(changes[name] != 0 for name in names if name != "dp")

    layouts = []
    for degrees in sorted(_factors(world, len(names)), key=change):
        candidate = layout.with_degrees(dict(zip(names, degrees)))
        if candidate.pp != layout.pp:
            # Stages are of another pipeline; virtual ones need one.
            virtual = layout.virtual if candidate.pp > 1 else 1
            candidate = replace(candidate, stages=(), virtual=virtual)
        layouts.append(candidate)
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
    """Faults of the degrees that share weights and tokens."""
    yield from _tensor_faults(spec, layout)
    if float8 and spec.experts:
        yield Fault("float8 with experts", "precision float8 does not know experts yet: try bf16")
    elif float8:
        yield from _scale_faults(spec, layout)
    yield from _ulysses_faults(spec, layout)


def _tensor_faults(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    tp = layout.tp
    counts = {"query heads": spec.heads}
    if not spec.experts:  # which are not cut
        counts["feed-forward columns"] = spec.ffn
    counts["vocabulary rows"] = spec.vocab
    for noun, count in counts.items():
        if tp > count:
            shares = f"tp{tp} shares {count} {noun} among {tp} ranks"
            reason = f"{shares}, which leaves some none: at most tp{count}"
            yield Fault(f"tp above {count} {noun}", reason)

    # A head on two ranks would count twice where the norm adds up their squares.
    keys = spec.kv_heads
    if spec.keys_stay_whole and tp <= spec.heads and keys % tp:
        works = max(degree for degree in range(1, tp) if keys % degree == 0)
        gives = f"tp{tp} gives some of {keys} key/value heads to two ranks"
        reason = f"{gives}, and the norm over all keys counts each once: try tp{works}"
        yield Fault(f"tp that does not divide {keys} key/value heads", reason)


def _scale_faults(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    name = cut_inside_a_block(spec, layout.tp)
    if layout.tp <= spec.heads and name:
        works = max(tp for tp in range(1, layout.tp) if not cut_inside_a_block(spec, tp))
        cuts = f"tp{layout.tp} cuts {name} inside a block of {BLOCK}"
        reason = f"{cuts} that shares a scale under precision float8: try tp{works}"
        yield Fault("tp that cuts blocks of a scale of float8", reason)


@lru_cache(maxsize=1024)
def cut_inside_a_block(spec: ModelSpec, tp: int) -> str | None:
    """The first weight of a block of the model that tensor-parallel ranks cut inside a block of a
    scale, or share a part of.

    None if there is none.
    """
    if tp == 1:
        return None  # nothing is cut, whatever parts a weight has
    layout = Layout(tp=tp)
    coords = [layout.coord(rank) for rank in range(tp)]
    checked: set[tuple] = set()
    for param in spec.params:
        key = param.shape, param.dim, param.parts
        dim = param.dim
        is_matrix = len(param.shape) == 2 and 0 < param.unit <= spec.layers
        # Adapters are not rounded to eight bits.
        is_adapter = param.role.endswith(("_lora_a", "_lora_b"))
        if dim is None or not is_matrix or is_adapter or key in checked:
            continue
        checked.add(key)
        size = param.shape[dim]
        boxes = [box for coord in coords for box in local_boxes(param, layout, coord)]
        edges = [edge for box in boxes for edge in (box.start[dim], box.stop[dim])]
        is_cut = any(edge % BLOCK and edge != size for edge in edges)
        if is_cut or sum(box.shape[dim] for box in boxes) > size:
            return param.name
    return None


def _ulysses_faults(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    """Ulysses shares a tensor-parallel rank's query heads; fewer key/value heads are replicated."""
    ulysses = layout.ulysses
    max_ulysses = spec.heads // layout.tp
    max_tp = spec.heads // ulysses
    if 1 <= max_ulysses < ulysses:
        after_tp = f" after tp{layout.tp} (of {spec.heads})" if layout.tp > 1 else ""
        or_tp = f", or tp{max_tp} with u{ulysses}" if 1 <= max_tp < layout.tp else ""
        heads = _count(max_ulysses, "query head")
        shares = f"u{ulysses} shares {heads}{after_tp} among {ulysses} ranks"
        rule = "ulysses above the query heads of a tensor-parallel rank"
        yield Fault(rule, f"{shares}: at most u{max_ulysses}{or_tp}; ring has no such limit")


def pipeline_faults(spec: ModelSpec, layout: Layout) -> Iterator[Fault]:
    """Faults of the stages, their order and their sizes."""
    pp = layout.pp
    virtual = layout.virtual
    layers = spec.layers
    if layout.order == "vertical" and pp * virtual > 1:
        yield Fault(
            "vertical in stages",
            "vertical takes all micro-batches through a block before the next, and stages wait for"
            " each: drop vertical, or pp and v",
        )
    if layout.order == "vertical" and layout.chunk:
        yield Fault(
            "vertical in chunks",
            "vertical is said of packs that are computed whole, and this layout has chunks:"
            " drop it",
        )
    if virtual > 1 and layout.order == "gpipe":
        reason = (
            f"gpipe and v{virtual} contradict: model chunks are what 1F1B interleaves; drop gpipe"
            f" or v{virtual}"
        )
        yield Fault("virtual stages under gpipe", reason)
    if virtual > 1 and pp == 1:
        reason = (
            f"v{virtual} interleaves the model chunks of several pipeline ranks, and pp is 1: drop"
            f" v{virtual} or add pp2"
        )
        yield Fault("virtual stages without a pipeline", reason)
    elif pp * virtual > layers:
        makes = f"pp{pp} makes {pp}"
        works = f"pp{min(pp, layers)}"
        if virtual > 1:
            makes = f"pp{pp}.v{virtual} makes {pp} x {virtual} = {pp * virtual}"
            fewer = ((layers // virtual, virtual), (pp, layers // pp))
            works = " or ".join(f"pp{p}.v{v}" for p, v in fewer if p > 1 and v > 1) or works
        reason = f"{makes} stages of at least one block, the model has {layers}: at most {works}"
        yield Fault(f"stages without one of {layers} blocks", reason)
    if layout.stages and (reason := _stage_sizes_fault(layout, layers)):
        yield Fault("stages of other sizes", reason)


def _stage_sizes_fault(layout: Layout, layers: int) -> str:
    """Explicit stage sizes are as many as virtual stages, each at least one block, together the
    model. Empty if they are."""
    sizes = layout.stages
    num_stages = layout.pp * layout.virtual
    problems = []
    if len(sizes) != num_stages:
        problems.append(f"{_count(len(sizes), 'stage')}, {num_stages} are needed")
    if sum(sizes) != layers:
        terms = " + ".join(map(str, sizes))
        problems.append(f"{terms} = {sum(sizes)} blocks, the model has {layers}")
    if min(sizes) < 1:
        problems.append("a stage without a block")
    if not problems:
        return ""
    hint = ""
    if num_stages <= layers:
        spans = [share(layers, num_stages, i) for i in range(num_stages)]
        even_sizes = "-".join(str(stop - start) for start, stop in spans)
        hint = f": try pp{layout.pp}:{even_sizes}"
    return f"pp{layout.pp}:{'-'.join(map(str, sizes))} has {' and '.join(problems)}{hint}"


def _streaming_faults(layout: Layout) -> Iterator[str]:
    """Words on chunks need a chunked layout, and offloading needs activations that can be told from
    the rest."""
    yield from _kept_block_faults(layout)
    if not layout.chunk:
        words = re.findall(r"every\d+|kv-offload|fpdt", str(layout))
        if words:
            yield (
                f"{' and '.join(words)} is said of a layout in chunks, and this one has none: add"
                " chunk64K, say"
            )
        if layout.offload != "device" and layout.recompute not in ("full", "auto"):
            yield (
                f"{layout.offload} takes what recompute-full or a chunked layout keeps: add"
                " recompute-full, or chunk64K"
            )
        return
    if layout.chunk != AUTO and layout.chunk < layout.sequence:
        yield (
            f"chunk{layout.chunk} has fewer tokens than the {layout.sequence} ranks that share it:"
            f" at least chunk{layout.sequence}"
        )
    if layout.recompute != "none":
        yield (
            f"recompute-{layout.recompute}: chunks are computed again from a block's input anyway;"
            " drop it, or say every1"
        )
    if layout.kv == "offload" and layout.offload == "device":
        yield "kv-offload has nowhere to go: add host or disk"


def _kept_block_faults(layout: Layout) -> Iterator[str]:
    """Blocks that keep all need a layout in which the rest does not."""
    if not layout.kept_blocks:
        return
    word = f"keep{layout.kept_blocks}"
    if layout.chunk:
        yield (
            f"{word} is said of blocks that are computed whole, and this layout has chunks: drop it"
        )
    elif layout.recompute == "auto":
        yield f"recompute-auto chooses how many blocks keep all: drop {word}"
    elif layout.recompute in ("none", "selective"):
        keep = "keep all" if layout.recompute == "none" else "keep all but attention's inside"
        yield f"{word}: the blocks of this layout {keep} anyway; drop it, or add recompute-full"


def min_chunk(max_tokens: int, pack_tokens: int) -> int:
    """The smallest power of two for which a pack of such documents has no more pairs of chunks than
    one document of MAX_CHUNKS."""
    chunk = 1
    while -(-max_tokens // chunk) * -(-pack_tokens // chunk) > MAX_CHUNKS**2:
        chunk *= 2
    return chunk


def _chunk_faults(layout: Layout, max_tokens: int | None, pack_tokens: int | None) -> Iterator[str]:
    chunk = layout.chunk
    if chunk <= 0 or max_tokens is None:
        return
    pack_tokens = max(max_tokens, pack_tokens or 0)

    # Chunks pair inside their document: each of the pack's with at most `document_chunks`.
    document_chunks = -(-max_tokens // chunk)
    pack_chunks = -(-pack_tokens // chunk)
    if document_chunks * pack_chunks > MAX_CHUNKS**2:
        possible = replace(layout, chunk=min_chunk(max_tokens, pack_tokens))
        in_packs = ""
        limit = f"{MAX_CHUNKS}"
        if pack_chunks > document_chunks:
            in_packs = f", in packs of {pack_tokens} of {pack_chunks}"
            limit = f"{MAX_CHUNKS} x {MAX_CHUNKS}"
        documents = f"documents of {max_tokens} tokens are {document_chunks} chunks of {chunk}"
        yield f"{documents}{in_packs}, whose pairs are too many: at most {limit}, as in {possible}"


def _length_faults(spec: ModelSpec, max_tokens: int | None) -> Iterator[str]:
    if max_tokens is None:
        return
    limit = spec.max_positions
    # Rotary positions are computed for any length; learned ones are a table.
    if spec.learned_positions and max_tokens > limit:
        yield (
            f"documents are up to {max_tokens} tokens long, the model has learned"
            f" {limit} positions: data.max_len at most {limit}"
        )


def _count(number: int | str, noun: str) -> str:
    return f"{number} {noun}" if number in (1, "1") else f"{number} {noun}s"
