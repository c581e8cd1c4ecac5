"""Trackers: where the rows of a run go besides `metrics.jsonl`. Each is an optional extra, as in
`pip install 'longshift[wandb]'`.

    save: {trackers: [wandb, mlflow], project: my-project}

    tensorboard  scalars in the run folder's `tensorboard/`, for `tensorboard --logdir runs`
    wandb        offline, into the run folder's `wandb/`, unless the user's environment or
                 settings say otherwise (WANDB_MODE=online); `wandb sync RUN/wandb/offline-run-*`
                 sends it later
    trackio      into its own folder (TRACKIO_DIR), unless the environment names a Space
                 (TRACKIO_SPACE_ID); `trackio show` shows it
    mlflow       where MLFLOW_TRACKING_URI says, else into `mlflow.db` in the current folder, for
                 `mlflow ui`

    my_module:MyTracker  a class of the user's own, of the protocol `Tracker`

Rank 0 alone has them. A process that trains is one run of the tracker: a run that was resumed is
there in parts, named by their first steps and grouped by the run's folder, for trackers do not take
a step again that they have already. Needs no torch.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Protocol, TextIO

from longshift.errors import UsageError, shown
from longshift.terminal import say
from longshift.trainer.metrics import StepMetrics
from longshift.user_code import describe_error, is_object, load_object, printing_aside

# Of a step's fields, those that are no number of their own.
PLAIN = ("step", "groups", "layout", "valid", "home", "logged", "stopped")
KEY = "save.trackers"  # of a config
PATIENCE_S = 30.0  # for servers, at the end of a run
MLFLOW_PARAMS = 100  # of one call, at the most
MLFLOW_LETTERS = 500  # of a value, at the most


METHODS = ("start", "log", "finish")


class Tracker(Protocol):
    """Takes the rows of one process of a run. `save.trackers` may name a class of this protocol,
    which is made with the run's folder and `save.project`.

    It is made in the main thread of rank 0's process. Its methods are called in one other thread,
    for which training does not wait. Any may raise: the run goes on without the tracker then."""

    def start(self, config: Mapping[str, Any], first: int) -> None:
        """Begin with a resolved config, before the first row. `first`: its step."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def finish(self, ok: bool) -> None:
        """End. `ok`: whether the run has ended without an error."""


class PackageTracker(Tracker):
    """A tracker that is a package. Mutable: `run`, of the package."""

    package = ""

    def __init__(self, folder: Path, project: str):
        """`folder`: of the run. Raises ImportError where the package cannot be imported."""
        self.folder = folder
        self.project = project
        self.library: Any = import_module(self.package)
        self.run: Any = None

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self.run.log(dict(row), step=step)

    def part_names(self, first: int) -> dict[str, str]:
        """What a process of the run that begins with step `first` is called, and the group of all
        parts of the run."""
        name = self.folder.name
        return {
            "project": self.project,
            "name": name if first == 1 else f"{name} from step {first}",
            "group": name,
        }


class TensorBoardLog(PackageTracker):
    """A resumed run hides the steps that it computes again."""

    package = "torch.utils.tensorboard.writer"

    def start(self, config: Mapping[str, Any], first: int) -> None:
        self.run = self.library.SummaryWriter(str(self.folder / "tensorboard"), purge_step=first)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self.run.add_scalar(name, value, step)
        self.run.flush()

    def finish(self, ok: bool) -> None:
        self.run.close()


class WandbLog(PackageTracker):
    """Weights & Biases, which is asked nothing: no code, no console, no git."""

    package = "wandb"

    def start(self, config: Mapping[str, Any], first: int) -> None:
        # By WANDB_MODE, or a settings file.
        has_mode = "mode" in self.library.setup().settings.model_fields_set
        settings = self.library.Settings(
            console="off", silent=True, disable_git=True, save_code=False, login_timeout=30
        )
        self.run = self.library.init(
            **self.part_names(first),
            dir=str(self.folder),
            config=dict(config),
            mode=None if has_mode else "offline",
            settings=settings,
            reinit="create_new",
        )

    def finish(self, ok: bool) -> None:
        self.run.finish(exit_code=0 if ok else 1)


class TrackioLog(PackageTracker):
    package = "trackio"

    def start(self, config: Mapping[str, Any], first: int) -> None:
        self.run = self.library.init(
            **self.part_names(first),
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def finish(self, ok: bool) -> None:
        self.library.finish()  # that of the run would be called again when Python ends


class MlflowLog(PackageTracker):
    """MLflow, in the experiment that is named as the project.
    The parts of a run have the tag longshift.run."""

    package = "mlflow"

    def start(self, config: Mapping[str, Any], first: int) -> None:
        self.client = self.library.MlflowClient()
        tags = {"longshift.run": str(self.folder)}
        name = self.part_names(first)["name"]
        self.run = self.client.create_run(self._experiment(), run_name=name, tags=tags).info.run_id
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in flat(config)
        }
        params = [
            self.library.entities.Param(key, text[:MLFLOW_LETTERS]) for key, text in texts.items()
        ]
        for begin in range(0, len(params), MLFLOW_PARAMS):
            self.client.log_batch(self.run, params=params[begin : begin + MLFLOW_PARAMS])

    def _experiment(self) -> str:
        """The experiment's number. Another process may make it at the same time."""
        if experiment := self.client.get_experiment_by_name(self.project):
            return experiment.experiment_id
        try:
            return self.client.create_experiment(self.project)
        except self.library.MlflowException:
            return self.client.get_experiment_by_name(self.project).experiment_id

    def log(self, step: int, row: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self.library.entities.Metric(name, value, now_ms, step) for name, value in row.items()
        ]
        self.client.log_batch(self.run, metrics=metrics)

    def finish(self, ok: bool) -> None:
        self.client.set_terminated(self.run, status="FINISHED" if ok else "FAILED")


TRACKERS: Mapping[str, type[PackageTracker]] = {
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
    "trackio": TrackioLog,
    "mlflow": MlflowLog,
}


def open_trackers(names: Sequence[str], folder: Path, project: str) -> dict[str, Tracker]:
    """Trackers that have not started, by name. One of the user's own that cannot be made is said
    and left out. Raises UsageError where a package, or a person's module, cannot be imported."""
    trackers = dict[str, Tracker]()
    for name in names:
        make = load_object(name, KEY) if is_object(name) else TRACKERS[name]
        try:
            with printing_aside():
                trackers[name] = make(folder, project)
        except (Exception, SystemExit) as fault:
            if name in TRACKERS and isinstance(fault, ImportError):
                raise UsageError(
                    f"{KEY}: {name} cannot be imported ({fault}): pip install 'longshift[{name}]'"
                ) from None
            say(
                f"{name} failed when it was made, and the run goes on without it:"
                f" {describe_error(fault, name.partition(':')[0])}"
            )
    return trackers


def expect(names: Sequence[str]) -> None:
    """Raises UsageError for the first tracker whose package is not installed, or whose class is
    none of the protocol `Tracker`."""
    for name in names:
        if is_object(name):
            tracker_class = load_object(name, KEY)
            missing = [
                method for method in METHODS if not callable(getattr(tracker_class, method, None))
            ]
            if missing or not isinstance(tracker_class, type):
                needed = (
                    "a class with start(config, first), log(step, row) and finish(ok) is needed"
                )
                has_not = f" without {' and '.join(missing)}" if missing else ""
                raise UsageError(
                    f"{KEY}: {name} is {shown(tracker_class)}{has_not}, where {needed}"
                )
        # Looked for, and not imported: TensorBoard's writer brings torch.
        elif find_spec(name) is None:
            raise UsageError(
                f"save.trackers: {name} is not installed: pip install 'longshift[{name}]', or leave"
                " it out"
            )


def numbers(step: StepMetrics) -> dict[str, float]:
    """The row of a step: its numbers by name, those of validations by length and of length groups
    with theirs before a slash."""
    values = asdict(step)
    row = {
        name: float(value)
        for name, value in values.items()
        if name not in PLAIN and value is not None
    }
    row |= step.logged
    row |= {f"home/{name}": float(value) for name, value in (values["home"] or {}).items()}
    row |= {f"valid/to {part.upto}": part.loss for part in step.valid}
    for group in step.groups:
        for name, value in asdict(group).items():
            if name not in ("layout", "upto") and value is not None:
                row[f"{group.layout} to {group.upto}/{name}"] = float(value)
    return row


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what is no mapping."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


class Trackers:
    """The trackers of a run, each in a thread of its own: the run never waits for a server, and
    goes on without a tracker that fails, which is said once on standard error. Mutable. What
    trackers print goes to standard error too, for standard output is the run's."""

    def __init__(self, trackers: Mapping[str, Tracker], config: Mapping[str, Any]):
        self._aside = _Aside(sys.stdout)
        if trackers:
            sys.stdout = self._aside  # pyright: ignore[reportAttributeAccessIssue]
        self._followers = [_Follower(name, tracker, config) for name, tracker in trackers.items()]

    def write(self, step: StepMetrics) -> None:
        row = numbers(step) if self._followers else {}
        for follower in self._followers:
            follower.rows.put((step.step, row))

    def finish(self, ok: bool, patience_s: float = PATIENCE_S) -> None:
        """End those that have begun. `ok`: whether the run has ended without an error;
        `patience_s`: how long to wait for all of them."""
        for follower in self._followers:
            follower.rows.put(ok)
        # One deadline for all, since they finish at the same time.
        until = time.monotonic() + patience_s
        for follower in self._followers:
            follower.join(max(0.0, until - time.monotonic()))
            if follower.is_alive():
                follower.say(
                    f"has not taken all rows {patience_s:g} s after the last step, and is left"
                )
        if sys.stdout is self._aside:
            sys.stdout = self._aside.out


class _Follower(Thread):
    """The thread of a tracker. Takes rows until it is told whether the run has
    ended well. Mutable."""

    def __init__(self, tracker_name: str, tracker: Tracker, config: Mapping[str, Any]):
        # A daemon: a server that hangs must not keep the process alive.
        super().__init__(name=f"longshift tracker {tracker_name}", daemon=True)
        self.rows: SimpleQueue[tuple[int, dict[str, float]] | bool] = SimpleQueue()
        self._tracker_name = tracker_name
        self._tracker = tracker
        self._config = config
        self._said = False
        self.start()

    def run(self) -> None:
        row = self.rows.get()
        if isinstance(row, bool):  # the run has no step
            return
        when = f"before step {row[0]}"
        try:
            self._tracker.start(self._config, row[0])
            while not isinstance(row, bool):
                when = f"at step {row[0]}"
                self._tracker.log(*row)
                row = self.rows.get()
            when = "at the end"
            self._tracker.finish(row)
        except BaseException as fault:
            # A package may raise anything; what would end the process ends this thread.
            reason = describe_error(fault, module_name="")
            self.say(f"failed {when}, and the run goes on without it: {reason}")

    def say(self, text: str) -> None:
        """Say it, unless something was said before."""
        if not self._said:
            self._said = True
            say(f"{self._tracker_name} {text}")


class _Aside:
    """Standard output, but what the threads of trackers print goes to standard error."""

    def __init__(self, out: TextIO):
        self.out = out

    def write(self, text: str) -> int:
        return (sys.stderr if isinstance(current_thread(), _Follower) else self.out).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)
