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
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from longshift import errors
from longshift.config import Config
from longshift.config_file import load_config
from longshift.errors import LongshiftError
from longshift.layout.layout import AUTO
from longshift.planner.asked import AutoLayout
from longshift.train.metrics import MetricsLog, StepMetrics
from longshift.train.resumed import going_on, named
from longshift.train.run_folder import RunFolder, prepare


def train(config: Config | str | Path, *overrides: str, resume: bool = False) -> Iterator[StepMetrics]:
    """Run a config, or a config file with `overrides` such as "train.lr=2e-5", and yield each step's metrics; checkpoints and the run
    folder are looked after.

    In a process that torchrun started, this is one rank of the run. Elsewhere a layout of several ranks runs in local worker
    processes; leaving the loop early lets them finish the step and save.

    `resume`: go on from the newest checkpoint. Of a config file, the run's settings stay but for the overrides, and what the file has
    otherwise is told on standard error; a Config is meant as it is, and what it changes is told. Raises LongshiftError."""
    from longshift.dist.world import launched, own_rank

    say = _say if own_rank() == 0 else _silent
    if not isinstance(config, Config):
        file, config = Path(config), load_config(config, overrides)
        config = going_on(config, file, overrides, say) if resume else config
    elif overrides:
        raise errors.UsageError("overrides are of a config file: ls.train('run.yaml', 'train.lr=2e-5')")
    elif resume:
        named(config, say)
    if isinstance(config.layout, AutoLayout):
        yield from _run_workers(config, resume)
        return
    if any(edge.use.chunk == AUTO for edge in config.edges):
        from longshift.profile.choose import with_chunks

        config = with_chunks(config, say)
    if config.world == 1 or launched():
        yield from run_rank(config, prepare(config, resume, own_rank()), resume)
    else:
        yield from _run_workers(config, resume)


def run_rank(
    config: Config, folder: RunFolder, resume: bool, stop: Callable[[], bool] = lambda: False, trace: Path | None = None
) -> Iterator[StepMetrics]:
    """The part of a run that this process does, as the rank that the environment says it is. Rank 0 keeps the metrics.
    `stop`: asked after each step whether to save and end early; a yes on any rank counts for all. `trace`: see `loop.train`."""
    import torch.distributed as dist

    from longshift.train import loop

    logs = _logs(config, folder)
    for step in loop.train(config, folder.path, resume, stop, trace):
        if not dist.is_initialized() or dist.get_rank() == 0:
            for log in logs:
                log.write(step)
        yield step


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
    with tempfile.TemporaryDirectory(prefix="longshift-") as scratch:
        file = Path(scratch) / "config.yaml"
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
