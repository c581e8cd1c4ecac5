"""Streaming a sequence through a device in chunks: what is fetched, computed, sent, stored and
freed, in which order.

Papers: Fully Pipelined Distributed Transformer (FPDT, arXiv 2408.16978), Ulysses-Offload.

A pack is cut into chunks of consecutive tokens. What a block reads and writes lies in a *tier*
(device, host or disk memory) as objects, one a chunk; on the device it lies in *buffers*, for as
long as it is used. Not only attention is cut: the residual stream itself comes and goes by chunk,
so that the device holds a few chunks, and with `kv="device"` the keys and values of one block.

    x      input of the block                     dx     gradient of x
    y      output of the block                    dy     gradient of y
    q, kv  queries; keys and values, rotated      dq, dkv   their gradients, in float32
    o      output of attention, log-sum-exp       do     gradient of o

Forward of chunk c, both schedules: x_c -> q_c, kv_c; attention of q_c to kv_c, then to the earlier
kv_j of its first document; o_c -> y_c.

    stream   backward: queries outside, descending. After the pairs (c, j) of chunk c, dkv_c is
             complete: dx_c is formed at once and leaves. Inside a pair: kv_j in, dkv_j in and out.
    fpdt     the paper's: a first pass forms q_c and do_c of all chunks, then keys and values
             outside, ascending. Inside a pair: q_i, do_i, o_i in, dq_i in and out. After the pairs
             of kv_j, dq_j is complete.

    keep="output"   o and kv stay in the tier from forward to backward: attention is never computed
                    twice
    keep="input"    x alone stays; backward begins with the forward of attention
    kv="device"     what all pairs need stays on the device while the block runs: of `stream` kv and
                    dkv, of `fpdt` q, do, o, dq

A pair is explained at [Note: pairs] in `schedule.chunks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from longshift.layout.layout import Schedule, Where
from longshift.schedule.chunks import BufferBytes
from longshift.schedule.event import Buffer, Event, Kind, assign_slots, begin_fetches

AHEAD = 1  # operations before its first reader, at which an object's fetch begins


@dataclass(frozen=True)
class Policy:
    """How a block is streamed.

    `ahead`: how many operations before its first reader a fetch begins.
    `sent`: the share of a buffer that leaves its rank where tokens and heads are exchanged, 0 where
    they are not.
    """

    schedule: Schedule = "stream"
    keep: Literal["output", "input"] = "output"
    kv: Where = "device"
    ahead: int = AHEAD
    sent: float = 0.0


def forward_events(
    first_keys: Sequence[int], policy: Policy, sizes: BufferBytes, drop_x: bool = False
) -> tuple[Event, ...]:
    """A block's forward: from objects x to objects y, and what backward needs.

    `first_keys`: as of `first_key_chunks`.
    `drop_x`: drops x, so that a backward needs another forward before it.
    """
    events = _EventList(first_keys, policy, sizes)
    is_output_kept = policy.keep == "output"
    for chunk in range(len(first_keys)):
        events.attention(chunk, keep=is_output_kept)
        events.tail(chunk)
        if is_output_kept:
            events.store(chunk, "o")
        events.free(chunk, "x", "o")
        if drop_x:
            events.drop(chunk, "x")
    return events.finish()


def backward_events(
    first_keys: Sequence[int], policy: Policy, sizes: BufferBytes
) -> tuple[Event, ...]:
    """A block's backward: from objects dy, and what forward kept, to objects dx. Nothing but dx is
    left in the tier."""
    events = _EventList(first_keys, policy, sizes)
    is_stream = policy.schedule == "stream"
    if policy.keep == "input":
        leave_kv = is_stream and policy.kv == "device"
        for chunk in range(len(first_keys)):
            events.attention(chunk, keep=True, leave_kv=leave_kv)
            events.store(chunk, "o")
            events.free(chunk, "x", "o")
    if is_stream:
        events.queries_outside()
    else:
        events.keys_outside()
    return events.finish()


def end_events(
    operation: str,
    reads: str | None,
    writes: str | None,
    count: int,
    sizes: BufferBytes,
    blocks: Sequence[int] = (),
) -> tuple[Event, ...]:
    """An end of the model, embedding or loss, chunk by chunk: from objects `reads`, which are
    dropped, to objects `writes`.

    `blocks`: of a loss, into how many blocks of rows each chunk is cut.
    """
    events = _EventList(range(count), Policy(), sizes)
    inputs = [reads] if reads else []
    outputs = [writes] if writes else []
    for c in range(count):
        events.need(c, *inputs)
        for block in range(blocks[c] if blocks else 1):
            # The first block of rows makes the output, further ones write into it.
            names = inputs + (outputs if block else [])
            keys = block if blocks else -1
            events.compute(operation, c, _of_chunk(c, names), _of_chunk(c, outputs), keys)
            if operation not in ("embed", "score"):
                events.accumulate(c)
        events.store(c, *outputs)
        events.free(c, *inputs, *outputs)
        events.drop(c, *inputs)
    return events.finish()


def _of_chunk(chunk: int, names: Sequence[str]) -> list[Buffer]:
    return [(name, chunk) for name in names]


class _EventList:
    """An event list while it grows. Mutable.

    `last_readers`: by chunk, the last chunk that sees its keys.
    `live`: buffers on the device.
    `stored`: objects that this list has put into the tier.
    """

    def __init__(self, first_keys: Sequence[int], policy: Policy, sizes: BufferBytes):
        self.first_keys = first_keys
        self.policy = policy
        self.sizes = sizes
        self.count = len(first_keys)
        self.last_readers = []
        for j in range(self.count):
            readers = [c for c in range(j, self.count) if first_keys[c] <= j]
            self.last_readers.append(readers[-1])
        self.is_resident = policy.kv == "device"
        self.events: list[Event] = []
        self.live: dict[Buffer, None] = {}
        self.stored: dict[Buffer, None] = {}

    # Parts of a block

    def attention(self, c: int, keep: bool, leave_kv: bool = False) -> None:
        """Chunk c up to the output of attention. x_c and o_c stay on the device.

        `keep`: whether kv waits for the backward. `leave_kv`: on the device.
        """
        # 1. Attention to its own keys, which go to the tier where they are read again.
        self.need(c, "x")
        self.project(c, graph=False)
        self.compute("attend", c, [("q", c), ("kv", c)], [("o", c)], keys=c)
        is_read_again = self.last_readers[c] > c
        waits_in_tier = not self.is_resident or (keep and not leave_kv)
        if is_read_again and waits_in_tier:
            self.store(c, "kv")
        if not is_read_again or not self.is_resident:
            self.free(c, "kv")

        # 2. Attention to earlier keys.
        for j in range(self.first_keys[c], c):
            self.need(j, "kv")
            self.compute("attend", c, [("q", c), ("kv", j), ("o", c)], [("o", c)], keys=j)
            is_last_reader = self.last_readers[j] == c
            if not self.is_resident or (is_last_reader and not leave_kv):
                self.free(j, "kv")
            if is_last_reader and not self.is_resident and not keep:
                self.drop(j, "kv")
        self.free(c, "q")

    def tail(self, c: int) -> None:
        """o_c and x_c to y_c, which leaves."""
        self.compute("tail", c, [("x", c), self.to_tokens(c)], [("y", c)])
        self.store(c, "y")
        self.free(c, "y", "o_tokens")

    def project(self, c: int, graph: bool, heads: bool = True) -> None:
        """x_c to q_c and kv_c, with what their backward needs; without `heads`, to that alone."""
        x = [("x", c)]
        graphs = [("graph", c)] if graph else []
        outputs = [("q", c), ("kv", c)] if heads else []
        if not self.policy.sent:
            self.compute("qkv", c, x, graphs + outputs)
            return

        # The exchange of tokens for heads is a graph of its own.
        qkv = [("qkv", c)]
        self.compute("qkv", c, x, graphs + qkv)
        exchanges = [("exchange", c)] if graph else []
        self.send("to_heads", c, qkv, exchanges + outputs)
        self.free(c, "qkv")

    def to_tokens(self, c: int) -> Buffer:
        """Have o_c as the rest of the block takes it. Returns its buffer."""
        if not self.policy.sent:
            return "o", c
        self.send("to_tokens", c, [("o", c)], [("o_tokens", c)])
        return "o_tokens", c

    def tail_back(self, c: int) -> None:
        """o_c, x_c and dy_c to do_c and dr_c, the part of dx_c that does not go through
        attention."""
        self.need(c, "x", "o", "dy")
        reads = [("x", c), self.to_tokens(c), ("dy", c)]
        do = ("do_tokens" if self.policy.sent else "do", c)
        self.compute("tail_back", c, reads, [("dr", c), do])
        self.accumulate(c)
        self.free(c, "dy")
        if self.policy.sent:
            self.send("to_tokens_back", c, [do], [("do", c)])
            self.free(c, "do_tokens", "o_tokens")

    def qkv_back(self, c: int) -> None:
        """dq_c, dkv_c and dr_c to dx_c, which leaves."""
        grads = [("dq", c), ("dkv", c)]
        if self.policy.sent:
            dqkv = [("dqkv", c)]
            self.send("to_heads_back", c, [("exchange", c), *grads], dqkv)
            grads = dqkv
        reads = [("graph", c), *grads, ("dr", c)]
        self.compute("qkv_back", c, reads, [("dx", c)])
        self.accumulate(c)
        self.store(c, "dx")
        self.free(c, "graph", "exchange", "dqkv", "dq", "dkv", "dr", "dx", "x")

    # Backward

    def queries_outside(self) -> None:
        for c in reversed(range(self.count)):
            # 1. Make q_c, do_c, and kv_c with its graph.
            self.tail_back(c)
            self.free(c, "kv")  # computed again with its graph
            self.project(c, graph=True)

            # 2. All pairs of queries c.
            for j in range(c, self.first_keys[c] - 1, -1):
                sums: list[Buffer] = []
                if j < c:
                    self.need(j, "kv")
                if ("dkv", j) in self.live or ("dkv", j) in self.stored:
                    self.need(j, "dkv")
                    sums.append(("dkv", j))
                if j < c:
                    sums.append(("dq", c))
                self.attend_back(c, j, sums)
                if j < c and not self.is_resident:
                    self.store(j, "dkv")
                    self.free(j, "dkv", "kv")
            self.free(c, "q", "kv", "o", "do")

            # 3. dkv_c is complete: no earlier queries see it.
            self.qkv_back(c)
            self.drop(c, "x", "o", "dy")
            self.drop_kv(c)
            if ("dkv", c) in self.stored:
                self.drop(c, "dkv")

    def keys_outside(self) -> None:
        # 1. Make q and do of all chunks.
        for c in range(self.count):
            self.tail_back(c)
            self.project(c, graph=False)
            self.store(c, "dr")
            self.free(c, "dr", "x")
            if self.last_readers[c] == c:
                self.store(c, "kv")
            self.free(c, "kv")
            if not self.is_resident:
                self.store(c, "q", "do")
                self.free(c, "q", "do", "o")

        for j in range(self.count):
            # 2. All pairs of keys j.
            self.need(j, "kv")
            for i in range(self.last_readers[j], j - 1, -1):
                sums: list[Buffer] = []
                self.need(i, "q", "do", "o")
                if self.first_keys[i] < j:
                    self.need(i, "dq")
                    sums.append(("dq", i))
                if i < self.last_readers[j]:
                    sums.append(("dkv", j))
                self.attend_back(i, j, sums)
                if i > j and not self.is_resident:
                    self.store(i, "dq")
                    self.free(i, "q", "do", "o", "dq")
            self.free(j, "q", "do", "o", "kv")

            # 3. dq_j is complete: it sees no later keys.
            self.need(j, "x", "dr")
            self.project(j, graph=True, heads=False)
            self.qkv_back(j)
            self.drop(j, "x", "o", "dy", "dr")
            for name in ("q", "do", "dq"):
                if (name, j) in self.stored:
                    self.drop(j, name)
            self.drop_kv(j)

    def attend_back(self, c: int, j: int, sums: Sequence[Buffer]) -> None:
        """The pair (c, j) to dq_c and dkv_j. `sums`: those of them that it adds to."""
        reads = [("q", c), ("kv", j), ("o", c), ("do", c), *sums]
        self.compute("attend_back", c, reads, [("dq", c), ("dkv", j)], keys=j)

    # Events

    def need(self, chunk: int, *names: str) -> None:
        """Have buffers on the device."""
        for name in names:
            if (name, chunk) not in self.live:
                self.live[name, chunk] = None
                self.add_move("fetch", name, chunk, writes=((name, chunk),))

    def compute(
        self,
        name: str,
        c: int,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        keys: int = -1,
    ) -> None:
        self.live |= dict.fromkeys(writes)
        self.events.append(Event("compute", name, c, tuple(reads), tuple(writes), keys))

    def accumulate(self, c: int) -> None:
        self.events.append(Event("accumulate", "weights", c))

    def send(self, name: str, c: int, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        self.live |= dict.fromkeys(writes)
        # What attention works on, or its output, which is as large as its queries. Ranks that
        # share a key/value head are each sent it.
        size = self.size("q", c)
        if name.startswith("to_heads"):
            size += self.size("kv", c)
        sent_bytes = int(size * self.policy.sent)
        self.events.append(Event("send", name, c, tuple(reads), tuple(writes), bytes=sent_bytes))

    def store(self, chunk: int, *names: str) -> None:
        for name in names:
            self.stored[name, chunk] = None
            self.add_move("store", name, chunk, reads=((name, chunk),))

    def free(self, chunk: int, *names: str) -> None:
        """Free those that are on the device."""
        for name in names:
            if (name, chunk) in self.live:
                del self.live[name, chunk]
                self.add_move("free", name, chunk)

    def drop(self, chunk: int, *names: str) -> None:
        for name in names:
            self.stored.pop((name, chunk), None)
            self.add_move("drop", name, chunk)

    def drop_kv(self, c: int) -> None:
        """Drop kv where this list or the forward has stored it."""
        # The forward stores keys and values that a later chunk reads.
        is_kept = self.policy.keep == "output" and self.last_readers[c] > c
        if is_kept or ("kv", c) in self.stored:
            self.drop(c, "kv")

    def add_move(
        self,
        kind: Kind,
        name: str,
        chunk: int,
        reads: tuple[Buffer, ...] = (),
        writes: tuple[Buffer, ...] = (),
    ) -> None:
        size = self.size(name, chunk)
        self.events.append(Event(kind, name, chunk, reads, writes, bytes=size))

    def size(self, name: str, chunk: int) -> int:
        return self.sizes[name][chunk] if name in self.sizes else 0

    def finish(self) -> tuple[Event, ...]:
        assert not self.live, f"left on the device: {list(self.live)}"
        return assign_slots(begin_fetches(self.events, self.policy.ahead))
