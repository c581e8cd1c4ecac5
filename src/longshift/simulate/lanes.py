"""Work on lanes: when each piece of work of some ranks begins and ends.

A rank has a list of actions and plays it in order: it begins pieces of work, which go on by themselves, and waits until pieces have
ended. A lane of a rank does one piece at a time, in the order in which the rank began them. A piece of several parties (a message, an
exchange) starts when it is first in its lane on all of them. Pieces that use the same resource of a rank at the same time share it
equally: two gathers on one link take twice as long each. A piece can crowd a resource that it does not need for itself: while it goes on,
users of the resource lose a share `crowd` of their rate, once for all that crowd it.

    rank 0   begin gather 2 │ begin compute 1, end compute 1 │ end gather 2 │ begin compute 2 ...
             gather   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
             compute  ████████████████████████        exposed ██████████████
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Begin(NamedTuple):
    """Begins a piece of work that takes `seconds` where nothing shares what it `uses`. `parties`: the ranks that begin it under the same
    key; the rank alone where there are none. `crowds`: resources whose users it slows."""

    key: Hashable
    lane: str
    seconds: float
    uses: tuple[str, ...]
    parties: tuple[int, ...] = ()
    crowds: tuple[str, ...] = ()


class End(NamedTuple):
    """Waits until a piece of work has ended."""

    key: Hashable


class Timed(NamedTuple):
    """A piece of work as it was played on a rank."""

    rank: int
    lane: str
    key: Hashable
    start: float
    end: float


@dataclass
class _Work:
    """A piece under way, or not yet. Mutable. `left`: seconds at full rate, as of `since`; `version`: of its entry in the heap."""

    lane: str
    left: float
    places: list[tuple[int, str]]
    crowds: list[tuple[int, str]]
    parties: tuple[int, ...]
    begun: int = 0
    start: float = -1.0
    since: float = 0.0
    rate: float = 1.0
    version: int = 0
    waiting: list[int] = field(default_factory=list)


def play(lists: Sequence[Sequence[Begin | End]], crowd: float = 0.0) -> list[Timed]:
    """All pieces of work with their times, by end. `crowd`: share of its rate that a piece loses while others crowd what it uses. Raises
    ValueError where ranks wait for each other for ever."""
    return _Lanes(lists, crowd).run()


class _Lanes:
    def __init__(self, lists: Sequence[Sequence[Begin | End]], crowd: float):
        self.lists, self.crowd = lists, crowd
        self.next = [0] * len(lists)
        self.now = 0.0
        self.works: dict[Hashable, _Work] = {}
        self.ended: set[Hashable] = set()
        self.queues: dict[tuple[int, str], deque[Hashable]] = defaultdict(deque)
        self.users: dict[tuple[int, str], dict[Hashable, None]] = defaultdict(dict)
        self.crowding: dict[tuple[int, str], int] = defaultdict(int)
        self.heap: list[tuple[float, int, int, Hashable]] = []
        self.count = 0
        self.spans: list[Timed] = []

    def run(self) -> list[Timed]:
        for rank in range(len(self.lists)):
            self._advance(rank)
        while self.heap:
            end, _, version, key = heapq.heappop(self.heap)
            if key in self.works and self.works[key].version == version:
                self.now = end
                self._finish(key)
        for rank, actions in enumerate(self.lists):
            if self.next[rank] < len(actions):
                raise ValueError(f"rank {rank} waits for ever for {actions[self.next[rank]].key}")
        return self.spans

    def _advance(self, rank: int) -> None:
        actions = self.lists[rank]
        while self.next[rank] < len(actions):
            action = actions[self.next[rank]]
            if isinstance(action, End):
                if action.key not in self.ended:
                    self.works[action.key].waiting.append(rank)
                    return
            else:
                self._begin(rank, action)
            self.next[rank] += 1

    def _begin(self, rank: int, action: Begin) -> None:
        work = self.works.get(action.key)
        if work is None:
            work = self.works[action.key] = _Work(action.lane, action.seconds, [], [], action.parties or (rank,))
        work.left = max(work.left, action.seconds)
        work.places += [(rank, name) for name in action.uses]
        work.crowds += [(rank, name) for name in action.crowds]
        work.begun += 1
        self.queues[rank, action.lane].append(action.key)
        self._start(action.key)

    def _start(self, key: Hashable) -> None:
        """Start a piece that all parties have begun, where it is first in all lanes."""
        work = self.works[key]
        if work.start >= 0 or work.begun < len(work.parties) or any(self.queues[rank, work.lane][0] != key for rank in work.parties):
            return
        work.start = work.since = self.now
        for place in work.places:
            self.users[place][key] = None
        for place in work.crowds:
            self.crowding[place] += 1
        self._share([*work.places, *work.crowds], key)

    def _finish(self, key: Hashable) -> None:
        work = self.works.pop(key)
        self.ended.add(key)
        for place in work.places:
            del self.users[place][key]
        for place in work.crowds:
            self.crowding[place] -= 1
        self._share([*work.places, *work.crowds])
        for rank in work.parties:
            self.spans.append(Timed(rank, work.lane, key, work.start, self.now))
            queue = self.queues[rank, work.lane]
            queue.popleft()
            if queue:
                self._start(queue[0])
        for rank in work.waiting:
            self.next[rank] += 1
            self._advance(rank)

    def _share(self, places: Sequence[tuple[int, str]], fresh: Hashable | None = None) -> None:
        """Give the users of some places their new rates."""
        keys = dict.fromkeys(key for place in places for key in self.users[place])
        if fresh is not None:
            keys[fresh] = None
        for key in keys:
            work = self.works[key]
            slowed = (len(self.users[place]) / (1.0 - self.crowd * (self.crowding[place] > 0)) for place in work.places)
            rate = 1.0 / max(slowed, default=1.0)
            if rate != work.rate or key == fresh:
                work.left -= (self.now - work.since) * work.rate
                work.since, work.rate = self.now, rate
                work.version += 1
                self.count += 1
                heapq.heappush(self.heap, (self.now + max(0.0, work.left) / rate, self.count, work.version, key))
