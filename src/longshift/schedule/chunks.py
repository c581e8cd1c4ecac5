"""Streaming a sequence through a device in chunks: what is fetched, computed, sent, stored and freed, in which order.

Papers: Fully Pipelined Distributed Transformer (FPDT, arXiv 2408.16978), Ulysses-Offload.

A pack is cut into chunks of consecutive tokens. What a block reads and writes lies in a *tier* (device, host or disk memory) as objects,
one a chunk; on the device it lies in *buffers*, for as long as it is used. Not only attention is cut: the residual stream itself comes and
goes by chunk, so that the device holds a few chunks, and with `kv="device"` the keys and values of one block.

    x   input of the block      q, kv  queries; keys and values, rotated     dy, dx  gradients of output and input
    y   output of the block     o      output of attention, log-sum-exp      do, dq, dkv  gradients of o, q, kv, the last two in float32

Forward of chunk c, both schedules: x_c -> q_c, kv_c; attention of q_c to kv_c, then to the earlier kv_j of its first document; o_c -> y_c.

    stream   backward: queries outside, descending. After the pairs (c, j) of chunk c, all that adds to dkv_c has been: dx_c is formed at
             once and leaves. Inside a pair: kv_j in, dkv_j in and out.
    fpdt     the paper's: a first pass forms q_c and do_c of all chunks, then keys and values outside, ascending. Inside a pair: q_i, do_i,
             o_i in, dq_i in and out. After the pairs of kv_j all of dq_j has been.

    keep="output"   o and kv stay in the tier from forward to backward: attention is never computed twice
    keep="input"    x alone stays; backward begins with the forward of attention
    kv="device"     what the pairs need in turn stays on the device while the block runs: of `stream` kv and dkv, of `fpdt` q, do, o, dq

[Note: pairs] Documents lie end to end, so only a chunk's first document can have begun in an earlier chunk, and only a chunk's last one
goes on. A pair (c, j), j < c, is one rectangle without a mask: the first piece of c against the last piece of j.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple

from longshift.layout.heads import own_heads, tensor_heads
from longshift.layout.layout import Coord, Layout, Schedule, Where
from longshift.schedule.sequence import Run, TokenOrder, pack_order
from longshift.spec.model import ModelSpec

Kind = Literal["fetch", "compute", "send", "store", "free", "drop", "accumulate"]
MULTIPLYING_BACK = ("loss", "tail_back", "qkv_back")  # events that form gradients of weights by matmuls
Buffer = tuple[str, int]  # an object's name, its chunk
Sizes = Mapping[str, Sequence[int]]  # bytes of each chunk, by name
LANES = {"fetch": "in", "compute": "compute", "send": "link", "store": "out"}  # kinds of events that go on at the same time

AHEAD = 1  # operations before its first reader, at which an object's fetch begins


@dataclass(frozen=True)
class StreamOptions:
    """`folder`: where the disk tier keeps its file; `ahead`: see Policy; `checked`: what comes back from disk is compared."""

    folder: str = "."
    ahead: int = AHEAD
    checked: bool = False


class Event(NamedTuple):
    """`name`: of compute and send the operation, else the object. `keys`: of attention the chunk whose keys, of a loss the block of rows;
    `accumulate` adds the gradients that the operation before it left on weights to their sums. `slots`: the places on the
    device of `reads` and `writes`, in that order; two buffers of one name and slot are never there at one time. `bytes`: that move."""

    kind: Kind
    name: str
    chunk: int
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    keys: int = -1
    bytes: int = 0
    slots: tuple[int, ...] = ()

    @property
    def object(self) -> Buffer:
        """What fetch, store, free and drop are about."""
        return self.name, self.chunk


@dataclass(frozen=True)
class Policy:
    """`sent`: the share of a buffer that leaves its rank where tokens and heads are exchanged, 0 where they are not; `ahead`: how many
    operations before its first reader a fetch begins."""

    schedule: Schedule = "stream"
    keep: Literal["output", "input"] = "output"
    kv: Where = "device"
    ahead: int = AHEAD
    sent: float = 0.0


def cut(lengths: Sequence[int], chunk_tokens: int) -> tuple[tuple[Run, ...], ...]:
    """Documents of these lengths, end to end, in chunks of `chunk_tokens`, the last one shorter."""
    chunks: list[list[Run]] = []
    room = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                chunks.append([])
                room = chunk_tokens
            taken = min(room, length - start)
            chunks[-1].append(Run(document, start, taken))
            start, room = start + taken, room - taken
    return tuple(map(tuple, chunks))


def reach(chunks: Sequence[Sequence[Run]], window: int | None = None) -> tuple[int, ...]:
    """The first chunk that each chunk's queries see, in blocks with this sliding window. [Note: pairs]"""
    found: list[int] = []
    for number, runs in enumerate(chunks):
        goes_on = number > 0 and runs[0].start > 0
        alone = len(chunks[number - 1]) > 1 or chunks[number - 1][0].start == 0 if goes_on else True
        found.append(number if not goes_on else number - 1 if alone else found[number - 1])
    return tuple(found if window is None else (_seen(chunks, number, first, window) for number, first in enumerate(found)))


def _seen(chunks: Sequence[Sequence[Run]], number: int, first: int, window: int) -> int:
    """The first chunk from `first` on with a key that the first query of a chunk sees."""
    seen = chunks[number][0].start - window  # the last position out of sight
    while first < number and chunks[first][-1].start + chunks[first][-1].length - 1 <= seen:
        first += 1
    return first


def orders(chunks: Sequence[Sequence[Run]], layout: Layout) -> list[TokenOrder]:
    """How the tokens of each chunk lie over the ranks that share them; its documents are the pieces."""
    return [pack_order(layout, [run.length for run in runs]) for runs in chunks]


def forward(sees: Sequence[int], policy: Policy, sizes: Sizes, drop_x: bool = False) -> tuple[Event, ...]:
    """A block's forward, chunk c seeing chunks `sees[c]` to c: from objects x to objects y, and what backward needs. With `drop_x` x is
    gone, and a backward needs another forward before it."""
    made = _List(sees, policy, sizes)
    for chunk in range(len(sees)):
        made.attention(chunk, stay=False, keep_o=policy.keep == "output", keep_kv=policy.keep == "output", tail=True)
        made.drop(*([("x", chunk)] if drop_x else []))
    return made.finished()


def backward(sees: Sequence[int], policy: Policy, sizes: Sizes) -> tuple[Event, ...]:
    """A block's backward: from objects dy, and what forward kept, to objects dx. Nothing but dx is left in the tier."""
    made = _List(sees, policy, sizes)
    if policy.keep == "input":
        for chunk in range(len(sees)):
            made.attention(chunk, stay=policy.kv == "device" and policy.schedule == "stream", keep_o=True, keep_kv=True, tail=False)
    (made.queries_outside if policy.schedule == "stream" else made.keys_outside)()
    return made.finished()


def alone(
    operation: str, reads: str | None, writes: str | None, count: int, ahead: int, sizes: Sizes, blocks: Sequence[int] = ()
) -> tuple[Event, ...]:
    """Chunk by chunk from objects `reads`, which are dropped, to objects `writes`: embedding and loss. `blocks`: of a loss, into how many
    blocks of rows each chunk is cut."""
    made = _List(range(count), Policy(ahead=ahead), sizes)
    for c in range(count):
        read, write = ([(name, c)] if name else [] for name in (reads, writes))
        made.need(*read)
        for block in range(blocks[c] if blocks else 1):
            made.compute(operation, c, read + (write if block else []), write, keys=block if blocks else -1)
            if operation not in ("embed", "score"):
                made.accumulate(c)
        made.store(*write)
        made.free(*read, *write)
        made.drop(*read)
    return made.finished()


def sizes(spec: ModelSpec, layout: Layout, at: Coord, orders: Sequence[TokenOrder], compute_bytes: int) -> Sizes:
    """Bytes on the rank that stands at `at`."""
    heads, (queries, keys) = len(tensor_heads(spec, layout, at)[0]), own_heads(spec, layout, at)
    wide = max(4, compute_bytes)
    row, head = spec.width * compute_bytes, spec.head_width * compute_bytes
    per_token = {  # of attention's tokens
        "q": queries * head,
        "do": queries * head,
        "kv": 2 * keys * head,
        "o": queries * (head + wide),
        "dq": queries * spec.head_width * wide,
        "dkv": 2 * keys * spec.head_width * wide,
    }
    found: dict[str, list[int]] = {name: [order.local_tokens * size for order in orders] for name, size in per_token.items()}
    found |= {name: [order.local_tokens // layout.contiguous_ranks * row for order in orders] for name in ("x", "y", "dx", "dy", "dr")}
    tokens = [order.local_tokens // layout.neighbor_ranks for order in orders]
    kv_heads = -(-heads * spec.kv_heads // spec.heads)
    found |= {name: [n * heads * head for n in tokens] for name in ("o_tokens", "do_tokens")}
    found |= {name: [n * (heads + 2 * kv_heads) * head for n in tokens] for name in ("qkv", "dqkv")}
    return found


class _List:
    """An event list while it grows. Mutable. `live`: buffers on the device; `stored`: objects that this list has put into the tier."""

    def __init__(self, sees: Sequence[int], policy: Policy, sizes: Sizes):
        self.sees, self.policy, self.sizes = sees, policy, sizes
        self.count = len(sees)
        self.last = [max(c for c in range(j, self.count) if sees[c] <= j) for j in range(self.count)]  # the last chunk that sees j
        self.events: list[Event] = []
        self.live: dict[Buffer, None] = {}
        self.stored: dict[Buffer, None] = {}

    # Both passes of attention

    def attention(self, c: int, stay: bool, keep_o: bool, keep_kv: bool, tail: bool) -> None:
        """Chunk c through a block, or without its `tail` up to the output of attention; with `stay`, kv is left on the device."""
        self.need(("x", c))
        self.project(c, graph=False)
        self.compute("attend", c, [("q", c), ("kv", c)], [("o", c)], keys=c)
        resident, later = self.policy.kv == "device", self.last[c] > c
        if later and ((keep_kv and not stay) or not resident):
            self.store(("kv", c))
        if not later or not resident:
            self.free(("kv", c))
        for j in range(self.sees[c], c):
            self.need(("kv", j))
            self.compute("attend", c, [("q", c), ("kv", j), ("o", c)], [("o", c)], keys=j)
            if not resident or (self.last[j] == c and not stay):
                self.free(("kv", j))
            if not keep_kv and not resident and self.last[j] == c:
                self.drop(("kv", j))
        self.free(("q", c))
        if tail:
            self.compute("tail", c, [("x", c), self.to_tokens(c)], [("y", c)])
            self.store(("y", c))
            self.free(("y", c), ("o_tokens", c))
        if keep_o:
            self.store(("o", c))
        self.free(("x", c), ("o", c))

    def project(self, c: int, graph: bool, heads: bool = True) -> None:
        """x_c to q_c and kv_c, with what their backward needs; without `heads`, to that alone."""
        writes = [("q", c), ("kv", c)] if heads else []
        kept = [("graph", c)] if graph else []
        if not self.policy.sent:
            self.compute("qkv", c, [("x", c)], kept + writes)
            return
        self.compute("qkv", c, [("x", c)], [*kept, ("qkv", c)])
        self.send("to_heads", c, [("qkv", c)], [*([("exchange", c)] if graph else []), *writes])
        self.free(("qkv", c))

    def to_tokens(self, c: int) -> Buffer:
        """o_c where the rest of the block wants it."""
        if not self.policy.sent:
            return "o", c
        self.send("to_tokens", c, [("o", c)], [("o_tokens", c)])
        return "o_tokens", c

    def tail_back(self, c: int) -> None:
        """o_c, x_c and dy_c to do_c and dr_c, the part of dx_c that does not go through attention."""
        self.need(("x", c), ("o", c), ("dy", c))
        self.compute("tail_back", c, [("x", c), self.to_tokens(c), ("dy", c)], [("dr", c), ("do_tokens" if self.policy.sent else "do", c)])
        self.accumulate(c)
        self.free(("dy", c))
        if self.policy.sent:
            self.send("to_tokens_back", c, [("do_tokens", c)], [("do", c)])
            self.free(("do_tokens", c), ("o_tokens", c))

    def qkv_back(self, c: int) -> None:
        """dq_c, dkv_c and dr_c to dx_c, which leaves."""
        if self.policy.sent:
            self.send("to_heads_back", c, [("exchange", c), ("dq", c), ("dkv", c)], [("dqkv", c)])
            self.compute("qkv_back", c, [("graph", c), ("dqkv", c), ("dr", c)], [("dx", c)])
        else:
            self.compute("qkv_back", c, [("graph", c), ("dq", c), ("dkv", c), ("dr", c)], [("dx", c)])
        self.accumulate(c)
        self.store(("dx", c))
        self.free(*((n, c) for n in ("graph", "exchange", "dqkv", "dq", "dkv", "dr", "dx", "x")))

    # Backward

    def queries_outside(self) -> None:
        resident = self.policy.kv == "device"
        for c in reversed(range(self.count)):
            self.tail_back(c)
            self.free(("kv", c))  # computed again with its graph
            self.project(c, graph=True)
            for j in range(c, self.sees[c] - 1, -1):
                if j < c:
                    self.need(("kv", j))
                added = [("dkv", j)] if ("dkv", j) in self.live or ("dkv", j) in self.stored else []
                self.need(*added)
                began = [("dq", c)] if j < c else []
                reads = [("q", c), ("kv", j), ("o", c), ("do", c), *added, *began]
                self.compute("attend_back", c, reads, [("dq", c), ("dkv", j)], keys=j)
                if j < c and not resident:
                    self.store(("dkv", j))
                    self.free(("dkv", j), ("kv", j))
            self.free(("q", c), ("kv", c), ("o", c), ("do", c))
            self.qkv_back(c)
            self.drop(*((n, c) for n in ("x", "o", "dy")))
            self.drop_kv(c)
            self.drop(*([("dkv", c)] if ("dkv", c) in self.stored else []))

    def keys_outside(self) -> None:
        resident = self.policy.kv == "device"
        for c in range(self.count):
            self.tail_back(c)
            self.project(c, graph=False)
            self.store(("dr", c))
            self.free(("dr", c), ("x", c))
            if self.last[c] == c:
                self.store(("kv", c))
            self.free(("kv", c))
            if not resident:
                self.store(("q", c), ("do", c))
                self.free(("q", c), ("do", c), ("o", c))
        for j in range(self.count):
            self.need(("kv", j))
            for i in range(self.last[j], j - 1, -1):
                added = [("dq", i)] if self.sees[i] < j else []
                self.need(("q", i), ("do", i), ("o", i), *added)
                began = [("dkv", j)] if i < self.last[j] else []
                reads = [("q", i), ("kv", j), ("o", i), ("do", i), *added, *began]
                self.compute("attend_back", i, reads, [("dq", i), ("dkv", j)], keys=j)
                if i > j and not resident:
                    self.store(("dq", i))
                    self.free(("q", i), ("do", i), ("o", i), ("dq", i))
            self.free(("q", j), ("do", j), ("o", j), ("kv", j))
            self.need(("x", j), ("dr", j))
            self.project(j, graph=True, heads=False)
            self.qkv_back(j)
            self.drop(*((n, j) for n in ("x", "o", "dy", "dr")))
            self.drop(*((n, j) for n in ("q", "do", "dq") if (n, j) in self.stored))
            self.drop_kv(j)

    # Events

    def need(self, *buffers: Buffer) -> None:
        """Have them on the device."""
        for buffer in buffers:
            if buffer not in self.live:
                self.live[buffer] = None
                self.events.append(Event("fetch", *buffer, writes=(buffer,), bytes=self.size(buffer)))

    def compute(self, name: str, c: int, reads: Sequence[Buffer], writes: Sequence[Buffer], keys: int = -1) -> None:
        self.live |= dict.fromkeys(writes)
        self.events.append(Event("compute", name, c, tuple(reads), tuple(writes), keys))

    def accumulate(self, c: int) -> None:
        self.events.append(Event("accumulate", "weights", c))

    def send(self, name: str, c: int, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """The bytes are those of what attention works on, or of its output, as large as its queries. Ranks that share a key/value head are
        each sent it."""
        self.live |= dict.fromkeys(writes)
        moved = self.size(("q", c)) + (self.size(("kv", c)) if name.startswith("to_heads") else 0)
        self.events.append(Event("send", name, c, tuple(reads), tuple(writes), bytes=int(moved * self.policy.sent)))

    def store(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            self.stored[buffer] = None
            self.events.append(Event("store", *buffer, reads=(buffer,), bytes=self.size(buffer)))

    def free(self, *buffers: Buffer) -> None:
        """Those that are there."""
        for buffer in buffers:
            if buffer in self.live:
                del self.live[buffer]
                self.events.append(Event("free", *buffer, bytes=self.size(buffer)))

    def drop(self, *objects: Buffer) -> None:
        for item in objects:
            self.stored.pop(item, None)
            self.events.append(Event("drop", *item, bytes=self.size(item)))

    def drop_kv(self, c: int) -> None:
        """Where this list or the forward has stored it."""
        if ("kv", c) in self.stored or (self.policy.keep == "output" and self.last[c] > c):
            self.drop(("kv", c))

    def size(self, buffer: Buffer) -> int:
        return self.sizes[buffer[0]][buffer[1]] if buffer[0] in self.sizes else 0

    def finished(self) -> tuple[Event, ...]:
        assert not self.live, f"left on the device: {list(self.live)}"
        return _placed(_ahead(self.events, self.policy.ahead))


def _ahead(events: Sequence[Event], count: int) -> list[Event]:
    """Each fetch moved up, before `count` more operations than it stands before, but not above what puts its object into the tier or its
    buffer out of use, nor above an earlier fetch."""
    found: list[Event] = []
    for event in events:
        at = len(found)
        if event.kind == "fetch":
            crossed = 0
            while at and crossed < count and found[at - 1].kind != "fetch":
                before = found[at - 1]
                if before.kind in ("store", "free") and before.object == event.object:
                    break
                crossed += before.kind in ("compute", "send")
                at -= 1
        found.insert(at, event)
    return found


def _placed(events: Sequence[Event]) -> tuple[Event, ...]:
    """With slots: a buffer takes the lowest free one of its name. What is equal is one object, since a list grows with the square of the
    chunks."""
    slot: dict[Buffer, int] = {}
    taken: dict[str, set[int]] = defaultdict(set)
    known: dict[Any, Any] = {}
    found = []

    def same(value: Any) -> Any:
        return known.setdefault(value, value)

    for event in events:
        for buffer in event.writes:
            if buffer not in slot:
                mine = taken[buffer[0]]
                slot[buffer] = next(number for number in count() if number not in mine)
                mine.add(slot[buffer])
        buffers = event.reads + event.writes or ((event.object,) if event.kind == "free" else ())
        reads, writes = (same(tuple(map(same, some))) for some in (event.reads, event.writes))
        found.append(same(event._replace(reads=reads, writes=writes, slots=same(tuple(slot[b] for b in buffers)))))
        if event.kind == "free":
            taken[event.name].discard(slot.pop(event.object))
    return tuple(found)


def dependencies(events: Sequence[Event]) -> tuple[tuple[int, ...], ...]:
    """For each event the earlier ones that must have ended: who wrote what it reads, who last used what it writes. Places on the device
    and objects in the tier count alike."""
    writer: dict[tuple, int] = {}
    readers: dict[tuple, list[int]] = {}
    found = []
    for number, event in enumerate(events):
        places = [(buffer[0], slot) for buffer, slot in zip(event.reads + event.writes, event.slots)]
        reads, writes = places[: len(event.reads)], places[len(event.reads) :]
        if event.kind == "fetch":
            reads = [*reads, ("tier", event.object)]
        elif event.kind in ("store", "drop"):
            writes = [*writes, ("tier", event.object)]
        after = {writer[place] for place in reads if place in writer}
        for place in writes:
            after.update(readers.get(place, ()))
            after.update([writer[place]] if place in writer else [])
        for place in reads:
            readers.setdefault(place, []).append(number)
        for place in writes:
            writer[place], readers[place] = number, []
        found.append(tuple(sorted(after - {number})))
    return tuple(found)
