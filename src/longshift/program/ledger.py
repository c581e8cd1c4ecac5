"""The ledger: a program played on bytes. Which tensors are alive when, where they lie, and how much that is at the most.

The ledger keeps what the player keeps (`step.player`, `step.runner`, `state.copies`), under names instead of with numbers, and lets it go
when the player does. What operations need inside themselves is `schedule.inside`'s. Bytes of tensors: an allocator's rounding and holes,
and the process itself, come on top.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from longshift.layout.layout import Layout
from longshift.layout.placement import buckets_of, units_on
from longshift.program.book import Book, Held, Peak, Place
from longshift.program.held_packs import ChunkedPacks, Packs, WholePacks
from longshift.program.operations import Op
from longshift.program.step import RankLayout, Steps, Visit
from longshift.schedule.inside import Transport
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Cut
from longshift.switch.plan import Plan

SMALL = 16 << 10  # scalars: losses, counters of updates, norms of runs of gradients


@dataclass(frozen=True)
class Weighed:
    """What a step needs on one rank. `sent`: bytes out of the rank to others, by communicator; `moved`: bytes put into tiers and
    fetched."""

    peaks: dict[str, Peak]
    sent: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def device(self) -> int:
        return self.peaks["device"].total


@dataclass(frozen=True)
class Route:
    """A bucket of a unit on this rank, in elements: the fused buffer is [slots, width], of which `own` are kept at home."""

    holders: int
    sharded: bool
    width: int
    own: int

    @property
    def slots(self) -> int:
        return self.holders if self.sharded else 1


@dataclass(frozen=True)
class UnitSizes:
    """Elements of one moving unit on this rank: of the copies that are no tensors of home's, and of all weights."""

    flat: int
    weights: tuple[int, ...]
    routes: tuple[Route, ...]


def unit_sizes(spec: ModelSpec, view: RankLayout, home: Layout, rank: int, same_format: bool) -> dict[int, UnitSizes]:
    """By moving unit, for a layout whose copies' source is cut as `home` is. `same_format`: copies have the format of their source, and are
    its own tensors where it keeps a weight whole."""
    mine = buckets_of(spec, home, rank)
    at_home = {name: box for bucket in mine if not bucket.sharded and same_format for name, box in bucket.home(rank)}
    routes: dict[int, list[Route]] = {}
    for bucket in mine:
        routes.setdefault(bucket.unit, []).append(Route(len(bucket.holders), bucket.sharded, bucket.width, bucket.kept(rank)))
    found = {}
    for unit in units_on(spec, view.layout, rank):
        weights = {name: sum(box.elements for box in boxes) for name, boxes in unit.boxes.items()}
        flat = sum(weights[name] for name, boxes in unit.boxes.items() if boxes != (at_home.get(name),))
        found[unit.unit] = UnitSizes(flat, tuple(weights.values()), tuple(routes.get(unit.unit, ())))
    return found


class Copies:
    """What `state.copies` and `state.visit` keep of one cut. Mutable."""

    def __init__(self, ledger: "Ledger", view: RankLayout):
        self.ledger, self.view, self.cut = ledger, view, view.cut
        steps, spec = ledger.steps, view.spec
        source = view.cut.layout if view.collective and not view.cut.at_home else steps.itinerary.home
        self.guest = view.collective and not view.cut.at_home
        compute, home = steps.bytes
        same = self.guest or ledger.same_format
        self.units = unit_sizes(spec, view, source, steps.rank, same)
        self.name = str(view.cut.layout)
        self.flats: dict[int, Held] = {}
        self.rows: dict[int, Held] = {}
        self.gathering: dict[int, deque[Held]] = {}
        self.sums: dict[int, list[Held]] = {}
        self.reducing: dict[int, deque[list[tuple[Held, list[Held], Route]]]] = {}
        self.guest_sums: dict[tuple[int, int], Held] = {}
        self.compute, self.home = compute, home

    def hold(self, unit: int) -> None:
        if unit not in self.flats:
            self.flats[unit] = self.ledger.held(f"working copies of {self.name}", self.units[unit].flat * self.compute)

    def open(self, unit: int) -> None:
        if self.guest:
            own = sum(route.own for route in self.units[unit].routes)
            self.rows[unit] = self.ledger.held(f"rows of {self.name}", own * self.compute)
        else:
            self.hold(unit)

    def release(self, unit: int) -> None:
        """Rows stay: the next gather is from them."""
        self.flats.pop(unit, None)

    def close(self, unit: int) -> None:
        for number in list(self.units) if unit < 0 else [unit]:
            self.flats.pop(number, None)
            self.rows.pop(number, None)

    def gather(self, unit: int) -> None:
        self.hold(unit)
        coming = self.gathering[unit] = deque[Held]()
        for route in self.units[unit].routes:
            if route.sharded:
                copied = self.ledger.transport == "gloo" and route.holders > 2  # then what is sent lies there once for each holder
                size = route.width * (2 * route.holders if copied else 1 + route.holders) * self.compute
                coming.append(self.ledger.held("gathers under way", size))
                self.ledger.book.inside(route.width * self.compute if copied else 0)
                self.ledger.send("gather", route.width * (route.holders - 1) * self.compute)

    def gathered(self, unit: int) -> None:
        del self.gathering[unit]

    def accumulate(self, unit: int, grads: list[Held]) -> None:
        if unit not in self.sums:
            sizes = self.units[unit]
            elements = [r.slots * r.width for r in sizes.routes] if self.view.collective else sizes.weights
            self.sums[unit] = [self.ledger.held("gradient sums", n * self.home) for n in elements]
        grads.clear()

    def reduce(self, unit: int) -> None:
        sums, leaving = self.sums.pop(unit), list[tuple[Held, list[Held], Route]]()
        gloo = self.ledger.transport == "gloo"
        sums.reverse()
        for route in self.units[unit].routes:
            total, size, extra = sums.pop(), route.width * self.home, list[Held]()
            if route.sharded:
                out = self.ledger.held("reductions under way", size)
                extra = [total]
                if gloo:
                    extra.append(self.ledger.held("reductions under way", size * (1 if route.holders == 2 else route.holders)))
                self.ledger.send("reduce", size * (route.holders - 1))
            else:
                out = total
                if gloo and route.holders == 2:
                    extra = [self.ledger.held("reductions under way", size)]
                if route.holders > 1:
                    self.ledger.send("reduce", size if gloo and route.holders == 2 else 2 * size * (route.holders - 1) // route.holders)
            leaving.append((out, extra, route))
        leaving.reverse()
        self.reducing.setdefault(unit, deque()).append(leaving)

    def reduced(self, unit: int) -> None:
        leaving = self.reducing[unit].popleft()
        number = 0
        while leaving:
            out, extra, route = leaving.pop()
            if route.sharded and self.ledger.transport == "gloo" and route.holders > 2:
                self.ledger.book.inside(route.width * self.home)
            extra.clear()
            sums = self.guest_sums if self.guest else self.ledger.home_sums
            sums.setdefault((unit, number), out)
            del out
            number += 1

    def forget(self) -> None:
        self.sums.clear()
        self.guest_sums.clear()


class Ledger:
    """Plays programs of one rank on bytes. `transport`: how collectives move, which decides what they need besides their results;
    `same_format`: weights are computed with in home's format; `host_is_device`: a CPU, whose host tier moves nothing. Mutable."""

    def __init__(self, steps: Steps, transport: Transport, same_format: bool, host_is_device: bool, ahead: int = 1):
        self.steps, self.same_format = steps, same_format
        self.transport: Transport = transport
        self.host_is_device, self.ahead = host_is_device, ahead
        self.spec = steps.itinerary.spec
        self.book, self.sent, self.moved = Book(), Counter[str](), Counter[str]()
        self.home_sums: dict[tuple[int, int], Held] = {}
        home = steps.bytes[1]
        self.shards = [(bucket.unit, bucket.kept(steps.rank)) for bucket in buckets_of(self.spec, steps.itinerary.home, steps.rank)]
        state = 3 * home * sum(elements for _, elements in self.shards)
        self.state = [self.held("master weights", state // 3), self.held("moments", state - state // 3), self.held("scalars", SMALL)]
        self.copies: dict[Cut, Copies] = {}
        self.runners: dict[Layout, Packs] = {}
        for layout, view in steps.views.items():
            if view.cut not in self.copies:
                self.copies[view.cut] = Copies(self, view)
            self.runners[layout] = (ChunkedPacks if layout.chunk else WholePacks)(self, view)
        self.visits: Sequence[Visit] = ()
        self.packs: Sequence[Sequence[Sequence[int]]] = ()
        self.table: dict[str, Callable[[Op], object]] = {
            "enter": lambda op: None,
            "leave": lambda op: None,
            "load": lambda op: self._runner(op).load(op.micro, self.packs[op.visit][op.micro]),
            "unload": lambda op: self._runner(op).unload(op.micro),
            "gather": lambda op: self._copies(op).gather(op.unit),
            "await gather": lambda op: self._copies(op).gathered(op.unit),
            "release": lambda op: self._copies(op).release(op.unit),
            "receive": lambda op: self._runner(op).receive(op),
            "await receive": lambda op: self._runner(op).received(op),
            "send": lambda op: self._runner(op).send(op),
            "await send": lambda op: self._runner(op).sending.pop(op.number),
            "compute": lambda op: self._runner(op).compute(op),
            "arrive": lambda op: self._runner(op).arrive(op),
            "depart": lambda op: self._runner(op).depart(op),
            "put": lambda op: self._runner(op).put(op),
            "fetch": lambda op: self._runner(op).fetch(op),
            "await fetch": lambda op: self._runner(op).await_fetch(op),
            "drop": lambda op: self._runner(op).drop(op),
            "accumulate": lambda op: self._copies(op).accumulate(op.unit, self._runner(op).grads.pop(op.unit, [])),
            "reduce": lambda op: self._copies(op).reduce(op.unit),
            "await reduce": lambda op: self._copies(op).reduced(op.unit),
            "open": lambda op: self._copies(op).open(op.unit),
            "exchange": self._exchange,
            "await exchange": self._await_exchange,
            "close": lambda op: self._copies(op).close(op.unit),
            "arrived": lambda op: None,
            "total": self._total,
            "forget": lambda op: self._copies(op).forget(),
            "norm": lambda op: self.send("everyone", self._of_norm()),
            "update": lambda op: self.home_sums.clear(),
        }
        self._fused: dict[tuple[int, str], Held] = {}
        self._passing: dict[tuple[int, str, int], Held] = {}
        self._exchanged: dict[int, list[list[int]]] = {}  # by plan, which the itinerary keeps

    def held(self, name: str, size: int, place: Place = "device") -> Held:
        return Held(self.book, name, size, place)

    def send(self, what: str, size: int) -> None:
        self.sent[what] += size

    def play(self, visits: Sequence[Visit], packs: Sequence[Sequence[Sequence[int]]]) -> Weighed:
        """What the second of two equal steps needs: the first leaves working copies. `packs`: lengths of the documents of each micro-batch,
        by visit."""
        self.visits, self.packs = visits, packs
        program = self.steps.program(visits)
        for _ in range(2):
            self.sent.clear()
            self.moved.clear()
            for op in program:
                self.table[op.kind](op)
                self.book.settle(op, str(visits[op.visit].layout) if len(visits) > 1 and op.kind not in ("norm", "update") else "")
        return Weighed(self.book.peaks, dict(self.sent), dict(self.moved))

    def _runner(self, op: Op) -> Packs:
        return self.runners[self.visits[op.visit].layout]

    def _copies(self, op: Op) -> Copies:
        return self.copies[self.steps.views[self.visits[op.visit].layout].cut]

    def _of_norm(self) -> int:
        """Bytes that go out for the sum of two float64 over all ranks: to each on gloo, by a ring on NCCL."""
        peers = self.steps.world - 1
        return 16 * peers if self.transport == "gloo" else 2 * 16 * peers // self.steps.world

    def _total(self, op: Op) -> None:
        units = Counter[int]()
        for unit, elements in self.shards:
            key = unit, units[unit]
            units[unit] += 1
            if key not in self.home_sums:
                self.home_sums[key] = self.held("gradients at home", elements * self.steps.bytes[1])

    def _exchange(self, op: Op) -> None:
        """The fused buffer of a switch grows to the largest exchange so far; slices that pass through stay until they have left."""
        plan = self._plan(op)
        if id(plan) not in self._exchanged:
            self._exchanged[id(plan)] = exchanged(plan, self.steps.rank)
        sent, received, through = self._exchanged[id(plan)][op.number]
        self.send(op.way, sent)
        self._passing[op.visit, op.way, op.number] = self.held("slices that pass through", through)
        fused = self._fused.get((op.visit, op.way))
        if fused is None or fused.size < sent + received:
            self._fused.pop((op.visit, op.way), None)
            del fused
            self._fused[op.visit, op.way] = self.held("exchanges of a switch", sent + received)
        self._passing.pop((op.visit, op.way, op.number - plan.rounds + 1), None)

    def _await_exchange(self, op: Op) -> None:
        if op.number == exchanges_of(self._plan(op)) - 1:
            self._fused.pop((op.visit, op.way), None)

    def _plan(self, op: Op) -> Plan:
        cut = self.steps.views[self.visits[op.visit].layout].cut
        if op.way == "sums":
            return self.steps.itinerary.sums(cut)
        before = self.visits[op.visit - 1].layout if op.visit else None
        return self.steps.itinerary.weights(self.steps.source(before), cut)


def exchanges_of(plan: Plan) -> int:
    return plan.buckets + plan.rounds - 1 if plan.bytes_by_pair.any() else plan.buckets


def exchanged(plan: Plan, rank: int) -> list[list[int]]:
    """Bytes that a rank sends and receives in each exchange, and that arrive there only to pass on."""
    found = np.zeros((3, exchanges_of(plan)), np.int64)
    for w in plan.weights:
        m = w.moves
        if len(m):
            number, size = w.bucket[m.slice].astype(np.int64) + m.round, w.slices.size_bytes[m.slice]
            there = m.target == rank
            for row, here in zip(found, (m.source == rank, there)):
                np.add.at(row, number[here], size[here])
            passing = np.unique(m.slice[there & (m.round < plan.rounds - 1) & ~w.slices.wants[m.slice, rank]])
            np.add.at(found[2], w.bucket[passing], w.slices.size_bytes[passing])
    return found.T.tolist()
