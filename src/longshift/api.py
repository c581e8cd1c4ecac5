"""The Python front door.

    import longshift as ls
    config = ls.load_config("run.yaml")
    for step in ls.train(config):
        print(step.loss, step.tokens_per_s)

[Note: imports inside functions]  `import longshift` and the command line's help and config errors must not wait for torch. So the
functions of this file and of `cli.py`, and only they, import what needs torch when they are called.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longshift import errors
from longshift.cluster.host import has_gpu
from longshift.config import Config
from longshift.config_file import load_config
from longshift.errors import LongshiftError
from longshift.explain import Explanation
from longshift.explain import explain as explanation
from longshift.files import temporary_folder, written
from longshift.layout import legal
from longshift.layout.layout import AUTO, Layout
from longshift.planner.asked import AutoLayout
from longshift.spec.formats import PrecisionName
from longshift.train.metrics import MetricsLog, StepMetrics
from longshift.train.resumed import going_on, named
from longshift.train.run_folder import RunFolder, prepare, read_config

if TYPE_CHECKING:
    from longshift.reports.read import RunReport


def train(config: Config | str | Path, *overrides: str, resume: bool = False) -> Iterator[StepMetrics]:
    """Run a config, or a config file with `overrides` such as "train.lr=2e-5", and yield each step's metrics; checkpoints and the run
    folder are looked after.

    In a process that torchrun started, this is one rank of the run. Elsewhere a layout of several ranks runs in local worker
    processes; leaving the loop early lets them finish the step and save.

    `resume`: go on from the newest checkpoint. Of a config file, the run's settings stay but for the overrides, and what the file has
    otherwise is told on standard error; a Config is meant as it is, and what it changes is told. Raises LongshiftError."""
    from longshift.dist.world import launched, own_rank

    say = _say if own_rank() == 0 else _silent
    run = _read(config, overrides)
    if resume and isinstance(config, Config):
        named(run, say)
    elif resume and not isinstance(config, Config):
        run = going_on(run, Path(config), overrides, say)
    if isinstance(run.layout, AutoLayout):
        yield from _run_workers(run, resume)
        return
    run = with_chunks(run, say)
    if run.world == 1 or launched():
        yield from run_rank(run, prepare(run, resume, own_rank(), alone=not launched()), resume)
    else:
        yield from _run_workers(run, resume)


def check(config: Config | str | Path, *overrides: str, against: str) -> dict[str, Any]:
    """Compute the same batches under the layout of a config, or its groups of lengths, and under another, each in processes of its own.

    Worst relative differences to one process, positions that leak from document to document, and under "pass" whether all are within
    the tolerance: what `longshift check --json` prints. Raises LongshiftError."""
    config = _read(config, overrides)
    other = Layout.parse(against)
    legal.check(config.spec, other, None, config.data.max_len)
    (edge,) = with_chunks(config.model_copy(update={"layout": other}), _say).edges
    config = with_chunks(config, _say)
    from longshift.dist.world import own_device
    from longshift.train.check_run import check as compare

    return compare(config, [[each.use for each in config.edges], [edge.use]], own_device().type)


def explain(config: Config | str | Path, *overrides: str) -> tuple[Explanation, ...]:
    """What a step inserts, prunes, moves and needs, of each stage of the run: a text when it is printed. Starts nothing, needs no GPU.
    Raises LongshiftError."""
    config = with_chunks(_read(config, overrides), _say)
    return tuple(explanation(part, gpus=has_gpu()) for part in config.parts)


def export(run: str | Path, to: str | Path, *, best: bool = False, precision: PrecisionName | None = None, merge: bool = False) -> Path:
    """Write a run's newest checkpoint, or its best, as a Hugging Face folder, or its adapters as a folder of PEFT; returns the folder.
    `precision`: of the weights; `merge`: adapters are added to them. Raises LongshiftError."""
    config = read_config(Path(run))
    from longshift.train.export import export as write

    write(config, Path(run), Path(to), precision, best, merge)
    return Path(to)


def report(*runs: str | Path, to: str | Path | None = None) -> "tuple[RunReport, ...]":
    """What runs have done, in numbers; with `to`, also as an HTML file. Raises LongshiftError."""
    from longshift.reports.read import read_run

    found = tuple(read_run(Path(run)) for run in runs)
    if to is not None:
        try:
            from longshift.reports.page import write
        except ImportError as fault:
            raise errors.UsageError(f"{fault.name} is not installed, which draws reports: pip install 'longshift[report]'") from None
        write(found, Path(to))
    return found


def _read(config: Config | str | Path, overrides: tuple[str, ...]) -> Config:
    if not isinstance(config, Config):
        return load_config(config, overrides)
    if overrides:
        raise errors.UsageError("overrides are of a config file: ls.train('run.yaml', 'train.lr=2e-5')")
    return config


def with_chunks(config: Config, say: Callable[[str], None]) -> Config:
    """The config with every `chunk-auto` chosen, which `say` hears of."""
    if all(edge.use.chunk != AUTO for edge in config.edges):
        return config
    from longshift.profile.choose import with_chunks as chosen

    return chosen(config, say)


def run_rank(
    config: Config, folder: RunFolder, resume: bool, stop: Callable[[], bool] = lambda: False, trace: Path | None = None
) -> Iterator[StepMetrics]:
    """The part of a run that this process does, as the rank that the environment says it is. Rank 0 keeps the metrics.
    `stop`: asked after each step whether to save and end early; a yes on any rank counts for all. `trace`: see `loop.train`."""
    from longshift.train import loop

    logs = _logs(config, folder)

    def record(step: StepMetrics) -> None:
        for log in logs:
            log.write(step)

    yield from loop.train(config, folder.path, resume, stop, trace, record)


def _logs(config: Config, folder: RunFolder) -> list:
    logs: list = [MetricsLog(folder.metrics)]
    if config.save.tensorboard:
        try:
            from longshift.train.tensorboard import TensorBoardLog
        except ImportError:
            raise errors.UsageError("save.tensorboard needs a package: pip install 'longshift[tensorboard]'") from None
        logs.append(TensorBoardLog(folder.path / "tensorboard"))
    return logs


def _run_workers(config: Config, resume: bool) -> Iterator[StepMetrics]:
    """The steps of `longshift train` in a process of its own, whose JSON lines are read back."""
    with temporary_folder() as place:
        file = place / "config.yaml"
        with written(str(file)):
            file.write_text(config.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "longshift.cli", "train", str(file), "--json"]
        command += [*named(config, _silent), "--resume"] if resume else []
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        assert child.stdout is not None
        last = {}
        try:
            for line in child.stdout:
                last = json.loads(line)
                if "step" in last:
                    yield StepMetrics.from_json(last)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
            child.communicate()
            code = child.returncode
    if code:
        kind = getattr(errors, last.get("kind", ""), LongshiftError)
        raise kind(last.get("error", f"longshift train ended with exit code {code}"))


def _say(line: str) -> None:
    print(f"longshift: {line}", file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
