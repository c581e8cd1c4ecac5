"""Seconds of a chunked pack's turns: the event lists of a unit, played on the lanes of `schedule.chunk_times`."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from longshift.cluster.cluster import Cluster, Heads
from longshift.layout.heads import own_heads
from longshift.layout.layout import Layout
from longshift.model.kernel_calls import EVEN, LONG
from longshift.schedule import chunk_times
from longshift.schedule.chunks import Event
from longshift.schedule.streamed import Lists, Turn
from longshift.simulate.cost import Cost, Mesh
from longshift.simulate.rates import CUDNN_BACKEND
from longshift.spec.model import ModelSpec, attended

HEADS = ("loss", "score")


@dataclass(frozen=True)
class ChunkSeconds:
    """How long events take on a rank of `cluster`. `cost`: of what is computed, as for whole packs; `device_is_host`: a CPU, whose host
    tier moves nothing; `moving`: whether tiers take time; `window`: of the block."""

    spec: ModelSpec
    layout: Layout
    cluster: Cluster
    cost: Cost
    device_is_host: bool
    moving: bool = True
    window: int | None = None

    def turn(self, made: Lists, turn: Turn) -> tuple[float, float]:
        """A turn of a unit until its last operation, and the seconds of its busiest lane, which many such units need each."""
        events = made.of[turn]
        blocks = Counter(event.chunk for event in events if event.kind == "compute" and event.name in HEADS)
        seconds = self._of(made, blocks)
        played = [(event, *times) for event, times in zip(events, chunk_times.timeline(events, seconds))]
        until = max((end for event, _, end in played if event.kind in ("compute", "send")), default=0.0)
        busy: dict[str, float] = {}
        for event, start, end in played:
            lane = chunk_times.LANES.get(event.kind, "")
            busy[lane] = busy.get(lane, 0.0) + end - start
        return until, max(busy.values(), default=0.0)

    def _of(self, made: Lists, blocks: Mapping[int, int]) -> Callable[[Event], float]:
        """`blocks`: in how many blocks of rows the loss of each chunk is computed."""
        known: dict[tuple, float] = {}

        def seconds(event: Event) -> float:
            queries = made.orders[event.chunk].local_tokens
            keys = made.orders[event.keys].local_tokens if event.keys >= 0 and event.name.startswith("attend") else 0
            what = event.kind, event.name, event.bytes, queries, keys, event.chunk == event.keys, blocks.get(event.chunk, 1)
            if what not in known:
                moves = event.kind in ("fetch", "store")
                known[what] = self._moved(event) if moves else self._computed(event, queries, keys, what[-1])
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

    def _computed(self, event: Event, queries: int, keys: int, blocks: int) -> float:
        """`queries`, `keys`: tokens of a ring rank."""
        layout = self.layout
        if event.kind == "send":
            rates = self.cost.rates
            per_node = max(1, int(rates.fabric.per_node) // layout.tp)
            return float(rates.collective_s("all_to_all", event.bytes, layout.ulysses, per_node))
        if event.name.startswith("attend"):
            return self._attention_s(event, queries, keys)
        mesh, tokens = Mesh(layout.tp, layout.ulysses, layout.ring), queries * layout.ring
        if event.name.startswith("embed"):
            work = self.cost.embeddings(mesh, tokens, event.name == "embed_back")
        elif event.name in HEADS:
            work = self.cost.head(mesh, tokens / blocks, event.name == "loss")
            if event.name == "loss":
                work = work + self.cost.accumulated(mesh, self.cost.sizes.head_elements * self.cost.sizes.head_trained)
        else:
            work = self.cost.seam(event.name, mesh, tokens)  # pyright: ignore[reportArgumentType]
        return float(work.exposed_s(self.cost.launch_s))

    def _attention_s(self, event: Event, queries: int, keys: int) -> float:
        """Of a chunk's queries and the keys of one chunk, all the ring's."""
        layout, cluster, rates = self.layout, self.cluster, self.cost.rates
        backward, diagonal, seen = event.name == "attend_back", event.chunk == event.keys, self._seen(event)
        if rates.cluster is None:
            pairs = queries * keys * layout.ring * (0.5 if diagonal else 1.0) * seen
            flash_s = rates.attention_s(queries * seen, pairs, self.heads.query, self.heads.width, backward)
            return float(flash_s / self.cost.attention_gain(queries, pairs, backward))
        how = self.heads, rates.dtype, "backward" if backward else "forward"
        without = None if queries % EVEN == 0 or min(queries, keys) >= LONG else CUDNN_BACKEND
        if diagonal and layout.ring == 1:
            return seen * float(cluster.attention_s(queries, keys, *how, causal=True, beyond=True, without=without))
        whole_s = cluster.attention_s(queries, keys * layout.ring, *how, beyond=True, without=without)
        return seen * (0.5 if diagonal else 1.0) * float(whole_s)

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
