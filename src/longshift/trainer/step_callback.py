"""A function of the user's own that rank 0 calls after each step: `train.on_step`, or
`ls.train(..., on_step=...)`.

    def watch(metrics, control):
        control.log(perplexity=math.exp(metrics.loss))
        if metrics.loss < 2:
            control.stop("the loss is low enough")

What it asks for goes to all ranks before any acts on it. It is given numbers, and nothing that they
are computed from."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING

from longshift.config import Config
from longshift.errors import UsageError, shown
from longshift.trainer.metrics import StepMetrics
from longshift.user_code import describe_error, load_object, printing_aside

if TYPE_CHECKING:  # what `run_folder` asks of a function needs no torch
    from longshift.dist.world import World

KEY = "train.on_step"  # of a config


@dataclass
class StepRequest:
    """What a callback asks for after a step. `stop`: why the run is to end; `fault`: what the
    callback raised, in a line."""

    stop: str | None = None
    save: bool = False
    logged: dict[str, float] = field(default_factory=dict)
    fault: str | None = None


class StepControl:
    """What a callback may do after a step. Mutable: the request that it makes."""

    def __init__(self, request: StepRequest):
        self._request = request

    def stop(self, reason: str) -> None:
        """Save this step, and end the run without an error. `reason` stands in the last line of the
        run, and in its metrics."""
        self._request.stop = str(reason)

    def save(self) -> None:
        """Save a checkpoint of this step."""
        self._request.save = True

    def log(self, **numbers: float) -> None:
        """Add numbers to the step's row, in metrics.jsonl and at the trackers. Raises ValueError
        for a name that a row has already, and TypeError for what is no number."""
        for name, value in numbers.items():
            if name in _ROW_NAMES:
                raise ValueError(
                    f"control.log: {name} is a name of the step's own metrics; take another"
                )
            try:
                self._request.logged[name] = float(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"control.log: {name} is {shown(value)}, where a number is needed"
                ) from None


_ROW_NAMES = frozenset(metric.name for metric in fields(StepMetrics))
OnStep = Callable[[StepMetrics, StepControl], object]


class StepCallback:
    """The callback of a run. Mutable: `request`, of the newest step, the same on all ranks."""

    def __init__(self, name: str, function: OnStep | None):
        """`name`: as a person knows the function; `function`: None on ranks that do not call it."""
        self.name = name
        self.request = StepRequest()
        self._function = function
        self._error: BaseException | None = None

    @classmethod
    def of(cls, config: Config, rank: int, function: OnStep | None = None) -> "StepCallback | None":
        """The callback of a run on a rank: `function`, of a run of one process, else what the
        config names; None where there is none. Raises UsageError."""
        if function is not None:
            return cls(
                f"{function.__module__}"
                f":{getattr(function, '__qualname__', type(function).__name__)}",
                function,
            )
        name = config.train.on_step
        if name is None:
            return None
        return cls(name, load_callback(name) if rank == 0 else None)

    @property
    def ends_run(self) -> bool:
        return self.request.stop is not None or self.request.fault is not None

    def after(self, metrics: StepMetrics, world: "World") -> StepMetrics:
        """Call the function with a step. Returns the step with what
        the function adds; collective."""
        request = StepRequest()
        if self._function is not None:
            request = self._call(self._function, metrics)
        world.wait_for([0])  # a function may take longer than a collective
        self.request = StepRequest(**json.loads(world.gather_text(json.dumps(asdict(request)))[0]))
        return replace(metrics, logged=self.request.logged, stopped=self.request.stop)

    def _call(self, function: OnStep, metrics: StepMetrics) -> StepRequest:
        request = StepRequest()
        try:
            with printing_aside():
                function(metrics, StepControl(request))
        except (Exception, SystemExit) as error:
            # Rank 0 must not end alone, while the others wait for its answer.
            self._error = error
            request.fault = describe_error(error, self.name.partition(":")[0])
        return request

    def check(self, step: int) -> None:
        """Raises UsageError where the function has raised after this step, which is saved;
        on all ranks."""
        if self.request.fault is not None:
            raise UsageError(
                f"{KEY}: {self.name} raised after step {step}: {self.request.fault}. The step is"
                " saved: mend the function and go on with --resume"
            ) from self._error


def load_callback(name: str) -> OnStep:
    """The function that a config names. Raises UsageError."""
    function = load_object(name, KEY)
    if not callable(function):
        raise UsageError(
            f"{KEY}: {name} is {shown(function)}, where a function of (metrics, control) is needed"
        )
    return function
