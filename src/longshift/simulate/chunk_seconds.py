"""Seconds of a chunked pack's turns: the event lists of a unit, played on the lanes of `schedule.chunk_times`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longshift.cluster.cluster import Cluster, Heads
from longshift.layout.heads import own_heads
from longshift.layout.layout import Layout
from longshift.schedule import chunk_times
from longshift.schedule.chunks import Event
from longshift.schedule.streamed import Lists, Turn
from longshift.spec.formats import FORMATS
from longshift.spec.model import ModelSpec, attended


@dataclass(frozen=True)
class ChunkSeconds:
    """How long events take on a rank. `device_is_host`: a CPU, whose host tier moves nothing; `moving`: whether tiers take time; `window`:
    of the block."""

    spec: ModelSpec
    layout: Layout
    cluster: Cluster
    dtype: str
    device_is_host: bool
    moving: bool = True
    window: int | None = None

    def turn(self, made: Lists, turn: Turn) -> tuple[float, float]:
        """A turn of a unit until its last operation, and the seconds of its busiest lane, which many such units need each."""
        seconds = self._of(made)
        events = made.of[turn]
        played = [(event, *times) for event, times in zip(events, chunk_times.timeline(events, seconds))]
        until = max((end for event, _, end in played if event.kind in ("compute", "send")), default=0.0)
        busy: dict[str, float] = {}
        for event, start, end in played:
            lane = chunk_times.LANES.get(event.kind, "")
            busy[lane] = busy.get(lane, 0.0) + end - start
        return until, max(busy.values(), default=0.0)

    def _of(self, made: Lists) -> Callable[[Event], float]:
        known: dict[tuple, float] = {}

        def seconds(event: Event) -> float:
            queries = made.orders[event.chunk].local_tokens
            keys = made.orders[event.keys].local_tokens if event.keys >= 0 and event.name.startswith("attend") else 0
            what = event.kind, event.name, event.bytes, queries, keys, event.chunk == event.keys
            if what not in known:
                moves = event.kind in ("fetch", "store")
                known[what] = self._moved(event) if moves else self._computed(event, queries, keys)
            return known[what]

        return seconds

    def _moved(self, event: Event) -> float:
        """The disk is one for all ranks of a node."""
        layout, cluster = self.layout, self.cluster
        if not self.moving or layout.offload == "device" or (layout.offload == "host" and self.device_is_host):
            return 0.0
        if layout.offload == "host":
            way = "to_device" if event.kind == "fetch" else "to_host"
            return float(cluster.copy_s(f"{way} pinned both", event.bytes, beyond=True))
        ranks = layout.world / cluster.nodes
        return ranks * float(cluster.disk_s("read" if event.kind == "fetch" else "write", event.bytes, depth=1, mode="plain", beyond=True))

    def _computed(self, event: Event, queries: int, keys: int) -> float:
        """`queries`, `keys`: tokens of a ring rank."""
        cluster, dtype, layout, spec = self.cluster, self.dtype, self.layout, self.spec
        if event.kind == "send":
            return float(cluster.collective_s("all_to_all", event.bytes, layout.ulysses, "node", beyond=True))
        if event.name.startswith("attend"):
            direction, diagonal = "backward" if event.name == "attend_back" else "forward", event.chunk == event.keys
            if diagonal and layout.ring == 1:
                return self._seen(event) * float(cluster.attention_s(queries, keys, self.heads, dtype, direction, causal=True, beyond=True))
            part = 0.5 if diagonal else 1.0
            if self.window is not None:
                part *= self._seen(event)
            return part * float(cluster.attention_s(queries, keys * layout.ring, self.heads, dtype, direction, beyond=True))
        rows, width, inner = queries / layout.ulysses, spec.width, spec.heads * spec.head_width / layout.tp
        if event.name.startswith("embed"):
            return float(cluster.elementwise_s(2 * FORMATS[dtype].compute_bytes * rows / layout.tp * width, dtype, beyond=True))
        if event.name == "loss":
            shapes: Sequence[tuple[float, float]] = [(width, spec.vocab / layout.tp)]
        elif event.name.startswith("qkv"):
            shapes = [(width, inner + 2 * spec.kv_heads * spec.head_width / layout.tp)]
        else:
            ffn = spec.ffn / layout.tp
            shapes = [(inner, width), *[(width, ffn)] * (2 if spec.gated else 1), (ffn, width)]
        times = {"qkv": 1, "tail": 1, "tail_back": 3, "qkv_back": 2, "loss": 3}[event.name]
        return times * sum(float(cluster.matmul_s(rows, k, n, dtype, beyond=True)) for k, n in shapes)

    def _seen(self, event: Event) -> float:
        """Share of a pair of chunks that lies inside the window."""
        n, back = self.layout.chunk, event.chunk - event.keys
        if self.window is None or self.window >= (back + 1) * n:
            return 1.0
        until = [attended((number + 1) * n, self.window) for number in (back - 2, back - 1, back)]
        whole = [attended((number + 1) * n, None) for number in (back - 2, back - 1, back)]
        seen, area = (now - 2 * before + earlier for earlier, before, now in (until, whole))
        return float(seen / area)

    @property
    def heads(self) -> Heads:
        """The heads of the first rank, which has no fewer than another."""
        return Heads(*own_heads(self.spec, self.layout, self.layout.coord(0)), self.spec.head_width)
