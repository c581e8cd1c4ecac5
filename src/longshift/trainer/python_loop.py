"""A run as the loop of a Python program: a notebook shows it, Ctrl-C saves, and a newer run in its
folder closes it. Needs no torch."""

from collections.abc import Generator
from contextlib import closing
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from pathlib import Path
from weakref import WeakValueDictionary

from longshift.config import Config
from longshift.errors import UsageError
from longshift.terminal import NotebookBar, Say
from longshift.trainer.display import describe
from longshift.trainer.interrupt import StepInterrupt
from longshift.trainer.metrics import StepMetrics
from longshift.trainer.run_folder import RunFolder

Steps = Generator[StepMetrics, None, None]

# By folder: what this process has begun and not ended. Its lock lets the process in again.
_OPEN = WeakValueDictionary[Path, Steps]()


def close_older(config: Config, tell: Say) -> None:
    """Close the run that this process has open in the config's folder. It saves its newest step,
    from which a newer run goes on. Raises what its save raises, and UsageError where it computes
    now, in another thread."""
    folder = RunFolder(Path(config.save.dir))
    steps = _OPEN.get(folder.path.resolve())
    if steps is None or getgeneratorstate(steps) == GEN_CLOSED:
        return
    if getgeneratorstate(steps) == GEN_RUNNING:
        raise UsageError(
            f"this process trains in {folder.shown} now, in another loop; close that first, or"
            " choose another with save.dir=..."
        )
    tell(f"a loop over the run in {folder.shown} is still open: it saves and is closed")
    steps.close()


def loop_over(config: Config, steps: Steps, tell: Say, alone: bool) -> Steps:
    """The steps of a run, which a notebook shows on one line. `alone`: it computes in this process
    and waits for no other; then Ctrl-C during a step is raised when that is saved."""
    _OPEN[Path(config.save.dir).resolve()] = steps
    bar = NotebookBar()
    bar.show("waiting for the first step", 0, config.train.steps)
    with closing(steps):
        while (step := _next_step(steps, tell) if alone else next(steps, None)) is not None:
            bar.show(describe(step, config.train.steps), step.step, config.train.steps)
            yield step


def _next_step(steps: Steps, tell: Say) -> StepMetrics | None:
    """The next step, None at the end. Raises KeyboardInterrupt after a Ctrl-C, when the step is
    saved."""
    interrupt = StepInterrupt(tell)
    with interrupt:
        step = next(steps, None)
    if interrupt.asked:
        steps.close()
        raise KeyboardInterrupt
    return step
