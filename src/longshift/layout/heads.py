"""Which heads of attention a rank has where tensor-parallel and Ulysses ranks share them, by their global numbers."""

from longshift.layout import axes
from longshift.layout.layout import Coord, Layout
from longshift.spec.model import ModelSpec, Part, share


def tensor_heads(spec: ModelSpec, layout: Layout, at: Coord) -> tuple[range, range]:
    """Query and key/value heads of this rank's cut of the weights."""
    ranks, cut = layout.weight_ranks, layout.place(at, axes.weight_axes())
    return range(*share(spec.heads, ranks, cut)), range(*Part(spec.kv_heads, heads=spec.heads).rows(ranks, cut))


def heads_of(heads: range, group_size: int, ranks: int, index: int) -> tuple[range, range]:
    """Query heads, of `heads`, that the `index`-th of `ranks` attends with, and the key/value heads that those need."""
    first, last = share(len(heads), ranks, index)
    queries = heads[first:last]
    return queries, range(queries.start // group_size, -(-queries.stop // group_size))


def matched_heads(queries: range, keys: range, group: int) -> int:
    """How many key/value heads a kernel is given: those of `keys`, or one a query head where `queries` do not divide evenly over them."""
    even, extra = divmod(len(queries), len(keys))
    fit = not extra and all(head // group - keys.start == i // even for i, head in enumerate(queries))
    return len(keys) if fit else len(queries)


def own_heads(spec: ModelSpec, layout: Layout, at: Coord) -> tuple[int, int]:
    """How many query and key/value heads a rank attends with, after Ulysses' exchange."""
    queries, keys = tensor_heads(spec, layout, at)
    group = spec.heads // spec.kv_heads
    if layout.ulysses > 1:
        queries, keys = heads_of(queries, group, layout.ulysses, at.ulysses)
    return len(queries), matched_heads(queries, keys, group)
