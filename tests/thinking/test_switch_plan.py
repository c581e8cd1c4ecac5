"""Switch plans over random pairs of layouts: every wanted element once, from a rank that has it by then; nothing that is there already;
what home's copies sum to; the same plan everywhere."""

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from longshift.errors import UsageError
from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Itinerary
from longshift.switch.links import Links
from longshift.switch.options import SwitchOptions
from longshift.switch.plan import Plan, switch_plan
from longshift.switch.spread import BoxesByWeight, Spread, plainest, spread_weights, together, turn_about
from longshift.switch.traffic import least_s, traffic
from longshift.workload.groups import Edge

SPEC = ModelSpec("llama", 7, 6, 3, 6, 2, 1, 5, 16, tied=True)
ROLES = ("embed", "k", "o", "gate", "norm2")  # rows on two stages, shared heads, columns, uneven rows, uncut
KINDS = ("copies", "home", "both")
LINKS = [Links(n, 300e9, 25e9) for n in (1, 2, 3, 4, 8, 16)]
PLANNERS = ("algorithm1", "fan_out")


def legal_layouts() -> list[Layout]:
    """All up to 12 ranks: dp, tp, pp, ulysses and ring together, every ZeRO stage that places otherwise, uneven stages."""
    degrees = product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 5), (1, 2), (1, 2), (0, 1))
    found = [Layout(dp=d, pp=p, tp=t, ulysses=u, ring=r, zero=z) for d, p, t, u, r, z in degrees if d * p * t * u * r <= 12]
    found += [replace(l, stages=(2, 1)) for l in found if l.pp == 2] + [replace(l, virtual=3 // l.pp) for l in found if l.pp == 1]
    return [layout for layout in dict.fromkeys(found) if not faults(SPEC, layout, None)]


LAYOUTS = legal_layouts()
PLACED = {(layout, side): spread_weights(SPEC, layout, side) for layout in LAYOUTS for side in ("copies", "home", "rows")}
NAMES = {role: [p.name for p in SPEC.params if p.role == role] for role in ROLES}

layouts = st.sampled_from(LAYOUTS)
links = st.sampled_from(LINKS)
planners = st.sampled_from(PLANNERS)


def some(side: BoxesByWeight, names: list[str]) -> dict[str, Spread]:
    return {name: side[name] for name in names}


def held_under(old: Layout, older: Layout, kind: str, names: list[str]) -> BoxesByWeight:
    """What is there when the next layout takes over: copies, home, or home and the copies of a layout before."""
    home = some(PLACED[old, "home"], names)
    return {"copies": some(PLACED[old, "copies"], names), "home": home}.get(kind) or together(home, some(PLACED[older, "copies"], names))


def check_slices(p: Plan, held: BoxesByWeight, wanted: BoxesByWeight) -> None:
    """Slices tile what is wanted, and lie wholly inside or outside every box; `has` and `wants` are the boxes' ranks."""
    for w in p.weights:
        start, stop = (np.array([getattr(box, side) for box in w.slices.boxes]) for side in ("start", "stop"))
        elements = (stop - start).prod(1)
        shared = np.minimum(stop[:, None], stop) - np.maximum(start[:, None], start)
        assert ((shared > 0).all(2) == np.eye(len(start), dtype=bool)).all()
        assert (w.slices.size_bytes == p.itemsize * elements).all()
        for spread, members in ((held[w.name], w.slices.has), (wanted[w.name], w.slices.wants)):
            true = np.zeros_like(members)
            for box, ranks in spread.boxes:
                inside = ((start >= box.start) & (stop <= box.stop)).all(1)
                assert (inside | ((start >= box.stop) | (stop <= box.start)).any(1)).all()
                assert spread is held[w.name] or elements[inside].sum() == box.elements
                true[np.ix_(inside, np.array(ranks))] = True
            assert (true == members).all()


def check_moves(p: Plan) -> None:
    """Played round by round: sources have what they send, nobody gets what it has, all who want a slice end with it, relays pass it on."""
    for w in p.weights:
        there = w.slices.has.copy()
        for number in range(p.rounds):
            now = w.moves.round == number
            index, source, target = w.moves.slice[now], w.moves.source[now], w.moves.target[now]
            assert there[index, source].all()
            assert not there[index, target].any()
            assert len(set(zip(index.tolist(), target.tolist()))) == len(index)
            there[index, target] = True
        assert (there >= w.slices.wants).all()
        relays = there & ~w.slices.wants & ~w.slices.has
        sends = np.zeros_like(there)
        sends[w.moves.slice, w.moves.source] = True
        assert (sends >= relays).all()
        assert (np.diff(w.bucket) >= 0).all()


def check_buckets(p: Plan) -> None:
    """No rank sends or receives more than the bucket; `buffer_bytes` is the most of both together."""
    volumes = np.zeros((p.buckets, 2, p.world), np.int64)
    for w in p.weights:
        for side, ranks in enumerate((w.moves.source, w.moves.target)):
            np.add.at(volumes[:, side], (w.bucket[w.moves.slice], ranks), w.slices.size_bytes[w.moves.slice])
    assert p.bucket_bytes is None or volumes.max() <= p.bucket_bytes
    assert p.buffer_bytes == volumes.sum(1).max()


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_every_wanted_element_arrives_once_from_a_holder(seed) -> None:
    """Ten thousand pairs: 50 an example."""
    draw = Random(seed)
    for _ in range(50):
        old, new, names = draw.choice(LAYOUTS), draw.choice(LAYOUTS), NAMES[draw.choice(ROLES)][-2:]
        kind, planner, link, bucket = draw.choice(KINDS), draw.choice(PLANNERS), draw.choice(LINKS), draw.choice((None, 64, 100))
        note(f"{kind} of {old} -> {new}: {names} by {planner}, {link}, buckets of {bucket}")
        held, wanted = held_under(old, draw.choice(LAYOUTS), kind, names), some(PLACED[new, "copies"], names)
        p = switch_plan(held, wanted, link, 2, planner, bucket)
        check_slices(p, held, wanted)
        check_moves(p)
        check_buckets(p)
        if planner == "fan_out":
            check_entries(p)


def check_entries(p: Plan) -> None:
    """A slice enters a node once, and only where no rank of it had the slice."""
    for w in p.weights:
        node, other = w.moves.target // p.links.per_node, w.moves.source // p.links.per_node
        entering = [(int(s), int(n)) for s, n, o in zip(w.moves.slice, node, other) if n != o]
        assert len(entering) == len(set(entering))
        for s, n in entering:
            assert not w.slices.has[s, n * p.links.per_node : (n + 1) * p.links.per_node].any()
            assert w.slices.wants[s, n * p.links.per_node : (n + 1) * p.links.per_node].any()


@settings(max_examples=60)
@given(layouts, layouts, layouts, st.sampled_from(KINDS), planners, links, st.sampled_from([None, 40, 200]), st.booleans())
def test_joined_boxes_are_the_slices_that_move(old, older, new, kind, planner, link, bucket, backwards) -> None:
    """By bucket, round, source and target: the same elements, each once, in no more boxes; both ends list them alike."""
    held, wanted = held_under(old, older, "home" if backwards else kind, list(PLACED[new, "copies"])), PLACED[new, "copies"]
    if backwards:
        held = PLACED[old, "rows"]
    p = switch_plan(held, wanted, link, 2, planner, bucket)
    p = p.reversed() if backwards else p
    moved: dict[tuple, list[Box]] = {}
    for w in p.weights:
        for index, number, source, target in zip(w.moves.slice, w.moves.round, w.moves.source, w.moves.target):
            moved.setdefault((int(w.bucket[index]), int(number), int(source), int(target), w.name), []).append(w.slices.boxes[index])
        for index, rank in zip(*np.nonzero(w.slices.has & w.slices.wants)):
            moved.setdefault((int(w.bucket[index]), -1, int(rank), int(rank), w.name), []).append(w.slices.boxes[index])
    seen: list[dict[tuple, list[Box]]] = [{}, {}]
    for rank in range(p.world):
        for number, turn in enumerate(p.turns(rank)):
            for m in turn.local:
                for side in seen:
                    side.setdefault((number, -1, rank, rank, m.name), []).append(m.box)
            for which, played in enumerate(turn.rounds):
                for side, moves in zip(seen, (played.sends, played.receives)):
                    for m in moves:
                        side.setdefault((number, which, m.source, m.target, m.name), []).append(m.box)
    assert seen[0] == seen[1]
    assert seen[0].keys() == moved.keys()
    for key, boxes in seen[0].items():
        assert len(boxes) <= len(moved[key])
        assert sum(box.elements for box in boxes) == sum(box.elements for box in moved[key])
        assert all(any(part in box for box in boxes) for part in moved[key])


def test_slices_that_others_cut_finer_travel_as_one_box() -> None:
    """Sixteen ranks keep rows of what two tensor-parallel layouts compute with: what stays on a rank is as many boxes as it wants, not as
    many as there are rows."""
    spec = ModelSpec("llama", 64, 64, 1, 8, 8, 8, 64, 16)
    rows, old, new = (
        spread_weights(spec, Layout(dp=8, tp=2), "rows"),
        spread_weights(spec, Layout(dp=8, tp=2), "copies"),
        spread_weights(spec, Layout(dp=4, tp=4), "copies"),
    )
    p = switch_plan(together(rows, old), new, Links(8, 8.0, 1.0), 2)
    for rank in (0, 15):
        (turn,) = p.turns(rank)
        slices = sum(int((w.slices.has & w.slices.wants)[:, rank].sum()) for w in p.weights)
        assert slices > 4 * len(turn.local)
        assert len(turn.local) <= sum(rank in ranks for spread in new.values() for _, ranks in spread.boxes)


# Played as an executor would, with values


def arrays(boxes: BoxesByWeight, world: int, value) -> list[dict[tuple[str, Box], np.ndarray]]:
    """By rank, the boxes of a side, filled by `value(name, box, rank)`."""
    found: list[dict[tuple[str, Box], np.ndarray]] = [{} for _ in range(world)]
    for name, spread in boxes.items():
        for box, ranks in spread.boxes:
            for rank in ranks:
                found[rank][name, box] = value(name, box, rank)
    return found


def view(held: dict[tuple[str, Box], np.ndarray], name: str, box: Box) -> np.ndarray | None:
    return next((a[box.within(whole)] for (n, whole), a in held.items() if n == name and box in whole), None)


def play(p: Plan, held: list[dict], wanted: list[dict]) -> None:
    """Every rank sees only its own turns. One buffer a pair of ranks and round; what comes to a rank that keeps no copy waits in `passing`
    until the bucket ends."""
    turns = [list(p.turns(rank)) for rank in range(p.world)]
    assert len({len(turn) for turn in turns}) == 1
    for bucket in zip(*turns):
        passing: list[dict] = [{} for _ in bucket]

        def local(rank: int, name: str, box: Box, passing=passing) -> np.ndarray:
            places = (view(side[rank], name, box) for side in ((wanted, passing, held) if p.sums else (held, passing, wanted)))
            return next(place for place in places if place is not None)

        for rank, turn in enumerate(bucket):
            for move in turn.local:
                into, out = view(wanted[rank], move.name, move.box), view(held[rank], move.name, move.box)
                assert into is not None
                assert out is not None
                if p.sums:
                    out += into
                else:
                    into[...] = out
        for number in range(p.rounds):
            wires = {}
            for rank, turn in enumerate(bucket):
                for move in turn.rounds[number].sends:
                    assert move.source == rank
                    wires.setdefault((rank, move.target), []).append(local(rank, move.name, move.box).copy())
            for rank, turn in enumerate(bucket):
                for move in turn.rounds[number].receives:
                    data = wires[move.source, rank].pop(0)
                    assert data.shape == move.box.shape
                    receive(p, data, move, held[rank], wanted[rank], passing[rank])
            assert not any(wires.values())


def receive(p: Plan, data: np.ndarray, move, held: dict, wanted: dict, passing: dict) -> None:
    if p.sums:
        places = (view(side, move.name, move.box) for side in (held, wanted, passing))
        into = next((place for place in places if place is not None), None)
        if into is None:
            passing[move.name, move.box] = data
        else:
            into += data
        return
    into = view(wanted, move.name, move.box)
    if into is None:
        passing[move.name, move.box] = data
    else:
        assert np.isnan(into).all()
        into[...] = data


def truth(name: str, box: Box, rank: int = 0) -> np.ndarray:
    whole = Box.whole(SPEC.by_name[name].shape)
    flat = np.arange(whole.elements, dtype=float) + 1000 * [p.name for p in SPEC.params].index(name)
    return flat.reshape(whole.shape)[box.within(whole)].copy()


def nothing(name: str, box: Box, rank: int = 0) -> np.ndarray:
    return np.full(box.shape, np.nan)


def same(a: list[dict], b: list[dict]) -> bool:
    return all(x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x) for x, y in zip(a, b))


@settings(max_examples=60)
@given(layouts, layouts, planners, links, st.sampled_from([None, 40, 4000]))
def test_there_and_back_is_the_identity(old, new, planner, link, bucket) -> None:
    a, b, world = PLACED[old, "copies"], PLACED[new, "copies"], max(old.world, new.world)
    there = switch_plan(a, turn_about(a, b), link, 2, planner, bucket)
    back = switch_plan(b, a, link, 2, planner, bucket)
    start, middle, end = arrays(a, world, truth), arrays(b, world, nothing), arrays(a, world, nothing)
    play(there, start, middle)
    assert same(middle, arrays(b, world, truth))
    play(back, middle, end)
    assert same(end, start)


@settings(max_examples=60)
@given(layouts, layouts, st.sampled_from(["algorithm1", "fan_out"]), links, st.sampled_from([None, 80]))
def test_gradients_go_home_as_one_sum(home, layout, planner, link, bucket) -> None:
    """Every copy has another partial sum; every element at home gets all of them once."""
    rows, copies, world = PLACED[home, "rows"], PLACED[layout, "copies"], max(home.world, layout.world)
    p = switch_plan(rows, copies, link, 4, planner, bucket).reversed()
    partial = arrays(copies, world, lambda name, box, rank: truth(name, box) * 2.0**-rank)
    sums = arrays(rows, world, lambda name, box, rank: np.zeros(box.shape))
    expected = {name: truth(name, Box.whole(SPEC.by_name[name].shape)) * painted(spread) for name, spread in copies.items()}
    play(p, sums, partial)
    for at_home in sums:
        for (name, box), array in at_home.items():
            assert np.array_equal(array, expected[name][box.within(Box.whole(SPEC.by_name[name].shape))])


def painted(spread: Spread) -> np.ndarray:
    """By element, the sum of 2^-rank over the ranks that have it."""
    total = np.zeros(tuple(max(box.stop[d] for box, _ in spread.boxes) for d in range(len(spread.boxes[0][0].stop))))
    for box, ranks in spread.boxes:
        total[box.within(Box.whole(total.shape))] += sum(2.0**-rank for rank in ranks)
    return total


@settings(max_examples=100)
@given(layouts, layouts, layouts, st.sampled_from(KINDS), st.sampled_from(["algorithm1", "fan_out"]), links)
def test_the_estimate_without_a_plan_is_a_lower_bound(old, older, new, kind, planner, link) -> None:
    held, wanted = held_under(old, older, kind, list(PLACED[new, "copies"])), PLACED[new, "copies"]
    bound_s, least = traffic(switch_plan(held, wanted, link, 2, planner)).bound_s, least_s(held, wanted, link, 2)
    assert least <= bound_s * (1 + 1e-12)
    assert (least > 0) == (bound_s > 0)


def test_a_sum_needs_one_home() -> None:
    replicated = switch_plan(PLACED[Layout(dp=2), "copies"], PLACED[Layout(tp=2), "copies"], Links(2, 1, 1), 4)
    with pytest.raises(ValueError, match="held more than once"):
        replicated.reversed()


# The planners


def greedy(p: Plan) -> list[tuple[str, int, int, int]]:
    """Algorithm 1 as the paper prints it, over the plan's slices in their order."""
    intra, inter, found = [0] * p.world, [0] * p.world, []
    for w in p.weights:
        for index in range(len(w.slices)):
            owners, targets = (np.flatnonzero(side[index]).tolist() for side in (w.slices.has, w.slices.wants))
            for target in targets:
                if target not in owners:
                    near = [s for s in owners if s // p.links.per_node == target // p.links.per_node]
                    source = min(near or owners, key=(intra if near else inter).__getitem__)
                    (intra if near else inter)[source] += int(w.slices.size_bytes[index])
                    found.append((w.name, index, source, target))
    return found


@settings(max_examples=100)
@given(layouts, layouts, links, st.booleans())
def test_algorithm1_is_the_papers(old, new, link, from_home) -> None:
    p = switch_plan(PLACED[old, "home" if from_home else "copies"], PLACED[new, "copies"], link, 2, "algorithm1")
    ours = [(w.name, *map(int, row)) for w in p.weights for row in zip(w.moves.slice, w.moves.source, w.moves.target)]
    assert ours == greedy(p)


@settings(max_examples=40)
@given(layouts, layouts, planners, links, st.sampled_from([None, 40]))
def test_every_rank_finds_the_same_plan(old, new, planner, link, bucket) -> None:
    """From sides made anew and told by rank, as one process after another would."""
    world = max(old.world, new.world)

    def made() -> Plan:
        a, b = (spread_weights(SPEC, layout, "copies") for layout in (old, new))
        return switch_plan(a, b, link, 2, planner, bucket)

    first, second = made(), made()
    assert first.digest == second.digest
    assert [list(first.turns(r)) for r in range(world)] == [list(second.turns(r)) for r in range(world)]


def test_the_digest_sees_every_difference() -> None:
    a, b, c = (spread_weights(SPEC, Layout.parse(text), "copies") for text in ("pp2.tp2", "dp2.tp2", "dp4"))
    one = switch_plan(a, b, Links(2, 1, 1), 2)
    at = next(i for i, w in enumerate(one.weights) if len(w.moves))
    other = replace(one.weights[at].moves, source=one.weights[at].moves.source + 1)
    others = [
        switch_plan(a, c, Links(2, 1, 1), 2),
        switch_plan(a, b, Links(2, 1, 1), 4),
        switch_plan(a, b, Links(2, 1, 1), 2, "algorithm1"),
        switch_plan(a, b, Links(2, 1, 1), 2, bucket_bytes=64),
        switch_plan(a, dict(reversed(b.items())), Links(2, 1, 1), 2),
        replace(one, sums=True),
        replace(one, weights=one.weights[:-1]),
        replace(one, weights=(*one.weights[:at], replace(one.weights[at], moves=other), *one.weights[at + 1 :])),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(("old", "new"), [("dp4", "u4"), ("dp4", "ring2.u2"), ("dp2.tp2", "ring2.tp2"), ("pp2.dp2", "pp2.u2")])
def test_only_the_sequence_axes_change_and_nothing_moves(old, new) -> None:
    p = switch_plan(spread_weights(SPEC, Layout.parse(old), "copies"), spread_weights(SPEC, Layout.parse(new), "copies"), Links(2, 1, 1), 2)
    assert p.bytes_by_pair.sum() == 0
    assert p.buffer_bytes == 0


@settings(max_examples=60)
@given(layouts, st.sampled_from(["", ".recompute-full", ".chunk4.host", ".vertical"]))
def test_weights_lie_where_the_plainest_layout_puts_them(layout, words) -> None:
    other = Layout.parse(f"{layout}{words if layout.pp == 1 or words != '.vertical' else ''}")
    for side in ("copies", "rows"):
        ours, plain = spread_weights(SPEC, other, side), spread_weights(SPEC, plainest(other), side)
        assert [(name, spread.boxes) for name, spread in ours.items()] == [(name, spread.boxes) for name, spread in plain.items()]


def test_ways_that_place_alike_share_their_plans() -> None:
    def planned(short: str, long: str) -> tuple[Plan, Plan]:
        edges = Edge(8, Layout.parse(short)), Edge(16, Layout.parse(long))
        way = Itinerary(SPEC, edges, Links(2, 8.0, 1.0), 2, 4, SwitchOptions())
        cut = way.cuts[edges[0].use]
        assert not cut.at_home
        return way.weights(None, cut), way.sums(cut)

    one = planned("dp4.z1", "tp2.u2")
    assert planned("ring2.u2.recompute-full.z1", "tp2.dp2.recompute-full.z3") == one
    assert not set(planned("dp4.z2", "tp2.u2")) & set(one[:1])


# Refusals


def test_what_nobody_holds_is_refused() -> None:
    whole = Box((0, 0), (4, 3))
    held, wanted = {"w": Spread(((whole.cut(0, 0, 2), (0,)), (whole.cut(0, 3, 4), (1,))))}, {"w": Spread(((whole, (0,)),))}
    with pytest.raises(ValueError, match=r"w: \[2:3, 0:3\] is wanted on rank 0, and no rank holds it"):
        switch_plan(held, wanted, Links(4, 1, 1), 2)
    with pytest.raises(ValueError, match=r"w: .* no rank holds it"):
        switch_plan({}, wanted, Links(4, 1, 1), 2)


def test_a_bucket_for_less_than_an_element_is_refused() -> None:
    a, b = spread_weights(SPEC, Layout(tp=4), "copies"), spread_weights(SPEC, Layout(dp=4), "copies")
    with pytest.raises(UsageError, match="at least 6"):
        switch_plan(a, b, Links(4, 1, 1), 2, bucket_bytes=5)
    assert switch_plan(a, b, Links(4, 1, 1), 2, bucket_bytes=6).buffer_bytes <= 12


def test_a_rank_takes_from_itself_then_from_the_first_holder() -> None:
    whole = Box((0,), (4,))
    held = {"w": Spread(((whole.cut(0, 0, 2), (0, 1)), (whole.cut(0, 2, 4), (2, 3))))}
    (turn,) = switch_plan(held, {"w": Spread(((whole, (1,)),))}, Links(4, 1, 1), 2, "algorithm1").turns(1)
    moves = (*turn.local, *turn.rounds[0].receives)
    assert [(m.source, m.target, str(m.box)) for m in moves] == [(1, 1, "[0:2]"), (2, 1, "[2:4]")]


def test_weights_of_different_stages_come_turn_about() -> None:
    """The switch of four stages to four replicas in small buckets: in the model's order one stage sends at a time."""
    spec = ModelSpec("llama", 64, 32, 16, 4, 4, 8, 64, 16)
    old, new = spread_weights(spec, Layout(pp=4), "copies"), spread_weights(spec, Layout(dp=4), "copies")
    link = Links(4, 1e9, 1e9)
    assert sorted(turn_about(old, new)) == sorted(new)
    plain, mixed = (traffic(switch_plan(old, side, link, 2, "fan_out", 50_000)) for side in (new, turn_about(old, new)))
    assert plain.bound_s == mixed.bound_s
    assert mixed.in_order_s < 0.5 * plain.in_order_s
