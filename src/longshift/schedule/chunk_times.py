"""When the events of a chunk's list begin and end: what each waits for, on lanes that do one thing at a time."""

from collections.abc import Callable, Sequence

from longshift.schedule.chunks import Event

LANES = {"fetch": "in", "compute": "compute", "send": "link", "store": "out"}  # what runs at the same time


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


def timeline(events: Sequence[Event], seconds: Callable[[Event], float]) -> tuple[tuple[float, float], ...]:
    """(start, end) of each event in seconds, where each of LANES does one thing at a time, in the list's order."""
    free_at: dict[str, float] = {}
    found: list[tuple[float, float]] = []
    for event, after in zip(events, dependencies(events)):
        lane = LANES.get(event.kind)
        start = end = max((found[number][1] for number in after), default=0.0)
        if lane:
            start = max(start, free_at.get(lane, 0.0))
            end = free_at[lane] = start + seconds(event)
        found.append((start, end))
    return tuple(found)
