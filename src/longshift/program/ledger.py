"""The ledger: a program played on bytes. Which tensors are alive when, where they lie, and how much that is at the most.

The ledger keeps what the player keeps (`step.player`, `step.runner`, `state.copies`), under names instead of with numbers, and lets it go when
the player does. What operations need inside themselves is `schedule.inside`'s. Bytes of tensors: an allocator's rounding and holes, and the
process itself, come on top.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from longshift.layout.box import Box
from longshift.layout.layout import Layout
from longshift.layout.memory import loss_rows
from longshift.layout.placement import buckets, local_boxes, local_shape, moving_unit, stages_of
from longshift.program.operations import Op
from longshift.program.step import RankLayout, Steps, Visit
from longshift.schedule import inside
from longshift.schedule.inside import Inside
from longshift.schedule.sequence import TokenOrder, token_order
from longshift.spec.model import ModelSpec
from longshift.switch.itinerary import Cut
from longshift.switch.plan import Plan

Place = Literal["device", "host", "disk"]
Transport = Literal["gloo", "nccl"]
SMALL = 16 << 10  # scalars: losses, counters of updates, norms of runs of gradients


@dataclass(frozen=True)
class Peak:
    """The most bytes in a place: after which operation of the step, and what was alive, by name, largest first."""

    total: int
    op: str
    alive: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Weighed:
    """What a step needs on one rank. `sent`: bytes out of the rank to others, by communicator or axis."""

    peaks: dict[str, Peak]
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def device(self) -> int:
        return self.peaks["device"].total


class Held:
    """A storage: so many bytes of a ledger, until nobody refers to it."""

    __slots__ = ("book", "name", "place", "size")

    def __init__(self, book: "Book", name: str, size: int, place: Place = "device"):
        self.book, self.name, self.size, self.place = book, name, size, place
        book.change(name, size, place)

    def __del__(self) -> None:
        self.book.change(self.name, -self.size, self.place)


class Book:
    """Bytes by name, now and at the most of each place. Mutable."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.by_name: dict[str, Counter[str]] = {}
        self.peaks: dict[str, Peak] = {}
        self.op = ""

    def change(self, name: str, size: int, place: str) -> None:
        self.now[place] += size
        self.by_name.setdefault(place, Counter())[name] += size
        if self.now[place] > self.most[place]:
            self.most[place] = self.now[place]

    def inside(self, size: int) -> None:
        """An operation needs so many bytes on the device, beyond what is there."""
        self.most["device"] = max(self.most["device"], self.now["device"] + size)

    def settle(self, op: Op) -> None:
        """After an operation: write down peaks that it has raised."""
        for place, most in self.most.items():
            known = self.peaks.get(place)
            if known is None or most > known.total:
                held = self.by_name.get(place, Counter())
                rows = sorted(((name, size) for name, size in held.items() if size), key=lambda row: -row[1])
                inside = most - sum(size for _, size in rows)
                self.peaks[place] = Peak(most, str(op), (*rows, ("inside the operation", inside)) if inside > 0 else tuple(rows))


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
    at, layout = view.at, view.layout
    mine = [bucket for bucket in buckets(spec, home) if rank in bucket.holders]
    at_home = {name: box for bucket in mine if not bucket.sharded and same_format for name, box in bucket.home(rank)}
    routes: dict[int, list[Route]] = {}
    for bucket in mine:
        widths = [sum(box.elements for _, box in bucket.home(holder)) for holder in (bucket.holders[0], rank)]
        routes.setdefault(bucket.unit, []).append(Route(len(bucket.holders), bucket.sharded, *widths))
    flat: Counter[int] = Counter()
    weights: dict[int, list[int]] = {}
    for param in spec.params:
        if at.pp in stages_of(spec, layout, param):
            boxes = local_boxes(param, layout, at.tp)
            elements = Box.whole(local_shape(param, boxes)).elements
            unit = moving_unit(spec, param)
            weights.setdefault(unit, []).append(elements)
            flat[unit] += 0 if boxes == (at_home.get(param.name),) else elements
    return {unit: UnitSizes(flat[unit], tuple(some), tuple(routes.get(unit, ()))) for unit, some in weights.items()}


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
        self.steps, self.transport, self.same_format = steps, transport, same_format
        self.host_is_device, self.ahead = host_is_device, ahead
        self.spec = steps.itinerary.spec
        self.book, self.sent = Book(), Counter[str]()
        self.home_sums: dict[tuple[int, int], Held] = {}
        compute, home = steps.bytes
        owned = [b for b in buckets(self.spec, steps.itinerary.home) if steps.rank in b.holders]
        self.shards = [(b.unit, sum(box.elements for _, box in b.home(steps.rank))) for b in owned]
        state = 3 * home * sum(elements for _, elements in self.shards)
        self.state = [self.held("master weights", state // 3), self.held("moments", state - state // 3), self.held("scalars", SMALL)]
        self.copies: dict[Cut, Copies] = {}
        self.runners: dict[Layout, Any] = {}
        for layout, view in steps.views.items():
            if view.cut not in self.copies:
                self.copies[view.cut] = Copies(self, view)
            self.runners[layout] = WholePacks(self, view)
        self.visits: Sequence[Visit] = ()
        self.packs: Sequence[Sequence[Sequence[int]]] = ()
        self.table: dict[str, Callable[[Op], object]] = {
            "enter": lambda op: None,
            "leave": lambda op: None,
            "load": lambda op: self._runner(op).load(op.micro, self.packs[op.visit][op.micro]),
            "unload": lambda op: self._runner(op).unload(op.micro),
            "gather": lambda op: self._copies(op).gather(op.unit),
            "await gather": lambda op: self._copies(op).gathered(op.unit),
            "release": lambda op: self._copies(op).close(op.unit),
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
            "norm": lambda op: self.send("everyone", 16 * (self.steps.world - 1) if self.transport == "gloo" else 16),
            "update": lambda op: self.home_sums.clear(),
        }
        self._fused: dict[tuple[int, str], Held] = {}
        self._moved: dict[tuple, list[tuple[int, int]]] = {}

    def held(self, name: str, size: int, place: Place = "device") -> Held:
        return Held(self.book, name, size, place)

    def send(self, what: str, size: int) -> None:
        self.sent[what] += size

    def play(self, visits: Sequence[Visit], packs: Sequence[Sequence[Sequence[int]]]) -> Weighed:
        """What the second of two equal steps needs: the first leaves working copies. `packs`: lengths of the documents of each micro-batch, by
        visit."""
        self.visits, self.packs = visits, packs
        program = self.steps.program(visits)
        for _ in range(2):
            self.sent.clear()
            for op in program:
                self.table[op.kind](op)
                self.book.settle(op)
        return Weighed(self.book.peaks, dict(self.sent))

    def _runner(self, op: Op) -> Any:
        return self.runners[self.visits[op.visit].layout]

    def _copies(self, op: Op) -> Copies:
        return self.copies[self.steps.views[self.visits[op.visit].layout].cut]

    def _total(self, op: Op) -> None:
        units = Counter[int]()
        for unit, elements in self.shards:
            key = unit, units[unit]
            units[unit] += 1
            if key not in self.home_sums:
                self.home_sums[key] = self.held("gradients at home", elements * self.steps.bytes[1])

    def _exchange(self, op: Op) -> None:
        """The fused buffer of a switch grows to the largest exchange so far."""
        plan, itemsize = self._plan(op)
        key = id(plan)
        if key not in self._moved:
            self._moved[key,] = []
        sent, received = exchanged(plan, self.steps.rank, op.number)
        self.send(op.way, sent)
        fused = self._fused.get((op.visit, op.way))
        if fused is None or fused.size < sent + received:
            self._fused.pop((op.visit, op.way), None)
            del fused
            self._fused[op.visit, op.way] = self.held("exchanges of a switch", sent + received)

    def _await_exchange(self, op: Op) -> None:
        plan, _ = self._plan(op)
        if op.number == exchanges_of(plan) - 1:
            self._fused.pop((op.visit, op.way), None)

    def _plan(self, op: Op) -> tuple[Plan, int]:
        cut = self.steps.views[self.visits[op.visit].layout].cut
        if op.way == "sums":
            return self.steps.itinerary.sums(cut), self.steps.bytes[1]
        before = self.visits[op.visit - 1].layout if op.visit else None
        return self.steps.itinerary.weights(self.steps.source(before), cut), self.steps.bytes[0]


def exchanges_of(plan: Plan) -> int:
    return plan.buckets + plan.rounds - 1 if plan.bytes_by_pair.any() else plan.buckets


def exchanged(plan: Plan, rank: int, number: int) -> tuple[int, int]:
    """Bytes that a rank sends and receives in an exchange."""
    sent = received = 0
    for w in plan.weights:
        m = w.moves
        if len(m):
            here = w.bucket[m.slice] + m.round == number
            size = w.slices.size_bytes[m.slice]
            sent += int(size[here & (m.source == rank)].sum())
            received += int(size[here & (m.target == rank)].sum())
    return sent, received


class WholePacks:
    """What `step.runner.WholePacks` keeps. Mutable."""

    def __init__(self, ledger: Ledger, view: RankLayout):
        self.ledger, self.view, self.spec, self.layout = ledger, view, view.spec, view.layout
        self.compute_bytes = ledger.steps.bytes[0]
        self.rank = inside.Place(self.spec, self.layout, view.at, self.compute_bytes, ledger.transport)
        self.orders: dict[int, TokenOrder] = {}
        self.micros: dict[int, Held] = {}
        self.x: dict[int, Held] = {}
        self.g: dict[int, Held] = {}
        self.graphs: dict[tuple, tuple[Held | None, Held, Held]] = {}
        self.inputs: dict[tuple, Held] = {}
        self.grads: dict[int, list[Held]] = {}
        self.receiving: dict[int, Held] = {}
        self.sending: dict[int, Held] = {}
        self.tier: dict[tuple, Held] = {}
        self.fetched: dict[tuple, Held] = {}

    def load(self, micro: int, lengths: Sequence[int]) -> None:
        order = token_order(list(lengths) or [1], self.layout.ring, self.layout.ulysses * self.layout.tp)
        self.orders[micro] = order
        size, inside = micro_bytes(self.spec, order.local_tokens // self.layout.ulysses, self.compute_bytes)
        self.ledger.book.inside(size + inside)
        self.micros[micro] = self.ledger.held("token ids, labels, rotary angles", size)

    def unload(self, micro: int) -> None:
        for held in (self.micros, self.x, self.g):
            held.pop(micro, None)

    def tokens(self, micro: int) -> int:
        """T'."""
        return self.orders[micro].local_tokens // (self.layout.ulysses * self.layout.tp)

    def residual(self, micro: int, name: str) -> Held:
        return self.ledger.held(name, self.tokens(micro) * self.spec.width * self.compute_bytes)

    def receive(self, op: Op) -> None:
        self.receiving[op.number] = self.residual(op.micro, "messages between stages")

    def received(self, op: Op) -> None:
        (self.x if op.turn == "forward" else self.g)[op.micro] = self.receiving.pop(op.number)

    def send(self, op: Op) -> None:
        held = (self.x if op.turn == "forward" else self.g).pop(op.micro)
        self.ledger.send(op.way, held.size)
        self.sending[op.number] = held

    def compute(self, op: Op) -> None:
        {"pass": self._pass, "forward": self._forward, "again": self._again, "backward": self._backward, "loss": self._loss}[op.turn](op)

    def _inside(self, op: Op) -> Inside:
        turn = op.turn if op.turn != "again" else "forward"
        found = inside.inside(self.rank, self.orders[op.micro], op.part, turn)  # pyright: ignore[reportArgumentType]
        self.ledger.book.inside(found.peak)
        for axis, size in found.sent.items():
            self.ledger.send(axis, size)
        return found

    @staticmethod
    def _key(op: Op) -> tuple[int, int, str]:
        return op.micro, op.unit, op.part

    def _pass(self, op: Op) -> None:
        self._inside(op)
        self.inputs[self._key(op)] = self.x[op.micro]
        self.x[op.micro] = self.residual(op.micro, "residual stream")

    def _forward(self, op: Op) -> None:
        self._graph(op, self.x.pop(op.micro, None))
        self.x[op.micro] = self.graphs[self._key(op)][1]

    def _again(self, op: Op) -> None:
        self._graph(op, self.inputs.pop(self._key(op)))

    def _graph(self, op: Op, x: Held | None) -> None:
        found = self._inside(op)
        y = self.residual(op.micro, "residual stream")
        self.graphs[self._key(op)] = x, y, self.ledger.held("activations for the backward", found.graph)

    def _backward(self, op: Op) -> None:
        found = self._inside(op)
        x = self.graphs.pop(self._key(op))[0]
        del self.g[op.micro]
        self._leave(op.unit)
        if x is not None:
            self.g[op.micro] = self.residual(op.micro, "gradient of the residual stream")

    def _leave(self, unit: int) -> None:
        """Gradients on the weights of a unit, and on those that it shares."""
        units = [u for u in (*self.view.shared(unit), unit) if u in self.view.units]
        sizes = self.ledger.copies[self.view.cut].units
        for moving in units:
            own = sum(sizes[moving].weights) * self.compute_bytes
            self.grads.setdefault(moving, []).append(self.ledger.held("gradients of weights", own))

    def _loss(self, op: Op) -> None:
        if op.number == 0:
            self.g[op.micro] = self.residual(op.micro, "gradient of the residual stream")
        rows = self.tokens(op.micro)
        found = inside.loss_of_rows(self.rank, self.orders[op.micro], op.number)
        self.ledger.book.inside(found.peak)
        for axis, size in found.sent.items():
            self.ledger.send(axis, size)
        self._leave(op.unit)
        if (op.number + 1) * loss_rows(self.spec, rows) >= rows:
            del self.x[op.micro]

    def put(self, op: Op) -> None:
        x = self.inputs.pop(self._key(op))
        self.tier[self._key(op)] = x if self._stays else self.ledger.held("waiting for the backward", x.size, self._tier_place)

    @property
    def _stays(self) -> bool:
        return self.layout.offload == "device" or (self.layout.offload == "host" and self.ledger.host_is_device)

    @property
    def _tier_place(self) -> Place:
        return self.layout.offload

    def fetch(self, op: Op) -> None:
        stored = self.tier[self._key(op)]
        self.fetched[self._key(op)] = stored if self._stays else self.ledger.held("fetched from the tier", stored.size)

    def await_fetch(self, op: Op) -> None:
        self.inputs[self._key(op)] = self.fetched[self._key(op)]

    def drop(self, op: Op) -> None:
        del self.fetched[self._key(op)], self.tier[self._key(op)]


def micro_bytes(spec: ModelSpec, tokens: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a micro-batch's ids, labels, positions and rotary angles, and what is needed besides while they are made."""
    ints = 3 * 8 * tokens
    if spec.rope is None:
        return ints, 0
    half = spec.head_width // 2
    both = 2 * tokens * spec.head_width * itemsize
    angle, narrow = tokens * half * 8, (tokens * half * itemsize if itemsize < 8 else 0)
    return ints + both, max(0, angle + max(angle + narrow, max(narrow, angle) + both // 2) - both // 2)
