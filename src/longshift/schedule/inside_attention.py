"""Attention of a rank on tensors without numbers, as `model.attention`, `model.kernels` and `parallel.ring` hold and drop theirs."""

# ruff: noqa: F841, RUF059  (variables hold tensors for as long as the model's do)

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from longshift.schedule.abstract import Tensor, recorded
from longshift.schedule.inside_rank import END_BYTES, EVEN, LONG, MOST_SCORES, Place, Rank, SizedGroup, cast
from longshift.schedule.kernel_calls import banded, cut_parts
from longshift.schedule.sequence import Pair, TokenOrder, pairs
from longshift.schedule.windows import Mask, pieces
from longshift.spec.model import attended


def _parts(place: Place, queries: int, keys: int, causal: bool) -> list[tuple[int, list[tuple[int, bool]]]]:
    """`schedule.kernel_calls.cut_parts`, in tokens. Empty where a piece is not cut;
    on a GPU whose kernel takes all lengths none is, and less is held than this says."""
    fused = place.transport == "nccl" and place.itemsize <= 2 and not place.spec.score_cap
    if not fused or min(queries, keys) < LONG or queries % EVEN == keys % EVEN == 0:
        return []
    return [
        (rows.stop - rows.start, [(keys.stop - keys.start, hides) for keys, hides in seen])
        for rows, seen in cut_parts(queries, keys, EVEN, causal)
    ]


def _fold_parts(rank: Rank, q: Tensor, k: Tensor, parts: list[tuple[int, list[tuple[int, bool]]]], times: int, wide: bool, first: bool):
    """`model.cut.Multiples.fold`; `wide`: into an output in at least float32."""
    for rows, seen in parts:
        narrow = not wide and not (first and len(seen) == 1)
        sums = q.new((rows, *q.shape[1:]), rank.place.wide) if narrow else None
        for number, (keys, hides) in enumerate(seen):
            _merge(*_whole_flash(rank, _rows(q, rows), _rows(k, keys), hides, times), first and number == 0)
        del sums


def _flash(rank: Rank, q: Tensor, k: Tensor, causal: bool, times: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a piece; of each of `times` equal ones."""
    if not (parts := _parts(rank.place, q.shape[0], k.shape[0], causal)):
        return _whole_flash(rank, q, k, causal, times)
    found = q.new(), q.new(q.shape[:2], rank.place.wide)
    _fold_parts(rank, q, k, parts, times, wide=False, first=True)
    return found


def _whole_flash(rank: Rank, q: Tensor, k: Tensor, causal: bool, times: int) -> tuple[Tensor, Tensor]:
    place, scores = rank.place, times * q.shape[0] * k.shape[0] * q.shape[1]
    rank.flops["attention"] += 4 * scores * q.shape[2] // (2 if causal else 1)
    if place.spec.score_cap:
        return _capped(place.wide, q, k, causal)
    if place.by_definition:
        return _by_definition(q, k, causal)
    found = q.new(), q.new(q.shape[:2], place.wide)
    state = q.new((3,), 8) if place.transport == "nccl" else None  # of random numbers
    return found


def _flash_backward(rank: Rank, q: Tensor, k: Tensor, v: Tensor, causal: bool, times: int) -> tuple[Tensor, Tensor, Tensor]:
    if not (parts := _parts(rank.place, q.shape[0], k.shape[0], causal)):
        return _whole_flash_backward(rank, q, k, v, causal, times)
    totals = q.new(), k.new(), v.new()
    for rows, seen in parts:
        for keys, hides in seen:
            _whole_flash_backward(rank, _rows(q, rows), _rows(k, keys), _rows(v, keys), hides, times)
    return totals


def _whole_flash_backward(rank: Rank, q: Tensor, k: Tensor, v: Tensor, causal: bool, times: int) -> tuple[Tensor, Tensor, Tensor]:
    place, scores = rank.place, times * q.shape[0] * k.shape[0] * q.shape[1]
    rank.flops["attention"] += 10 * scores * q.shape[2] // (2 if causal else 1)
    if place.spec.score_cap:
        return _capped_backward(place.wide, q, k, causal)
    if place.by_definition:
        return _by_definition_backward(q, k, causal)
    lse = q.new(q.shape[:2], place.wide) if place.transport == "nccl" else None  # made contiguous
    grads = q.new(), k.new(), v.new()
    inside = _inside_backward(q, k) if place.transport == "nccl" else None
    return grads


def _inside_backward(q: Tensor, k: Tensor) -> list[Tensor]:
    """What a backward of FlashAttention-2 holds inside on a GPU (`mha_bwd` of its flash_api.cpp): gradients of queries in float32, a
    number for every query and head, and where query heads share keys, gradients of keys and values for every query head. What cuDNN's
    holds is not known, and taken to be no more."""
    shared = q.shape[1] != k.shape[1]
    expanded = [k.new((k.shape[0], *q.shape[1:])) for _ in range(2 * shared)]
    return [q.new(itemsize=4), q.new(q.shape[:2], 4), *expanded]


def _capped(wide: int, q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`model.kernels.capped`, forward."""
    q_wide, k_wide, v_wide = cast(q, wide), cast(k, wide), cast(k, wide)
    out, lse = _by_definition(q_wide, k_wide, causal)
    del q_wide, k_wide, v_wide
    return cast(out, q.itemsize), lse


def _capped_backward(wide: int, q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`model.kernels.capped`, backward."""
    given = [cast(t, wide) for t in (q, q, k, k, q)]
    dq, dk, dv = _by_definition_backward(given[1], given[2], causal, slope=True)
    return cast(dq, q.itemsize), cast(dk, k.itemsize), cast(dv, k.itemsize)


def _by_definition(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`model.kernels.reference`."""
    (tokens, heads, width), outs, lses = q.shape, [], []
    keys, values = (k.new((k.shape[0], heads, width)) for _ in range(2))
    scores = None
    for rows in _score_rows(q, k):
        scores = _scores(q, k, rows, causal)
        lses.append(q.new((rows, heads)))
        weights = _exp_of_difference(scores)
        outs.append(q.new((rows, heads, width)))
        del weights
    out = q.new()
    return out, q.new((tokens, heads))


def _by_definition_backward(q: Tensor, k: Tensor, causal: bool, slope: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`model.kernels.reference_backward`. `slope`: of a soft cap, made of the scores."""
    (_, heads, width), dqs = q.shape, []
    keys, values = (k.new((k.shape[0], heads, width)) for _ in range(2))
    dk, dv = k.new(), k.new()
    p = ds = kept = None
    for rows in _score_rows(q, k):
        scores = _scores(q, k, rows, causal)
        p = _exp_of_difference(scores)
        kept = scores if slope else None
        del scores
        ds = _gradient_of_scores(q, p)
        dqs.append(q.new((rows, heads, width)))
        for total in (dk, dv):
            wide = keys.new()
            part = total.new()
            del wide, part
    return q.new(), dk, dv


def _gradient_of_scores(q: Tensor, p: Tensor) -> Tensor:
    rows, heads, _ = p.shape
    given = p.new()
    product = q.new((rows, *q.shape[1:]))
    delta = q.new((rows, heads))
    del product
    less = p.new()
    del given, delta
    weighed = p.new()
    del less
    return weighed.new()


def _score_rows(q: Tensor, k: Tensor) -> list[int]:
    """How many rows are there at one time."""
    count = max(1, MOST_SCORES // (q.shape[1] * k.shape[0]))
    return [min(count, q.shape[0] - first) for first in range(0, q.shape[0], count)]


def _scores(q: Tensor, k: Tensor, rows: int, causal: bool) -> Tensor:
    scores = q.new((rows, q.shape[1], k.shape[0])).new()
    if causal:
        hidden = q.new((rows, k.shape[0]), 1).new()
        return scores.new()
    return scores


def _fold(rank: Rank, q: Tensor, k: Tensor, mask: Mask, times: int, first: bool, wide: bool = True) -> None:
    """`model.attention.Attention.fold`; `wide`: into an output in at least float32."""
    if mask == "later":
        q_flipped, k_flipped, v_flipped = q.new(), k.new(), k.new()
        out, lse = _flash(rank, q_flipped, k_flipped, True, times)
        del q_flipped, k_flipped, v_flipped
        _merge(out.new(), lse.new(), first)
    elif parts := _parts(rank.place, q.shape[0], k.shape[0], mask == "causal"):
        _fold_parts(rank, q, k, parts, times, wide, first)
    else:
        _merge(*_whole_flash(rank, q, k, mask == "causal", times), first)


def _add(rank: Rank, q: Tensor, k: Tensor, v: Tensor, mask: Mask, times: int) -> tuple[Tensor, ...]:
    """`model.attention.Attention.add`; of a piece that is cut no more than this."""
    if mask != "later":
        return _whole_flash_backward(rank, q, k, v, mask == "causal", times)
    given = q.new(), q.new(), k.new(), v.new(), q.new(), q.new(q.shape[:2], rank.place.wide)
    found = _flash_backward(rank, given[1], given[2], given[3], True, times)
    del given
    return tuple(t.new() for t in found)


def _merge(part: Tensor, part_lse: Tensor, first: bool) -> None:
    """`model.kernels.merge`."""
    if first:
        return
    total = part_lse.new()
    weight = _exp_of_difference(part_lse)
    del weight
    weight = _exp_of_difference(part_lse)
    product = part.new(itemsize=part_lse.itemsize)
    del weight, product


def _exp_of_difference(x: Tensor) -> Tensor:
    difference = x.new()
    return difference.new()


def _rows(t: Tensor, count: int) -> Tensor:
    """A view of some tokens."""
    return Tensor(t.storage, (count, *t.shape[1:]), t.itemsize, t.whole)


def packed_attention(rank: Rank, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """`model.attention.PackedAttention`."""

    again = rank.place.layout.recompute == "selective"

    def back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *made: Tensor) -> list[Tensor]:
        (calls, ends), result = _calls(rank, lengths, window), ()
        if calls.total() == 1 and (rank.place.packed(lengths, window) or not banded(lengths, window)):
            result = _forward(rank, q, k, lengths, window) if again else ()
            return list(_backward(rank, q, k, v, lengths, window, 1))
        grads = [q.new(), k.new(), v.new()]
        for some, times in calls.items():
            piece = _rows(q, sum(some)), _rows(k, sum(some)), _rows(v, sum(some))
            result = _forward(rank, *piece[:2], some, window, times) if again else ()
            _backward(rank, *piece, some, window, times)
        return grads

    out, lse = rank.whole(lambda: _forward(rank, q, k, lengths, window))
    return recorded(out, (q, k, v), back, (q, k, v) if again else (q, k, v, out, lse))


def _calls(rank: Rank, lengths: Sequence[int], window: int | None) -> tuple[Counter[tuple[int, ...]], list[Tensor]]:
    """`model.attention._calls`: how often documents of these lengths are computed together, and where they end."""
    calls = rank.place.calls(lengths, window)
    several = [some for some in calls if len(some) > 1] if len(calls) > 1 else []
    return Counter(calls), [rank.new((len(some) + 1,), END_BYTES) for some in several]


def _backward(rank: Rank, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None, times: int) -> Sequence[Tensor]:
    """`model.attention._backward`; of each of `times` equal calls."""
    if rank.place.packed(lengths, window):
        return _one_call_backward(rank, q, k, v, lengths, window, times)
    if window is None or lengths[0] <= window:
        return _flash_backward(rank, q, k, v, True, times)
    totals = [t.new(itemsize=rank.place.wide) for t in (q, k, v)]
    for (queries, keys, mask), count in _equal(_pieces(lengths[0], window)):
        _add(rank, _rows(q, queries), _rows(k, keys), _rows(v, keys), mask, times * count)
    return totals


def _one_call(rank: Rank, q: Tensor, lengths: Sequence[int], window: int | None, times: int = 1) -> tuple[Tensor, Tensor]:
    """`model.packed.flash_forward`; of each of `times` equal calls."""
    rank.flops["attention"] += times * 4 * q.shape[1] * q.shape[2] * _seen(lengths, window)
    out, by_head, states = q.new(), q.new(q.shape[:2], rank.place.wide), q.new((3,), 8)  # of random numbers
    lse = by_head.new()
    return out, lse


def _one_call_backward(rank: Rank, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None, times: int) -> list[Tensor]:
    """`model.packed.flash_backward`; of each of `times` equal calls."""
    rank.flops["attention"] += times * 10 * q.shape[1] * q.shape[2] * _seen(lengths, window)
    seed, lse = q.new((2,), 8), q.new(q.shape[:2], rank.place.wide)
    grads = [q.new(), k.new(), v.new()]
    inside = _inside_backward(q, k)
    return grads


def _seen(lengths: Sequence[int], window: int | None) -> int:
    """Pairs of a token and one that it attends to, half of them on the diagonal."""
    return int(sum(attended(length, window) for length in lengths))


def _forward(rank: Rank, q: Tensor, k: Tensor, lengths: Sequence[int], window: int | None, each: int = 1) -> tuple[Tensor, Tensor]:
    """`model.attention._forward`; of each of `each` equal packs."""
    calls, ends = _calls(rank, lengths, window)
    if calls.total() == 1 and rank.place.packed(lengths, window):
        return _one_call(rank, q, lengths, window, each)
    out, lse = q.new(), q.new(q.shape[:2], rank.place.wide)
    for some, count in calls.items():
        length, times = some[0], count * each
        if len(some) > 1:
            _one_call(rank, _rows(q, sum(some)), some, window, times)
            continue
        if window is None or length <= window:
            _fold(rank, _rows(q, length), _rows(k, length), "causal", times, first=True, wide=False)
            continue
        sums = q.new((length, *q.shape[1:]), rank.place.wide) if q.itemsize != rank.place.wide else None
        for (queries, keys, mask), pieces_ in _equal(_pieces(length, window)):
            _fold(rank, _rows(q, queries), _rows(k, keys), mask, times * pieces_, first=mask == "causal")
        del sums
    return out, lse


@lru_cache(maxsize=4096)
def _pieces(length: int, window: int) -> tuple[Pair, ...]:
    """`model.attention._pieces`"""
    return tuple((slice(*queries), slice(*keys), mask) for queries, keys, mask in pieces((0, length), (0, length), window))


def ring_attention(rank: Rank, q: Tensor, k: Tensor, v: Tensor, order: TokenOrder, window: int | None, group: "SizedGroup") -> Tensor:
    """`parallel.ring.RingAttention`."""
    wide, index = rank.place.wide, group.index
    again = rank.place.layout.recompute == "selective"

    def forward(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new(itemsize=wide), q.new(q.shape[:2], wide)
        ring_forward(rank, q, kv, lambda i: pairs(order, index, i, window), group, first=True)
        return cast(out, q.itemsize), lse

    def back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *made: Tensor) -> list[Tensor]:
        kv = k.new((2, *k.shape))
        result = forward(q, kv) if again else ()
        dq, dkv = q.new(itemsize=wide), kv.new(itemsize=wide)
        ring_backward(rank, dkv, q, kv, lambda i: pairs(order, index, i, window), group)
        dq_cast = cast(dq, q.itemsize)
        dkv_cast = cast(dkv, k.itemsize)
        return [dq_cast, *(Tensor(dkv_cast.storage, k.shape, k.itemsize) for _ in range(2))]

    o, lse = rank.whole(lambda: forward(q, k.new((2, *k.shape))))
    return recorded(o, (q, k, v), back, (q, k, v) if again else (q, k, v, o, lse))


def ring_forward(rank: Rank, q: Tensor, kv: Tensor, pairs_of: Callable[[int], Sequence[Pair]], group: "SizedGroup", first: bool) -> None:
    """`parallel.ring.forward_into`."""
    for step in range(group.size):
        sending, following = _pass_on(kv, group) if step < group.size - 1 else (None, kv)
        for (queries, keys, mask), times in _equal(pairs_of((group.index - step) % group.size)):
            _fold(rank, *_piece(q, kv, queries, keys)[:2], mask, times, first=first and step == 0 and mask == "causal")
        del sending
        kv = following


def ring_backward(rank: Rank, dkv: Tensor, q: Tensor, kv: Tensor, pairs_of: Callable[[int], Sequence[Pair]], group: "SizedGroup") -> None:
    """`parallel.ring.backward_into`."""
    arriving, received = None, dkv
    for step in range(group.size):
        sending, following = _pass_on(kv, group) if step < group.size - 1 else (None, kv)
        here = dkv.new() if group.size > 1 else dkv
        for (queries, keys, mask), times in _equal(pairs_of((group.index - step) % group.size)):
            _add(rank, *_piece(q, kv, queries, keys), mask, times)
        if group.size == 1:
            return
        arriving = None
        arriving, received = _pass_on(here.new() if step else here, group)
        sending = None
        kv = following


def _equal(found: Sequence[Pair]) -> Iterable[tuple[tuple[int, int, Mask], int]]:
    """Pieces by numbers of queries and keys, and how many there are of each."""
    counted: Counter[tuple[int, int, Mask]] = Counter()
    counted.update((queries.stop - queries.start, keys.stop - keys.start, mask) for queries, keys, mask in found)
    return counted.items()


def _piece(q: Tensor, kv: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    piece = Tensor(kv.storage, (keys, *kv.shape[2:]), kv.itemsize)
    return _rows(q, queries), piece, piece


def _pass_on(x: Tensor, group: "SizedGroup") -> tuple[Tensor, Tensor]:
    """What is being sent, a copy, and what arrives."""
    sending = x.new()
    group.count(x.bytes)
    return sending, x.new()
