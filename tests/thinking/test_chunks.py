"""Chunk lists: every pair once, nothing read before it is there, bounded memory, one result in any order that keeps the dependencies.

The lists are played with symbols for tensors (`meaning`), and what comes out is held against the definition without chunks (`truth`)."""

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshift.schedule.block_events import Policy, backward_events, end_events, forward_events
from longshift.schedule.chunks import BufferBytes, cut_chunks, first_key_chunks
from longshift.schedule.event import LANES, Buffer, Event, dependencies
from longshift.simulate.chunk_clock import timeline

NAMES = ["x", "y", "q", "kv", "o", "dy", "dx", "do", "dq", "dkv", "dr", "qkv", "graph", "exchange", "dqkv", "o_tokens", "do_tokens"]
SEEDS = st.integers(0, 10**6)

packs = st.lists(st.integers(0, 7), max_size=4) | st.integers(8, 12).map(lambda n: [n])
chunk_tokens = st.integers(1, 5)
policies = st.builds(
    Policy,
    schedule=st.sampled_from(["stream", "fpdt"]),
    keep=st.sampled_from(["output", "input"]),
    kv=st.sampled_from(["device", "offload"]),
    ahead=st.integers(0, 3),
    sent=st.sampled_from([0.0, 0.5]),
)
offloads = policies.map(lambda policy: replace(policy, kv="offload"))
seen = st.builds(lambda lengths, tokens: first_key_chunks(cut_chunks(lengths, tokens)), packs, chunk_tokens)


def distinct_sizes(names, count, seed):
    drawn = iter(random.Random(seed).sample(range(1, 10**6), len(names) * count))
    return {name: [next(drawn) for _ in range(count)] for name in names}


def both(sees, policy, sizes=None):
    return forward_events(sees, policy, sizes or {}), backward_events(sees, policy, sizes or {})


# What the lists mean


def meaning(event, read):
    """The symbols that an operation writes, by name; a sum is the sorted tuple of its terms, so that a term added twice shows."""
    c, j = event.chunk, event.keys

    def added(to, *term):
        return tuple(sorted([*read.get(to, ()), (c, j, *term)], key=lambda term: term[:2]))

    match event.name:
        case "qkv":
            made = ("qkv", read["x", c])
            return {"qkv": made, "q": ("q", made), "kv": ("kv", made), "graph": ("graph", made)}
        case "to_heads":
            made = read["qkv", c]
            return {"q": ("q", made), "kv": ("kv", made), "exchange": ("exchange", made)}
        case "attend":
            return {"o": added(("o", c), read["q", c], read["kv", j])}
        case "to_tokens":
            return {"o_tokens": read["o", c]}
        case "tail":
            return {"y": ("y", read["x", c], read.get(("o_tokens", c)) or read["o", c])}
        case "tail_back":
            used = read["x", c], read.get(("o_tokens", c)) or read["o", c], read["dy", c]
            return dict.fromkeys(("dx", "dr"), ("dr", *used)) | dict.fromkeys(("do", "do_tokens"), ("do", *used))
        case "to_tokens_back":
            return {"do": read["do_tokens", c]}
        case "attend_back":
            term = read["q", c], read["kv", j], read["o", c], read["do", c]
            return {"dq": added(("dq", c), *term), "dkv": added(("dkv", j), *term)}
        case "to_heads_back":
            return {"dqkv": (read["exchange", c], read["dq", c], read["dkv", c])}
        case "qkv_back":
            dqkv = read.get(("dqkv", c)) or (None, read["dq", c], read["dkv", c])
            return {"dx": ("dx", read["graph", c], *dqkv, read.get(("dx", c)) or read["dr", c])}
    raise AssertionError(f"no operation is called {event.name}")


def truth(sees, policy):
    """The symbols of y and dx, from the definition."""
    chunks = range(len(sees))
    made = [("qkv", ("x", c)) for c in chunks]
    q, kv = [("q", m) for m in made], [("kv", m) for m in made]
    o = [tuple((c, j, q[c], kv[j]) for j in range(sees[c], c + 1)) for c in chunks]
    used = [(("x", c), o[c], ("dy", c)) for c in chunks]
    term = {(c, j): (c, j, q[c], kv[j], o[c], ("do", *used[c])) for c in chunks for j in range(sees[c], c + 1)}
    result = {("y", c): ("y", ("x", c), o[c]) for c in chunks}
    for c in chunks:
        exchange = ("exchange", made[c]) if policy.sent else None
        dq, dkv = tuple(term[p] for p in term if p[0] == c), tuple(term[p] for p in term if p[1] == c)
        result["dx", c] = ("dx", ("graph", made[c]), exchange, dq, dkv, ("dr", *used[c]))
    return result


def play(events, tier, order=None):
    """The events, in their own or another order, on places addressed by name and slot. Changes `tier`. Raises KeyError where a fetch or
    a drop finds nothing."""
    device = {}
    for event in events if order is None else [events[number] for number in order]:
        places = [(buffer[0], slot) for buffer, slot in zip(event.reads + event.writes, event.slots)]
        read = {buffer: device[place] for buffer, place in zip(event.reads, places)}
        if event.kind == "fetch":
            device[places[0]] = tier[event.object]
        elif event.kind == "store":
            tier[event.object] = read[event.object]
        elif event.kind == "drop":
            del tier[event.object]
        elif event.kind in ("compute", "send"):
            made = meaning(event, read)
            device |= {place: made[place[0]] for place in places[len(event.reads) :]}


def wrong(sees, policy, lists, orders=(None, None)):
    """The objects that the tier holds after forward and backward and should not, or not so, or should and does not."""
    tier = {("x", c): ("x", c) for c in range(len(sees))}
    play(lists[0], tier, orders[0])
    tier |= {("dy", c): ("dy", c) for c in range(len(sees))}
    play(lists[1], tier, orders[1])
    expected = truth(sees, policy)
    return sorted(item for item in tier.keys() | expected.keys() if tier.get(item) != expected.get(item))


# Chunks and pairs


@given(packs, chunk_tokens)
def test_chunks_hold_every_token_once_in_order_and_reach_back_to_where_their_first_document_began(lengths, tokens):
    chunks = cut_chunks(lengths, tokens)
    held = [[(r.document, r.start + i) for r in runs for i in range(r.length)] for runs in chunks]
    flat = [token for chunk in held for token in chunk]
    assert flat == [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    assert all(len(chunk) == tokens for chunk in held[:-1])
    assert all(0 < len(chunk) <= tokens for chunk in held)
    assert all(a.document < b.document for runs in chunks for a, b in pairwise(runs))
    starts = (0, *accumulate(lengths))
    assert first_key_chunks(chunks) == tuple(starts[chunk[0][0]] // tokens for chunk in held)


@given(seen, policies)
def test_attention_of_every_pair_once_forward_and_once_backward(sees, policy):
    pairs = Counter((c, j) for c in range(len(sees)) for j in range(sees[c], c + 1))
    first, second = both(sees, policy)
    assert Counter((e.chunk, e.keys) for e in first if e.name == "attend") == pairs
    assert Counter((e.chunk, e.keys) for e in second if e.name == "attend_back") == pairs
    assert Counter((e.chunk, e.keys) for e in second if e.name == "attend") == (pairs if policy.keep == "input" else Counter())


@given(packs, chunk_tokens)
def test_rectangles_between_chunks_and_triangles_inside_cover_every_query_and_key_once(lengths, tokens):
    chunks = cut_chunks(lengths, tokens)
    starts = (0, *accumulate(lengths))
    document = np.repeat(np.arange(len(lengths)), lengths)
    found = np.zeros((len(document), len(document)), int)

    def span(r):
        return slice(starts[r.document] + r.start, starts[r.document] + r.start + r.length)

    for c, j in {(e.chunk, e.keys) for e in forward_events(first_key_chunks(chunks), Policy(), {}) if e.name == "attend"}:
        for r in chunks[c] if c == j else ():
            found[span(r), span(r)] += np.tri(r.length, dtype=int)
        if c != j:
            found[span(chunks[c][0]), span(chunks[j][-1])] += 1
    np.testing.assert_array_equal(found, np.tril(document[:, None] == document[None, :]))


# Memory


@given(seen, policies, SEEDS)
def test_buffers_are_read_while_they_live_in_a_slot_of_their_own_and_freed_once(sees, policy, seed):
    sizes = distinct_sizes(NAMES, len(sees), seed)
    for events in both(sees, policy, sizes):
        live = {}
        for event in events:
            assert all(buffer in live for buffer in event.reads)
            if event.kind == "free":
                assert event.slots == (live.pop(event.object),)
            for buffer in event.writes:
                assert (buffer in live) == (buffer in event.reads)  # what is overwritten was read
            assert len(event.slots) == (len(event.reads) + len(event.writes) or (event.kind == "free"))
            for buffer, slot in zip(event.reads + event.writes, event.slots):
                assert live.setdefault(buffer, slot) == slot
            places = [(name, slot) for (name, _), slot in live.items()]
            assert len(set(places)) == len(places)
            if event.kind == "send":
                moved = ("q", "kv") if event.name in ("to_heads", "to_heads_back") else ("q",)
                assert event.bytes == int(policy.sent * sum(sizes[name][event.chunk] for name in moved))
            else:
                assert event.bytes == (0 if event.kind in ("compute", "accumulate") else sizes[event.name][event.chunk])
        assert not live


@given(seen, policies)
def test_the_tier_ends_with_the_right_outputs_and_gradients_and_nothing_else(sees, policy):
    assert not wrong(sees, policy, both(sees, policy))


@given(seen, policies)
def test_forward_leaves_what_backward_is_to_find(sees, policy):
    tier = {("x", c): ("x", c) for c in range(len(sees))}
    play(forward_events(sees, policy, {}), tier)
    kept = {("o", c) for c in range(len(sees))} | {("kv", j) for c in range(len(sees)) for j in range(sees[c], c)}
    assert set(tier) == {(n, c) for n in "xy" for c in range(len(sees))} | (kept if policy.keep == "output" else set())


@given(seen, policies)
def test_a_forward_that_passes_on_leaves_its_output_alone(sees, policy):
    tier = {("x", c): ("x", c) for c in range(len(sees))}
    play(forward_events(sees, replace(policy, keep="input"), {}, drop_x=True), tier)
    expected = truth(sees, policy)
    assert tier == {item: expected[item] for item in expected if item[0] == "y"}


@given(seen, offloads)
def test_slots_are_bounded_whatever_the_number_of_chunks(sees, policy):
    for events in both(sees, policy):
        slots = Counter()
        for event in events:
            for (name, _), slot in zip(event.reads + event.writes, event.slots):
                slots[name] = max(slots[name], slot + 1)
        assert all(taken <= policy.ahead + 2 for taken in slots.values()), slots


@given(seen, policies)
def test_gradients_that_an_operation_leaves_on_weights_are_added_up_at_once(sees, policy):
    blocks = [1 + c % 3 for c in range(len(sees))]
    loss = end_events("loss", "x", "dx", len(sees), {}, blocks)
    embedding = [end_events(*ends, len(sees), {}) for ends in (("embed", None, "y"), ("embed_back", "dy", None))]
    assert [(e.chunk, e.keys) for e in loss if e.name == "loss"] == [(c, block) for c, count in enumerate(blocks) for block in range(count)]
    for events in (*both(sees, policy), loss, *embedding):
        leaves = [event.name in ("tail_back", "qkv_back", "embed_back", "loss") for event in events]
        assert [event.kind == "accumulate" for event in events] == [False, *leaves][: len(events)]
        assert all(after.chunk == event.chunk for event, after in pairwise(events) if after.kind == "accumulate")


def peak_bytes(events: Sequence[Event], sizes: BufferBytes) -> int:
    """The most that buffers take on the device at one time, in the order of the list; what operations need inside is not counted."""
    live: set[Buffer] = set()
    now = most = 0

    def size(buffer: Buffer) -> int:
        return sizes[buffer[0]][buffer[1]] if buffer[0] in sizes else 0

    for event in events:
        now += sum(size(buffer) for buffer in event.writes if buffer not in live)
        live.update(event.writes)
        most = max(most, now)
        if event.kind == "free":
            live.remove(event.object)
            now -= size(event.object)
    return most


@given(seen, policies, SEEDS)
def test_peak_bytes_is_that_of_a_replay(sees, policy, seed):
    sizes = distinct_sizes(random.Random(seed).sample(NAMES, 12), len(sees), seed)
    for events in both(sees, policy, sizes):
        change, live = [], set()
        for event in events:
            began, ended = set(event.writes) - live, {event.object} if event.kind == "free" else set()
            live = (live | began) - ended
            change.append(sum(sizes[name][c] for name, c in began if name in sizes))
            change[-1] -= sum(sizes[name][c] for name, c in ended if name in sizes)
        assert peak_bytes(events, sizes) == max(accumulate(change), default=0)


ONE = {name: 7 + number for number, name in enumerate(NAMES)}


@given(policies)
@settings(max_examples=30)
def test_the_peak_grows_with_the_chunks_only_by_what_stays_on_the_device(policy):
    def peaks(count):
        sizes = {name: [size] * count for name, size in ONE.items()}
        return np.array([peak_bytes(events, sizes) for events in both((0,) * count, policy, sizes)])

    staying = (("kv",), ("kv", "dkv") if policy.schedule == "stream" else ("q", "do", "o", "dq"))
    growth = [sum(ONE[name] for name in names) if policy.kv == "device" else 0 for names in staying]
    assert ((peaks(10) - peaks(8)) / 2).tolist() == growth


# Traffic


@given(seen, policies)
def test_nothing_is_stored_or_fetched_for_nothing(sees, policy):
    first, second = both(sees, policy)
    stored, fetched = set(), set()
    for event in (*first, *second):
        fetched -= set(event.reads)
        if event.kind == "fetch":
            stored.discard(event.object)
            fetched.add(event.object)
        elif event.kind == "free":
            assert event.object not in fetched
        elif event.kind in ("store", "drop"):
            assert event.object not in stored
            stored |= {event.object} if event.kind == "store" else set()
    assert stored == {(name, c) for name in ("y", "dx") for c in range(len(sees))}


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_traffic_of_both_schedules_backward(n):
    """One document in n chunks, 32 heads of 128 and 8 for keys and values, bfloat16 with dq and dkv in float32; bytes a token."""
    one = {"q": 8192, "do": 8192, "o": 8192 + 128, "dq": 16384, "kv": 4096, "dkv": 8192}
    pairs = n * (n - 1) // 2  # (c, j), j < c
    moves = {
        "stream": {"kv": pairs, "dkv": 2 * pairs, "o": n, "x": n, "dy": n, "dx": n},
        "fpdt": dict.fromkeys(("q", "do", "o"), pairs + 2 * n) | {"dq": 2 * pairs, "kv": n + 1, "x": 2 * n, "dr": 2 * n, "dy": n, "dx": n},
    }
    taken = {}
    for schedule, expected in moves.items():
        listed = backward_events((0,) * n, Policy(schedule, kv="offload"), {name: [size] * n for name, size in one.items()})
        events = [event for event in listed if event.kind in ("fetch", "store")]
        assert Counter(event.name for event in events) == Counter(expected)
        taken[schedule] = sum(event.bytes for event in events)
        assert taken[schedule] == sum(count * one.get(name, 0) for name, count in expected.items())
    assert taken["fpdt"] > 2.8 * taken["stream"]


# Order


def shuffled(events, after, seed):
    """A random order that keeps `after` and, in each lane, the list's; seeds differ in which kinds run early."""
    chance = random.Random(seed)
    urge = {kind: chance.random() for kind in ("fetch", "compute", "send", "store", "drop", "free", "accumulate")}
    last, before = {}, [set(a) for a in after]
    for number, event in enumerate(events):
        if event.kind in LANES:
            before[number] |= {last[event.kind]} if event.kind in last else set()
            last[event.kind] = number
    following = [[] for _ in events]
    for number, found in enumerate(before):
        assert all(b < number for b in found)
        for b in found:
            following[b].append(number)
    left = [len(found) for found in before]
    urgency = [urge[event.kind] + 0.5 * chance.random() for event in events]
    ready = [(urgency[number], number) for number, count in enumerate(left) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for number in following[order[-1]]:
            left[number] -= 1
            if not left[number]:
                heapq.heappush(ready, (urgency[number], number))
    return order


@given(seen, policies, SEEDS)
def test_any_order_that_keeps_the_dependencies_gives_the_same(sees, policy, seed):
    lists = both(sees, policy)
    orders = [shuffled(events, dependencies(events), seed) for events in lists]
    assert all(len(order) == len(events) for order, events in zip(orders, lists))
    assert not wrong(sees, policy, lists, orders)


def conflicts(first, second):
    """What keeps `second` behind `first`: "read after write", "write after read", "write after write"."""
    used = []
    for event in (first, second):
        places = [(buffer[0], slot) for buffer, slot in zip(event.reads + event.writes, event.slots)]
        reads, writes = set(places[: len(event.reads)]), set(places[len(event.reads) :])
        (reads if event.kind == "fetch" else writes).update({event.object} if event.kind in ("fetch", "store", "drop") else ())
        used.append((reads, writes))
    (a_reads, a_writes), (b_reads, b_writes) = used
    found = {"read after write": a_writes & b_reads, "write after read": a_reads & b_writes, "write after write": a_writes & b_writes}
    return {name for name, places in found.items() if places}


@pytest.mark.parametrize("schedule", ["stream", "fpdt"])
@pytest.mark.parametrize("forgotten", ["read after write", "write after read"])
def test_dependencies_without_one_kind_give_something_else(schedule, forgotten):
    sees = (0, 0, 1, 1)
    policy = Policy(schedule, kv="offload")
    lists = both(sees, policy)
    after = [
        [[a for a in found if conflicts(events[a], events[b]) != {forgotten}] for b, found in enumerate(dependencies(events))]
        for events in lists
    ]

    def right(seed):
        try:
            return not wrong(sees, policy, lists, [shuffled(events, found, seed) for events, found in zip(lists, after)])
        except KeyError:  # read before anything was there
            return False

    assert not all(right(seed) for seed in range(20))


def fetches(events):
    """Of each fetch what moves, operations before it, moves of its object before it, and whether it can stand no higher."""
    operations, moves = 0, Counter()
    for number, event in enumerate(events):
        if event.kind == "fetch":
            above = events[number - 1] if number else None
            highest = above is None or above.kind == "fetch" or (above.kind in ("store", "free") and above.object == event.object)
            yield event.object, operations, moves[event.object], highest
        operations += event.kind in ("compute", "send")
        moves[event.object] += event.kind in ("store", "free", "drop")


@given(seen, policies)
def test_a_fetch_moves_up_by_as_many_operations_as_asked_unless_what_it_waits_for_stands_there(sees, policy):
    for late, early in zip(both(sees, replace(policy, ahead=0)), both(sees, policy)):
        others = [[event._replace(slots=()) for event in events if event.kind != "fetch"] for events in (late, early)]
        assert others[0] == others[1]
        for (item, was, after, _), (same_item, at, same_after, highest) in zip(fetches(late), fetches(early), strict=True):
            assert (item, after) == (same_item, same_after)
            assert was - at == policy.ahead or (highest and 0 <= was - at < policy.ahead)


# Time


@given(seen, policies, SEEDS)
def test_a_lane_does_one_thing_at_a_time_and_waits_for_what_it_needs(sees, policy, seed):
    chance, took = random.Random(seed), {}
    for events in both(sees, policy):
        pieces = timeline(events, lambda event: took.setdefault((event.kind, *event.object, event.keys), float(chance.randint(0, 9))))
        times = {piece.key: (piece.start, piece.end) for piece in pieces}
        ended, busy = dict.fromkeys(LANES, 0.0), 0.0
        for number, (event, after) in enumerate(zip(events, dependencies(events), strict=True)):
            wanted = max((times[other][1] for other in after), default=0.0)
            if event.kind not in LANES:
                times[number] = wanted, wanted
                continue
            start, end = times[number]
            assert start == max(wanted, ended[event.kind])
            assert end - start == took[event.kind, *event.object, event.keys]
            ended[event.kind], busy = end, busy + end - start
        assert max(ended.values()) == max((end for _, end in times.values()), default=0.0) <= busy


@pytest.mark.parametrize("schedule", ["stream", "fpdt"])
@pytest.mark.parametrize("keep", ["output", "input"])
def test_with_slow_operations_copies_of_pairs_show_only_where_no_fetch_is_ahead(schedule, keep):
    n = 12

    def exposed(ahead):
        """Copies a tenth of an operation that show, in copies."""
        lists = both((0,) * n, Policy(schedule, keep, "offload", ahead))
        busy = [sum(10.0 for event in events if event.kind == "compute") for events in lists]
        ends = [max(piece.end for piece in timeline(events, lambda event: 10.0 if event.kind == "compute" else 1.0)) for events in lists]
        return [end - work for end, work in zip(ends, busy)]

    assert all(copies >= n * (n - 1) / 2 for copies in exposed(ahead=0))
    assert all(copies <= 4 * n for copies in exposed(ahead=1))
