"""Work on lanes: when each piece of work of some ranks begins and ends.

A rank has a list of actions and plays it in order: it begins pieces of work, which go on by
themselves, and waits until pieces have
ended. A lane of a rank does one piece at a time, in the order in which the rank began them. A piece
of several parties (a message, an exchange) starts when it is first in its lane on all of them.
Pieces that use the same resource of a rank at the same time share it equally: two gathers on one
link take twice as long each. A piece may need only a share of the last resource that it uses: it
gets so much, or an equal part where that is less, and others share the rest. A piece can crowd a
resource that it does not need for itself: while it goes on, users of the resource lose a share
`crowd` of their rate, once for all that crowd it.

    rank 0   begin gather 2 │ begin compute 1, end compute 1 │ end gather 2 │ begin compute 2 ...
             gather   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
             compute  ████████████████████████        exposed ██████████████
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Begin(NamedTuple):
    """Begins a piece of work that takes `seconds` where nothing shares what it `uses`. `parties`:
    the ranks that begin it under the same key; the rank alone where there are none. `crowds`:
    resources whose users it slows. `share`: of the last resource that it uses, what it needs to go
    at its full rate; of the others it needs all."""

    key: Hashable
    lane: str
    seconds: float
    uses: tuple[str, ...]
    parties: tuple[int, ...] = ()
    crowds: tuple[str, ...] = ()
    share: float = 1.0


class End(NamedTuple):
    """Waits until a piece of work has ended, which any rank may have begun, or will begin."""

    key: Hashable


class TimedWork(NamedTuple):
    """A piece of work as it was played on a rank."""

    rank: int
    lane: str
    key: Hashable
    start: float
    end: float


@dataclass(slots=True)
class _PendingWork:
    """A piece under way, or not yet. Mutable.

    `remaining_s`: seconds at full rate, as of `since`, the most of all parties'.
    `share`: the largest of all parties'.
    `queues`: its lane of each rank that has begun it.
    `places`, `crowds`: resources of all of them.
    `version`: of its entry in the heap.
    """

    begin: Begin
    parties: tuple[int, ...]
    remaining_s: float = 0.0
    share: float = 0.0
    queues: dict[int, int] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    crowds: list[int] = field(default_factory=list)
    start: float = -1.0
    since: float = 0.0
    rate: float = 1.0
    version: int = 0


def play(lists: Sequence[Sequence[Begin | End]], crowd: float = 0.0) -> list[TimedWork]:
    """All pieces of work with their times, by end. `crowd`: share of its rate that a piece loses
    while others crowd what it uses. Raises ValueError where ranks wait for each other for ever."""
    return _Lanes(lists, crowd).run()


def part(needs: Collection[float], capacity: float) -> float:
    """The most that a user of a resource gets of it, where users need these shares.

    It is an equal part of what those who need less leave (max-min fairness).
    """
    count = len(needs)
    if count == 1 or min(needs) == 1.0:
        return capacity / count
    for need in sorted(needs):
        if need * count > capacity:
            break
        capacity -= need
        count -= 1
    return capacity / count if count else math.inf


class _Lanes:
    """Mutable. Pieces, lanes of ranks and resources of ranks go by numbers: a key is looked up once
    where a rank begins or awaits it."""

    def __init__(self, lists: Sequence[Sequence[Begin | End]], crowd: float):
        self.crowd = crowd
        numbers: dict[Hashable, int] = {}
        self.lists = [
            [(numbers.setdefault(action.key, len(numbers)), action) for action in actions]
            for actions in lists
        ]
        self.next = [0] * len(lists)
        self.now = 0.0
        self.works: list[_PendingWork | None] = [None] * len(numbers)
        self.ended = bytearray(len(numbers))
        self.waiting: dict[int, list[int]] = {}  # ranks, by the piece that they wait for
        self.resources: dict[tuple[int, tuple[str, ...]], list[int]] = {}  # of a rank, by names
        self.lanes: dict[tuple[int, str], int] = {}
        self.places: dict[tuple[int, str], int] = {}
        self.queues: list[deque[int]] = []
        self.users: list[dict[int, float]] = []  # of each resource, and the share that each needs
        self.crowding: list[int] = []
        self.heap: list[tuple[float, int, int, int]] = []
        self.count = 0
        self.under_way = 0  # pieces that are begun and have not ended
        self.spans: list[TimedWork] = []

    def run(self) -> list[TimedWork]:
        for rank in range(len(self.lists)):
            self._advance(rank)
        while self.heap:
            end, _, version, number = heapq.heappop(self.heap)
            work = self.works[number]
            # An entry of an older version was pushed before the piece changed its rate.
            if work is not None and work.version == version:
                self.now = end
                self._finish(number, work)

        for rank, actions in enumerate(self.lists):
            if self.next[rank] < len(actions):
                raise ValueError(
                    f"rank {rank} waits for ever for {actions[self.next[rank]][1].key}"
                )
        return self.spans

    def _advance(self, rank: int) -> None:
        """Play a rank's actions until one has to wait."""
        actions = self.lists[rank]
        index = self.next[rank]
        while index < len(actions):
            number, action = actions[index]
            if isinstance(action, Begin):
                if self._undisturbed(actions, index, action):
                    # Its time is known already, so it needs no heap.
                    start = self.now
                    self.now = start + action.seconds
                    self.ended[number] = True
                    self.spans.append(TimedWork(rank, action.lane, action.key, start, self.now))
                    index += 1
                else:
                    self._begin(rank, number, action)
            elif not self.ended[number]:
                self.waiting.setdefault(number, []).append(rank)
                break
            index += 1
        self.next[rank] = index

    def _undisturbed(
        self, actions: Sequence[tuple[int, Begin | End]], index: int, action: Begin
    ) -> bool:
        """Whether a piece that begins here takes its own seconds.

        It does if a single rank awaits it at once while nothing else goes on.
        """
        if len(self.lists) > 1 or self.under_way or index + 1 == len(actions):
            return False
        number, next_action = actions[index + 1]
        if number != actions[index][0] or not isinstance(next_action, End):
            return False
        return not (action.crowds and set(action.crowds) & set(action.uses))

    def _begin(self, rank: int, number: int, action: Begin) -> None:
        work = self.works[number]
        if work is None:
            work = self.works[number] = _PendingWork(action, action.parties or (rank,))
            self.under_way += 1
        lane = self.lanes.setdefault((rank, action.lane), len(self.queues))
        if lane == len(self.queues):
            self.queues.append(deque())

        # Parties may say different seconds: of a message the sender alone knows its bytes.
        work.remaining_s = max(work.remaining_s, action.seconds)
        work.share = max(work.share, action.share)
        work.queues[rank] = lane
        work.places += self._resources(rank, action.uses)
        work.crowds += self._resources(rank, action.crowds)
        self.queues[lane].append(number)
        self._start(number, work)

    def _resources(self, rank: int, names: tuple[str, ...]) -> list[int]:
        """The numbers of a rank's resources."""
        key = rank, names
        if key not in self.resources:
            numbers = [self.places.setdefault((rank, name), len(self.places)) for name in names]
            self.resources[key] = numbers
            num_new = len(self.places) - len(self.users)
            self.users += [{} for _ in range(num_new)]
            self.crowding += [0] * num_new
        return self.resources[key]

    def _start(self, number: int, work: _PendingWork) -> None:
        """Start a piece that all parties have begun, where it is first in all lanes."""
        if work.start >= 0 or len(work.queues) < len(work.parties):
            return
        if any(self.queues[lane][0] != number for lane in work.queues.values()):
            return
        work.start = work.since = self.now
        # Each party's resources stand in a row; a share is of the last of them.
        num_uses = len(work.begin.uses)
        for count, place in enumerate(work.places, 1):
            self.users[place][number] = 1.0 if count % num_uses else work.share
        for place in work.crowds:
            self.crowding[place] += 1
        self._share((*work.places, *work.crowds), number)

    def _finish(self, number: int, work: _PendingWork) -> None:
        """End a piece, and go on with all that waits for it."""
        self.ended[number] = True
        self.works[number] = None
        self.under_way -= 1
        for place in work.places:
            del self.users[place][number]
        for place in work.crowds:
            self.crowding[place] -= 1
        self._share((*work.places, *work.crowds))

        # What is next in a lane starts before ranks that waited begin more.
        for rank in work.parties:
            self.spans.append(
                TimedWork(rank, work.begin.lane, work.begin.key, work.start, self.now)
            )
            queue = self.queues[work.queues[rank]]
            queue.popleft()
            if queue:
                following = self.works[queue[0]]
                assert following is not None
                self._start(queue[0], following)
        for rank in self.waiting.pop(number, ()):
            self.next[rank] += 1  # past the action that waited
            self._advance(rank)

    def _share(self, places: Sequence[int], fresh: int = -1) -> None:
        """Give the users of some places their new rates."""
        numbers = {number: None for place in places for number in self.users[place]}
        if fresh >= 0:
            numbers[fresh] = None
        for number in numbers:
            work = self.works[number]
            assert work is not None
            slowdown = 1.0
            for place in work.places:
                users = self.users[place]
                capacity = 1.0 - self.crowd * (self.crowding[place] > 0)
                slowdown = max(slowdown, users[number] / part(users.values(), capacity))
            rate = 1.0 / slowdown
            if rate == work.rate and number != fresh:
                continue
            work.remaining_s -= (self.now - work.since) * work.rate
            work.since = self.now
            work.rate = rate
            # Entries of older versions stay in the heap, and are passed over.
            work.version += 1
            self.count += 1
            end_s = self.now + max(0.0, work.remaining_s) / rate
            heapq.heappush(self.heap, (end_s, self.count, work.version, number))
