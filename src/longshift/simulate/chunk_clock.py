"""Seconds of a chunked pack: the event lists of a unit, recorded event by event and played on
lanes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longshift.cluster.cluster import Cluster
from longshift.layout.layout import Layout
from longshift.schedule import chunks
from longshift.schedule.event import LANES, Event, dependencies
from longshift.schedule.sequence import Run
from longshift.schedule.unit_events import EventLists, Turn, event_lists
from longshift.simulate.cost import Cost
from longshift.simulate.lanes import Begin, End, TimedWork, play
from longshift.simulate.rates import tier_copy_s
from longshift.weigh.chunk_profile import event_turn
from longshift.weigh.turn_profile import RankSetup


@dataclass(frozen=True)
class ChunkClock:
    """Times the events of a rank. `moving`: whether tiers take time."""

    cost: Cost
    cluster: Cluster
    layout: Layout
    moving: bool = True

    def turn_s(self, pack: Sequence[int], turn: Turn) -> float:
        """Seconds of a turn of a mean block, or of another unit, on a pack: until its last
        operation, or as long as its busiest lane is busy. The lanes of a turn are not those of the
        next."""
        total_s = 0.0
        for window, share in self.cost.spec.windows.items():
            until_s, busiest_s = self.turn(pack, turn, window)
            total_s += share * max(until_s, busiest_s)
        return total_s

    def turn(self, pack: Sequence[int], turn: Turn, window: int | None) -> tuple[float, float]:
        """Seconds of a turn of a unit until its last operation, and of its busiest lane, which many
        such units need each."""
        cut = chunks.cut_chunks(list(pack), self.layout.chunk)
        events = self.lists(cut, window)
        pieces = timeline(events.by_turn[turn], self._seconds(events, cut, window))
        busy = {}
        for piece in pieces:
            busy[piece.lane] = busy.get(piece.lane, 0.0) + piece.end - piece.start

        # Copies to a tier may end later: they go on beside the next unit.
        ends = [piece.end for piece in pieces if piece.lane in ("compute", "link")]
        return max(ends, default=0.0), max(busy.values(), default=0.0)

    def lists(self, cut: Sequence[Sequence[Run]], window: int | None) -> EventLists:
        """Event lists of the first rank, which has no fewer heads than another."""
        layout = self.layout
        element_bytes = int(self.cost.rates.element_bytes)
        return event_lists(self.cost.spec, layout, layout.coord(0), element_bytes, cut, window)

    def _seconds(
        self, events: EventLists, cut: Sequence[Sequence[Run]], window: int | None
    ) -> Callable[[Event], float]:
        """Seconds of events of these lists. Events of equal chunks, as far apart, take equally
        long."""
        spec = self.cost.spec
        cache: dict[tuple, float] = {}
        block = next(
            number for number in range(1, spec.layers + 1) if spec.window(number) == window
        )

        def seconds(event: Event) -> float:
            if event.kind in ("fetch", "store"):
                return self._copy_s(event)

            is_attention = event.name.startswith("attend")
            keys = None
            if is_attention:
                keys = events.orders[event.keys]
            elif event.name in ("loss", "score"):
                keys = event.keys
            # A window cuts pairs of chunks by their distance; else the diagonal alone differs.
            distance = event.chunk == event.keys
            if is_attention and window:
                distance = event.chunk - event.keys
            queries = events.orders[event.chunk]
            key = event.name, queries, keys, distance, len(event.reads), len(event.writes)
            if key not in cache:
                cache[key] = self._compute_s(events, cut, event, block)
            return cache[key]

        return seconds

    def _compute_s(
        self, events: EventLists, cut: Sequence[Sequence[Run]], event: Event, block: int
    ) -> float:
        cost = self.cost
        rates = cost.rates
        layout = self.layout
        setup = RankSetup(
            spec=cost.spec,
            layout=layout,
            coord=layout.coord(0),
            compute_bytes=int(rates.element_bytes),
            transport=cost.transport,
            float8=cost.rounds,
            compiled=cost.habits.compiled,
        )
        profile = event_turn(setup, events, cut, event, block)
        is_block = event.name not in ("embed", "embed_back", "loss", "score")
        work = cost.event(layout.mesh, profile.calls, is_block)
        seconds = float(work.exposed_s(cost.launch_s))
        # Gradients that the event leaves on weights are added to their sums after it.
        if profile.grads:
            elements = profile.grads / rates.element_bytes
            seconds += float(rates.elementwise_s(elements * cost.accumulation_bytes))
        return seconds

    def _copy_s(self, event: Event) -> float:
        """The disk is one for all ranks of a node; a CPU's host tier moves nothing."""
        tier = self.layout.offload
        is_same_memory = tier == "host" and self.cluster.device.kind == "cpu"
        if not self.moving or tier == "device" or is_same_memory:
            return 0.0
        direction = "in" if event.kind == "fetch" else "out"
        return tier_copy_s(self.cluster, tier, self.layout.world, event.bytes, direction)


def timeline(events: Sequence[Event], seconds: Callable[[Event], float]) -> list[TimedWork]:
    """The pieces of work of a list by number, on the lanes of `schedule.event.LANES`.

    Each lane does one thing at a time, in the list's order. An event without a lane takes no time:
    who waits for it waits for its own dependencies.
    """
    waits_of_event: list[tuple[int, ...]] = []
    actions: Mapping[str, list[Begin | End]] = {lane: [] for lane in LANES.values()}
    for number, (event, earlier_events) in enumerate(zip(events, dependencies(events))):
        waits: set[int] = set()
        for earlier in earlier_events:
            has_lane = events[earlier].kind in LANES
            waits.update((earlier,) if has_lane else waits_of_event[earlier])
        waits_of_event.append(tuple(sorted(waits)))
        lane = LANES.get(event.kind)
        if lane:
            actions[lane] += [End(wait) for wait in waits_of_event[number]]
            actions[lane] += [Begin(number, lane, seconds(event), ()), End(number)]
    pieces = play(list(actions.values()))
    return sorted(pieces, key=lambda piece: piece.key)  # pyright: ignore
