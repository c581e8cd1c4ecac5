"""Seconds of each operation of a step, whatever goes on beside it: turns of units, passes over
memory, collectives, messages between stages and exchanges of a switch."""

from collections.abc import Sequence

import numpy as np

from longshift.cluster.cluster import Cluster
from longshift.layout.layout import Layout
from longshift.program.operations import Op
from longshift.program.turns import Visit
from longshift.simulate.chunk_clock import ChunkClock
from longshift.simulate.cost import Cost, recompute_code
from longshift.simulate.mesh import Mesh
from longshift.simulate.turn_calls import UnitKind
from longshift.spec.formats import Format
from longshift.switch.traffic import seconds_by_exchange
from longshift.weigh.needs import StepShape

MOVES = {"gather": "all_gather", "reduce": "reduce_scatter"}


def update_bytes(moments: int) -> float:
    """Bytes that the update of an owned weight moves: master and moments are read and written in
    float32, the gradient is read twice (norm, update), the copy is written."""
    return 18.0 + 8.0 * moments


def packing_bytes(formats: Format) -> float:
    """Bytes that it moves to unpack and to pack the moments of an owned weight: codes are read and
    written, values written once and read twice, for the largest of a block and for its codes."""
    return formats.moments * (2 * formats.moment_bytes + 3 * formats.home_bytes)


class OpSeconds:
    """Seconds of a run's operations on a cluster's rates. Mutable: it caches them."""

    def __init__(self, shape: StepShape, cluster: Cluster, cost: Cost):
        self.shape = shape
        self.cluster = cluster
        self.cost = cost
        self.on_cpu = cluster.device.kind == "cpu"
        self.spec = shape.itinerary.spec
        self.rates = cost.rates
        self.per_node = int(self.rates.fabric.per_node)
        node_share, network_share = self.rates.core_shares or (1.0, 1.0)
        self.cores_shares = {"node": node_share, "network": network_share}

        # Caches.
        self.turns: dict[tuple, dict[str, float]] = {}
        self.exchanges: dict[int, list[float]] = {}
        self.collectives: dict[tuple[Layout, str, int], float] = {}
        self.passes: dict[float, float] = {}

    def block_seconds(self, layout: Layout, packs: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Seconds of one block's forward and backward on each pack, float64 [packs]."""
        seconds = np.zeros(len(packs))
        if layout.chunk:
            for turn in ("forward", "backward"):
                turn_s = [self._chunked_turn_s(layout, pack, turn) for pack in packs]
                seconds = seconds + np.array(turn_s)
            return seconds

        tokens = np.array([sum(pack or (1,)) for pack in packs], float)
        pairs = np.array([self._causal_pairs(pack or (1,)) for pack in packs], float)
        mesh = Mesh.of(layout)
        code = recompute_code(layout)
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
        if key in self.turns:
            return self.turns[key]
        if layout.chunk:
            self.turns[key] = {"compute": self._chunked_turn_s(layout, pack, turn)}
            return self.turns[key]

        lengths = pack or (1,)  # a replica without a pack computes one token
        mesh = Mesh.of(layout)
        tokens = sum(lengths)
        pairs = self._causal_pairs(lengths)
        code = recompute_code(layout)
        work = self.cost.turn(kind, turn, part, mesh, tokens, pairs, code, loss_blocks)

        compute_s = float(work.compute_s(self.cost.launch_s))
        attention_s = min(float(work.attention_s), compute_s) if work.under_attention_s else 0.0
        traffic_s = {axis: float(seconds) for axis, seconds in work.traffic_s.items()}
        lanes = {"compute": compute_s - attention_s, "attention": attention_s, **traffic_s}
        self.turns[key] = lanes
        return lanes

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
        members = layout.state_holders(self.shape.itinerary.spec.experts > 0)
        if members == 1 or not sent_bytes:
            return 0.0

        key = layout, kind, sent_bytes
        if key not in self.collectives:
            collective = MOVES[kind]
            if kind == "reduce" and self.shape.formats.wire.gradients != "float32":
                collective = "all_to_all"  # the owner decodes rounded gradients before it sums them
            strides = layout.world // layout.pp // members
            per_node = max(1, self.per_node // strides)
            total_bytes = sent_bytes * members / (members - 1)
            seconds = self.rates.collective_s(collective, total_bytes, members, per_node)
            self.collectives[key] = float(seconds)

        return self.collectives[key]

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
        previous = visits[op.visit - 1].layout if op.visit else None
        plan = self.shape.itinerary.plan_of(op.way, previous, visits[op.visit].layout)
        if id(plan) not in self.exchanges:
            self.exchanges[id(plan)] = seconds_by_exchange(plan)
        return self.exchanges[id(plan)]
