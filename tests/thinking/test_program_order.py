"""The programs of all ranks together: one order on every communicator, no deadlock even where everything blocks, and each program sound in
itself. Random models, layouts, groups and packs."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product, zip_longest
from typing import Any

import pytest

from longshift.layout.blocks import cut_blocks
from longshift.layout.home_tiers import HomeTiers
from longshift.layout.layout import Layout
from longshift.layout.legal import faults
from longshift.layout.placement import Bucket, buckets, moving_unit
from longshift.program.operations import Op, Program
from longshift.program.step import Steps
from longshift.program.turns import RankLayout, Visit
from longshift.schedule.pipeline import stage_passes
from longshift.spec.model import ModelSpec, Rope
from longshift.switch.itinerary import Cut, Itinerary
from longshift.switch.links import Links
from longshift.switch.options import SwitchOptions
from longshift.switch.plan import Plan
from longshift.workload.groups import Edge

MODELS, EACH = 400, 5  # random models with layouts; random packs of each
WEIGHT_BYTES, SUM_BYTES = 2, 4
AXES = ("tp", "ulysses", "ring")
ADDS = ("loss", "backward", "backward from x", "embed_back")  # turns of a chunked layout whose events accumulate
Post = tuple[str, tuple[int, ...], object]  # a communicator by purpose and ranks, and what is posted on it


# Cases


@dataclass(frozen=True)
class Case:
    """`visits[r]`: those of rank r. `left[r]`: units whose updates the step before has left there; `early`: whether this one makes its own
    early, as far as a rank can."""

    steps: tuple[Steps, ...]
    visits: tuple[tuple[Visit, ...], ...]
    left: tuple[tuple[int, ...], ...] = ()
    early: bool = False

    @property
    def itinerary(self) -> Itinerary:
        return self.steps[0].itinerary

    @cached_property
    def known(self) -> dict[tuple, Any]:
        """Answers of the two methods below, by their arguments."""
        return {}

    def buckets(self, layout: Layout, unit: int) -> list[Bucket]:
        """The buckets of a unit, as this layout cuts them."""
        if (layout, unit) not in self.known:
            self.known[layout, unit] = [bucket for bucket in buckets(self.itinerary.spec, layout) if bucket.unit == unit]
        return self.known[layout, unit]

    def moving(self, plan: Plan, number: int) -> set[int]:
        """The units of which a switch's bucket has something. Plans live as long as the itinerary."""
        if (id(plan), number) not in self.known:
            spec, some = self.itinerary.spec, [weight.name for weight in plan.weights if (weight.bucket == number).any()]
            self.known[id(plan), number] = {moving_unit(spec, spec.by_name[name]) for name in some}
        return self.known[id(plan), number]

    def programs(self) -> list[Program]:
        each = zip_longest(self.steps, self.visits, self.left, fillvalue=())
        return [steps.program(visits, left=left, early=self.early) for steps, visits, left in each]

    def __str__(self) -> str:
        layouts = ", ".join(f"{visit.layout} x {visit.micros}" for visit in self.visits[0])
        spec, steps = self.itinerary.spec, self.steps[0]
        home = f"home in {steps.home_in}, left {self.left}, early {self.early}"
        return f"{spec.layers} layers, tied {spec.tied}, {layouts}, {home}"


@cache
def degrees(world: int) -> list[tuple[int, ...]]:
    """Every dp, pp, tp, ulysses and ring whose product is `world`."""
    ways = range(1, world + 1)
    return [some for some in product(ways, ways, ways, (1, 2, 4), (1, 2, 3)) if some[0] * some[1] * some[2] * some[3] * some[4] == world]


def random_spec(draw: random.Random) -> ModelSpec:
    layers, ffn = draw.randint(2, 4), draw.randint(4, 9)
    sizes = {"tied": draw.random() < 0.4, "loss_rows": draw.choice((1024, 5))}
    return ModelSpec("llama", draw.choice((5, 64)), 8, layers, 4, 2, 2, ffn, 64, rope=Rope(), **sizes)


def random_layout(draw: random.Random, spec: ModelSpec, world: int) -> Layout:
    while True:
        layout = Layout(**dict(zip(("dp", "pp", "tp", "ulysses", "ring"), draw.choice(degrees(world)))), zero=draw.randint(0, 3))
        if layout.pp > 1:
            layout = replace(layout, virtual=draw.choice((1, 1, 2)), order=draw.choice(("gpipe", "1f1b")))
            layout = replace(layout, order="1f1b" if layout.virtual > 1 else layout.order)
        kind = draw.random()
        if kind < 0.3:
            layout = replace(layout, chunk=16, every=draw.choice((1, 2)), offload=draw.choice(("device", "host")))
        elif kind < 0.5:
            layout = replace(layout, recompute="selective")
        elif kind < 0.7:
            layout = replace(layout, recompute="full", offload=draw.choice(("device", "host")))
            layout = replace(layout, kept_blocks=draw.choice((0, 0, 1, 2)))
        if layout.pp == 1 and not layout.chunk and draw.random() < 0.2:
            layout = replace(layout, order="vertical")
        if not faults(spec, layout, world):
            return layout


def cases(seed: int, models: int, each: int) -> Iterator[Case]:
    draw = random.Random(seed)
    for _ in range(models):
        spec, world = random_spec(draw), draw.choice((2, 2, 3, 4, 4, 6, 8))
        layouts = list(dict.fromkeys(random_layout(draw, spec, world) for _ in range(draw.choice((1, 1, 2, 2, 3)))))
        edges = [Edge(number + 1, layout) for number, layout in enumerate(layouts)]
        options = SwitchOptions("fan_out", draw.choice((200, 1000, 1 << 20)), draw.choice((0, 1000, 1 << 20)))
        links = Links(draw.choice([n for n in range(1, world + 1) if world % n == 0]), 8.0, 1.0)
        itinerary = Itinerary(spec, edges, links, WEIGHT_BYTES, SUM_BYTES, options)
        for _ in range(each):
            split = HomeTiers("disk", (("device", draw.choice((3000, 10000, 50000))),))
            home_in = draw.choice((HomeTiers(), HomeTiers("host"), HomeTiers("disk"), split, split))
            moments = 2, draw.choice(("float32", "float32", "bf16", "float8"))
            how = WEIGHT_BYTES, SUM_BYTES, home_in, *moments
            steps = tuple(Steps(itinerary, rank, *how, doubled=draw.random() < 0.7) for rank in range(world))
            visits = random_visits(draw, world, draw.sample(layouts, draw.randint(1, len(layouts))))
            before = draw.choice(("nothing", "all", "all", "rest", "rest"))
            left = {"nothing": [()] * world, "all": [own.left() for own in steps], "rest": [own.left(own.early) for own in steps]}[before]
            yield Case(steps, visits, tuple(left), draw.random() < 0.5)


def random_visits(draw: random.Random, world: int, order: Sequence[Layout]) -> tuple[tuple[Visit, ...], ...]:
    """The packs of a replica differ from another's in their lengths, not in their number."""
    found: list[list[Visit]] = [[] for _ in range(world)]
    for layout in order:
        micros = draw.randint(1, layout.pp + 2)
        blocks = [() if layout.chunk else tuple(draw.choice((1, 1, 2)) for _ in range(micros)) for _ in range(layout.dp)]
        for rank in range(world):
            found[rank].append(Visit(layout, micros, blocks[layout.coord(rank).dp]))
    return tuple(map(tuple, found))


# What ranks post


def posts(case: Case, rank: int, op: Op) -> Iterator[Post]:
    """The collectives of an operation, in order."""
    itinerary, visit = case.itinerary, case.visits[rank][op.visit]
    everyone, cut = tuple(range(visit.layout.world)), itinerary.cuts[visit.layout]
    if op.kind in ("gather", "reduce"):
        for bucket in case.buckets(itinerary.home if cut.at_home else cut.layout, op.unit):
            if rank in bucket.holders and (bucket.sharded or op.kind == "reduce") and len(bucket.holders) > 1:
                yield op.kind, bucket.holders, op.unit
    elif op.kind == "exchange":
        before = case.visits[rank][op.visit - 1].layout if op.visit else None
        plan = itinerary.sums(cut) if op.way == "sums" else itinerary.weights(itinerary.source(before), cut)
        if op.number == 0:
            yield "", everyone, (op.visit, op.way)  # ranks compare their plans
        if plan.bytes_by_pair.any():
            yield op.way, everyone, (op.visit, op.number)
    elif op.kind == "norm":
        yield "", everyone, "norm"
    elif op.kind == "pack" and case.steps[rank].packed == "float8":
        cut = cut_blocks(itinerary.spec, itinerary.home).get(op.unit)
        if cut is not None and len(cut.ranks) > 1:
            yield "scales", cut.ranks, op.unit
    elif op.kind == "compute":
        block = 0 < op.unit <= itinerary.spec.layers
        for axis in AXES if block else ("tp",):
            if visit.layout.degree(axis) > 1:
                yield "", visit.layout.ranks(axis, of=rank), (op.visit, axis, op.unit, op.micro, op.turn, op.part, op.number)


def messages(case: Case, rank: int, program: Program) -> Iterator[Post]:
    """What a rank posts to or from each other rank, each way on a communicator of its own."""
    for op in program:
        if op.kind in ("send", "receive"):
            visit, way, ends, tag = message(case, rank, op)
            yield f"{visit} {way}", tuple(sorted(ends)), (ends, tag)


def disagreements(listed: Sequence[Sequence[Post]]) -> Iterator[str]:
    """Communicators whose members do not post the same things in the same order."""
    sequences: dict[tuple[str, tuple[int, ...]], dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(listed):
        for purpose, ranks, what in own:
            sequences[purpose, ranks][rank].append(what)
    for (purpose, ranks), by_rank in sequences.items():
        if any(by_rank[rank] != by_rank[ranks[0]] for rank in ranks):
            yield f"ranks {ranks} disagree on communicator {purpose!r}"


def message(case: Case, rank: int, op: Op) -> tuple:
    """What both ends of a message call it."""
    ranks = case.visits[rank][op.visit].layout.ranks("pp", of=rank)
    ends = (ranks[op.peer], rank) if "receive" in op.kind else (rank, ranks[op.peer])
    return op.visit, op.way, ends, op.number


def blocking(case: Case, rank: int, program: Program, listed: Sequence[Sequence[Post]]) -> Iterator[tuple[str, Any]]:
    """What others see of a rank, and what it waits for."""
    given: list[tuple[str, Any]] = []
    for op, own in zip(program, listed):
        if op.kind in ("compute", "await receive", "leave"):
            yield from given
            given.clear()
        yield from (("meet", post) for post in own)
        if op.kind in ("send", "receive", "await receive"):
            yield op.kind, message(case, rank, op)
        if op.kind == "send":
            given.append(("matched", message(case, rank, op)))
            if case.visits[rank][op.visit].layout.virtual == 1:
                yield given.pop()


def stuck(case: Case, programs: Sequence[Program], listed: Sequence[Sequence[Sequence[Post]]]) -> str:
    """What the ranks wait for in the end; nothing where all finish. A collective blocks until all members have posted it, a send until the
    receive is posted, the end of a receive until the send is posted. Of an interleaved pipeline, in which two stages send to each other at
    one time, a send blocks what is computed or awaited next."""
    waits = [list(blocking(case, rank, program, listed[rank])) for rank, program in enumerate(programs)]
    at, here, posted, sent = [0] * len(programs), Counter[Post](), set(), set()
    arrived = [-1] * len(programs)  # the last collective or send at which a rank was counted
    awake = list(range(len(programs)))
    while awake:
        progress = set()
        for rank in awake:
            while at[rank] < len(waits[rank]):
                kind, what = waits[rank][at[rank]]
                if kind == "receive":
                    posted.add(what)
                elif kind == "send":
                    sent.add(what)
                elif kind == "matched":
                    if what not in posted:
                        break
                elif kind == "await receive":
                    if what not in sent:
                        break
                else:
                    _, ranks, _ = what
                    if arrived[rank] < at[rank]:
                        arrived[rank] = at[rank]
                        here[what] += 1
                        if here[what] % len(ranks) == 0:
                            for member in ranks:
                                at[member] += 1
                                progress.add(member)
                            continue
                    break
                at[rank] += 1
                progress.add(rank)
        awake = [rank for rank in range(len(programs)) if at[rank] < len(waits[rank])] if progress else []
    left = [f"rank {rank} at {waits[rank][n]}" for rank, n in enumerate(at) if n < len(waits[rank])]
    return "; ".join(left)


# One program


class Unsound(Exception):
    """What a program does wrong."""


class Follow:
    """A program, operation by operation. Mutable: what there is."""

    def __init__(self, case: Case, rank: int):
        self.case, self.rank, self.spec = case, rank, case.itinerary.spec
        self.visits, self.views = case.visits[rank], case.steps[rank].views
        self.present: set[tuple] = set()  # (cut, unit)
        self.under_way: dict[str, list[int]] = {"gather": [], "reduce": []}
        self.opened: set[tuple] = set()
        self.added: set[tuple] = set()
        self.loaded: set[tuple] = set()
        self.done: Counter[tuple] = Counter()
        self.messages: dict[str, set[tuple]] = {"receive": set(), "send": set()}
        self.waiting: dict[tuple, str] = {}  # what a tier has, and whether it is "put", "coming" or "here"
        self.exchanged: dict[tuple[int, str], int] = {}
        self.coming: set[str] = set()  # ways on which an exchange is under way
        self.brought: set[Cut] = set()
        own = {bucket.unit for bucket in buckets(self.spec, case.itinerary.home) if rank in bucket.holders}
        self.on_disk = own & {unit for unit, tier in case.steps[rank].home_tiers.items() if tier == "disk"}
        self.packs = case.steps[rank].packed != "float32"
        late = case.steps[rank].home_in.updates_late
        self.by_unit = own if late or self.packs else set()
        self.left = set(case.left[rank]) if case.left else set()  # units with an update that the step before has left
        self.before, self.after = set(self.left), set() if late else self.by_unit  # units updated before the norm, and after
        self.early: set[int] = set()  # units updated before the norm, as if that would not clip
        self.unpacked: int | None = None
        self.parts: dict[tuple[str, int], str] = {}  # of units on disk in memory, and whether they are "coming", "here", "new" or "going"
        self.summed = self.on_disk & self.left  # units whose gradient sums are on disk
        self.updated: list[int] = []
        self.normed = 0

    def follow(self, program: Program) -> None:
        for op in program:
            self.op, self.layout = op, self.visits[op.visit].layout
            self.cut, self.view = self.case.itinerary.cuts[self.layout], self.views[self.layout]
            getattr(self, op.kind.replace(" ", "_"), self.nothing)()

    def all(self, program: Program) -> None:
        self.follow(program)
        for name in ("opened", "added", "loaded", "waiting", "coming"):
            self.need(not getattr(self, name), f"{name} at the end: {getattr(self, name)}")
        self.need(not self.parts, f"in memory at the end: {self.parts}")
        middle = self.updated.index(-1) if -1 in self.updated else 0
        before, after = self.updated[:middle], self.updated[middle:]
        right = sorted(before) == sorted(self.before) and sorted(after) == [-1, *sorted(self.after)]
        self.need(right, "updates are missing, or twice")
        own, last = self.case.steps[self.rank], self.case.itinerary.cuts[self.visits[-1].layout]
        reduced = {op.unit: at for at, op in enumerate(program) if op.kind == "reduce" and op.visit == len(self.visits) - 1}
        early = own.early.intersection(sorted(reduced, key=lambda unit: reduced[unit])[:-1])
        self.need(self.early == (early if self.case.early and last.at_home else set()), "early updates are missing")
        self.need(self.unpacked is None, "moments are not packed")
        self.need(not any(self.under_way.values()) and not any(self.messages.values()), "something is under way at the end")
        self.need(Counter(dict.fromkeys(self.wanted(), 1)) == self.done, "backwards are missing, or twice")

    def wanted(self) -> Iterator[tuple]:
        """Every backward of a unit, or of a block of rows of the loss."""
        for number, visit in enumerate(self.visits):
            view = self.views[visit.layout]
            for event in stage_passes(visit.layout, view.at.pp, visit.micros):
                for unit in view.chunks[event.chunk] if event.kind == "backward" else ():
                    head = unit > self.spec.layers
                    after = [later for later in view.chunks[event.chunk] if unit < later <= self.spec.layers]
                    recomputed = visit.layout.recompute == "full" and len(after) >= visit.layout.kept_blocks
                    part = "block with output" if recomputed else "block"
                    part = "" if head or visit.layout.chunk else part if unit else "embed"
                    blocks = range(visit.loss_blocks[event.micro]) if head and visit.loss_blocks else (-1,)
                    yield from product((number,), (event.micro,), (unit,), (part,), blocks)

    def need(self, right: bool, what: str) -> None:
        if not right:
            raise Unsound(f"rank {self.rank}, {self.op}: {what}")

    def nothing(self) -> None: ...

    def units(self) -> list[tuple]:
        """Those whose weights the operation's unit computes with."""
        return [(self.cut, unit) for unit in sorted({moving_unit(self.spec, param) for param in self.spec.of_unit(self.op.unit)})]

    def within(self, kind: str, itemsize: int) -> None:
        def size(unit: int) -> int:
            own = [param for param in self.spec.params if moving_unit(self.spec, param) == unit]
            return itemsize * sum(p.elements if p.dim is None else -(-p.elements // self.layout.tp) for p in own)

        most = max(size(unit) for unit in range(1, self.spec.layers + 1))
        flying = self.under_way[kind]
        self.need(len(flying) < 2 or sum(map(size, flying)) <= most, f"{flying} under way, window {most}")

    def part(self, *states: str) -> tuple[str, int]:
        key = self.op.part, self.op.unit
        self.need(self.op.unit in self.on_disk and self.parts.get(key) in states, f"its {self.op.part} is {self.parts.get(key)}")
        return key

    def read(self) -> None:
        key = self.op.part, self.op.unit
        self.need(self.op.unit in self.on_disk and key not in self.parts, "it is in memory")
        self.need(key[0] != "sums" or key[1] in self.summed, "there are no sums yet")
        known = self.normed == 1 or key[1] in self.left
        self.need(key[0] != "record" or (known and key[1] in self.summed), "the norm is not known")
        self.need(key[0] != "state" or (not self.normed and key[1] not in self.left), "it is not updated early")
        self.need(key[0] != "state" or ("record", key[1]) not in self.parts, "its record is in memory")
        self.need(key[1] not in self.early, "it is as after an update that may not stand")
        self.parts[key] = "coming"

    def await_read(self) -> None:
        self.parts[self.part("coming")] = "here"

    def evict(self) -> None:
        del self.parts[self.part("here")]

    def write(self) -> None:
        self.need(self.unpacked is None, "moments are not packed")
        self.parts[self.part("new")] = "going"

    def await_write(self) -> None:
        key = self.part("going")
        del self.parts[key]
        self.summed |= {key[1]} if key[0] == "sums" else set()

    def norm(self) -> None:
        self.normed += 1
        self.need(self.normed == 1 and not self.parts and self.summed == self.on_disk, "sums are not all on disk")
        self.need(not self.left, "updates are left")

    def update(self) -> None:
        if self.op.part == "early":
            self.need(self.parts.get(("state", self.op.unit)) == "here", "its masters and moments are not here")
            self.need(self.parts.get(("sums", self.op.unit)) in ("new", "going"), "its gradients are not here")
            self.need(("master", self.op.unit) not in self.parts, "a gather may still read its masters")
            self.parts["state", self.op.unit] = "new"
            self.early.add(self.op.unit)
            return
        self.need(self.normed == 1 or self.op.unit in self.left, "the norm is not known")
        self.updated.append(self.op.unit)
        if self.op.unit in self.left:
            self.left.remove(self.op.unit)
            self.summed.discard(self.op.unit)
        if self.op.unit >= 0 and self.packs:
            self.need(self.unpacked is None, "another unit's moments are unpacked")
            self.unpacked = self.op.unit
        if self.op.unit in self.on_disk:
            self.need(self.parts.get(("record", self.op.unit)) == "here", "its record is not here")
            self.parts["record", self.op.unit] = "new"

    def pack(self) -> None:
        self.need(self.unpacked == self.op.unit, "its moments are not unpacked")
        self.unpacked = None

    def add_to_sums(self, unit: int) -> None:
        """The first sums need nothing; later ones are added to what is on disk."""
        self.need(unit not in self.left, "its sums of the step before are not done with")
        self.need(unit not in self.early, "it has been updated without these")
        if unit in self.on_disk:
            known = self.parts.get(("sums", unit))
            self.need(known in ("here", "new") if unit in self.summed else known is None, f"its sums are {known}")
            self.parts["sums", unit] = "new"

    def total(self) -> None:
        for unit in {*self.on_disk, *self.left} if self.op.unit < 0 else {self.op.unit}:
            self.add_to_sums(unit)

    def gather(self) -> None:
        if self.cut.at_home:
            here = self.parts.get(("master", self.op.unit)) == "here" or self.parts.get(("record", self.op.unit)) in ("new", "going")
            self.need(self.op.unit not in self.on_disk or here, "its master is not here")
            self.need(self.op.unit not in self.left, "its master is stale")
        self.need(self.view.collective and self.op.unit in self.view.units, "no unit to gather here")
        self.need(self.cut.at_home or self.cut in self.brought, "its rows are not here")
        self.need((self.cut, self.op.unit) not in self.present and self.op.unit not in self.under_way["gather"], "it is here or coming")
        self.under_way["gather"].append(self.op.unit)
        self.within("gather", WEIGHT_BYTES)

    def await_gather(self) -> None:
        self.need(self.op.unit in self.under_way["gather"], "it is not coming")
        self.under_way["gather"].remove(self.op.unit)
        self.present.add((self.cut, self.op.unit))

    def release(self) -> None:
        self.need((self.cut, self.op.unit) in self.present, "it is not here")
        self.present.remove((self.cut, self.op.unit))

    def compute(self) -> None:
        op = self.op
        self.need(set(self.units()) <= self.present, "weights are not here")
        self.need((op.visit, op.micro) in self.loaded, "the micro-batch is not loaded")
        if op.turn == "again" and self.layout.offload != "device":
            self.need(self.waiting[op.visit, op.micro, op.unit, op.part] == "here", "its input is in the tier")
        if op.turn in ADDS:
            self.done[op.visit, op.micro, op.unit, op.part, op.number] += 1
        if op.turn in ADDS and self.layout.chunk:
            self.added.update(self.units())

    def accumulate(self) -> None:
        self.added.add((self.cut, self.op.unit))

    def reduce(self) -> None:
        self.need((self.cut, self.op.unit) in self.added and self.view.collective, "nothing was added up")
        self.added.remove((self.cut, self.op.unit))
        self.under_way["reduce"].append(self.op.unit)
        self.within("reduce", SUM_BYTES)

    def await_reduce(self) -> None:
        self.need(self.op.unit in self.under_way["reduce"], "it is not under way")
        self.under_way["reduce"].remove(self.op.unit)
        if self.cut.at_home:
            self.add_to_sums(self.op.unit)

    def enter(self) -> None:
        self.need(not any(self.under_way.values()), "a group began before another's collectives had ended")

    def load(self) -> None:
        self.need((self.op.visit, self.op.micro) not in self.loaded, "it is loaded")
        self.loaded.add((self.op.visit, self.op.micro))

    def unload(self) -> None:
        self.loaded.remove((self.op.visit, self.op.micro))

    def receive(self) -> None:
        self.need((self.op.visit, self.op.micro) in self.loaded, "nobody knows its size")
        self.messages["receive"].add((self.op.visit, self.op.number))

    def await_receive(self) -> None:
        self.messages["receive"].remove((self.op.visit, self.op.number))

    def send(self) -> None:
        self.messages["send"].add((self.op.visit, self.op.number))

    def await_send(self) -> None:
        self.messages["send"].remove((self.op.visit, self.op.number))

    def moved(self, before: str | None, after: str | None) -> None:
        key = self.op.visit, self.op.micro, self.op.unit, self.op.part
        self.need(self.waiting.pop(key, None) == before, f"it is not {before}")
        self.waiting |= {key: after} if after else {}

    def put(self) -> None:
        self.moved(None, "put")

    def fetch(self) -> None:
        self.moved("put", "coming")

    def await_fetch(self) -> None:
        self.moved("coming", "here")

    def drop(self) -> None:
        self.moved("here", None)

    def open(self) -> None:
        self.need(not self.cut.at_home and (self.cut, self.op.unit) not in self.opened, "it has storage")
        self.opened.add((self.cut, self.op.unit))

    def exchange(self) -> None:
        key = self.op.visit, self.op.way
        self.need(self.op.way not in self.coming, "the one before is under way")
        self.need(self.op.number == self.exchanged.get(key, -1) + 1, "another is next")
        self.exchanged[key] = self.op.number
        self.coming.add(self.op.way)
        if self.op.way == "sums":
            self.need(not self.under_way["reduce"], "sums are not there yet")
        else:
            before = self.visits[self.op.visit - 1].layout if self.op.visit else None
            plan = self.case.itinerary.weights(self.case.itinerary.source(before), self.cut)
            here = {unit for part, unit in self.parts if part == "master" and self.parts[part, unit] == "here"}
            self.need(self.case.moving(plan, self.op.number) & self.on_disk <= here, "a master that it sends is not here")
            self.need(not self.case.moving(plan, self.op.number) & self.left, "a master that it sends is stale")

    def await_exchange(self) -> None:
        key = self.op.visit, self.op.way
        self.need(self.op.number == self.exchanged.get(key), "it is not under way")
        self.coming.remove(self.op.way)
        if self.op.way == "sums":
            plan = self.case.itinerary.sums(self.cut)
            here = {unit for part, unit in self.parts if part == "sums" and self.parts[part, unit] in ("here", "new")}
            ended = self.case.moving(plan, self.op.number - plan.rounds + 1) & self.on_disk
            self.need(ended <= here, "sums that it adds to are not here")
            self.parts |= {("sums", unit): "new" for unit in ended}

    def arrived(self) -> None:
        here = {(self.cut, unit) for unit in self.view.units}
        before = self.visits[self.op.visit - 1].layout if self.op.visit else None
        count = self.case.itinerary.weights(self.case.itinerary.source(before), self.cut).exchanges
        self.need("weights" not in self.coming and self.exchanged.get((self.op.visit, "weights")) == count - 1, "exchanges are missing")
        self.need(here <= self.opened, "a unit has no storage")
        self.present |= here if not self.view.collective else set()
        self.brought.add(self.cut)

    def close(self) -> None:
        units = self.view.units if self.op.unit < 0 else {self.op.unit}
        self.brought -= {self.cut} if self.op.unit < 0 else set()
        gone = {(self.cut, unit) for unit in units}
        self.present -= gone
        self.opened -= gone

    def forget(self) -> None:
        count = self.case.itinerary.sums(self.cut).exchanges
        self.need("sums" not in self.coming and self.exchanged.get((self.op.visit, "sums")) == count - 1, "exchanges are missing")
        left = {(cut, unit) for cut, unit in self.added if cut == self.cut}
        self.need(not (left and self.view.collective), "sums were not reduced")
        self.added -= left


# The properties


def wrong(case: Case, programs: Sequence[Program]) -> str:
    """The first thing that is wrong with the programs of all ranks, if any."""
    listed = [[tuple(posts(case, rank, op)) for op in program] for rank, program in enumerate(programs)]
    flat = [[post for own in rank for post in own] for rank in listed]
    between = [list(messages(case, rank, program)) for rank, program in enumerate(programs)]
    for disagreement in (*disagreements(flat), *disagreements(between)):
        return disagreement
    if waits := stuck(case, programs, listed):
        return f"deadlock: {waits}"
    try:
        for rank, program in enumerate(programs):
            Follow(case, rank).all(program)
    except (Unsound, KeyError) as fault:
        return repr(fault)
    return ""


def test_ranks_agree_on_every_order_and_none_waits_for_ever():
    seen: Counter[str] = Counter()
    for number, case in enumerate(cases(1, MODELS, EACH)):
        programs = case.programs()
        assert not (fault := wrong(case, programs)), f"case {number}: {case}: {fault}"
        seen.update({op.kind for program in programs for op in program})
        seen["late"] += any(case.left)
        seen["rest"] += any(0 < len(left) < len(own.left()) for left, own in zip(case.left, case.steps))
        seen["early"] += any(op.part == "early" for program in programs for op in program)
        seen["ahead"] += any(op.kind == "exchange" and op.way == "weights" and op.visit == visit + 1 for visit, op in entered(programs[0]))
    assert number + 1 >= 2000
    assert all(count >= 50 for count in seen.values()), seen
    assert len(seen) == 40


def test_what_a_step_leaves_can_be_finished_alone():
    found = 0
    for case in cases(7, 60, 2):
        programs = [steps.program((), left=left) for steps, left in zip(case.steps, case.left)] if any(case.left) else []
        listed = [[tuple(posts(case, rank, op)) for op in program] for rank, program in enumerate(programs)]
        assert not [*disagreements([[post for own in rank for post in own] for rank in listed])]
        assert not stuck(case, programs, listed)
        for rank, program in enumerate(programs):
            seen = Follow(case, rank)
            seen.follow(program)
            assert not seen.left
            assert not seen.parts
            assert seen.unpacked is None
            assert sorted(seen.updated) == sorted(case.left[rank])
            found += len(program) > 0
    assert found >= 50


def entered(program: Program) -> Iterator[tuple[int, Op]]:
    """Every operation with the group that the rank was in."""
    now = 0
    for op in program:
        now = op.visit if op.kind == "enter" else now
        yield now, op


# Mistakes


def swapped(program: Program, first: int, second: int) -> Program:
    ops = list(program)
    ops[first], ops[second] = ops[second], ops[first]
    return tuple(ops)


def test_two_operations_of_a_communicator_swapped_on_one_rank_are_noticed():
    draw, noticed = random.Random(2), Counter()
    for case in cases(3, 240, 1):
        programs = case.programs()
        rank = draw.randrange(len(programs))
        own = [(at, post) for at, op in enumerate(programs[rank]) for post in posts(case, rank, op) if len(post[1]) > 1]
        if not own:
            continue
        chosen = draw.choice(sorted({purpose for _, (purpose, *_) in own}))
        at, (purpose, ranks, what) = draw.choice([one for one in own if one[1][0] == chosen])
        others = [other for other, (same, with_, differs) in own if (same, with_) == (purpose, ranks) and differs != what and other != at]
        if others:
            programs[rank] = swapped(programs[rank], at, draw.choice(others))
            assert wrong(case, programs), (str(case), rank, at)
            noticed[purpose] += 1
    assert all(noticed[purpose] >= 3 for purpose in ("", "gather", "reduce", "weights", "sums")), noticed


def damaged(draw: random.Random, kind: str, program: Program) -> Program | None:
    """A program with one mistake; None where there is nothing to do wrong."""
    name, _, what = kind.partition(" ")
    places = [at for at, op in enumerate(program) if op.kind == what]
    if not places:
        return None
    at = draw.choice(places)
    if what == "update" and name == "early":
        places = [at for at, op in enumerate(program) if op.part == "early"]
        at = draw.choice(places) if places else 0
        uses = [before for before in range(at) if program[before].kind == "await reduce" and program[before].unit == program[at].unit]
        return (*program[: uses[-1]], program[at], *program[uses[-1] : at], *program[at + 1 :]) if uses else None
    if name == "stale":
        uses = [after for after in range(at) if program[after].kind == "update" and program[after].unit == program[at].unit]
        return (*program[: uses[-1]], *program[uses[-1] + 1 : at + 1], program[uses[-1]], *program[at + 1 :]) if uses else None
    if name == "no":
        return program[:at] + program[at + 1 :]
    if name == "twice":
        return program[: at + 1] + program[at:]
    uses = [before for before in range(at) if program[before].kind == "compute" and program[before].unit == program[at].unit]
    return (*program[: uses[-1]], program[at], *program[uses[-1] : at], *program[at + 1 :])


@cache
def sound() -> list[tuple[Case, list[Program]]]:
    """What is damaged, by one kind of mistake after the other."""
    return [(case, case.programs()) for case in cases(6, 200, 1)]


@pytest.mark.parametrize(
    "kind",
    [
        "early release",
        "early update",
        "stale gather",
        *(f"no {kind}" for kind in ("gather", "await gather", "reduce", "await reduce", "open", "exchange", "await exchange", "arrived")),
        *(f"no {kind}" for kind in ("load", "unload", "receive", "await receive", "send", "await send", "put", "fetch", "drop", "norm")),
        *(f"no {kind}" for kind in ("read", "await read", "evict", "write", "await write", "update", "pack")),
        *(f"twice {kind}" for kind in ("read", "evict", "write", "update", "pack")),
        *(f"twice {kind}" for kind in ("gather", "reduce", "put", "fetch", "drop", "exchange", "load", "release", "norm")),
    ],
)
def test_a_damaged_program_is_noticed(kind: str):
    draw, noticed = random.Random(5), 0
    for case, programs in sound():
        rank = draw.randrange(len(programs))
        damage = damaged(draw, kind, programs[rank])
        if damage is not None:
            assert wrong(case, [*programs[:rank], damage, *programs[rank + 1 :]]), (str(case), rank)
            noticed += 1
            if noticed == 10:
                break
    assert noticed >= 3


def test_exchanges_in_the_middle_of_a_backward_that_others_wait_for_are_noticed(monkeypatch: pytest.MonkeyPatch):
    spec = ModelSpec("llama", 64, 8, 4, 4, 2, 2, 9, 64, rope=Rope())
    layouts = [Layout(pp=2, zero=1), Layout(dp=2, zero=1), Layout(tp=2, zero=1)]
    edges = [Edge(number + 1, layout) for number, layout in enumerate(layouts)]
    itinerary = Itinerary(spec, edges, Links(2, 8.0, 1.0), WEIGHT_BYTES, SUM_BYTES, SwitchOptions("fan_out", 200, 1 << 20))

    def fault() -> str:
        steps = tuple(Steps(itinerary, rank, WEIGHT_BYTES, SUM_BYTES) for rank in range(2))
        case = Case(steps, ((Visit(layouts[0], 3, (1, 1, 1)), Visit(layouts[1], 1, (1,))),) * 2)
        return wrong(case, case.programs())

    assert not fault()
    monkeypatch.setattr(RankLayout, "leads", True)
    assert fault().startswith("deadlock")
