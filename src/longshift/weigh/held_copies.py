"""What the working copies of a cut, their gradients on the way home and switches take on a rank, in bytes: see `weigh.ledger`."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longshift.layout.placement import boxes_on, buckets_of
from longshift.program.turns import RankLayout
from longshift.switch.plan import Plan
from longshift.weigh.book import Account, Held
from longshift.weigh.coding import Coding, gradients_of, weights_of
from longshift.weigh.held_home import HeldHome


@dataclass(frozen=True)
class Route:
    """A bucket of a unit on this rank, in elements: the fused buffer is [slots, width], of which `own` are kept at home. `gathered`,
    `reduced`: how these are coded, where they are."""

    holders: int
    sharded: bool
    width: int
    own: int
    frozen: bool
    gathered: Coding | None = None
    reduced: Coding | None = None

    @property
    def slots(self) -> int:
        return self.holders if self.sharded else 1


@dataclass(frozen=True)
class UnitSizes:
    """Elements of one moving unit on this rank: of the copies that are no tensors of home's, and of each weight that is trained, by
    name."""

    flat: int
    weights: Mapping[str, int]
    routes: tuple[Route, ...]

    @property
    def learning(self) -> list[Route]:
        """The buckets of weights that are trained."""
        return [route for route in self.routes if not route.frozen]


def unit_sizes(account: Account, view: RankLayout, guest: bool) -> dict[int, UnitSizes]:
    """Elements of each moving unit on this rank. `guest`: the layout's copies have rows of their own, in the compute format, as their
    source, else home."""
    spec, rank, wire = view.spec, account.steps.rank, account.steps.wire
    home = view.cut.layout if guest else account.steps.itinerary.home
    same_format, borrowed = guest or account.same_format, (lambda unit: True) if guest else account.borrowed
    mine = buckets_of(spec, home, rank)
    whole = (bucket for bucket in mine if not bucket.sharded and borrowed(bucket.unit) and (same_format or bucket.frozen))
    at_home = {name: box for bucket in whole for name, box in bucket.home(rank)}
    routes: dict[int, list[Route]] = {}
    for bucket in mine:
        master_bytes = account.weight_bytes if guest or bucket.frozen else account.sum_bytes
        gathered = weights_of(bucket, rank, wire, account.weight_bytes, master_bytes)
        reduced = gradients_of(bucket, rank, wire, account.sum_bytes)
        route = Route(len(bucket.holders), bucket.sharded, bucket.width, bucket.kept(rank), bucket.frozen, gathered, reduced)
        routes.setdefault(bucket.unit, []).append(route)
    found = {}
    for unit, local in boxes_on(spec, view.layout, rank).items():
        weights = {name: sum(box.elements for box in boxes) for name, boxes in local.items()}
        flat = sum(weights[name] for name, boxes in local.items() if boxes != (at_home.get(name),))
        learned = {name: size for name, size in weights.items() if not spec.by_name[name].frozen}
        found[unit] = UnitSizes(flat, learned, tuple(routes.get(unit, ())))
    return found


class HeldCopies:
    """`state.copies.Copies` on bytes, and `state.visit.RowCopies` of a guest, a cut that fused collectives bring here. Mutable."""

    def __init__(self, account: Account, view: RankLayout, home: HeldHome):
        self.account, self.view, self.home, self.is_guest = account, view, home, view.collective and not view.cut.at_home
        self.units = unit_sizes(account, view, self.is_guest)
        self.rows: dict[int, Held] = {}  # of a guest, by unit
        self.totals: dict[tuple[int, int], Held] = {}  # sums of a guest, by unit and bucket
        self.name = str(view.cut.layout)
        self.flats: dict[int, Held] = {}
        self.arriving: dict[int, deque[tuple[Held, Coding | None]]] = {}
        self.grads: dict[int, Held] = {}  # that a backward has left on weights
        self.sums: dict[int, list[Held]] = {}
        self.reducing: dict[int, deque[deque[tuple[Held, list[Held], Route]]]] = {}

    def open(self, unit: int) -> None:
        if self.is_guest:
            own = sum(route.own for route in self.units[unit].routes)
            self.rows[unit] = self.account.held(f"rows of {self.name}", own * self.account.weight_bytes)
        else:
            self.hold(unit)

    def close(self, unit: int) -> None:
        for number in list(self.units) if unit < 0 else [unit]:
            self.release(number)
            self.rows.pop(number, None)

    def forget_totals(self) -> None:
        self.sums.clear()
        self.totals.clear()

    def hold(self, unit: int) -> None:
        if unit not in self.flats:
            self.flats[unit] = self.account.held(f"working copies of {self.name}", self.units[unit].flat * self.account.weight_bytes)

    def release(self, unit: int) -> None:
        self.flats.pop(unit, None)

    def gather(self, unit: int) -> None:
        self.hold(unit)
        self.arriving[unit] = deque((self._start(unit, route), route.gathered) for route in self.units[unit].routes if route.sharded)

    def _start(self, unit: int, route: Route) -> Held:
        account, size = self.account, route.width * self.account.weight_bytes
        if coding := route.gathered:
            size = coding.size
            account.coded += coding.encoded
            account.book.inside(size + coding.encoding, "device" if self.is_guest else account.memory_of_home(unit))
        is_copied = account.transport == "gloo" and route.holders > 2  # then what is sent lies there once for each holder
        buffer = account.held("gathers under way", size * (2 * route.holders if is_copied else 1 + route.holders))
        account.book.inside(size if is_copied else 0)
        account.send("gather", size * (route.holders - 1))
        return buffer

    def ready(self, unit: int) -> None:
        arriving = self.arriving.pop(unit)
        while arriving:
            buffer, coding = arriving.popleft()
            if coding:
                self.account.coded += coding.decoded
                self.account.book.inside(coding.decoding)
            del buffer

    def inside(self, module: int) -> frozenset[str]:
        """Weights whose gradients go into their sums as they are formed."""
        return self.view.spec.multiplied[module] if self.account.adds_inside else frozenset()

    def expect(self, module: int) -> None:
        inside = self.inside(module)
        for unit in self.view.learning(module):
            if inside & self.units[unit].weights.keys():
                self._begin(unit)

    def _begin(self, unit: int) -> None:
        if unit not in self.sums:
            sizes, item = self.units[unit], self.account.sum_bytes
            elements = [route.slots * route.width for route in sizes.learning] if self.view.collective else sizes.weights.values()
            self.sums[unit] = [self.account.held("gradient sums", count * item) for count in elements]

    def leave(self, unit: int, size: int) -> None:
        """Have gradients on a unit's weights."""
        self.grads[unit] = self.account.held("gradients of weights", size)

    def accumulate(self, unit: int) -> None:
        self._begin(unit)
        if grads := self.grads.pop(unit, None):
            self.account.added += grads.nbytes

    def reduce(self, unit: int) -> None:
        sums, leaving = deque(self.sums.pop(unit)), deque[tuple[Held, list[Held], Route]]()
        for route in self.units[unit].learning:
            leaving.append((*self._leaving(route, [sums.popleft()]), route))
        self.reducing.setdefault(unit, deque()).append(leaving)

    def _leaving(self, route: Route, total: list[Held]) -> tuple[Held, list[Held]]:
        """Where a reduction ends, and what else it holds meanwhile, of the sum in a list, which is emptied."""
        account, size, peers = self.account, route.width * self.account.sum_bytes, route.holders - 1
        is_gloo, is_pair = account.transport == "gloo", route.holders == 2

        def buffer(size: int) -> Held:
            return account.held("reductions under way", size)

        if coding := route.reduced:
            account.coded += coding.encoded
            codes = buffer(route.slots * coding.size)
            account.book.inside(coding.encoding)
            total.clear()
            account.send("reduce", coding.size * peers)
            return buffer(route.slots * coding.size), [codes]
        if route.sharded:
            account.send("reduce", size * peers)
            out = buffer(size)
            return out, [*total, *([buffer(size * (1 if is_pair else route.holders))] if is_gloo else [])]
        swaps = is_gloo and is_pair
        if peers:
            account.send("reduce", size if swaps else 2 * size * peers // route.holders)
        return total[0], [buffer(size)] if swaps else []

    def reduced(self, unit: int) -> None:
        account, leaving = self.account, self.reducing[unit].popleft()
        for number in range(len(leaving)):
            out, extra, route = leaving.popleft()
            if route.sharded and route.reduced is None and account.transport == "gloo" and route.holders > 2:
                account.book.inside(route.width * account.sum_bytes)
            extra.clear()
            if coding := route.reduced:
                account.coded += coding.decoded
                received, out = out, account.held("reductions under way", route.width * account.sum_bytes)
                account.book.inside(coding.decoding)
                del received
            if self.is_guest:
                self.totals.setdefault((unit, number), out)
            else:
                self.home.receive(unit, number, out, route.own * account.sum_bytes)
            del out


class HeldTransfer:
    """`state.transfer.Transfer` on bytes. Mutable. The fused buffer has the size of the largest exchange; what passes through stays for all
    rounds of its bucket."""

    def __init__(self, account: Account, plan: Plan, way: str):
        self.account, self.way, self.rounds = account, way, plan.rounds
        self.moved = exchanged(plan, account.steps.rank)
        self.fused: Held | None = None
        self.passing: dict[int, Held] = {}

    def post(self, number: int) -> None:
        self.account.send(self.way, self.moved.sent[number])
        if number == 0:
            self.fused = self.account.held("exchanges of a switch", self.moved.most)
        if size := self.moved.passing[number]:
            self.passing[number] = self.account.held("passing through", size)
        self.passing.pop(number - self.rounds + 1, None)

    def take_in(self, number: int) -> None:
        if number == len(self.moved.sent) - 1:
            self.fused = None


@dataclass(frozen=True)
class Exchanged:
    """Bytes of a switch on one rank, by exchange: that it sends, and that begin to pass through; `most`: that it sends and receives in
    the largest."""

    sent: tuple[int, ...]
    passing: tuple[int, ...]
    most: int


@lru_cache(maxsize=64)  # a planner weighs many ways with the same switches
def exchanged(plan: Plan, rank: int) -> Exchanged:
    """What `state.transfer.Transfer` moves on a rank."""
    sent, received, passing = np.zeros((3, plan.exchanges), np.int64)
    for w in plan.weights:
        m = w.moves
        if len(m):
            number, size = w.bucket[m.slice] + m.round, w.slices.size_bytes[m.slice]
            out, into = m.source == rank, m.target == rank
            np.add.at(sent, number[out], size[out])
            np.add.at(received, number[into], size[into])
            through = np.unique(m.slice[into & (m.round < plan.rounds - 1) & ~w.slices.wants[m.slice, rank]])
            np.add.at(passing, w.bucket[through], w.slices.size_bytes[through])
    return Exchanged(tuple(sent.tolist()), tuple(passing.tolist()), int((sent + received).max()))
