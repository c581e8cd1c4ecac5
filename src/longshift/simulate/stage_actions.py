"""What a rank of one stage does in a visit, as actions on lanes: which pieces of work it begins,
and which it waits for."""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal

from longshift.layout import axes
from longshift.layout.layout import Layout
from longshift.program.operations import AWAITED, LANES, Op
from longshift.program.turns import Visit
from longshift.simulate.lanes import Begin, End
from longshift.simulate.op_seconds import OpSeconds, packing_bytes, update_bytes
from longshift.simulate.op_traffic import OpTraffic
from longshift.simulate.rates import tier_copy_s
from longshift.simulate.turn_calls import UnitKind

# Of a rank's part of the host's memory: torch's fused AdamW took 0.47 ns for the 28 bytes of a
# parameter.
HOST_BYTES_PER_S = 60e9


class StageActions:
    """What a rank of one stage does in a visit, as actions on lanes. Mutable while it is made."""

    def __init__(
        self,
        op_seconds: OpSeconds,
        layout: Layout,
        stage: int,
        visits: Sequence[Visit],
        packs: Sequence[tuple[int, ...]],
    ):
        self.op_seconds = op_seconds
        self.layout = layout
        self.stage = stage
        self.visits = visits
        self.packs = packs
        self.num_pieces = 0
        self.under_way: dict[tuple, deque[Hashable]] = {}  # keys of pieces, by what awaits them

        # Seconds that were asked for before. The caches of `OpSeconds` hash a whole layout, which
        # is slow to do for each operation.
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
        return ("network",) if span > self.op_seconds.per_node else ("node",)

    def actions(self, operations: Sequence[OpTraffic]) -> Iterator[Begin | End]:
        """Yield which pieces of work the rank begins, and which it waits for."""
        for traffic in operations:
            op = traffic.op
            # What is sent is converted before it goes, and by `_await` after it has come.
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

    def _cast_masters(self, traffic: OpTraffic) -> Iterator[Begin]:
        """The host casts masters of a home outside a GPU, and copies them to the device. What is
        not trained has no wider masters: it is copied alone."""
        elements = traffic.elements + traffic.frozen_elements
        if traffic.op.kind != "gather" or not elements:
            return
        formats = self.op_seconds.shape.formats
        # The host casts one piece while the link carries another: the longer of both counts.
        read_bytes = traffic.elements * formats.home_bytes
        read_bytes += traffic.frozen_elements * formats.compute_bytes
        cast_s = (read_bytes + elements * formats.compute_bytes) / HOST_BYTES_PER_S

        copied_bytes = elements * formats.compute_bytes
        copy_s = float(self.op_seconds.cluster.copy_s("to_device pinned", copied_bytes))

        yield self._piece(traffic.op, LANES["gather"], max(cast_s, copy_s), ("host",))

    def _convert_format(self, traffic: OpTraffic) -> Iterator[Begin | End]:
        """The device converts to or from the format of the wire."""
        if traffic.format_bytes:
            seconds = self.op_seconds.pass_s(traffic.format_bytes)
            yield from self._blocking_piece("compute", traffic.op, seconds)

    def _begin(self, traffic: OpTraffic) -> Begin:
        """Begin what a later operation awaits."""
        op = traffic.op
        if op.kind in ("gather", "reduce"):
            seconds = self.op_seconds.collective_s(self.layout, op.kind, traffic.sent_bytes)
            piece = self._piece(op, LANES[op.kind], seconds, self.holders_link)
        elif op.kind in ("send", "receive"):
            piece = self._message(traffic)
        elif op.kind == "exchange":
            piece = self._exchange(op)
        else:
            direction = "out" if op.kind == "write" else "in"
            seconds = self._copy_s(traffic, direction)
            piece = self._piece(op, LANES[op.kind], seconds, (f"host {direction}",))

        # The operation that awaits it differs in its kind alone.
        awaiting_op = (AWAITED[op.kind], *op[1:])
        self.under_way.setdefault(awaiting_op, deque()).append(piece.key)
        return piece

    def _message(self, traffic: OpTraffic) -> Begin:
        """A message between two stages. Both begin it, and the sender alone knows its bytes."""
        op = traffic.op
        first = min(self.stage, op.peer)
        last = max(self.stage, op.peer)
        seconds = 0.0
        if op.kind == "send":
            sent_bytes = traffic.sent_bytes
            seconds = self.op_seconds.message_s(self.layout, self.stage, op.peer, sent_bytes)

        link = ("node",) if self.op_seconds.on_one_node(self.layout, first, last) else ("network",)
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
        # All exchanges of a switch are known at once.
        switch = op.visit, op.way
        if switch not in self.exchanges:
            self.exchanges[switch] = self.op_seconds.exchange_seconds(self.visits, op)

        return Begin(
            key=("exchange", op.visit, op.way, op.number),
            lane=LANES[op.kind],
            seconds=self.exchanges[switch][op.number],
            uses=self.uses(self.holders_link),
            parties=tuple(range(self.layout.pp)),
            crowds=self.crowds(self.holders_link),
            share=self.share(self.holders_link),
        )

    def _await(self, traffic: OpTraffic) -> Iterator[Begin | End]:
        """Wait for what was begun, and do on the device what its arrival needs."""
        op = traffic.op
        pieces = self.under_way.get((op.kind, *op[1:]))
        if pieces:  # else it was begun in the visit before, and has ended
            yield End(pieces.popleft())

        yield from self._convert_format(traffic)
        if op.kind == "await reduce" and traffic.elements:
            # Reduced gradients go to an optimizer state outside the device.
            size_bytes = traffic.elements * self.op_seconds.shape.formats.home_bytes
            copy_s = float(self.op_seconds.cluster.copy_s("to_host pinned", size_bytes))
            piece = self._piece(op, "home out", copy_s, ("host out",))
            yield piece
            # Gradients of a home on disk are waited for, as `simulate.clock` says.
            if traffic.home == "disk":
                yield End(piece.key)

    def _pass_over_memory(self, traffic: OpTraffic) -> Iterator[Begin | End]:
        """Pass over gradients or optimizer state, on the device or on the host."""
        op = traffic.op
        formats = self.op_seconds.shape.formats
        on_device = traffic.home == "device"
        if op.kind == "accumulate":
            on_device = True  # where gradients and their sums are
            element_bytes = float(self.op_seconds.cost.accumulation_bytes)
        elif op.kind == "update":
            update_factor = float(self.op_seconds.rates.constants.update) if on_device else 1.0
            element_bytes = update_bytes(formats.moments) * update_factor
        else:
            element_bytes = packing_bytes(formats)

        moved_bytes = traffic.elements * element_bytes
        if on_device:
            yield from self._blocking_piece("compute", op, self.op_seconds.pass_s(moved_bytes))
        else:
            yield self._piece(op, LANES["gather"], moved_bytes / HOST_BYTES_PER_S, ("host",))

    def _copy_s(self, traffic: OpTraffic, direction: Literal["out", "in"]) -> float:
        tier = "disk" if traffic.op.kind in ("read", "write") else self.layout.offload
        world = self.layout.world
        return tier_copy_s(self.op_seconds.cluster, tier, world, traffic.moved_bytes, direction)

    def _compute(self, op: Op) -> Iterator[Begin | End]:
        """A turn of a unit: its lanes one after another, but for axes that overlap attention."""
        kind: UnitKind = "block"
        if op.unit == 0:
            kind = "embeddings"
        elif op.unit > self.op_seconds.spec.layers:
            kind = "head"
        key = op.micro, kind, op.turn, op.part
        if key not in self.turns:
            loss_blocks = 1
            if op.turn == "loss" and not self.layout.chunk:
                loss_blocks = self.visits[op.visit].loss_blocks[op.micro]
            pack = self.packs[op.micro]
            self.turns[key] = self.op_seconds.turn_seconds(
                self.layout, pack, loss_blocks, kind, op.turn, op.part
            )
        seconds_by_lane = self.turns[key]
        for lane, seconds in seconds_by_lane.items():
            if lane not in (*self.hidden_axes, "attention"):
                yield from self._blocking_piece(lane, op, seconds)

        # Traffic under attention begins before it, and is awaited after it.
        transfers = []
        for axis in self.hidden_axes:
            if seconds_by_lane.get(axis):
                transfers.append(self._piece(op, axis, seconds_by_lane[axis], self.links[axis]))
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
        return (*links, "cores") if self.op_seconds.on_cpu or not links else links

    def share(self, links: tuple[str, ...]) -> float:
        """Share of the last of these resources that a piece of work needs."""
        return min((self.op_seconds.cores_shares.get(link, 1.0) for link in links), default=1.0)

    def crowds(self, links: tuple[str, ...]) -> tuple[str, ...]:
        """Resources that a piece of work crowds.

        A collective of GPUs takes some of their multiprocessors and memory.
        """
        is_collective = links in (("node",), ("network",))
        return ("cores",) if is_collective and not self.op_seconds.on_cpu else ()
