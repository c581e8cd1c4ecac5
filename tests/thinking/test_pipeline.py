"""Pipeline orders: complete, free of deadlock, with the papers' bubbles and memory."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from longshift.layout.layout import Layout
from longshift.schedule.pipeline import StagePass, Transfer, receives, sends, stage_passes

CASES = [Layout(pp=p, order="gpipe") for p in (1, 2, 3, 4, 5, 8)] + [
    Layout(pp=p, virtual=v) for p in (1, 2, 3, 4, 5, 8) for v in range(1, 5)
]
MICROS = range(1, 21)


@dataclass(frozen=True)
class TimedPass:
    """An event with its start and end."""

    event: StagePass
    start_s: float
    end_s: float


def in_flight(order: Sequence[StagePass]) -> int:
    """The most forwards that wait for their backward at any time: the activations a coordinate keeps, in model chunks."""
    now = most = 0
    for event in order:
        now += 1 if event.kind == "forward" else -1
        most = max(most, now)
    return most


def timeline(
    layout: Layout, orders: Sequence[Sequence[StagePass]], seconds: Callable[[int, StagePass], float]
) -> tuple[tuple[TimedPass, ...], ...]:
    """When each event of each coordinate runs, if transfers take no time and `seconds(coord, event)` is what an event takes.

    `orders` holds one event list a coordinate. Raises RuntimeError where all unfinished coordinates wait: a deadlock.
    """
    done: list[list[TimedPass]] = [[] for _ in orders]
    arrived: dict[Transfer | None, float] = {None: 0.0}  # an event that receives nothing can start at once
    progress = True
    while progress:
        progress = False
        for coord, order in enumerate(orders):
            for event in order[len(done[coord]) :]:
                waited_for = receives(layout, coord, event)
                if waited_for not in arrived:
                    break
                start = max(arrived[waited_for], done[coord][-1].end_s if done[coord] else 0.0)
                done[coord].append(TimedPass(event, start, start + seconds(coord, event)))
                arrived.setdefault(sends(layout, coord, event), done[coord][-1].end_s)
                progress = True
    stuck = [f"coordinate {c} waits at {order[len(d)]}" for c, (order, d) in enumerate(zip(orders, done)) if len(d) < len(order)]
    if stuck:
        raise RuntimeError(f"pipeline {layout}: deadlock: {'; '.join(stuck)}")
    return tuple(map(tuple, done))


def makespan_s(times: Sequence[Sequence[TimedPass]]) -> float:
    """When the last event ends."""
    return max((row[-1].end_s for row in times if row), default=0.0)


@cache
def orders_of(layout, micros):
    return tuple(stage_passes(layout, coord, micros) for coord in range(layout.pp))


@cache
def unit_time(layout, micros):
    return makespan_s(timeline(layout, orders_of(layout, micros), lambda coord, event: 1.0))


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_every_pass_once_and_each_backward_after_its_forward(layout):
    for micros in MICROS:
        for order in orders_of(layout, micros):
            passes = [(micro, chunk) for chunk in range(layout.virtual) for micro in range(micros)]
            forwards = {(e.micro, e.chunk): i for i, e in enumerate(order) if e.kind == "forward"}
            backwards = {(e.micro, e.chunk): i for i, e in enumerate(order) if e.kind == "backward"}
            assert len(order) == 2 * len(passes)
            assert sorted(forwards) == sorted(backwards) == sorted(passes)
            assert all(forwards[key] < backwards[key] for key in passes)


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_backwards_of_a_chunk_keep_the_order_of_the_micro_batches(layout):
    for order in orders_of(layout, 7):
        for chunk in range(layout.virtual):
            assert [e.micro for e in order if e.kind == "backward" and e.chunk == chunk] == list(range(7))


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_from_one_coordinate_to_another_transfers_arrive_in_the_order_of_sending(layout):
    for micros in MICROS:
        sent, received = defaultdict(list), defaultdict(list)
        for coord, order in enumerate(orders_of(layout, micros)):
            for event in order:
                for found, book in ((sends(layout, coord, event), sent), (receives(layout, coord, event), received)):
                    if found and layout.pp > 1:
                        book[found.source % layout.pp, found.target % layout.pp].append(found)
        assert sent == received
        tags = [t.tag for transfers in sent.values() for t in transfers]
        assert len(set(tags)) == len(tags) == (0 if layout.pp == 1 else 2 * micros * (layout.pp * layout.virtual - 1))


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_no_deadlock_and_the_papers_bubble(layout):
    p, v = layout.pp, layout.virtual
    for micros in MICROS:
        took = unit_time(layout, micros)
        if micros % p == 0 or v == 1:
            ideal = 2 * micros * v
            assert (took - ideal) * (v * micros) == (p - 1) * ideal
        else:
            next_multiple = -(-micros // p) * p
            assert took <= unit_time(layout, next_multiple)
            assert took <= unit_time(Layout(pp=p), micros) * v  # interleaving never costs time


def finishes_with_blocking_sends(layout, micros, ahead):
    """Whether all ranks finish when a send blocks until its receive is posted, and receives are posted `ahead` events early."""
    orders, at, posted, sent = orders_of(layout, micros), [0] * layout.pp, set(), set()
    last = [None] * layout.pp
    progress = True
    while progress:
        progress = False
        for coord, order in enumerate(orders):
            while at[coord] < len(order):
                posted.update(receives(layout, coord, event) for event in order[at[coord] : at[coord] + 1 + ahead])
                wanted = receives(layout, coord, order[at[coord]])
                if (wanted and wanted not in sent) or (last[coord] and last[coord] not in posted):
                    break
                last[coord] = sends(layout, coord, order[at[coord]])
                sent.add(last[coord])
                at[coord] += 1
                progress = True
    return at == [len(order) for order in orders]


@pytest.mark.parametrize("layout", [case for case in CASES if case.pp > 1], ids=str)
def test_one_event_of_posted_receives_is_enough_for_blocking_sends(layout):
    assert all(finishes_with_blocking_sends(layout, micros, ahead=1) for micros in MICROS)


def test_interleaving_without_receives_posted_ahead_deadlocks_on_blocking_sends():
    assert not finishes_with_blocking_sends(Layout(pp=2, virtual=2), 4, ahead=0)


def finishes_on_serial_communicators(layout, micros, communicator, window=None):
    """Whether all ranks finish when the traffic of a pair on one communicator runs in the order in which both ranks issue it.
    `communicator(coord, peer, event)` names it. A rank issues the next event's receive before it runs an event, and waits for a send
    `window` sends later."""
    programs = []
    for coord, order in enumerate(orders_of(layout, micros)):
        steps, issued, under_way = [], 0, deque()
        for number, event in enumerate(order):
            ahead = [(e, receives(layout, coord, e)) for e in order[issued : number + 2]]
            issued = number + 2
            sent, wanted = sends(layout, coord, event), receives(layout, coord, event)
            steps += [("issue", t, communicator(t.source % layout.pp, coord, e)) for e, t in ahead if t]
            steps += [("wait", wanted, None)] if wanted else []
            steps += [("issue", sent, communicator(coord, sent.target % layout.pp, event))] if sent else []
            under_way.extend([sent] if sent else [])
            if window is not None and len(under_way) > window:
                steps.append(("wait", under_way.popleft(), None))
        programs.append(deque(steps))
    queues, done, progress = defaultdict(deque), set(), True
    while progress:
        progress = False
        for coord, steps in enumerate(programs):
            while steps and (steps[0][0] == "issue" or steps[0][1] in done):
                action, transfer, name = steps.popleft()
                progress = True
                if action == "issue":
                    pair = frozenset((transfer.source % layout.pp, transfer.target % layout.pp))
                    queues[name, pair, coord].append(transfer)
        for (name, pair, coord), mine in list(queues.items()):
            (peer,) = pair - {coord}
            other = queues[name, pair, peer]
            while mine and other and mine[0] == other[0]:
                done.add(mine.popleft())
                other.popleft()
                progress = True
    return not any(programs) and not any(queues.values())


@pytest.mark.parametrize("layout", [case for case in CASES if case.pp > 1], ids=str)
def test_a_communicator_each_way_is_enough_where_traffic_is_serial(layout):
    for micros in range(1, 13):
        assert finishes_on_serial_communicators(layout, micros, lambda a, b, event: a < b)
        assert finishes_on_serial_communicators(layout, micros, lambda a, b, event: a < b, window=layout.pp)


def test_one_communicator_or_one_for_up_and_one_for_down_deadlock():
    assert not finishes_on_serial_communicators(Layout(pp=2), 2, lambda a, b, event: None)
    assert not finishes_on_serial_communicators(Layout(pp=2, virtual=2), 2, lambda a, b, event: event.kind)


@pytest.mark.parametrize("p", range(1, 9))
def test_micro_batches_in_flight(p):
    for m in MICROS:
        for coord in range(p):
            assert in_flight(stage_passes(Layout(pp=p, order="gpipe"), coord, m)) == m
            assert in_flight(stage_passes(Layout(pp=p), coord, m)) == min(p - coord, m)
            for v in (2, 3):
                most = in_flight(stage_passes(Layout(pp=p, virtual=v), coord, m))
                formula = min(2 * (p - 1 - coord) + (v - 1) * p + 1, m * v)
                assert most == formula if m % p == 0 else most <= formula


def test_timeline_takes_the_times_it_is_given():
    layout = Layout(pp=2)
    times = timeline(layout, orders_of(layout, 3), lambda coord, event: {"forward": 1.0, "backward": 2.0}[event.kind])
    assert makespan_s(times) == (3 + 2 - 1) * 3.0
    assert [(t.event.kind[0], t.event.micro, t.start_s) for t in times[0]] == [
        ("f", 0, 0.0),
        ("f", 1, 1.0),
        ("b", 0, 4.0),
        ("f", 2, 6.0),
        ("b", 1, 7.0),
        ("b", 2, 10.0),
    ]
    slow_first_stage = timeline(layout, orders_of(layout, 3), lambda coord, event: 5.0 if coord == 0 else 1.0)
    assert makespan_s(slow_first_stage) == 6 * 5.0


def test_a_wrong_order_is_a_named_deadlock():
    layout = Layout(pp=2)
    orders = list(orders_of(layout, 2))
    orders[0] = (StagePass("forward", 0, 0), StagePass("backward", 1, 0), StagePass("forward", 1, 0), StagePass("backward", 0, 0))
    with pytest.raises(RuntimeError, match=r"pp2: deadlock: coordinate 0 waits at .*micro=1"):
        timeline(layout, orders, lambda coord, event: 1.0)


def test_nothing_to_do_takes_no_time():
    assert stage_passes(Layout(pp=2), 0, 0) == ()
    assert unit_time(Layout(pp=2), 0) == 0.0
