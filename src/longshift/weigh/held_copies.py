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
    spec, rank, home = view.spec, account.rank, view.cut.layout if guest else account.home
    same_format, borrowed = guest or account.same_format, (lambda unit: True) if guest else account.borrowed
    mine = buckets_of(spec, home, rank)
    whole = (bucket for bucket in mine if not bucket.sharded and borrowed(bucket.unit) and (same_format or bucket.frozen))
    at_home = {name: box for bucket in whole for name, box in bucket.home(rank)}
    routes: dict[int, list[Route]] = {}
    for bucket in mine:
        master_bytes = account.weight_bytes if guest or bucket.frozen else account.sum_bytes
        gathered = weights_of(bucket, rank, account.wire, account.weight_bytes, master_bytes)
        reduced = gradients_of(bucket, rank, account.wire, account.sum_bytes)
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
    """What `state.copies` and `state.visit` keep of one cut. Mutable."""

    def __init__(self, account: Account, view: RankLayout):
        self.account, self.view, self.cut = account, view, view.cut
        self.guest = view.collective and not view.cut.at_home
        self.units = unit_sizes(account, view, self.guest)
        self.name = str(view.cut.layout)
        self.flats: dict[int, Held] = {}
        self.rows: dict[int, Held] = {}
        self.gathering: dict[int, deque[Held]] = {}
        self.sums: dict[int, list[Held]] = {}
        self.reducing: dict[int, deque[deque[tuple[Held, list[Held], Route]]]] = {}
        self.guest_sums: dict[tuple[int, int], Held] = {}
        self.compute, self.home = account.weight_bytes, account.sum_bytes

    def hold(self, unit: int) -> None:
        if unit not in self.flats:
            self.flats[unit] = self.account.held(f"working copies of {self.name}", self.units[unit].flat * self.compute)

    def open(self, unit: int) -> None:
        if self.guest:
            own = sum(route.own for route in self.units[unit].routes)
            self.rows[unit] = self.account.held(f"rows of {self.name}", own * self.compute)
        else:
            self.hold(unit)

    def release(self, unit: int) -> None:
        """Drop a unit's copies. Rows stay: the next gather is from them."""
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
                copied = self.account.transport == "gloo" and route.holders > 2  # then what is sent lies there once for each holder
                size = route.width * self.compute
                if coding := route.gathered:
                    size = coding.size
                    self.account.coded += coding.encoded
                    place = "device" if self.guest else self.account.memory_of_home(unit)
                    self.account.book.inside(size + coding.encoding, place)
                coming.append(self.account.held("gathers under way", size * (2 * route.holders if copied else 1 + route.holders)))
                self.account.book.inside(size if copied else 0)
                self.account.send("gather", size * (route.holders - 1))

    def gathered(self, unit: int) -> None:
        coming = self.gathering.pop(unit)
        for route in self.units[unit].routes if coming else ():
            if coding := route.gathered:
                self.account.coded += coding.decoded
                self.account.book.inside(coding.decoding)
            if route.sharded:
                coming.popleft()

    def expect(self, module: int) -> None:
        """Make the sums that matmuls of a unit's backward add to."""
        inside = self.inside(module)
        for unit in self.view.learning(module):
            if inside & self.units[unit].weights.keys():
                self._begin(unit)

    def inside(self, module: int) -> frozenset[str]:
        """Weights whose gradients go into their sums as they are formed."""
        return self.view.spec.multiplied[module] if self.account.adds_inside else frozenset()

    def _begin(self, unit: int) -> None:
        if unit not in self.sums:
            sizes = self.units[unit]
            elements = [r.slots * r.width for r in sizes.learning] if self.view.collective else sizes.weights.values()
            self.sums[unit] = [self.account.held("gradient sums", n * self.home) for n in elements]

    def accumulate(self, unit: int, grads: list[Held]) -> None:
        self._begin(unit)
        self.account.added += sum(held.size for held in grads)
        grads.clear()

    def reduce(self, unit: int) -> None:
        sums, leaving = deque(self.sums.pop(unit)), deque[tuple[Held, list[Held], Route]]()
        gloo = self.account.transport == "gloo"
        for route in self.units[unit].learning:
            total, size, extra = sums.popleft(), route.width * self.home, list[Held]()
            if coding := route.reduced:
                self.account.coded += coding.encoded
                extra = [self.account.held("reductions under way", route.slots * coding.size)]
                self.account.book.inside(coding.encoding)
                del total
                out = self.account.held("reductions under way", route.slots * coding.size)
                self.account.send("reduce", coding.size * (route.holders - 1))
            elif route.sharded:
                out = self.account.held("reductions under way", size)
                extra = [total]
                if gloo:
                    extra.append(self.account.held("reductions under way", size * (1 if route.holders == 2 else route.holders)))
                self.account.send("reduce", size * (route.holders - 1))
            else:
                out = total
                if gloo and route.holders == 2:
                    extra = [self.account.held("reductions under way", size)]
                if route.holders > 1:
                    self.account.send("reduce", size if gloo and route.holders == 2 else 2 * size * (route.holders - 1) // route.holders)
            leaving.append((out, extra, route))
        self.reducing.setdefault(unit, deque()).append(leaving)

    def reduced(self, unit: int) -> None:
        leaving = self.reducing[unit].popleft()
        for number in range(len(leaving)):
            out, extra, route = leaving.popleft()
            if route.sharded and route.reduced is None and self.account.transport == "gloo" and route.holders > 2:
                self.account.book.inside(route.width * self.home)
            extra.clear()
            if coding := route.reduced:
                self.account.coded += coding.decoded
                received, out = out, self.account.held("reductions under way", route.width * self.home)
                self.account.book.inside(coding.decoding)
                del received
            if self.guest:
                self.guest_sums.setdefault((unit, number), out)
            else:
                self.account.receive(unit, number, out, route.own * self.home)
            del out

    def forget(self) -> None:
        self.sums.clear()
        self.guest_sums.clear()


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
