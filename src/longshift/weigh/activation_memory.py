"""Bytes of packs on a rank: their tensors, activations and gradients, and what lies in tiers.

The runners are those of `step`, with simulated allocations in the place of tensors. What their
turns and events need is known from profiles.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_rows
from longshift.program.operations import Op
from longshift.program.turns import RankLayout
from longshift.schedule import chunks
from longshift.schedule.event import Buffer, Event
from longshift.schedule.sequence import Run, TokenOrder, pack_order
from longshift.step.chunk_runner import ChunkedPacks, ChunkPlayer
from longshift.step.runner import Runner, WholePacks
from longshift.stream.gpu_tiers import BOUNCE_BYTES, BOUNCES, UNDER_WAY, UNDER_WAY_BYTES
from longshift.stream.tiers import (
    IN_FLIGHT_BYTES,
    WRITES,
    CopyTier,
    DeviceTier,
    StoredObject,
    Tier,
    size_of,
)
from longshift.weigh.allocations import Allocation, Place, RankMemory, TensorStandIn
from longshift.weigh.chunk_profile import event_turn
from longshift.weigh.meta_kernels import META
from longshift.weigh.recorder import TurnProfile
from longshift.weigh.turn_profile import RankSetup, load_turn, loss_turn, unit_turn
from longshift.weigh.weight_memory import WeightMemory

ENDS = 3  # chunks at either end of a document that are told apart
NO_PROFILE = TurnProfile(peak=0)  # of an operation whose workspace is not asked for
BUFFER_NAMES = {
    "kv": "keys and values",
    "dkv": "gradients of keys and values",
    "o": "output of attention",
}
STREAM_BUFFERS = ("x", "y", "dx", "dy", "dr")  # of the shape of the residual stream


class AllocationView(TensorStandIn):
    """A part of an allocation, which it keeps alive."""

    def __init__(self, base: Allocation, size: int, shape: Hashable):
        super().__init__(size, shape)
        self.base = base


class TierMemory(CopyTier):
    """`stream.tiers.CopyTier` on bytes. Mutable. What is sent stays as long as its put counts as
    under way, as on a disk."""

    keeps_sent = True

    def __init__(self, memory: RankMemory, place: Place, max_puts: int, max_put_bytes: int):
        super().__init__(META, max_puts, max_put_bytes)
        self.rank = memory
        self.place: Place = place
        self.pinned = None
        if place == "disk" and not memory.host_is_device:
            self.pinned = memory.allocate("pinned pieces", BOUNCES * BOUNCE_BYTES, "host")

    def send(self, tensors: Any, size: int) -> tuple[Allocation, Place]:
        self.rank.moved["put"] += size
        return self.rank.allocate("waiting for the backward", size, self.place), self.place

    def wait_sent(self, copy: Any) -> None:
        """A put ends where another has no room."""

    def bring(self, stored: StoredObject) -> Callable[[], Any]:
        self.rank.moved["fetched"] += stored.size
        tensors = tuple(self.memory(shape, dtype) for shape, dtype in stored.shapes)
        return lambda: tensors

    def empty(self, shape: Any, dtype: Any) -> Any:
        return self.rank.allocate("fetched from a tier", dtype, shape=shape)

    def fill_after(self, copy: Any) -> None:
        """Copies take no time."""

    def forget(self, stored: StoredObject) -> None:
        if not self.objects:
            self.under_way.clear()


def tier_memory(memory: RankMemory, layout: Layout) -> Tier:
    """A layout's tier, as `stream.gpu_tiers.tier_of` makes it."""
    place = layout.offload
    if place == "device" or (place == "host" and memory.host_is_device):
        return DeviceTier()
    if place == "disk":
        return TierMemory(memory, place, WRITES, IN_FLIGHT_BYTES)
    return TierMemory(memory, place, UNDER_WAY, UNDER_WAY_BYTES)


def chunk_positions(sees: Sequence[int]) -> list[tuple[int, ...]]:
    """Where each chunk of a pack stands: in the first, a middle or the last document, and where in
    that, up to ENDS chunks from its ends. Chunks of two packs with equal rows need equally much.

    `sees`: as of `chunks.first_key_chunks`.
    """
    # Chunks of one document see the same first chunk: the last of them is its last.
    last_by_first = {first: number for number, first in enumerate(sees)}
    positions = []
    for number, first in enumerate(sees):
        from_start = min(number - first, ENDS)
        to_end = min(last_by_first[first] - number, ENDS)
        positions.append((first > 0, first < sees[-1], from_start, to_end))
    return positions


@dataclass(frozen=True)
class LoadedPack:
    """A micro-batch.

    `tokens_here`: T', tokens of the residual stream on this rank.
    `orders`: of its chunks, or of all of it.
    `turns`: profiles of a pack that is computed whole.
    """

    tensors: Allocation
    tokens_here: int
    orders: Sequence[TokenOrder]
    turns: dict[tuple, TurnProfile]
    chunks: tuple[tuple[Run, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.chunks)


class ActivationMemory(Runner):
    """A runner on bytes. Mutable."""

    loaded: dict[int, LoadedPack]

    def __init__(self, memory: RankMemory, view: RankLayout, weights: WeightMemory):
        self.memory = memory
        self.view = view
        self.copies: Any = weights
        self.spec = view.spec
        self.layout = view.layout
        self.at = view.at
        self.rank = RankSetup(
            spec=self.spec,
            layout=self.layout,
            coord=view.at,
            compute_bytes=memory.weight_bytes,
            transport=memory.transport,
            float8=memory.float8,
        )

        # What the runners of `step` look at, of what they have on tensors.
        self.precision: Any = SimpleNamespace(compute=self.rank.dtype)
        self.ops: Any = SimpleNamespace(keeping=lambda kept: kept)
        self.modules: Any = dict.fromkeys(range(self.spec.layers + 2))
        self.learns = True
        self.crossing = {}

    def allocate_stream(self, tokens: int, name: str) -> Any:
        """Memory of x or its gradient, [T', D]."""
        size = tokens * self.spec.width * self.memory.weight_bytes
        return self.memory.allocate(name, size, shape=("stream", tokens))

    def boundary(self, micro: int) -> Any:
        return self.allocate_stream(self.loaded[micro].tokens_here, "messages between stages")

    def leave_grads(self, unit: int) -> None:
        """Have gradients on the weights of a unit, and on those that it shares."""
        weights: WeightMemory = self.copies
        added_weights = weights.added_weights(unit)
        for moving in self.view.learning(unit):
            sizes = weights.units[moving].weights
            elements = sum(size for name, size in sizes.items() if name not in added_weights)
            # Later gradients are added to those that are there.
            if elements and moving not in weights.grads:
                weights.leave_grads(moving, elements * self.memory.weight_bytes)


class WholePackMemory(WholePacks, ActivationMemory):
    """`step.runner.WholePacks` on bytes. Mutable."""

    def __init__(self, memory: RankMemory, view: RankLayout, weights: WeightMemory):
        super().__init__(memory, view, weights, tier=tier_memory(memory, view.layout))
        self.loaded: dict[int, LoadedPack] = {}  # pyright: ignore

    def load(self, micro: int, pack: Sequence[int]) -> None:  # pyright: ignore
        order = pack_order(self.layout, pack)
        profile = load_turn(self.rank, order) if self.memory.with_peaks else NO_PROFILE
        self.memory.record_profile(profile)
        self.loaded[micro] = LoadedPack(
            tensors=self.memory.allocate("token ids, labels, rotary angles", profile.output),
            tokens_here=self.rank.rows(order),
            orders=[order],
            turns={},
        )

    def _record_turn(self, op: Op) -> TurnProfile:
        """Note what a turn needs. Returns its profile."""
        # A pass is asked for in any case: its output of attention may go to a tier.
        if not self.memory.with_peaks and op.turn != "pass":
            return NO_PROFILE
        pack = self.loaded[op.micro]
        phase = "forward" if op.turn == "again" else op.turn
        block = self.spec.like(op.unit)
        key = op.part, phase, block
        if key not in pack.turns:
            order = pack.orders[0]
            pack.turns[key] = unit_turn(self.rank, order, op.part, phase, block)  # pyright: ignore
        self.memory.record_profile(pack.turns[key])
        return pack.turns[key]

    def _allocate_x(self, op: Op) -> Any:
        return self.allocate_stream(self.loaded[op.micro].tokens_here, "residual stream")

    def _allocate_dx(self, op: Op) -> Any:
        tokens = self.loaded[op.micro].tokens_here
        return self.allocate_stream(tokens, "gradient of the residual stream")

    def _pass(self, op: Op) -> None:
        attention_bytes = self._record_turn(op).graph
        output: Any = self.memory.allocate("output of attention", attention_bytes)
        self.inputs[self._key(op)] = self.x[op.micro], output
        self.x[op.micro] = self._allocate_x(op)

    def _graph(self, op: Op, x: Any, ops: Any) -> Any:
        graph_bytes = self._record_turn(op).graph
        graph: Any = self.memory.allocate("activations for the backward", graph_bytes)
        self.graphs[self._key(op)] = x, (graph, ops)  # pyright: ignore[reportArgumentType]
        return self._allocate_x(op)

    def _backward(self, op: Op) -> None:
        self.copies.expect(op.unit)
        # The turn begins with its graph and dy: both are there while its peak is noted.
        self._record_turn(op)
        x = self.graphs.pop(self._key(op))[0]
        del self.g[op.micro]
        self.leave_grads(op.unit)
        if x is not None:
            self.g[op.micro] = self._allocate_dx(op)

    def _loss(self, op: Op) -> None:
        self.copies.expect(op.unit)
        # All blocks of rows write to one gradient of x.
        if op.number == 0:
            self.g[op.micro] = self._allocate_dx(op)
        pack = self.loaded[op.micro]
        if self.memory.with_peaks:
            self.memory.record_profile(loss_turn(self.rank, pack.orders[0], op.number))
        self.leave_grads(op.unit)
        end = (op.number + 1) * loss_rows(self.spec, pack.tokens_here)
        if end >= pack.tokens_here:
            del self.x[op.micro]


class ChunkedPackMemory(ChunkedPacks, ActivationMemory):
    """`step.chunk_runner.ChunkedPacks` on bytes. Mutable.

    `profiles`: of events, by the chunks of a pack and the kind of block.
    """

    def __init__(self, memory: RankMemory, view: RankLayout, weights: WeightMemory):
        super().__init__(
            memory,
            view,
            weights,
            tier=tier_memory(memory, view.layout),
            accumulate=self._accumulate,
        )
        self.loaded: dict[int, LoadedPack] = {}  # pyright: ignore
        self.profiles: dict[tuple, dict[Event, TurnProfile]] = {}

    def _accumulate(self, unit: int) -> None:
        for moving in self.view.learning(unit):
            self.copies.accumulate(moving)

    def load(self, micro: int, pack: Sequence[int]) -> None:  # pyright: ignore
        lengths = list(pack) or [1]  # a replica without a pack computes one token
        pack_chunks = tuple(tuple(runs) for runs in chunks.cut_chunks(lengths, self.layout.chunk))
        orders = chunks.chunk_orders(pack_chunks, self.layout)
        profiles = [load_turn(self.rank, order, has_angles=False) for order in orders]
        size = sum(profile.output for profile in profiles)
        self.loaded[micro] = LoadedPack(
            tensors=self.memory.allocate("token ids, labels, positions", size),
            tokens_here=sum(self.rank.rows(order) for order in orders),
            orders=orders,
            turns={},
            chunks=pack_chunks,
        )

    def compute(self, op: Op) -> None:
        events = self.lists(self.loaded[op.micro], op.unit).by_turn[op.turn]  # pyright: ignore
        ChunkEventMemory(self, op.unit, op.micro).run(events)

    def split(self, x: Any, tokens: Sequence[int]) -> Sequence[Any]:
        row_bytes = self.spec.width * self.memory.weight_bytes
        return [AllocationView(x, count * row_bytes, ("stream", count)) for count in tokens]

    def join(self, micro: int, parts: Sequence[Any]) -> Any:
        return self.boundary(micro)


class ChunkEventMemory(ChunkPlayer):
    """`step.chunk_runner.ChunkPlayer` on bytes. Mutable."""

    runner: ChunkedPackMemory

    def __init__(self, runner: ChunkedPackMemory, unit: int, micro: int):
        super().__init__(runner, unit, micro)
        pack = runner.loaded[micro]
        self.memory = runner.memory
        self.block = runner.spec.like(unit)
        self.chunks: tuple = pack.chunks
        self.profiles = runner.profiles.setdefault((pack.chunks, self.block), {})
        self.positions: list[tuple[int, ...]] = []  # of chunks, where instants are told apart
        if self.memory.allocations.has_instants:
            self.positions = chunk_positions(chunks.first_key_chunks(pack.chunks))

    def _play(self, event: Event) -> None:
        super()._play(event)
        allocations = self.memory.allocations
        if self.positions and allocations.has_new_peak:
            allocations.save_peaks(self._instant(event))

    def _instant(self, event: Event) -> tuple:
        """What an event has in common with events of other packs that need equally much."""
        keys_position = ()
        distance = 0
        if event.keys >= 0 and event.name in ("attend", "attend_back"):
            keys_position = self.positions[event.keys]
            distance = min(event.chunk - event.keys, ENDS)
        return event.kind, event.name, self.positions[event.chunk], keys_position, distance

    def compute(self, event: Event) -> None:
        profile = self.profiles.get(event)
        if profile is None:
            profile = event_turn(self.runner.rank, self.lists, self.chunks, event, self.block)
            self.profiles[event] = profile
        self.memory.record_profile(profile)
        for name, size in profile.buffers.items():
            # Gradients of keys and values are those of the chunk that has the keys.
            chunk = event.keys if name == "dkv" else event.chunk
            self._resize((name, chunk), size)
        if profile.grads:
            moving = self.runner.view.learning(self.unit)[-1]
            self.runner.copies.leave_grads(moving, profile.grads)

    def _resize(self, buffer: Buffer, size: int) -> None:
        """Make a buffer so large. The tensors that it had stay where that has not changed."""
        if buffer in self.live and size_of(self.live[buffer]) == size:
            return
        self.live.pop(buffer, None)  # freed before its successor is allocated
        name, chunk = buffer
        label = BUFFER_NAMES.get(name, "buffers of chunks")
        shape = self._buffer_shape(name, self.orders[chunk])
        self.live[buffer] = (self.memory.allocate(label, size, shape=shape),)

    def _buffer_shape(self, name: str, order: TokenOrder) -> tuple:
        """Equal for buffers that may take over each other's memory."""
        if name in STREAM_BUFFERS:
            return "stream", self.runner.rank.rows(order)
        item = self.memory.weight_bytes
        if name in ("dq", "dkv"):
            item = max(4, item)
        return "kv" if name in ("kv", "dkv") else "q", order.local_tokens, item
