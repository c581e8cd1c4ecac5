"""The clock: a step's programs played on lanes. When each operation begins and ends, and so how long the step takes.

The operations are `program.step`'s, the bytes that they send and move the ledger's, their seconds `simulate.cost`'s. One rank plays for
all that are like it: in a length group, one of each stage of the replica with most to do. Ranks wait for each other where a group ends: an
exchange of a switch joins them there.

What overlaps is what the program overlaps: gathers, reductions, messages, exchanges and copies go on in their lanes from where they are
begun until they are awaited, and share a link where they use the same. Inside a turn, tensor parallelism and Ulysses are waited for, and
the ring passes keys under attention. On CPUs what travels takes a share of the cores that computing takes, as a profile says; on GPUs it
crowds them. Each visit ends with what ranks wait for the slowest of them.

A home outside a GPU has its masters cast and its units updated by the host, at HOST_BYTES_PER_S. The host is in a lane with the gathers,
which wait for the updates before them, and not with what the device computes. Weights cross the device's link while others are cast;
gradients cross it beside what is computed, and those of a home on disk are waited for. What a switch takes from such a home, and brings to
it, is not charged with that.

Of many micro-batches, which a pipeline computes at an even pace once it is full, an even choice is played, and the seconds that the rest
takes at that pace are added.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout.layout import Coord, Layout, Tier
from longshift.program.operations import AWAITED, LANES, Op
from longshift.program.turns import Visit, visit_of
from longshift.simulate.chunk_clock import ChunkClock
from longshift.simulate.cost import Cost, Mesh, UnitKind, recompute_code
from longshift.simulate.lanes import Begin, End, Timed, play
from longshift.simulate.rates import tier_copy_s
from longshift.spec.formats import Format, arithmetic
from longshift.switch.traffic import seconds_by_exchange
from longshift.weigh.ledger import Ledger
from longshift.weigh.needs import StepShape
from longshift.workload.groups import length_groups

LEAST_PLAYED = 16  # micro-batches of a visit, and of a pipeline at least FILLS times its stages' chunks
FILLS = 3
HOST_BYTES_PER_S = 60e9  # of a rank's part of the host's memory: torch's fused AdamW took 0.47 ns for the 28 bytes of a parameter
MOVES = {"gather": "all_gather", "reduce": "reduce_scatter"}

Packs = tuple[tuple[int, ...], ...]  # lengths of the documents of each micro-batch


def update_bytes(moments: int = 2) -> float:
    """Bytes that the update of an owned weight moves: master and moments are read and written in float32, the gradient is read twice (norm,
    update), the copy is written."""
    return 18.0 + 8.0 * moments


def packing_bytes(formats: Format) -> float:
    """Bytes that it moves to unpack and to pack the moments of an owned weight: codes are read and written, values written once and read
    twice, for the largest of a block and for its codes."""
    return formats.moments * (2 * formats.moment_bytes + 3 * formats.home_bytes)


@dataclass(frozen=True)
class GroupPacks:
    """A length group of a step: its layout, and the micro-batches of each replica."""

    layout: Layout
    replicas: tuple[Packs, ...]


@dataclass(frozen=True)
class StepTime:
    """A step on the clock. `starts`: seconds at which each visit begins; `played`: by visit, every piece of work of one rank of each stage,
    its times from the visit's start on; `shares`: of what there is to compute in each visit, that was played."""

    seconds: float
    starts: tuple[float, ...]
    played: tuple[tuple[Timed, ...], ...] = field(repr=False)
    shares: tuple[float, ...]

    def busy_s(self, lane: str) -> float:
        """Seconds in which a lane does something, of each visit's busiest stage, of all visits; what was not played as what was."""
        total = 0.0
        for pieces, share in zip(self.played, self.shares):
            by_stage = dict.fromkeys(range(1 + max((piece.rank for piece in pieces), default=0)), 0.0)
            for piece in pieces:
                if piece.lane == lane:
                    by_stage[piece.rank] += piece.end - piece.start
            total += max(by_stage.values(), default=0.0) / share
        return total


class _Moved:
    """An operation, bytes that the ledger saw it send, move, and read and write for the wire's format; `elements` that it adds or updates,
    or that cross between the device and a home outside it. `home`: the memory that its unit's state lies in; "device" on a CPU."""

    __slots__ = ("coded", "elements", "home", "moved", "op", "sent")

    def __init__(self, op: Op, sent: int, moved: int, coded: int, elements: int, home: Tier):
        self.op, self.sent, self.moved, self.coded, self.elements, self.home = op, sent, moved, coded, elements, home


class Clock:
    """Plays steps of a run on a cluster's rates. Mutable: it keeps what it has computed."""

    def __init__(self, shape: StepShape, cluster: Cluster, cost: Cost, precision: str):
        self.shape, self.cluster, self.cost, self.dtype = shape, cluster, cost, arithmetic(precision)
        self.on_cpu = cluster.device.kind == "cpu"
        self.spec, self.rates = shape.itinerary.spec, cost.rates
        self.per_node = int(self.rates.fabric.per_node)
        self.cores_shares = {level: cluster.cores_share(level) if self.on_cpu else 1.0 for level in ("node", "network")}
        self.turns: dict[tuple, list[tuple[str, float]]] = {}
        self.exchanges: dict[int, list[float]] = {}
        self.collectives: dict[tuple[Layout, str, int], float] = {}
        self.passes: dict[float, float] = {}
        self.ledgers: dict[tuple[int, tuple[Layout, ...]], Ledger] = {}  # by rank and the layouts that its steps visit
        self.paces: dict[Layout, float] = {}  # seconds of a visit for one of a block's on its packs

    def step(self, groups: Sequence[GroupPacks]) -> StepTime:
        """A step that visits these groups, in this order."""
        packs = [self.dearest(group) for group in groups]
        costs = [self.packs_s(group.layout, own) for group, own in zip(groups, packs)]
        many, few = zip(*(_chosen(group.layout, cost) for group, cost in zip(groups, costs)))
        layouts = [group.layout for group in groups]
        played = self._played(layouts, [[own[n] for n in some] for own, some in zip(packs, many)])
        ends = [max((piece.end for piece in pieces), default=0.0) for pieces in played]
        if any(some != less and layout not in self.paces for layout, some, less in zip(layouts, many, few)):
            fewer = self._played(layouts, [[own[n] for n in some] for own, some in zip(packs, few)])
            for layout, cost, some, less, end, pieces in zip(layouts, costs, many, few, ends, fewer):
                if some != less:
                    more_s = end - max(piece.end for piece in pieces)
                    self.paces[layout] = more_s / float(cost[list(some)].sum() - cost[list(less)].sum())
        now, starts, shares = float(self.rates.constants.begin_s), [], []
        for layout, cost, some, end in zip(layouts, costs, many, ends):
            left = float(cost.sum() - cost[list(some)].sum())
            starts.append(now)
            shares.append(1 - left / float(cost.sum()))
            now += (end + self.paces.get(layout, 0.0) * left) * (1 + float(self.rates.constants.jitter) * math.log2(layout.world))
        return StepTime(float(now), tuple(starts), tuple(map(tuple, played)), tuple(shares))

    def _played(self, layouts: Sequence[Layout], packs: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Timed]]:
        """Pieces of work of one rank of each stage, by visit."""
        visits = tuple(visit_of(self.spec, layout, own) for layout, own in zip(layouts, packs))
        seen: dict[int, list[list[_Moved]]] = {}
        found = []
        for number, (layout, own) in enumerate(zip(layouts, packs)):
            stages = [layout.rank(Coord(0, 0, 0, 0, stage)) for stage in range(layout.pp)]
            for rank in stages:
                if rank not in seen:
                    seen[rank] = self._weighed(rank, visits, packs)
            actions = [list(_Stage(self, layout, stage, visits, own).actions(seen[rank][number])) for stage, rank in enumerate(stages)]
            found.append(play(actions, float(self.rates.constants.crowd)))
        return found

    def _weighed(self, rank: int, visits: tuple[Visit, ...], packs: Sequence[Sequence[tuple[int, ...]]]) -> list[list[_Moved]]:
        """The operations of a rank's step by visit, and what the ledger says of them. A ledger that has played a step of the same visits
        goes on from there: its copies are as that step has left them."""
        key = rank, tuple(visit.layout for visit in visits)
        steps = 1 if key in self.ledgers else None
        if key not in self.ledgers:
            self.ledgers[key] = self.shape.ledger(rank, "gloo" if self.on_cpu else "nccl", self.on_cpu, inside=False)
        return _weigh(self.ledgers[key], visits, packs, self.on_cpu, steps)

    def dearest(self, group: GroupPacks) -> Packs:
        """The packs of the replica with most to do. Under ZeRO-3 replicas gather unit by unit together, so that each micro-batch is the
        dearest of all replicas'."""
        count = max(map(len, group.replicas))
        full = [replica + ((),) * (count - len(replica)) for replica in group.replicas]
        seconds = self.packs_s(group.layout, [pack for replica in full for pack in replica]).reshape(len(full), count)
        if group.layout.zero == 3:
            return tuple(full[replica][micro] for micro, replica in enumerate(seconds.argmax(0)))
        return full[int(seconds.sum(1).argmax())]

    def packs_s(self, layout: Layout, packs: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Seconds of a block's forward and backward on each pack."""
        if layout.chunk:
            return np.array([sum(self._chunked_s(layout, pack, turn) for turn in ("forward", "backward")) for pack in packs])
        tokens, pairs = (np.array([sum(of(pack or (1,))) for pack in packs], float) for of in (iter, self._pairs))
        mesh = Mesh(layout.tp, layout.ulysses, layout.ring)
        works = [self.cost.turn("block", turn, "block", mesh, tokens, pairs, recompute_code(layout)) for turn in ("forward", "backward")]
        return sum((np.asarray(work.exposed_s(self.cost.launch_s)) for work in works), np.zeros(len(packs)))

    def _pairs(self, lengths: Sequence[int]) -> Iterator[float]:
        """Causal pairs of documents, the mean of all blocks."""
        return (float(self.spec.attended(n)) for n in lengths)

    def turn(self, layout: Layout, pack: tuple[int, ...], blocks: int, kind: UnitKind, turn: str, part: str) -> list[tuple[str, float]]:
        """Seconds of a turn of a unit on a pack, by lane, in a row; `blocks` of rows of a loss. The ring goes on under attention."""
        key = layout, pack, blocks, kind, turn, part
        if key not in self.turns:
            self.turns[key] = [("compute", self._chunked_s(layout, pack, turn))] if layout.chunk else self._whole(*key)
        return self.turns[key]

    def _whole(self, layout: Layout, pack: tuple[int, ...], blocks: int, kind: UnitKind, turn: str, part: str) -> list[tuple[str, float]]:
        lengths = pack or (1,)
        mesh = Mesh(layout.tp, layout.ulysses, layout.ring)
        code = recompute_code(layout)
        tokens, pairs = sum(lengths), sum(self._pairs(lengths))
        work = self.cost.turn(kind, turn, part, mesh, tokens, pairs, code, blocks)
        computes, attention = float(work.compute_s(self.cost.launch_s)), float(work.attention_s)
        under = min(attention, computes) if float(work.ring_s) else 0.0
        found = [("compute", computes - under), ("tp", float(work.tensor_s)), ("ulysses", float(work.ulysses_s))]
        return [*found, ("attention", under), ("ring", float(work.ring_s))]

    def _chunked_s(self, layout: Layout, pack: tuple[int, ...], turn: str) -> float:
        """Seconds of a turn of a unit of a chunked pack."""
        chunk_clock = ChunkClock(self.cost, self.cluster, layout)
        return chunk_clock.turn_s(pack or (1,), turn)  # pyright: ignore[reportArgumentType]

    def pass_s(self, moved_bytes: float) -> float:
        """Seconds of a pass over so many bytes."""
        if moved_bytes not in self.passes:
            self.passes[moved_bytes] = float(self.rates.elementwise_s(moved_bytes))
        return self.passes[moved_bytes]

    def collective_s(self, layout: Layout, kind: str, sent_bytes: int) -> float:
        """Seconds of a gather or a reduction in which a rank sends so many bytes. Its members share one cut of the weights."""
        key = layout, kind, sent_bytes
        if key not in self.collectives:
            self.collectives[key] = self._collective_s(*key)
        return self.collectives[key]

    def _collective_s(self, layout: Layout, kind: str, sent_bytes: int) -> float:
        holders = layout.dp * layout.ulysses * layout.ring
        if holders == 1 or not sent_bytes:
            return 0.0
        per_node = max(1, self.per_node // layout.tp)
        move = "all_to_all" if kind == "reduce" and self.shape.formats.wire.gradients != "float32" else MOVES[kind]
        return float(self.rates.collective_s(move, sent_bytes * holders / (holders - 1), holders, per_node))  # pyright: ignore[reportArgumentType]

    def message_s(self, layout: Layout, stage: int, peer: int, sent_bytes: int) -> float:
        """Seconds of a message between stages."""
        per_node = 2 if self.together(layout, stage, peer) else 1
        return float(self.rates.constants.messages) * float(self.rates.collective_s("send", sent_bytes, 2, per_node))

    def together(self, layout: Layout, stage: int, peer: int) -> bool:
        """Whether two stages are on one node."""
        ranks = layout.world // layout.pp
        return abs(stage - peer) * ranks < self.per_node and stage * ranks // self.per_node == peer * ranks // self.per_node

    def exchanges_s(self, visits: Sequence[Visit], op: Op) -> list[float]:
        """Seconds of every exchange of the switch that `op` belongs to, each on the busiest link of any rank."""
        itinerary = self.shape.itinerary
        cut = itinerary.cuts[visits[op.visit].layout]
        if op.way == "sums":
            plan = itinerary.sums(cut)
        else:
            before = visits[op.visit - 1].layout if op.visit else None
            plan = itinerary.weights(None if before is None else itinerary.source(before), cut)
        if id(plan) not in self.exchanges:
            self.exchanges[id(plan)] = seconds_by_exchange(plan)
        return self.exchanges[id(plan)]


def _chosen(layout: Layout, costs: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Micro-batches of a replica that are played, by number; and fewer of them, from which the pace is found. Both are even choices by
    cost, and whole rounds of the stages fewer than all. Where there are not many, both are all of them."""
    count, most = len(costs), max(LEAST_PLAYED, FILLS * layout.pp * layout.virtual)
    many = count - layout.pp * -(-max(0, count - most) // layout.pp)
    few = many - layout.pp * max(1, most // 2 // layout.pp)
    if count == many or few < 1:
        return tuple(range(count)), tuple(range(count))
    order = np.argsort(costs, kind="stable")
    many_, few_ = (tuple(sorted(order[((np.arange(n) + 0.5) * count / n).astype(int)].tolist())) for n in (many, few))
    return many_, few_


def _weigh(
    ledger: Ledger, visits: Sequence[Visit], packs: Sequence[Sequence[tuple[int, ...]]], on_cpu: bool, steps: int | None
) -> list[list[_Moved]]:
    """The operations of a rank's step by visit, norm and update with the last one's, and what the ledger says of them."""
    found: list[list[_Moved]] = [[]]
    account, sent, moved, added, coded = ledger.account, 0, 0, 0, 0
    at_home = [ledger.steps.views[visit.layout].cut.at_home for visit in visits]

    def after(op: Op) -> None:
        nonlocal sent, moved, added, coded
        elements, home = 0, "device" if on_cpu else ledger.steps.home_tiers.get(op.unit, "device")
        earlier, added = added, account.added
        if op.kind == "accumulate":
            elements = (added - earlier) // account.weight_bytes
        elif op.kind == "update":
            all_at_once = not ledger.steps.by_unit
            elements = sum(size for unit, size in ledger.home.shards if op.unit == unit or (all_at_once and op.unit < 0))
        elif op.kind == "pack" or (home != "device" and op.kind in ("gather", "await reduce") and at_home[op.visit]):
            elements = sum(size for unit, size in ledger.home.shards if op.unit == unit)
        before = sent, moved, coded
        sent, moved, coded = sum(account.sent.values()), sum(account.moved.values()), account.coded
        found[-1].append(_Moved(op, sent - before[0], moved - before[1], coded - before[2], elements, home))
        if op.kind == "leave" and op.visit < len(visits) - 1:
            found.append([])

    ledger.play(visits, packs, after, steps)
    return found


class _Stage:
    """What a rank of one stage does in a visit, as actions on lanes. Mutable while it is made."""

    def __init__(self, clock: Clock, layout: Layout, stage: int, visits: Sequence[Visit], packs: Sequence[tuple[int, ...]]):
        self.clock, self.layout, self.stage, self.visits, self.packs = clock, layout, stage, visits, packs
        self.under_way: dict[tuple, deque[Hashable]] = {}
        self.turns: dict[tuple, dict[str, float]] = {}  # seconds by lane, of each turn of a kind of unit on a micro-batch
        self.exchanges: dict[tuple[int, str], list[float]] = {}  # seconds of each, by visit and way
        self.count = 0
        spans = {"tp": layout.tp, "ulysses": layout.tp * layout.ulysses, "ring": layout.tp * layout.ulysses * layout.ring}
        self.links = {lane: ("network",) if ranks > clock.per_node else ("node",) for lane, ranks in spans.items()}
        self.far = ("network",) if spans["ring"] * layout.dp > clock.per_node else ("node",)

    def actions(self, moved: Sequence[_Moved]) -> Iterator[Begin | End]:
        for one in moved:
            op = one.op
            if op.kind in AWAITED:
                yield from self._cast(one)
                yield from self._coded(one)
                yield self._begin(one)
            elif op.kind in AWAITED.values():
                key = (op.kind, *op[1:])
                if self.under_way.get(key):  # else it was begun in the visit before, and has ended
                    yield End(self.under_way[key].popleft())
                yield from self._coded(one)
                if op.kind == "await reduce" and one.elements:
                    size = one.elements * self.clock.shape.formats.home_bytes
                    copy_s = float(self.clock.cluster.copy_s("to_host pinned", size, beyond=True))
                    crosses = self._piece(op, "home out", copy_s, ("host out",))
                    yield crosses
                    if one.home == "disk":
                        yield End(crosses.key)
            elif op.kind == "compute":
                yield from self._turn(op)
            elif op.kind in ("accumulate", "update", "pack"):
                formats, rates = self.clock.shape.formats, self.clock.rates
                of_one = {
                    "accumulate": formats.compute_bytes + 2 * formats.home_bytes,  # a gradient is read, a sum read and written
                    "update": update_bytes(formats.moments) * (rates.constants.update if one.home == "device" else 1.0),
                    "pack": packing_bytes(formats),
                }[op.kind]
                if op.kind != "accumulate" and one.home != "device":
                    yield self._piece(op, LANES["gather"], one.elements * of_one / HOST_BYTES_PER_S, ("host",))
                else:
                    yield from self._alone("compute", op, self.clock.pass_s(one.elements * of_one))
            elif op.kind == "put":
                yield self._piece(op, LANES["put"], self._copy_s(one, "out"), ("host out",))

    def _cast(self, one: _Moved) -> Iterator[Begin]:
        """Masters of a home outside a GPU, cast by the host and copied to the device."""
        if one.op.kind == "gather" and one.elements:
            formats = self.clock.shape.formats
            cast_s = one.elements * (formats.home_bytes + formats.compute_bytes) / HOST_BYTES_PER_S
            copy_s = float(self.clock.cluster.copy_s("to_device pinned", one.elements * formats.compute_bytes, beyond=True))
            yield self._piece(one.op, LANES["gather"], max(cast_s, copy_s), ("host",))

    def _coded(self, one: _Moved) -> Iterator[Begin | End]:
        """What the device does to send or to take in another format."""
        if one.coded:
            yield from self._alone("compute", one.op, self.clock.pass_s(one.coded))

    def _begin(self, one: _Moved) -> Begin:
        op, clock, everyone = one.op, self.clock, tuple(range(self.layout.pp))
        sent_bytes = one.sent
        ended = (AWAITED[op.kind], *op[1:])
        if op.kind in ("gather", "reduce"):
            made = self._piece(op, LANES[op.kind], clock.collective_s(self.layout, op.kind, sent_bytes), self.far)
        elif op.kind in ("send", "receive"):
            ends = min(self.stage, op.peer), max(self.stage, op.peer)
            key = "message", op.visit, op.number
            seconds = clock.message_s(self.layout, self.stage, op.peer, sent_bytes) if op.kind == "send" else 0.0
            link = ("node",) if clock.together(self.layout, *ends) else ("network",)
            made = Begin(key, f"messages {op.way} {ends[0]}-{ends[1]}", seconds, self.uses(link), ends, share=self.share(link))
        elif op.kind == "exchange":
            key, switch = ("exchange", op.visit, op.way, op.number), (op.visit, op.way)
            if switch not in self.exchanges:
                self.exchanges[switch] = clock.exchanges_s(self.visits, op)
            seconds = self.exchanges[switch][op.number]
            made = Begin(key, LANES[op.kind], seconds, self.uses(self.far), everyone, self.crowds(self.far), self.share(self.far))
        else:
            way = "out" if op.kind == "write" else "in"
            made = self._piece(op, LANES[op.kind], self._copy_s(one, way), (f"host {way}",))
        self.under_way.setdefault(ended, deque()).append(made.key)
        return made

    def _copy_s(self, one: _Moved, way: Literal["out", "in"]) -> float:
        tier = "disk" if one.op.kind in ("read", "write") else self.layout.offload
        return tier_copy_s(self.clock.cluster, tier, self.layout.world, one.moved, way)

    def _turn(self, op: Op) -> Iterator[Begin | End]:
        kind: UnitKind = "embeddings" if op.unit == 0 else "head" if op.unit > self.clock.spec.layers else "block"
        key = op.micro, kind, op.turn, op.part
        if key not in self.turns:
            blocks = self.visits[op.visit].loss_blocks[op.micro] if op.turn == "loss" and not self.layout.chunk else 1
            self.turns[key] = dict(self.clock.turn(self.layout, self.packs[op.micro], blocks, kind, op.turn, op.part))
        times = self.turns[key]
        for lane, seconds in times.items():
            if lane not in ("ring", "attention"):
                yield from self._alone(lane, op, seconds)
        if times.get("ring"):
            travels = self._piece(op, "ring", times["ring"], self.links["ring"])
            yield travels
            yield from self._alone("compute", op, times.get("attention", 0.0))
            yield End(travels.key)

    def _alone(self, lane: str, name: Op, seconds: float) -> Iterator[Begin | End]:
        """Begins a piece and waits for it."""
        if seconds > 0:
            made = self._piece(name, lane, seconds, self.links.get(lane, ()))
            yield made
            yield End(made.key)

    def _piece(self, name: Op, lane: str, seconds: float, uses: tuple[str, ...]) -> Begin:
        self.count += 1
        return Begin((name, self.stage, self.count), lane, seconds, self.uses(uses), (), self.crowds(uses), self.share(uses))

    def uses(self, links: tuple[str, ...]) -> tuple[str, ...]:
        """Resources of a piece of work. On CPUs what moves takes of the cores that computing takes."""
        return (*links, "cores") if self.clock.on_cpu or not links else links

    def share(self, links: tuple[str, ...]) -> float:
        """Share of the last of these resources that a piece of work needs."""
        return min((self.clock.cores_shares.get(link, 1.0) for link in links), default=1.0)

    def crowds(self, links: tuple[str, ...]) -> tuple[str, ...]:
        """Resources that a piece of work crowds: a collective of GPUs takes some of their multiprocessors and memory."""
        return ("cores",) if not self.clock.on_cpu and links in (("node",), ("network",)) else ()


def in_visiting_order(shape: StepShape, lengths: Sequence[int]) -> list[GroupPacks]:
    """The groups of a step of documents of these lengths, dealt and packed, as they are visited."""
    groups = length_groups(lengths, shape.edges, shape.itinerary.spec)
    visited = []
    for index in shape.itinerary.order(tuple(group.layout for group in groups)):
        group = groups[index]
        packs = [tuple(lengths[d] for d in pack) for pack in group.packs]
        visited.append(GroupPacks(group.layout, tuple(tuple(packs[p] for p in share) for share in group.shares)))
    return visited
