"""What tests of many ranks share besides fixtures: how long a call may take, and the types of what the fixtures give."""

from collections.abc import Callable

from longshift.dist.fork import ForkedWorld
from longshift.trainer.check import Trial

DEADLINE_S = 300.0  # for a case of seconds: the machine may be busy

Worlds = Callable[[int], ForkedWorld]
Truth = Callable[[Trial], str]
Report = Callable[..., dict]
