"""The clock: a step's programs played on lanes. When each operation begins and ends, and so how
long the step takes.

The operations are `program.step`'s, the bytes that they send and move the ledger's, their seconds
`simulate.cost`'s. One rank plays for all that are like it: in a length group, one of each stage of
the replica with most to do. Ranks wait for each other where a group ends: an exchange of a switch
joins them there.

What overlaps is what the program overlaps: gathers, reductions, messages, exchanges and copies go
on in their lanes from where they are begun until they are awaited, and share a link where they use
the same. Inside a turn, tensor parallelism and Ulysses are waited for, and the ring passes keys
under attention. On CPUs what travels takes a share of the cores that computing takes, as a profile
says; on GPUs it crowds them. Each visit ends with what ranks wait for the slowest of them.

A home outside a GPU has its masters cast and its units updated by the host, at HOST_BYTES_PER_S.
The host is in a lane with the gathers, which wait for the updates before them, and not with what
the device computes. Weights cross the device's link while others are cast; gradients cross it
beside what is computed, and those of a home on disk are waited for. What a switch takes from such a
home, and brings to it, is not charged with that.

Of many micro-batches, which a pipeline computes at an even pace once it is full, an even choice is
played, and the seconds that the rest takes at that pace are added.
"""

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout import axes
from longshift.layout.layout import Coord, Layout, Tier
from longshift.program.operations import AWAITED, LANES, Op
from longshift.program.turns import Visit, visit_of
from longshift.simulate.chunk_clock import ChunkClock
from longshift.simulate.cost import Cost, Mesh, UnitKind, recompute_code
from longshift.simulate.lanes import Begin, End, TimedWork, play
from longshift.simulate.rates import tier_copy_s
from longshift.spec.formats import Format, arithmetic
from longshift.switch.traffic import seconds_by_exchange
from longshift.weigh.ledger import Ledger
from longshift.weigh.needs import StepShape
from longshift.workload.groups import length_groups

# At least so many micro-batches of a visit are played, and of a pipeline FILLS times its stages'
# chunks.
LEAST_PLAYED = 16
FILLS = 3
# Of a rank's part of the host's memory: torch's fused AdamW took 0.47 ns for the 28 bytes of a
# parameter.
HOST_BYTES_PER_S = 60e9
MOVES = {"gather": "all_gather", "reduce": "reduce_scatter"}

Packs = tuple[tuple[int, ...], ...]  # lengths of the documents of each micro-batch


def update_bytes(moments: int = 2) -> float:
    """Bytes that the update of an owned weight moves: master and moments are read and written in
    float32, the gradient is read twice (norm, update), the copy is written."""
    return 18.0 + 8.0 * moments


def packing_bytes(formats: Format) -> float:
    """Bytes that it moves to unpack and to pack the moments of an owned weight: codes are read and
    written, values written once and read twice, for the largest of a block and for its codes."""
    return formats.moments * (2 * formats.moment_bytes + 3 * formats.home_bytes)


@dataclass(frozen=True)
class GroupPacks:
    """A length group of a step: its layout, and the micro-batches of each replica."""

    layout: Layout
    replicas: tuple[Packs, ...]


@dataclass(frozen=True)
class StepTime:
    """A step on the clock. `starts`: seconds at which each visit begins; `played`: by visit, every
    piece of work of one rank of each stage, its times from the visit's start on; `shares`: of what
    there is to compute in each visit, that was played."""

    seconds: float
    starts: tuple[float, ...]
    played: tuple[tuple[TimedWork, ...], ...] = field(repr=False)
    shares: tuple[float, ...]

    def busy_s(self, lane: str) -> float:
        """Seconds in which a lane does something, of each visit's busiest stage, of all visits;
        what was not played as what was."""
        total = 0.0
        for pieces, share in zip(self.played, self.shares):
            by_stage = dict.fromkeys(
                range(1 + max((piece.rank for piece in pieces), default=0)), 0.0
            )
            for piece in pieces:
                if piece.lane == lane:
                    by_stage[piece.rank] += piece.end - piece.start
            total += max(by_stage.values(), default=0.0) / share
        return total


@dataclass(slots=True)
class _OpTraffic:
    """An operation and what it moves, as the ledger counts it.

    `format_bytes`: read and written on the device to convert to or from the wire's format.
    `elements`: that the operation adds or updates, or that cross between device and host.
    `home`: the memory that holds the optimizer state of its unit; "device" on a CPU.
    """

    op: Op
    sent_bytes: int
    moved_bytes: int
    format_bytes: int
    elements: int
    home: Tier


class Clock:
    """Plays steps of a run on a cluster's rates. Mutable: it caches what it has computed."""

    def __init__(self, shape: StepShape, cluster: Cluster, cost: Cost, precision: str):
        self.shape = shape
        self.cluster = cluster
        self.cost = cost
        self.dtype = arithmetic(precision)
        self.on_cpu = cluster.device.kind == "cpu"
        self.spec = shape.itinerary.spec
        self.rates = cost.rates
        self.per_node = int(self.rates.fabric.per_node)
        self.cores_shares = {"node": 1.0, "network": 1.0}
        if self.on_cpu:
            self.cores_shares = {level: cluster.cores_share(level) for level in ("node", "network")}

        # Seconds of a visit per second of one block on its packs. Known of sampled layouts alone.
        self.paces: dict[Layout, float] = {}

        # Caches. Ledgers are kept by rank and by the layouts that its steps visit.
        self.ledgers: dict[tuple[int, tuple[Layout, ...]], Ledger] = {}
        self.turns: dict[tuple, dict[str, float]] = {}
        self.exchanges: dict[int, list[float]] = {}
        self.collectives: dict[tuple[Layout, str, int], float] = {}
        self.passes: dict[float, float] = {}

    def step(self, groups: Sequence[GroupPacks]) -> StepTime:
        """A step that visits these groups, in this order."""
        # 1. Choose a sample of each group's micro-batches, and a smaller one.
        layouts = [group.layout for group in groups]
        packs_by_visit = [self.busiest_replica(group) for group in groups]
        costs_by_visit = []
        samples: list[tuple[int, ...]] = []
        small_samples: list[tuple[int, ...]] = []
        for layout, packs in zip(layouts, packs_by_visit):
            costs = self.block_seconds(layout, packs)
            size, small_size = _sample_sizes(layout, len(packs))
            costs_by_visit.append(costs)
            samples.append(_even_choice(costs, size))
            small_samples.append(_even_choice(costs, small_size))

        # 2. Play the samples.
        timelines = self._play(layouts, _selected(packs_by_visit, samples))
        ends = [max((piece.end for piece in timeline), default=0.0) for timeline in timelines]

        # 3. Learn from the smaller ones at which pace a layout computes further micro-batches.
        is_partial = [large != small for large, small in zip(samples, small_samples)]
        if any(
            partial and layout not in self.paces for layout, partial in zip(layouts, is_partial)
        ):
            small_timelines = self._play(layouts, _selected(packs_by_visit, small_samples))
            for visit, layout in enumerate(layouts):
                if is_partial[visit]:
                    costs = costs_by_visit[visit]
                    cost = float(
                        costs[list(samples[visit])].sum() - costs[list(small_samples[visit])].sum()
                    )
                    small_end_s = max(piece.end for piece in small_timelines[visit])
                    self.paces[layout] = (ends[visit] - small_end_s) / cost

        # 4. Extrapolate each group to all its micro-batches. The next group begins when all ranks
        #    have ended this one.
        start_s = float(self.rates.constants.begin_s)
        starts: list[float] = []
        shares: list[float] = []
        for layout, costs, sample, end_s in zip(layouts, costs_by_visit, samples, ends):
            skipped_cost = float(costs.sum() - costs[list(sample)].sum())
            skipped_s = self.paces.get(layout, 0.0) * skipped_cost
            wait_factor = 1 + float(self.rates.constants.jitter) * math.log2(layout.world)
            starts.append(start_s)
            shares.append(1 - skipped_cost / float(costs.sum()))
            start_s += (end_s + skipped_s) * wait_factor
        return StepTime(
            seconds=float(start_s),
            starts=tuple(starts),
            played=tuple(tuple(timeline) for timeline in timelines),
            shares=tuple(shares),
        )

    def _play(
        self, layouts: Sequence[Layout], packs_by_visit: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[TimedWork]]:
        """Play a step. Returns the pieces of work of one rank of each stage, by visit."""
        visits = tuple(
            visit_of(self.spec, layout, packs) for layout, packs in zip(layouts, packs_by_visit)
        )
        traffic_of_rank: dict[int, list[list[_OpTraffic]]] = {}
        timelines = []
        for number, (layout, packs) in enumerate(zip(layouts, packs_by_visit)):
            actions_by_stage = []
            for stage in range(layout.pp):
                rank = layout.rank(Coord(pp=stage))
                if rank not in traffic_of_rank:
                    traffic_of_rank[rank] = self._traffic(rank, visits, packs_by_visit)
                stage_actions = _Stage(self, layout, stage, visits, packs)
                actions_by_stage.append(list(stage_actions.actions(traffic_of_rank[rank][number])))
            timelines.append(play(actions_by_stage, float(self.rates.constants.crowd)))
        return timelines

    def _traffic(
        self,
        rank: int,
        visits: tuple[Visit, ...],
        packs_by_visit: Sequence[Sequence[tuple[int, ...]]],
    ) -> list[list[_OpTraffic]]:
        """The operations of a rank's step by visit, with what they move."""
        key = rank, tuple(visit.layout for visit in visits)
        steps = None
        if key in self.ledgers:
            # Weights are as the last step of the same visits has left them: one step is enough.
            steps = 1
        else:
            transport = "gloo" if self.on_cpu else "nccl"
            self.ledgers[key] = self.shape.ledger(rank, transport, self.on_cpu, with_peaks=False)
        return _record_traffic(self.ledgers[key], visits, packs_by_visit, self.on_cpu, steps)

    def busiest_replica(self, group: GroupPacks) -> Packs:
        """The packs of the replica with the most work.

        Under ZeRO-3 replicas gather each unit together, so every micro-batch takes as long as the
        largest one of any replica. Those largest ones are returned.
        """
        num_packs = max(len(packs) for packs in group.replicas)
        replicas = [packs + ((),) * (num_packs - len(packs)) for packs in group.replicas]
        all_packs = [pack for packs in replicas for pack in packs]
        seconds = self.block_seconds(group.layout, all_packs).reshape(len(replicas), num_packs)
        if group.layout.zero == 3:
            slowest_replica = seconds.argmax(axis=0)
            return tuple(replicas[r][number] for number, r in enumerate(slowest_replica))
        return replicas[int(seconds.sum(axis=1).argmax())]

    def block_seconds(self, layout: Layout, packs: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Seconds of one block's forward and backward on each pack, float64 [packs]."""
        if layout.chunk:
            forward = [self._chunked_turn_s(layout, pack, "forward") for pack in packs]
            backward = [self._chunked_turn_s(layout, pack, "backward") for pack in packs]
            return np.array(forward) + np.array(backward)

        tokens = np.array([sum(pack or (1,)) for pack in packs], float)
        pairs = np.array([self._causal_pairs(pack or (1,)) for pack in packs], float)
        mesh = Mesh.of(layout)
        code = recompute_code(layout)
        seconds = np.zeros(len(packs))
        for turn in ("forward", "backward"):
            work = self.cost.turn("block", turn, "block", mesh, tokens, pairs, code)
            seconds = seconds + np.asarray(work.exposed_s(self.cost.launch_s))
        return seconds

    def _causal_pairs(self, lengths: Sequence[int]) -> float:
        """Pairs of tokens that attend to each other in a pack, as a mean over all blocks."""
        return sum(float(self.spec.attended(length)) for length in lengths)

    def turn_seconds(
        self,
        layout: Layout,
        pack: tuple[int, ...],
        loss_blocks: int,
        kind: UnitKind,
        turn: str,
        part: str,
    ) -> dict[str, float]:
        """Seconds of a turn of a unit on a pack, by lane, in the order in which they are spent.

        `loss_blocks`: into how many blocks of rows the loss is cut. Axes that overlap go on under
        "attention", all others one after another.
        """
        key = layout, pack, loss_blocks, kind, turn, part
        if key not in self.turns:
            if layout.chunk:
                self.turns[key] = {"compute": self._chunked_turn_s(layout, pack, turn)}
            else:
                self.turns[key] = self._whole_turn(layout, pack, loss_blocks, kind, turn, part)
        return self.turns[key]

    def _whole_turn(
        self,
        layout: Layout,
        pack: tuple[int, ...],
        loss_blocks: int,
        kind: UnitKind,
        turn: str,
        part: str,
    ) -> dict[str, float]:
        """`turn_seconds` of a pack that is computed whole."""
        lengths = pack or (1,)  # a replica without a pack computes one token
        mesh = Mesh.of(layout)
        tokens = sum(lengths)
        pairs = self._causal_pairs(lengths)
        code = recompute_code(layout)
        work = self.cost.turn(kind, turn, part, mesh, tokens, pairs, code, loss_blocks)

        compute_s = float(work.compute_s(self.cost.launch_s))
        attention_s = min(float(work.attention_s), compute_s) if work.under_attention_s else 0.0
        traffic_s = {axis: float(seconds) for axis, seconds in work.traffic_s.items()}
        return {"compute": compute_s - attention_s, "attention": attention_s, **traffic_s}

    def _chunked_turn_s(self, layout: Layout, pack: tuple[int, ...], turn: str) -> float:
        """Seconds of a turn of a unit of a chunked pack."""
        chunk_clock = ChunkClock(self.cost, self.cluster, layout)
        return chunk_clock.turn_s(pack or (1,), turn)  # pyright: ignore[reportArgumentType]

    def pass_s(self, moved_bytes: float) -> float:
        """Seconds of one elementwise pass over so many bytes of device memory."""
        if moved_bytes not in self.passes:
            self.passes[moved_bytes] = float(self.rates.elementwise_s(moved_bytes))
        return self.passes[moved_bytes]

    def collective_s(self, layout: Layout, kind: str, sent_bytes: int) -> float:
        """Seconds of a gather or a reduction in which each rank sends so many bytes.

        Its members hold shards of the same cut of the weights.
        """
        key = layout, kind, sent_bytes
        if key not in self.collectives:
            self.collectives[key] = self._collective_s(layout, kind, sent_bytes)
        return self.collectives[key]

    def _collective_s(self, layout: Layout, kind: str, sent_bytes: int) -> float:
        members = layout.holders
        if members == 1 or not sent_bytes:
            return 0.0
        per_node = max(1, self.per_node // layout.weight_ranks)
        collective = MOVES[kind]
        if kind == "reduce" and self.shape.formats.wire.gradients != "float32":
            collective = "all_to_all"  # the owner decodes rounded gradients before it sums them
        total_bytes = sent_bytes * members / (members - 1)
        return float(self.rates.collective_s(collective, total_bytes, members, per_node))

    def message_s(self, layout: Layout, stage: int, peer: int, sent_bytes: int) -> float:
        """Seconds of a message between two stages."""
        per_node = 2 if self.on_one_node(layout, stage, peer) else 1
        seconds = float(self.rates.collective_s("send", sent_bytes, 2, per_node))
        return float(self.rates.constants.messages) * seconds

    def on_one_node(self, layout: Layout, stage: int, peer: int) -> bool:
        """Whether two stages are on one node."""
        ranks = layout.world // layout.pp
        node = stage * ranks // self.per_node
        peer_node = peer * ranks // self.per_node
        return abs(stage - peer) * ranks < self.per_node and node == peer_node

    def exchange_seconds(self, visits: Sequence[Visit], op: Op) -> list[float]:
        """Seconds of every exchange in the switch of `op`, each on the busiest link of any rank."""
        itinerary = self.shape.itinerary
        cut = itinerary.cuts[visits[op.visit].layout]
        if op.way == "sums":
            plan = itinerary.sums(cut)
        elif op.visit == 0:
            plan = itinerary.weights(None, cut)
        else:
            plan = itinerary.weights(itinerary.source(visits[op.visit - 1].layout), cut)
        if id(plan) not in self.exchanges:
            self.exchanges[id(plan)] = seconds_by_exchange(plan)
        return self.exchanges[id(plan)]


def _sample_sizes(layout: Layout, num_packs: int) -> tuple[int, int]:
    """How many micro-batches the larger and the smaller sample have; both all of them if few.

    Each leaves out whole rounds of the stages, so that the pipeline runs full in the same way.
    """
    target = max(LEAST_PLAYED, FILLS * layout.pp * layout.virtual)
    surplus = max(0, num_packs - target)
    large = num_packs - layout.pp * -(-surplus // layout.pp)
    small = large - layout.pp * max(1, target // 2 // layout.pp)
    if large == num_packs or small < 1:
        return num_packs, num_packs
    return large, small


def _even_choice(costs: np.ndarray, size: int) -> tuple[int, ...]:
    """Choose `size` micro-batches at even quantiles of the costs. Returns their numbers."""
    by_cost = np.argsort(costs, kind="stable")
    quantiles = ((np.arange(size) + 0.5) * len(costs) / size).astype(int)
    return tuple(sorted(by_cost[quantiles].tolist()))


def _selected(
    packs_by_visit: Sequence[Packs], samples: Sequence[Sequence[int]]
) -> list[list[tuple[int, ...]]]:
    """The packs of each visit's sample."""
    return [[packs[number] for number in sample] for packs, sample in zip(packs_by_visit, samples)]


def _record_traffic(
    ledger: Ledger,
    visits: Sequence[Visit],
    packs_by_visit: Sequence[Sequence[tuple[int, ...]]],
    on_cpu: bool,
    steps: int | None,
) -> list[list[_OpTraffic]]:
    """Play `steps` steps on the ledger, and return the last one's operations by visit.

    The norm and the update belong to the last visit.
    """
    by_visit: list[list[_OpTraffic]] = [[]]
    memory = ledger.memory
    uses_home = [ledger.steps.views[visit.layout].cut.at_home for visit in visits]
    # The ledger's counters after the operation before. What earlier steps have left in them goes
    # to the first operation, which moves nothing.
    total_sent = total_moved = total_coded = total_added = 0

    def shard_elements(unit: int) -> int:
        return sum(size for owner, size in ledger.home.shards if owner == unit)

    def updated_elements(op: Op, home: Tier) -> int:
        if op.kind == "accumulate":
            return (memory.added_bytes - total_added) // memory.weight_bytes
        if op.kind == "update" and op.unit < 0 and not ledger.steps.by_unit:
            return sum(size for _, size in ledger.home.shards)
        if op.kind in ("update", "pack"):
            return shard_elements(op.unit)
        crosses_link = home != "device" and op.kind in ("gather", "await reduce")
        return shard_elements(op.unit) if crosses_link and uses_home[op.visit] else 0

    def record(op: Op) -> None:
        nonlocal total_sent, total_moved, total_coded, total_added
        home: Tier = "device" if on_cpu else ledger.steps.home_tiers.get(op.unit, "device")
        sent_bytes = sum(memory.sent.values())
        moved_bytes = sum(memory.moved.values())
        by_visit[-1].append(
            _OpTraffic(
                op=op,
                sent_bytes=sent_bytes - total_sent,
                moved_bytes=moved_bytes - total_moved,
                format_bytes=memory.coded_bytes - total_coded,
                elements=updated_elements(op, home),
                home=home,
            )
        )
        total_sent = sent_bytes
        total_moved = moved_bytes
        total_coded = memory.coded_bytes
        total_added = memory.added_bytes
        if op.kind == "leave" and op.visit < len(visits) - 1:
            by_visit.append([])

    ledger.play(visits, packs_by_visit, record, steps)
    return by_visit


class _Stage:
    """What a rank of one stage does in a visit, as actions on lanes. Mutable while it is made."""

    def __init__(
        self,
        clock: Clock,
        layout: Layout,
        stage: int,
        visits: Sequence[Visit],
        packs: Sequence[tuple[int, ...]],
    ):
        self.clock = clock
        self.layout = layout
        self.stage = stage
        self.visits = visits
        self.packs = packs
        self.num_pieces = 0
        self.under_way: dict[tuple, deque[Hashable]] = {}  # keys of pieces, by what awaits them

        # Seconds that the clock was asked for. Its own caches hash a whole layout, which is slow
        # to do for each operation.
        self.turns: dict[tuple, dict[str, float]] = {}  # by micro-batch, unit kind, turn and part
        self.exchanges: dict[tuple[int, str], list[float]] = {}  # by visit and way

        # Ranks of an axis are neighbors, the fastest innermost: an axis that spans more ranks than
        # a node has uses the network.
        self.links: dict[str, tuple[str, ...]] = {}
        span = 1
        for axis in axes.token_axes():
            span *= layout.degree(axis.name)
            self.links[axis.name] = self._link(span)
        self.holders_link = self._link(layout.world // layout.pp)
        self.hidden_axes = [axis.name for axis in axes.token_axes() if axis.overlaps]

    def _link(self, span: int) -> tuple[str, ...]:
        return ("network",) if span > self.clock.per_node else ("node",)

    def actions(self, operations: Sequence[_OpTraffic]) -> Iterator[Begin | End]:
        """Yield which pieces of work the rank begins, and which it waits for."""
        for traffic in operations:
            op = traffic.op
            if op.kind in AWAITED:
                yield from self._cast_masters(traffic)
                yield from self._convert_format(traffic)
                yield self._begin(traffic)
            elif op.kind in AWAITED.values():
                yield from self._await(traffic)
            elif op.kind == "compute":
                yield from self._compute(op)
            elif op.kind in ("accumulate", "update", "pack"):
                yield from self._pass_over_memory(traffic)
            elif op.kind == "put":
                seconds = self._copy_s(traffic, "out")
                yield self._piece(op, LANES["put"], seconds, ("host out",))

    def _cast_masters(self, traffic: _OpTraffic) -> Iterator[Begin]:
        """The host casts masters of a home outside a GPU, and copies them to the device."""
        if traffic.op.kind != "gather" or not traffic.elements:
            return
        formats = self.clock.shape.formats
        cast_bytes = traffic.elements * (formats.home_bytes + formats.compute_bytes)
        cast_s = cast_bytes / HOST_BYTES_PER_S
        copied_bytes = traffic.elements * formats.compute_bytes
        copy_s = float(self.clock.cluster.copy_s("to_device pinned", copied_bytes))
        yield self._piece(traffic.op, LANES["gather"], max(cast_s, copy_s), ("host",))

    def _convert_format(self, traffic: _OpTraffic) -> Iterator[Begin | End]:
        """The device converts to or from the format of the wire."""
        if traffic.format_bytes:
            seconds = self.clock.pass_s(traffic.format_bytes)
            yield from self._blocking_piece("compute", traffic.op, seconds)

    def _begin(self, traffic: _OpTraffic) -> Begin:
        """Begin what a later operation awaits."""
        op = traffic.op
        if op.kind in ("gather", "reduce"):
            seconds = self.clock.collective_s(self.layout, op.kind, traffic.sent_bytes)
            piece = self._piece(op, LANES[op.kind], seconds, self.holders_link)
        elif op.kind in ("send", "receive"):
            piece = self._message(traffic)
        elif op.kind == "exchange":
            piece = self._exchange(op)
        else:
            direction = "out" if op.kind == "write" else "in"
            seconds = self._copy_s(traffic, direction)
            piece = self._piece(op, LANES[op.kind], seconds, (f"host {direction}",))
        awaiting_op = (AWAITED[op.kind], *op[1:])
        self.under_way.setdefault(awaiting_op, deque()).append(piece.key)
        return piece

    def _message(self, traffic: _OpTraffic) -> Begin:
        """A message between two stages. Both begin it, and the sender alone knows its bytes."""
        op = traffic.op
        first = min(self.stage, op.peer)
        last = max(self.stage, op.peer)
        seconds = 0.0
        if op.kind == "send":
            sent_bytes = traffic.sent_bytes
            seconds = self.clock.message_s(self.layout, self.stage, op.peer, sent_bytes)
        link = ("node",) if self.clock.on_one_node(self.layout, first, last) else ("network",)
        return Begin(
            key=("message", op.visit, op.number),
            lane=f"messages {op.way} {first}-{last}",
            seconds=seconds,
            uses=self.uses(link),
            parties=(first, last),
            share=self.share(link),
        )

    def _exchange(self, op: Op) -> Begin:
        """An exchange of a switch, in which all stages take part."""
        switch = op.visit, op.way
        if switch not in self.exchanges:
            self.exchanges[switch] = self.clock.exchange_seconds(self.visits, op)
        return Begin(
            key=("exchange", op.visit, op.way, op.number),
            lane=LANES[op.kind],
            seconds=self.exchanges[switch][op.number],
            uses=self.uses(self.holders_link),
            parties=tuple(range(self.layout.pp)),
            crowds=self.crowds(self.holders_link),
            share=self.share(self.holders_link),
        )

    def _await(self, traffic: _OpTraffic) -> Iterator[Begin | End]:
        """Wait for what was begun, and do on the device what its arrival needs."""
        op = traffic.op
        pieces = self.under_way.get((op.kind, *op[1:]))
        if pieces:  # else it was begun in the visit before, and has ended
            yield End(pieces.popleft())
        yield from self._convert_format(traffic)
        if op.kind == "await reduce" and traffic.elements:
            # Reduced gradients go to an optimizer state outside the device.
            size_bytes = traffic.elements * self.clock.shape.formats.home_bytes
            copy_s = float(self.clock.cluster.copy_s("to_host pinned", size_bytes))
            piece = self._piece(op, "home out", copy_s, ("host out",))
            yield piece
            if traffic.home == "disk":
                yield End(piece.key)

    def _pass_over_memory(self, traffic: _OpTraffic) -> Iterator[Begin | End]:
        """Pass over gradients or optimizer state, on the device or on the host."""
        op = traffic.op
        formats = self.clock.shape.formats
        on_device = traffic.home == "device"
        if op.kind == "accumulate":
            # A gradient is read, its sum read and written; both are on the device.
            on_device = True
            element_bytes = formats.compute_bytes + 2 * formats.home_bytes
        elif op.kind == "update":
            update_factor = float(self.clock.rates.constants.update) if on_device else 1.0
            element_bytes = update_bytes(formats.moments) * update_factor
        else:
            element_bytes = packing_bytes(formats)

        moved_bytes = traffic.elements * element_bytes
        if on_device:
            yield from self._blocking_piece("compute", op, self.clock.pass_s(moved_bytes))
        else:
            yield self._piece(op, LANES["gather"], moved_bytes / HOST_BYTES_PER_S, ("host",))

    def _copy_s(self, traffic: _OpTraffic, direction: Literal["out", "in"]) -> float:
        tier = "disk" if traffic.op.kind in ("read", "write") else self.layout.offload
        world = self.layout.world
        return tier_copy_s(self.clock.cluster, tier, world, traffic.moved_bytes, direction)

    def _compute(self, op: Op) -> Iterator[Begin | End]:
        """A turn of a unit: its lanes one after another, but for axes that overlap attention."""
        kind: UnitKind = "block"
        if op.unit == 0:
            kind = "embeddings"
        elif op.unit > self.clock.spec.layers:
            kind = "head"
        key = op.micro, kind, op.turn, op.part
        if key not in self.turns:
            loss_blocks = 1
            if op.turn == "loss" and not self.layout.chunk:
                loss_blocks = self.visits[op.visit].loss_blocks[op.micro]
            pack = self.packs[op.micro]
            self.turns[key] = self.clock.turn_seconds(
                self.layout, pack, loss_blocks, kind, op.turn, op.part
            )
        seconds_by_lane = self.turns[key]
        for lane, seconds in seconds_by_lane.items():
            if lane not in (*self.hidden_axes, "attention"):
                yield from self._blocking_piece(lane, op, seconds)

        hidden = {
            axis: seconds_by_lane[axis] for axis in self.hidden_axes if seconds_by_lane.get(axis)
        }
        transfers = [
            self._piece(op, axis, seconds, self.links[axis]) for axis, seconds in hidden.items()
        ]
        yield from transfers
        yield from self._blocking_piece("compute", op, seconds_by_lane.get("attention", 0.0))
        yield from (End(transfer.key) for transfer in transfers)

    def _blocking_piece(self, lane: str, name: Op, seconds: float) -> Iterator[Begin | End]:
        """Begin a piece, and wait for it."""
        if seconds > 0:
            piece = self._piece(name, lane, seconds, self.links.get(lane, ()))
            yield piece
            yield End(piece.key)

    def _piece(self, name: Op, lane: str, seconds: float, links: tuple[str, ...]) -> Begin:
        self.num_pieces += 1
        return Begin(
            key=(name, self.stage, self.num_pieces),
            lane=lane,
            seconds=seconds,
            uses=self.uses(links),
            crowds=self.crowds(links),
            share=self.share(links),
        )

    def uses(self, links: tuple[str, ...]) -> tuple[str, ...]:
        """Resources of a piece of work. On CPUs traffic takes of the cores that compute."""
        return (*links, "cores") if self.clock.on_cpu or not links else links

    def share(self, links: tuple[str, ...]) -> float:
        """Share of the last of these resources that a piece of work needs."""
        return min((self.clock.cores_shares.get(link, 1.0) for link in links), default=1.0)

    def crowds(self, links: tuple[str, ...]) -> tuple[str, ...]:
        """Resources that a piece of work crowds.

        A collective of GPUs takes some of their multiprocessors and memory.
        """
        is_collective = links in (("node",), ("network",))
        return ("cores",) if is_collective and not self.clock.on_cpu else ()


def in_visiting_order(shape: StepShape, lengths: Sequence[int]) -> list[GroupPacks]:
    """The groups of a step of documents of these lengths, packed, in the order of their visits."""
    groups = length_groups(lengths, shape.edges, shape.itinerary.spec)
    visits = []
    for index in shape.itinerary.order(tuple(group.layout for group in groups)):
        group = groups[index]
        packs = [tuple(lengths[document] for document in pack) for pack in group.packs]
        replicas = tuple(tuple(packs[number] for number in share) for share in group.shares)
        visits.append(GroupPacks(group.layout, replicas))
    return visits
