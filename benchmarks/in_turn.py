"""Steps of several ways in turn, so that what else a machine does falls on all of them alike."""

from collections.abc import Mapping
from typing import Any

from common import say

from longshift.dist.fork import ForkedWorld

DEADLINE_S = 600.0


def in_turn(world: ForkedWorld, ways: Mapping[str, Mapping[str, Any]], rounds: int, told: str = "") -> dict[str, list[dict]]:
    """What `home_ranks.timed_step` answers for each way, by round, on a world of one rank. A round begins with another way than the one
    before; the first is not counted."""
    names = list(ways)
    found: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            found[name] += world.call("home_ranks:timed_step", DEADLINE_S, **ways[name])
        say(f"{told}round {number} of {rounds}:", {name: round(some[-1]["seconds"], 3) for name, some in found.items()})
    world.call("home_ranks:forget", DEADLINE_S)
    return {name: some[1:] for name, some in found.items()}
