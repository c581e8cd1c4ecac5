"""What tests of many ranks share besides fixtures: how long a call may take, and the types of what the fixtures give."""

from collections.abc import Callable

from trial import Trial

from longshift.dist.fork import ForkedWorld

DEADLINE_S = 300.0  # for a case of seconds: the machine may be busy


class RenewedWorld(ForkedWorld):
    """Its ranks are started anew after `CALLS` calls: each call leaves some MiB in their heaps and caches."""

    CALLS = 60

    def __init__(self, size: int):
        super().__init__(size)
        self.calls = 0

    def call(self, function: str, deadline_s: float = 60.0, **arguments: object) -> list:
        self.calls += 1
        if self.calls % self.CALLS == 0:
            self.close()
        return super().call(function, deadline_s, **arguments)


Worlds = Callable[[int], ForkedWorld]
Truth = Callable[[Trial], str]
Report = Callable[..., dict]
