"""What the runners of `step` keep of packs, as bytes of a book: the runners themselves, whose turns and events are known from profiles."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_rows
from longshift.program.operations import Op
from longshift.program.turns import RankLayout
from longshift.schedule import chunks
from longshift.schedule.chunks import Buffer, Event
from longshift.schedule.sequence import Run, TokenOrder, pack_order
from longshift.step.chunked import ChunkedPacks, ChunkPlayer
from longshift.step.runner import Runner, WholePacks
from longshift.stream.tiers import (
    BOUNCE_BYTES,
    BOUNCES,
    IN_FLIGHT_BYTES,
    UNDER_WAY,
    UNDER_WAY_BYTES,
    WRITES,
    DeviceTier,
    Key,
    Tier,
)
from longshift.weigh.book import Account, Held, Place
from longshift.weigh.chunk_profile import event_turn
from longshift.weigh.held_copies import HeldCopies
from longshift.weigh.recorder import TurnProfile
from longshift.weigh.turn_profile import RankSetup, load_turn, loss_turn, unit_turn

ENDS = 3  # chunks at either end of a document that are told apart
UNKNOWN = TurnProfile(peak=0)  # of an operation that is not looked into
NAMES = {"kv": "keys and values", "dkv": "gradients of keys and values", "o": "output of attention"}
STREAMS = ("x", "y", "dx", "dy", "dr")  # buffers of the shape of the residual stream


class Part(NamedTuple):
    """A view of a tensor."""

    base: Held
    nbytes: int
    shape: tuple


class MovingTier(Tier):
    """`stream.tiers.DiskTier`, `BouncedTier` and `HostTier`, on bytes. Mutable. Fetches fill memory of what was fetched before and is no
    longer used; the last `under_way` puts keep what they send. An object of several tensors comes and goes as one."""

    def __init__(self, account: Account, place: Place, under_way: int, most_bytes: int):
        super().__init__()
        self.account = account
        bounced = place == "disk" and not account.host_is_device
        self.pinned = account.held("pinned pieces", BOUNCES * BOUNCE_BYTES, "host") if bounced else None
        self.place: Place = place
        self.under_way, self.most_bytes = under_way, most_bytes
        self.objects: dict[Key, Held] = {}
        self.leaving: deque[tuple[int, Sequence[Any]]] = deque()
        self.spare: dict[tuple, list[Held]] = {}  # by shape and bytes

    def put(self, key: Key, *tensors: Any) -> None:
        self.objects.pop(key, None)
        size = sum(tensor.nbytes for tensor in tensors)
        while self.leaving and (len(self.leaving) >= self.under_way or size + sum(s for s, _ in self.leaving) > self.most_bytes):
            self.leaving.popleft()
        self.leaving.append((size, tensors))
        self.objects[key] = self.account.held("waiting for the backward", size, self.place, tensors[0].shape)
        self.account.moved["put"] += size

    def fetch(self, key: Key) -> Callable[[], Any]:
        stored = self.objects[key]
        self.account.moved["fetched"] += stored.nbytes
        spare = self.spare.get((stored.shape, stored.nbytes))
        tensor = spare.pop() if spare else self.account.held("fetched from a tier", stored.nbytes, shape=stored.shape)
        return lambda: (tensor,)

    def recycle(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            self.spare.setdefault((tensor.shape, tensor.nbytes), []).append(tensor)

    def drop(self, key: Key) -> None:
        del self.objects[key]
        if not self.objects:
            self.spare.clear()
            self.leaving.clear()

    def close(self) -> None:
        self.objects.clear()


def tier_of(account: Account, layout: Layout) -> Tier:
    """A layout's tier, as `stream.tiers.tier_of` makes it."""
    if layout.offload == "device" or (layout.offload == "host" and account.host_is_device):
        return DeviceTier()
    disk = layout.offload == "disk"
    return MovingTier(account, layout.offload, *((WRITES, IN_FLIGHT_BYTES) if disk else (UNDER_WAY, UNDER_WAY_BYTES)))


def standings(sees: Sequence[int]) -> list[tuple[int, ...]]:
    """Where each chunk of a pack stands: in the first, a middle or the last document, and where in that. Chunks of two packs that stand
    alike have equal rows. `sees`: as of `chunks.reach`."""
    ends = {first: number for number, first in enumerate(sees)}
    found = []
    for number, first in enumerate(sees):
        found.append((first > 0, first < sees[-1], min(number - first, ENDS), min(ends[first] - number, ENDS)))
    return found


@dataclass(frozen=True)
class LoadedPack:
    """A micro-batch. `tokens_here`: T'; `orders`: of its chunks, or of all of it; `turns`: profiles of a whole one."""

    tensors: Held
    tokens_here: int
    orders: Sequence[TokenOrder]
    turns: dict[tuple, TurnProfile]
    chunks: tuple[tuple[Run, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.chunks)


class HeldRunner(Runner):
    """A runner whose tensors are bytes. Mutable."""

    loaded: dict[int, LoadedPack]

    def __init__(self, account: Account, view: RankLayout, copies: HeldCopies):
        self.account, self.view = account, view
        self.copies: Any = copies
        self.spec, self.layout, self.at = view.spec, view.layout, view.at
        self.rank = RankSetup(self.spec, self.layout, view.at, account.weight_bytes, account.transport, account.float8)
        self.precision: Any = SimpleNamespace(compute=self.rank.dtype)
        self.ops: Any = SimpleNamespace(keeping=lambda kept: kept)
        self.modules: Any = dict.fromkeys(range(self.spec.layers + 2))
        self.learns, self.crossing = True, {}

    def residual(self, tokens: int, name: str) -> Any:
        """The storage of x or its gradient, [T', D]."""
        return self.account.held(name, tokens * self.spec.width * self.account.weight_bytes, shape=("stream", tokens))

    def boundary(self, micro: int) -> Any:
        return self.residual(self.loaded[micro].tokens_here, "messages between stages")

    def happen(self, turn: TurnProfile) -> None:
        """Write down what an operation needs inside, what it computes, and what it sends."""
        self.account.book.inside(turn.peak)
        self.account.flops += turn.flops
        for axis, size in turn.sent.items():
            self.account.send(axis, size)

    def leave(self, unit: int) -> None:
        """Have gradients on the weights of a unit, and on those that it shares."""
        inside = self.copies.inside(unit)
        for moving in self.view.learning(unit):
            elements = sum(size for name, size in self.copies.units[moving].weights.items() if name not in inside)
            if elements and moving not in self.copies.grads:
                self.copies.leave(moving, elements * self.account.weight_bytes)


class HeldWhole(WholePacks, HeldRunner):
    """`step.runner.WholePacks` on bytes. Mutable."""

    def __init__(self, account: Account, view: RankLayout, copies: HeldCopies):
        super().__init__(account, view, copies, tier=tier_of(account, view.layout))
        self.loaded: dict[int, LoadedPack] = {}  # pyright: ignore[reportIncompatibleVariableOverride]

    def load(self, micro: int, pack: Sequence[int]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        order = pack_order(self.layout, pack)
        turn = load_turn(self.rank, order) if self.account.inside else UNKNOWN
        self.happen(turn)
        tensors = self.account.held("token ids, labels, rotary angles", turn.output)
        self.loaded[micro] = LoadedPack(tensors, self.rank.rows(order), [order], {})

    def _turn(self, op: Op) -> TurnProfile:
        if not self.account.inside and op.turn != "pass":  # whose output of attention may go to a tier
            return UNKNOWN
        pack, key = self.loaded[op.micro], (op.part, op.turn if op.turn != "again" else "forward", self.spec.like(op.unit))
        if key not in pack.turns:
            pack.turns[key] = unit_turn(self.rank, pack.orders[0], *key)  # pyright: ignore[reportArgumentType]
        self.happen(pack.turns[key])
        return pack.turns[key]

    def _stream(self, op: Op, name: str = "residual stream") -> Any:
        return self.residual(self.loaded[op.micro].tokens_here, name)

    def _pass(self, op: Op) -> None:
        kept: Any = self.account.held("output of attention", self._turn(op).graph)
        self.inputs[self._key(op)] = self.x[op.micro], kept
        self.x[op.micro] = self._stream(op)

    def _graph(self, op: Op, x: Any, ops: Any) -> Any:
        graph = self.account.held("activations for the backward", self._turn(op).graph)
        self.graphs[self._key(op)] = x, (graph, ops)  # pyright: ignore[reportArgumentType]
        return self._stream(op)

    def _backward(self, op: Op) -> None:
        self.copies.expect(op.unit)
        self._turn(op)
        x = self.graphs.pop(self._key(op))[0]
        del self.g[op.micro]
        self.leave(op.unit)
        if x is not None:
            self.g[op.micro] = self._stream(op, "gradient of the residual stream")

    def _loss(self, op: Op) -> None:
        self.copies.expect(op.unit)
        if op.number == 0:
            self.g[op.micro] = self._stream(op, "gradient of the residual stream")
        pack = self.loaded[op.micro]
        self.happen(loss_turn(self.rank, pack.orders[0], op.number) if self.account.inside else UNKNOWN)
        self.leave(op.unit)
        if (op.number + 1) * loss_rows(self.spec, pack.tokens_here) >= pack.tokens_here:
            del self.x[op.micro]


class HeldChunked(ChunkedPacks, HeldRunner):
    """`step.chunked.ChunkedPacks` on bytes. Mutable. `turns`: profiles of events, by the chunks of a pack and the kind of block."""

    def __init__(self, account: Account, view: RankLayout, copies: HeldCopies):
        super().__init__(account, view, copies, tier=tier_of(account, view.layout), ahead=account.ahead, accumulate=self._accumulate)
        self.loaded: dict[int, LoadedPack] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
        self.turns: dict[tuple, dict[Event, TurnProfile]] = {}

    def _accumulate(self, unit: int) -> None:
        for moving in self.view.learning(unit):
            self.copies.accumulate(moving)

    def load(self, micro: int, pack: Sequence[int]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        cut = tuple(map(tuple, chunks.cut(list(pack) or [1], self.layout.chunk)))
        orders = chunks.orders(cut, self.layout)
        size = sum(load_turn(self.rank, order, has_angles=False).output for order in orders)
        tensors = self.account.held("token ids, labels, positions", size)
        self.loaded[micro] = LoadedPack(tensors, sum(map(self.rank.rows, orders)), orders, {}, cut)

    def compute(self, op: Op) -> None:
        events = self.lists(self.loaded[op.micro], op.unit).of[op.turn]  # pyright: ignore
        EventWeigher(self, op.unit, op.micro).run(events)

    def split(self, x: Any, tokens: Sequence[int]) -> Sequence[Any]:
        width = self.spec.width * self.account.weight_bytes
        return [Part(x, count * width, ("stream", count)) for count in tokens]

    def join(self, micro: int, parts: Sequence[Any]) -> Any:
        return self.boundary(micro)


class EventWeigher(ChunkPlayer):
    """`step.chunked.ChunkPlayer` on bytes. Mutable."""

    runner: HeldChunked

    def __init__(self, runner: HeldChunked, unit: int, micro: int):
        super().__init__(runner, unit, micro)
        self.account, self.block = runner.account, runner.spec.like(unit)
        self.made = runner.lists(runner.loaded[micro], unit)  # pyright: ignore[reportArgumentType]
        self.cut: tuple = runner.loaded[micro].chunks
        self.turns = runner.turns.setdefault((self.cut, self.block), {})
        self.stands = standings(chunks.reach(self.cut)) if self.account.book.has_moments else []

    def _play(self, event: Event) -> None:
        super()._play(event)
        stands, book = self.stands, self.account.book
        if stands and book.grew:
            keys = stands[event.keys] if event.keys >= 0 and event.name in ("attend", "attend_back") else ()
            book.settle((event.kind, event.name, stands[event.chunk], keys, min(event.chunk - event.keys, ENDS) if keys else 0))

    def compute(self, event: Event) -> None:
        turn = self.turns.get(event)
        if turn is None:
            turn = self.turns[event] = event_turn(self.runner.rank, self.made, self.cut, event, self.block)
        self.runner.happen(turn)
        for name, size in turn.buffers.items():
            self._have((name, event.keys if name == "dkv" else event.chunk), size)
        if turn.grads:
            self.runner.copies.leave(self.runner.view.learning(self.unit)[-1], turn.grads)

    def _have(self, buffer: Buffer, size: int) -> None:
        """Make a buffer so large; the tensors that it had stay where that has not changed."""
        name, chunk = buffer
        if buffer in self.live and sum(tensor.nbytes for tensor in self.live[buffer]) == size:
            return
        self.live.pop(buffer, None)
        order, wide = self.orders[chunk], name in ("dq", "dkv")
        kind = "stream" if name in STREAMS else "kv" if name in ("kv", "dkv") else "q"
        tokens = self.runner.rank.rows(order) if kind == "stream" else order.local_tokens
        item = max(4, self.account.weight_bytes) if wide else self.account.weight_bytes
        shape = ("stream", tokens) if kind == "stream" else (kind, tokens, item)
        self.live[buffer] = (self.account.held(NAMES.get(name, "buffers of chunks"), size, shape=shape),)
