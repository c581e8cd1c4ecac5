"""What the runners of `step` keep of packs, on bytes: see `weigh.ledger`."""

from collections import deque
from collections.abc import Sequence

from longshift.layout.layout import Layout
from longshift.layout.loss_rows import loss_rows
from longshift.program.operations import Op
from longshift.program.turns import RankLayout
from longshift.schedule import chunks
from longshift.schedule.chunks import Buffer
from longshift.schedule.sequence import TokenOrder, token_order
from longshift.schedule.streamed import Lists, lists, tier_key
from longshift.stream.tiers import BOUNCE_BYTES, BOUNCES, IN_FLIGHT_BYTES, UNDER_WAY, UNDER_WAY_BYTES, WRITES
from longshift.weigh.book import Account, Held, Place
from longshift.weigh.chunk_profile import event_turn
from longshift.weigh.held_copies import HeldCopies
from longshift.weigh.recorder import TurnProfile
from longshift.weigh.turn_profile import RankSetup, load_turn, loss_turn, unit_turn

ENDS = 3  # chunks at either end of a document that are told apart
UNKNOWN = TurnProfile(peak=0)  # of an operation that is not looked into
NAMES = {"kv": "keys and values", "dkv": "gradients of keys and values", "o": "output of attention"}


class HeldTier:
    """`stream.tiers.DeviceTier`: the device keeps the tensors. Mutable."""

    def __init__(self, account: Account):
        self.account = account
        self.objects: dict[tuple, list[Held]] = {}

    def put(self, key: tuple, tensors: list[Held], shapes: Sequence[tuple], sizes: Sequence[int] = ()) -> None:
        self.objects[key] = list(tensors)

    def fetch(self, key: tuple) -> list[Held]:
        return list(self.objects[key])

    def recycle(self, tensors: list[Held], shapes: Sequence[tuple]) -> None:
        """Keep the tensors: they are still the object's."""

    def drop(self, key: tuple) -> None:
        del self.objects[key]


class MovingTier(HeldTier):
    """`stream.tiers.DiskTier`, `BouncedTier` and `HostTier`: fetches fill memory of what was fetched before and is no longer used; the last
    `under_way` puts keep what they send. Mutable."""

    def __init__(self, account: Account, place: Place, under_way: int, most_bytes: int):
        super().__init__(account)
        bounced = place == "disk" and not account.host_is_device
        self.pinned = account.held("pinned pieces", BOUNCES * BOUNCE_BYTES, "host") if bounced else None
        self.place: Place = place
        self.under_way, self.most_bytes = under_way, most_bytes
        self.shapes: dict[tuple, list[tuple[tuple, int]]] = {}
        self.leaving: deque[tuple[int, list[Held]]] = deque()
        self.spare: dict[tuple, deque[Held]] = {}

    def put(self, key: tuple, tensors: list[Held], shapes: Sequence[tuple], sizes: Sequence[int] = ()) -> None:
        self.objects.pop(key, None)
        size = sum(sizes) if sizes else sum(held.size for held in tensors)
        while self.leaving and (len(self.leaving) >= self.under_way or size + sum(s for s, _ in self.leaving) > self.most_bytes):
            self.leaving.popleft()
        if self.under_way:
            self.leaving.append((size, list(tensors)))
        self.objects[key] = [self.account.held("waiting for the backward", size, self.place)]
        self.account.moved["put"] += size
        self.shapes[key] = list(zip(shapes, (size, 0)))  # as if the first tensor were all of it: the other comes and goes with it

    def fetch(self, key: tuple) -> list[Held]:
        found = []
        self.account.moved["fetched"] += sum(size for _, size in self.shapes[key])
        for shape, size in self.shapes[key]:
            spare = self.spare.get((shape, size))
            found.append(spare.popleft() if spare else self.account.held("fetched from a tier", size))
        return found

    def recycle(self, tensors: list[Held], shapes: Sequence[tuple]) -> None:
        for held, shape in zip(tensors, shapes):
            self.spare.setdefault((shape, held.size), deque()).append(held)

    def drop(self, key: tuple) -> None:
        del self.objects[key], self.shapes[key]
        if not self.objects:
            self.spare.clear()
            self.leaving.clear()


def tier_of(account: Account, layout: Layout) -> HeldTier:
    """A layout's tier, as `stream.tiers.tier_of` makes it."""
    if layout.offload == "device" or (layout.offload == "host" and account.host_is_device):
        return HeldTier(account)
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


class HeldPacks:
    """What `step.runner.Runner` keeps of a layout's packs. Mutable."""

    def __init__(self, account: Account, view: RankLayout, copies: HeldCopies):
        self.account, self.view, self.spec, self.layout, self.copies = account, view, view.spec, view.layout, copies
        self.compute_bytes = account.weight_bytes
        self.rank = RankSetup(self.spec, self.layout, view.at, self.compute_bytes, account.transport, account.float8)
        self.grads: dict[int, list[Held]] = {}
        self.receiving: dict[int, Held] = {}
        self.sending: dict[int, Held] = {}
        self.tier = tier_of(account, self.layout)

    def residual(self, tokens: int, name: str) -> Held:
        """The storage of x or its gradient, [T', D]."""
        return self.account.held(name, tokens * self.spec.width * self.compute_bytes)

    def happen(self, found: TurnProfile) -> None:
        """Write down what an operation needs inside, what it computes, and what it sends."""
        self.account.book.inside(found.peak)
        self.account.flops["matmul"] += found.matmul_flops
        self.account.flops["attention"] += found.attention_flops
        for axis, size in found.sent.items():
            self.account.send(axis, size)

    def leave(self, unit: int) -> None:
        """Have gradients on the weights of a unit, and on those that it shares."""
        inside = self.copies.inside(unit)
        for moving in self.view.learning(unit):
            elements = sum(size for name, size in self.copies.units[moving].weights.items() if name not in inside)
            if elements and not self.grads.get(moving):
                self.grads[moving] = [self.account.held("gradients of weights", elements * self.compute_bytes)]

    def load(self, micro: int, lengths: Sequence[int]) -> None:
        raise NotImplementedError

    def unload(self, micro: int) -> None:
        raise NotImplementedError

    def tokens(self, micro: int) -> int:
        """Tokens of a micro-batch on this rank, T'."""
        raise NotImplementedError

    def receive(self, op: Op) -> None:
        self.receiving[op.number] = self.residual(self.tokens(op.micro), "messages between stages")

    def sent(self, op: Op, held: Held) -> None:
        self.account.send(op.way, held.size)
        self.sending[op.number] = held

    def arrive(self, op: Op) -> None:
        raise NotImplementedError(op)

    depart = put = fetch = await_fetch = drop = received = send = compute = arrive


class HeldWhole(HeldPacks):
    """What `step.runner.WholePacks` keeps. Mutable."""

    def __init__(self, account: Account, view: RankLayout, copies: HeldCopies):
        super().__init__(account, view, copies)
        self.orders: dict[int, TokenOrder] = {}
        self.insides: dict[int, dict[tuple, TurnProfile]] = {}  # what its operations need, by micro-batch
        self.micros: dict[int, Held] = {}
        self.x: dict[int, Held] = {}
        self.g: dict[int, Held] = {}
        self.graphs: dict[tuple, tuple[Held | None, Held, list[Held]]] = {}
        self.inputs: dict[tuple, list[Held]] = {}
        self.fetched: dict[tuple, list[Held]] = {}
        self.turns = {"pass": self._pass, "forward": self._forward, "again": self._again, "backward": self._backward, "loss": self._loss}

    def load(self, micro: int, lengths: Sequence[int]) -> None:
        order = token_order(list(lengths) or [1], self.layout.ring, self.layout.ulysses * self.layout.tp)
        self.orders[micro], self.insides[micro] = order, {}
        found = load_turn(self.rank, order) if self.account.inside else UNKNOWN
        self.happen(found)
        self.micros[micro] = self.account.held("token ids, labels, rotary angles", found.output)

    def unload(self, micro: int) -> None:
        for held in (self.micros, self.x, self.g):
            held.pop(micro, None)

    def tokens(self, micro: int) -> int:
        """T'."""
        return self.rank.rows(self.orders[micro])

    def received(self, op: Op) -> None:
        (self.x if op.turn == "forward" else self.g)[op.micro] = self.receiving.pop(op.number)

    def send(self, op: Op) -> None:
        self.sent(op, (self.x if op.turn == "forward" else self.g).pop(op.micro))

    def compute(self, op: Op) -> None:
        self.turns[op.turn](op)

    def _inside(self, op: Op) -> TurnProfile:
        if not self.account.inside and op.turn != "pass":  # whose output of attention may go to a tier
            return UNKNOWN
        known, key = self.insides[op.micro], (op.part, op.turn if op.turn != "again" else "forward", self.spec.like(op.unit))
        if key not in known:
            known[key] = unit_turn(self.rank, self.orders[op.micro], *key)  # pyright: ignore[reportArgumentType]
        self.happen(known[key])
        return known[key]

    @staticmethod
    def _key(op: Op) -> tuple[int, int, str]:
        return op.micro, op.unit, op.part

    def _pass(self, op: Op) -> None:
        kept = self._inside(op).graph
        self.inputs[self._key(op)] = [self.x[op.micro], self.account.held("output of attention", kept)]
        self.x[op.micro] = self.residual(self.tokens(op.micro), "residual stream")

    def _forward(self, op: Op) -> None:
        self.x[op.micro] = self._graph(op, self.x.pop(op.micro, None), [])

    def _again(self, op: Op) -> None:
        x, *kept = self.inputs.pop(self._key(op))
        self._graph(op, x, kept)

    def _graph(self, op: Op, x: Held | None, kept: list[Held]) -> Held:
        found = self._inside(op)
        self.graphs[self._key(op)] = x, self.account.held("activations for the backward", found.graph), kept
        return self.residual(self.tokens(op.micro), "residual stream")

    def _backward(self, op: Op) -> None:
        self.copies.expect(op.unit)
        self._inside(op)
        x = self.graphs.pop(self._key(op))[0]
        del self.g[op.micro]
        self.leave(op.unit)
        if x is not None:
            self.g[op.micro] = self.residual(self.tokens(op.micro), "gradient of the residual stream")

    def _loss(self, op: Op) -> None:
        self.copies.expect(op.unit)
        if op.number == 0:
            self.g[op.micro] = self.residual(self.tokens(op.micro), "gradient of the residual stream")
        rows = self.tokens(op.micro)
        self.happen(loss_turn(self.rank, self.orders[op.micro], op.number) if self.account.inside else UNKNOWN)
        self.leave(op.unit)
        if (op.number + 1) * loss_rows(self.spec, rows) >= rows:
            del self.x[op.micro]

    def put(self, op: Op) -> None:
        self.tier.put(self._key(op), self.inputs.pop(self._key(op)), self._shapes(op))

    def fetch(self, op: Op) -> None:
        self.fetched[self._key(op)] = self.tier.fetch(self._key(op))

    def await_fetch(self, op: Op) -> None:
        self.inputs[self._key(op)] = list(self.fetched[self._key(op)])

    def drop(self, op: Op) -> None:
        self.tier.recycle(self.fetched.pop(self._key(op)), self._shapes(op))
        self.tier.drop(self._key(op))

    def _shapes(self, op: Op) -> list[tuple]:
        """Shapes of what waits in the tier."""
        return [("x", self.tokens(op.micro)), ("o", self.tokens(op.micro))]


class HeldChunked(HeldPacks):
    """What `step.chunked.ChunkedPacks` keeps. Mutable."""

    def __init__(self, account: Account, view: RankLayout, copies: HeldCopies):
        super().__init__(account, view, copies)
        self.cuts: dict[int, tuple] = {}
        self.micros: dict[int, Held] = {}
        self.crossing: dict[tuple, Held] = {}
        self.known: dict[tuple, Lists] = {}
        self.made: dict[int, dict[int | None, Lists]] = {}  # of each micro-batch, by window
        self.insides: dict[tuple[int, int, str], dict[int, TurnProfile]] = {}  # what events need, by lists, block and turn

    def load(self, micro: int, lengths: Sequence[int]) -> None:
        self.cuts[micro], self.made[micro] = chunks.cut(list(lengths) or [1], self.layout.chunk), {}
        orders = chunks.orders(self.cuts[micro], self.layout)
        size = sum(load_turn(self.rank, order, has_angles=False).output for order in orders)
        self.micros[micro] = self.account.held("token ids, labels, positions", size)

    def unload(self, micro: int) -> None:
        del self.cuts[micro], self.micros[micro], self.made[micro]

    def lists(self, micro: int, unit: int) -> Lists:
        window, made = self.spec.window(unit), self.made[micro]
        if window not in made:
            key = cut, _ = self.cuts[micro], window
            if key not in self.known:
                self.known[key] = lists(self.spec, self.layout, self.view.at, cut, self.compute_bytes, self.account.ahead, window)
            made[window] = self.known[key]
        return made[window]

    def tokens(self, micro: int) -> int:
        return sum(self.shares(chunks.orders(self.cuts[micro], self.layout)))

    def shares(self, orders: Sequence[TokenOrder]) -> list[int]:
        """T' of each chunk."""
        return [self.rank.rows(order) for order in orders]

    def received(self, op: Op) -> None:
        self.crossing[op.micro, op.chunk, op.turn] = self.receiving.pop(op.number)

    def send(self, op: Op) -> None:
        self.sent(op, self.crossing.pop((op.micro, op.chunk, op.turn)))

    def arrive(self, op: Op) -> None:
        """Cut what arrived into chunks, which are views of it."""
        x, back = self.crossing.pop((op.micro, op.chunk, op.turn)), op.turn == "backward"
        for chunk, tokens in enumerate(self.shares(self.lists(op.micro, op.unit).orders)):
            size = tokens * self.spec.width * self.compute_bytes
            self.tier.put((op.micro, op.unit + back, "g" if back else "h", chunk), [x], [("stream", tokens)], [size])

    def depart(self, op: Op) -> None:
        back = op.turn == "backward"
        shares = self.shares(self.lists(op.micro, op.unit).orders)
        keys = [(op.micro, op.unit + (not back), "g" if back else "h", chunk) for chunk in range(len(shares))]
        parts = [self.tier.fetch(key) for key in keys]
        self.crossing[op.micro, op.chunk, op.turn] = self.residual(sum(shares), "messages between stages")
        for part, tokens in zip(parts, shares):
            self.tier.recycle(part, [("stream", tokens)])
        del parts
        for key in keys:
            self.tier.drop(key)

    def compute(self, op: Op) -> None:
        made, cut = self.lists(op.micro, op.unit), self.cuts[op.micro]
        live: dict[Buffer, list[Held]] = {}
        fetched: set[Buffer] = set()
        book = self.account.book
        stands = standings(chunks.reach(cut)) if book.moments is not None else []
        block = self.spec.like(op.unit)
        insides = self.insides.setdefault((id(made), block, op.turn), {})
        for number, event in enumerate(made.of[op.turn]):  # pyright: ignore[reportArgumentType]
            key = tier_key(op.micro, op.unit, event.object)
            if event.kind in ("compute", "send"):
                if event.name in chunks.MULTIPLYING_BACK:
                    self.copies.expect(op.unit)
                if number not in insides:
                    insides[number] = event_turn(self.rank, made, cut, event, block)
                found = insides[number]
                self.happen(found)
                for name, size in found.buffers.items():
                    self._have(live, (name, event.keys if name == "dkv" else event.chunk), size)
                if found.grads:
                    self.grads[self.view.learning(op.unit)[-1]] = [self.account.held("gradients of weights", found.grads)]
            elif event.kind == "accumulate":
                for unit in self.view.learning(op.unit):
                    self.copies.accumulate(unit, self.grads.pop(unit, []))
            elif event.kind == "fetch":
                live[event.object] = self.tier.fetch(key)
                fetched.add(event.object)
            elif event.kind == "store":
                self.tier.put(key, live[event.object], self._shapes(made, event.object))
            elif event.kind == "free":
                gone = live.pop(event.object)
                if event.object in fetched:
                    fetched.remove(event.object)
                    self.tier.recycle(gone, self._shapes(made, event.object))
                del gone
            else:
                self.tier.drop(key)
            if stands and book.grew:
                keys = stands[event.keys] if event.keys >= 0 and event.name in ("attend", "attend_back") else ()
                book.settle((event.kind, event.name, stands[event.chunk], keys, min(event.chunk - event.keys, ENDS) if keys else 0))

    def _have(self, live: dict[Buffer, list[Held]], buffer: Buffer, size: int) -> None:
        """Make a buffer so large; the tensors that it had stay where that has not changed."""
        if sum(held.size for held in live.get(buffer, ())) != size or buffer not in live:
            live.pop(buffer, None)
            live[buffer] = [self.account.held(NAMES.get(buffer[0], "buffers of chunks"), size)]

    def _shapes(self, made: Lists, buffer: Buffer) -> list[tuple]:
        """Shapes that a fetch of an object can take over: memory of the same shape and format."""
        name, chunk = buffer
        order = made.orders[chunk]
        if name in ("x", "y", "dx", "dy", "dr"):
            return [("stream", self.shares([order])[0])]
        wide = max(4, self.compute_bytes) if name in ("dq", "dkv") else self.compute_bytes
        kind = "kv" if name in ("kv", "dkv") else "q"
        return [(kind, order.local_tokens, wide), *([("lse", order.local_tokens)] if name == "o" else [])]
