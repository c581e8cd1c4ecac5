"""Which heads of attention a rank has where tensor-parallel and Ulysses ranks share them, by their
global numbers."""

from longshift.layout import axes
from longshift.layout.layout import Coord, Layout
from longshift.spec.model import ModelSpec, Part, share


def tensor_heads(spec: ModelSpec, layout: Layout, coord: Coord) -> tuple[range, range]:
    """Query and key/value heads of a rank's cut of the weights."""
    ranks = layout.weight_ranks
    index = layout.place(coord, axes.weight_axes())
    first, last = share(spec.heads, ranks, index)
    first_kv, last_kv = Part(spec.kv_heads, heads=spec.heads).rows(ranks, index)
    return range(first, last), range(first_kv, last_kv)


def heads_of(heads: range, group_size: int, ranks: int, index: int) -> tuple[range, range]:
    """Query heads, of `heads`, that the `index`-th of `ranks` attends with, and the key/value heads
    that those need."""
    first, last = share(len(heads), ranks, index)
    queries = heads[first:last]
    return queries, range(queries.start // group_size, -(-queries.stop // group_size))


def kernel_kv_heads(queries: range, keys: range, group_size: int) -> int:
    """How many key/value heads a kernel gets: those of `keys`, or one per query head if `queries`
    are not divided evenly over them."""
    queries_per_key, remainder = divmod(len(queries), len(keys))
    is_even = not remainder and all(
        head // group_size - keys.start == index // queries_per_key
        for index, head in enumerate(queries)
    )
    return len(keys) if is_even else len(queries)


def rank_heads(spec: ModelSpec, layout: Layout, coord: Coord) -> tuple[int, int]:
    """How many query and key/value heads a rank attends with, after Ulysses' exchange."""
    queries, keys = tensor_heads(spec, layout, coord)
    group_size = spec.heads // spec.kv_heads
    if layout.ulysses > 1:
        queries, keys = heads_of(queries, group_size, layout.ulysses, coord.ulysses)
    return len(queries), kernel_kv_heads(queries, keys, group_size)
