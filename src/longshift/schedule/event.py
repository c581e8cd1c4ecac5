"""What is done for a chunk, one event after another: the places on the device that events use, and
which events wait for which."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

Kind = Literal["fetch", "compute", "send", "store", "free", "drop", "accumulate"]
Buffer = tuple[str, int]  # an object's name, its chunk

# Events that form gradients of weights by matmuls.
MULTIPLYING_BACK = ("loss", "tail_back", "qkv_back")

# Kinds of events that go on at the same time.
LANES = {"fetch": "in", "compute": "compute", "send": "link", "store": "out"}


class Event(NamedTuple):
    """One thing that is done for a chunk. `accumulate` adds the gradients that the operation before
    it left on weights to their sums.

    `name`: of compute and send the operation, else the object.
    `keys`: of attention the chunk whose keys it takes, of a loss the block of rows.
    `bytes`: that move.
    `slots`: places on the device of `reads` and `writes`, in that order. Two buffers of one name
    and slot are never there at one time.
    """

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


def begin_fetches(events: Sequence[Event], ahead: int) -> list[Event]:
    """Move each fetch up, before `ahead` more operations than it stands before."""
    moved: list[Event] = []
    for event in events:
        index = len(moved)
        num_operations = 0
        while event.kind == "fetch" and index and num_operations < ahead:
            previous = moved[index - 1]
            # Fetches keep their order. What puts the object into the tier, or its buffer out of
            # use, comes first.
            if previous.kind == "fetch":
                break
            if previous.kind in ("store", "free") and previous.object == event.object:
                break
            num_operations += previous.kind in ("compute", "send")
            index -= 1
        moved.insert(index, event)
    return moved


def assign_slots(events: Sequence[Event]) -> tuple[Event, ...]:
    """Give each buffer the lowest free slot of its name."""
    slots: dict[Buffer, int] = {}
    used_slots: dict[str, set[int]] = defaultdict(set)

    # Equal values become one object, since a list grows with the square of the chunks.
    values: dict[Any, Any] = {}

    def intern(value: Any) -> Any:
        return values.setdefault(value, value)

    def intern_buffers(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return intern(tuple(map(intern, buffers)))

    slotted = []
    for event in events:
        for buffer in event.writes:
            if buffer not in slots:
                used = used_slots[buffer[0]]
                slots[buffer] = next(slot for slot in count() if slot not in used)
                used.add(slots[buffer])
        buffers = event.reads + event.writes
        if event.kind == "free":
            buffers = (event.object,)
        with_slots = event._replace(
            reads=intern_buffers(event.reads),
            writes=intern_buffers(event.writes),
            slots=intern(tuple(slots[buffer] for buffer in buffers)),
        )
        slotted.append(intern(with_slots))
        if event.kind == "free":
            used_slots[event.name].discard(slots.pop(event.object))
    return tuple(slotted)


def dependencies(events: Sequence[Event]) -> tuple[tuple[int, ...], ...]:
    """For each event the earlier ones that must have ended: who wrote what it reads, who last used
    what it writes. Places on the device and objects in the tier count alike."""
    writers: dict[tuple, int] = {}
    readers: dict[tuple, list[int]] = {}
    dependencies = []
    for number, event in enumerate(events):
        # 1. Places of what it reads and writes.
        buffers = event.reads + event.writes
        places: list[tuple] = [(name, slot) for (name, _), slot in zip(buffers, event.slots)]
        reads = places[: len(event.reads)]
        writes = places[len(event.reads) :]
        if event.kind == "fetch":
            reads.append(("tier", event.object))
        elif event.kind in ("store", "drop"):
            writes.append(("tier", event.object))

        # 2. It comes after who wrote them, and a write after who read them since.
        earlier = {writers[place] for place in reads + writes if place in writers}
        for place in writes:
            earlier.update(readers.get(place, ()))
        dependencies.append(tuple(sorted(earlier)))

        # 3. Later events come after this one.
        for place in reads:
            readers.setdefault(place, []).append(number)
        for place in writes:
            writers[place] = number
            readers[place] = []
    return tuple(dependencies)
