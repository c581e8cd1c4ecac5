"""The folder of a run: where everything lies, whether a run may start there, and why one of its
ranks failed. Needs no torch.

config.yaml      resolved config; what --resume changes is there when the run goes on with it
env.json         machine and versions
metrics.jsonl    a row per step
checkpoints/     step-N, whole or absent
LATEST           the newest checkpoint that is durable
identity         random: what shows that a checkpoint is of this run
errors/          rank-N.json: why rank N failed
.lock            held while a process trains here
.ranks           held by each of its ranks, which may outlive it by a moment
"""

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import psutil
from pydantic import BaseModel

from longshift import errors
from longshift.command_results import RunSummary
from longshift.config import Config
from longshift.config_file import is_run_folder, load_config
from longshift.errors import CheckpointError, LongshiftError, PeerError, UsageError
from longshift.files import NO_ROOM, rewrite, sweep, written
from longshift.spec.positions import beyond, replaced_scaling
from longshift.terminal import say
from longshift.trainer.metrics import read_rows
from longshift.trainer.step_callback import load_callback
from longshift.trainer.trackers import expect

# What killed processes leave.
LEFT = re.compile(
    r"\.(probe|\.?config\.yaml|(cluster|env|plan)\.json|metrics\.jsonl)-[0-9]+"
    r"|\.(LATEST|BEST|identity)\.writing"
)
RANKS_S = 10.0  # to wait for ranks whose launcher was killed


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of a run. `lock`: open while this process trains there."""

    path: Path
    lock: object = field(default=None, compare=False, repr=False)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def asked(self) -> Path:
        """The config of a run that is about to go on."""
        return self.path / ".config.yaml"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def latest(self) -> Path:
        return self.path / "LATEST"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def shown(self) -> str:
        """The path as a person would type it from here, in a shell."""
        return shlex.quote(shown_path(self.path))

    @property
    def export_command(self) -> str:
        return f"longshift export {self.shown} --to {self.shown}/export"

    @property
    def resume_command(self) -> str:
        return f"longshift train {self.shown}/config.yaml --resume"

    def begun(self) -> bool:
        """Whether there is a run to go on with. What a run has left that ended before its first
        checkpoint is put aside."""
        if not self.latest.exists():
            # There is none, or another rank was faster.
            with written(str(self.path)), suppress(FileNotFoundError):
                self.metrics.replace(self.metrics.with_suffix(f".{time.time_ns()}.jsonl"))
        return self.latest.exists()

    def steps_done(self) -> int:
        """The last step in the metrics; 0 before the first."""
        rows = read_rows(self.metrics)
        return rows[-1]["step"] if rows else 0

    def steps_saved(self) -> int:
        """The step of the newest checkpoint; 0 before the first."""
        name = (
            self.latest.read_text(encoding="utf-8", errors="replace").strip()
            if self.latest.exists()
            else ""
        )
        step = name.removeprefix("step-")
        return int(step) if step.isdecimal() else 0

    def joined(self) -> IO[str] | None:
        """A file that is open while this rank, which a launcher started, may write here. Raises
        OutOfMemoryError and CheckpointError."""
        with written(str(self.path)):
            file = (self.path / ".ranks").open("a", encoding="utf-8")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file


def shown_path(path: Path) -> str:
    """A path as a person would write it from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def prepare(config: Config, resume: bool, rank: int = 0, alone: bool = True) -> RunFolder:
    """Make the run folder, prove it writable, leave the resolved config in it. Every rank may do
    so: the outcome is the same, and rank 0's process holds the lock. `alone`: no other rank does it
    now; then what killed processes have left there is removed.

    Raises UsageError when the package of a tracker or the function of train.on_step is missing,
    stream.folder cannot be written, another process trains in the folder, it holds a run without
    `resume` being given, files that no run has written, or nothing to resume; OutOfMemoryError and
    CheckpointError where the disk refuses."""
    with written(f"the run folder {config.save.dir}"):
        return _prepared(config, resume, rank, alone)


def _prepared(config: Config, resume: bool, rank: int, alone: bool) -> RunFolder:
    folder = RunFolder(Path(config.save.dir))
    if rank == 0:
        expect(config.save.trackers)
        if config.train.on_step is not None:
            # What is wrong with it is said before the ranks start.
            load_callback(config.train.on_step)
    _prove_writable(folder.path, "the run folder", "save.dir", make=True)
    if config.stream.folder and (
        "disk" in config.home.at.tiers
        or any(edge.use.offload == "disk" for part in config.parts for edge in part.edges)
    ):
        _prove_writable(Path(config.stream.folder), "the folder", "stream.folder", make=False)
    if resume and not folder.latest.exists():
        raise UsageError(
            f"{folder.shown} holds no checkpoint to resume from; leave out --resume to start at"
            " step 1"
        )
    if not resume and folder.latest.exists():
        raise UsageError(
            f"{folder.shown} already holds a run; continue it with --resume, or start another with"
            " save.dir=..."
        )
    has_files = folder.config.exists() or folder.env.exists()
    if not resume and has_files and not is_run_folder(folder.path):
        raise UsageError(
            f"{folder.shown} holds a config.yaml or env.json that no run has written; choose"
            " another folder with save.dir=..."
        )
    folder = replace(folder, lock=_lock(folder) if rank == 0 else None)
    if alone:
        _wait_for_ranks(folder)
        _sweep(folder)
        with suppress(OSError):  # no temporary folder at all
            sweep(Path(tempfile.gettempdir()))
    if not resume and folder.metrics.exists():
        raise UsageError(
            f"{folder.shown} holds a run that ended at step {folder.steps_done()}, before its first"
            f" checkpoint; remove it with: rm -r {folder.shown}  or start another with save.dir=..."
        )
    if rank == 0:
        clear_causes(folder)  # of an earlier start
    rewrite(folder.asked, config.to_yaml())
    if not resume:
        adopt(folder, config)
    if rank == 0:
        notes = [replaced_scaling(part.model.spec, part.spec) for part in config.parts]
        notes += [beyond(part.spec, part.data.max_len) for part in config.parts]
        for note in dict.fromkeys(filter(None, notes)):
            say(note)
    return folder


def adopt(folder: RunFolder, config: Config) -> None:
    """Have the run go on with this config. By the machine that it stands beside, which is written
    first, `prepare` knows it as a run's. Raises OutOfMemoryError and CheckpointError where the disk
    refuses."""
    with written(str(folder.path)):
        rewrite(folder.env, json.dumps(describe_machine(), indent=2) + "\n")
        rewrite(folder.config, config.to_yaml())
        folder.asked.unlink(missing_ok=True)


def _prove_writable(path: Path, what: str, key: str, make: bool) -> None:
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)  # what is trained is its owner's
        probe = path / f".probe-{os.getpid()}"
        try:
            probe.write_bytes(b"longshift")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as fault:
        if fault.errno in NO_ROOM:
            raise
        # Only the run folder is made here.
        raise (CheckpointError if make else UsageError)(
            f"{what} {path} cannot be written: {fault.strerror}; choose another with {key}=..."
        ) from None


def _sweep(folder: RunFolder) -> None:
    """Remove what processes that were killed here have left. Whoever holds the lock may."""
    for path in (*folder.path.glob(".*"), *(folder.path / "checkpoints").glob(".step-*")):
        if path.is_dir() and path.parent != folder.path:
            shutil.rmtree(path, ignore_errors=True)
        elif LEFT.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def _wait_for_ranks(folder: RunFolder) -> None:
    """Wait for ranks whose launcher was killed: what they hold is freed when they are gone."""
    until = time.monotonic() + RANKS_S
    with suppress(FileNotFoundError), (folder.path / ".ranks").open(encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UsageError(
                        f"ranks of a launcher that is gone still save in {folder.shown}; wait for"
                        " them, or end them"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                return


def _lock(folder: RunFolder) -> IO[str]:
    """The file of the lock, held until this process ends, however it does."""
    file = (folder.path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        # A run that was left, and whose errors somebody still looks at.
        if owner == str(os.getpid()):
            return file
        raise UsageError(
            f"process {owner} trains in {folder.shown} now; wait, end it, or choose another with"
            " save.dir=..."
        ) from None
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def read_config(path: Path) -> Config:
    """The resolved config of a run folder. Raises CheckpointError where `path` is no run, and
    UsageError."""
    file = RunFolder(path).config
    if not file.is_file():
        raise CheckpointError(f"{path} is not a run folder: it holds no config.yaml")
    return load_config(file)


def read_asked(path: Path) -> Config:
    """The config that `prepare` was given."""
    folder = RunFolder(path)
    return load_config(folder.asked) if folder.asked.exists() else read_config(path)


def summarize_run(run: Config, folder: RunFolder) -> RunSummary:
    """Where the run is, and what can be done with it."""
    rows = read_rows(folder.metrics)
    # After a loss of power there may be no row of the checkpoint.
    last = rows[-1] if rows else {}
    steps = max(last.get("step", 0), folder.steps_saved())
    is_early = last.get("early", False)
    stopped = last.get("stopped")
    has_ended_itself = is_early or stopped is not None
    is_complete = steps >= run.train.steps
    can_be_longer = is_complete and not has_ended_itself and not run.train.stages
    losses = {row["step"]: row["valid_loss"] for row in rows if row.get("valid_loss") is not None}
    best_step = min(losses, key=losses.__getitem__, default=None)
    return RunSummary(
        run=folder.path,
        shown=folder.shown,
        steps=steps,
        planned_steps=run.train.steps,
        finished=is_complete or has_ended_itself,
        early=is_early,
        stopped=stopped,
        first_loss=rows[0]["loss"] if rows else None,
        last_loss=last.get("loss"),
        export=folder.export_command,
        resume=folder.resume_command + f" train.steps={2 * steps}" * can_be_longer,
        best_step=best_step,
        best_loss=None if best_step is None else losses[best_step],
    )


def describe_machine() -> dict[str, object]:
    """The machine and the versions, for the record."""
    packages = {}
    for name in ("longshift", "torch", "numpy", "safetensors", "tokenizers", "pyarrow"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "packages": packages,
        "command": shlex.join(sys.argv),
    }


class Cause(BaseModel):
    """Why a rank failed. `kind` is the class of the error; `trace` is empty for a person's
    mistake."""

    rank: int
    kind: str
    message: str
    time_s: float = 0.0
    trace: str = ""

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def write_cause(folder: RunFolder, rank: int, error: BaseException) -> Cause:
    """This rank's error, left in the run folder too, where that can be written."""
    kind = type(error).__name__
    message = str(error)
    trace = ""
    if not isinstance(error, LongshiftError):
        message = f"{kind}: {error}"
        trace = "".join(traceback.format_exception(error))
    cause = Cause(rank=rank, kind=kind, message=message, time_s=time.time(), trace=trace)
    # A folder that cannot be written may be why the rank failed.
    with suppress(OSError):
        folder.errors.mkdir(exist_ok=True)
        rewrite(folder.errors / f"rank-{rank}.json", cause.to_json())
    return cause


def read_causes(folder: RunFolder) -> list[Cause]:
    """Of the ranks that have left one that can be read."""
    causes = []
    for file in sorted(folder.errors.glob("rank-*.json")):
        with suppress(OSError, ValueError):
            causes.append(Cause.model_validate_json(file.read_bytes()))
    return causes


def clear_causes(folder: RunFolder) -> None:
    shutil.rmtree(folder.errors, ignore_errors=True)


def root_cause(causes: list[Cause], exit_codes: Mapping[int, int]) -> Cause:
    """The failure that began it. `exit_codes` by rank, negative for a signal.

    When one rank dies, the others fail because of it: they lose a peer (PeerError), abort in NCCL
    (SIGABRT) or are ended by the launcher (SIGTERM). So a rank's own error comes before those, and
    among equals the earliest. A signal in `causes` came before the launcher sent any."""
    told = {cause.rank for cause in causes}
    consequences = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)

    def order(cause: Cause) -> tuple[int, float]:
        # A person's error, a signal from outside, a crash, a lost peer, a signal that follows.
        if cause.kind == "Signal":
            follows = cause.rank not in told and -exit_codes[cause.rank] in consequences
            return (4 if follows else 1), cause.time_s
        if cause.kind == PeerError.__name__:
            return 3, cause.time_s
        return (2 if cause.trace else 0), cause.time_s

    for rank, code in exit_codes.items():
        if code and rank not in told:
            causes = [*causes, silent_cause(rank, code)]
    return min(causes, key=order)


def as_error(cause: Cause) -> LongshiftError:
    """The cause as the error that the launcher raises in its place."""
    # The class has the exit code of the command.
    kind = getattr(errors, cause.kind, None)
    if isinstance(kind, type) and issubclass(kind, LongshiftError):
        return kind(cause.message)
    if cause.kind == "Signal":
        return PeerError(cause.message)
    return LongshiftError(f"rank {cause.rank} failed: {cause.message}\n{cause.trace}".rstrip())


def silent_cause(rank: int, code: int) -> Cause:
    """The cause of a rank that ended without telling one."""
    if code >= 0:
        # With a trace, it comes after a person's own errors in `root_cause`.
        message = f"ended with exit code {code} and no message"
        return Cause(rank=rank, kind="Exit", message=message, trace="(none)")
    name = signal.Signals(-code).name
    hint = "; the kernel does this when memory runs out (see dmesg)" if name == "SIGKILL" else ""
    message = f"rank {rank} was ended by {name}{hint}"
    return Cause(rank=rank, kind="Signal", message=message)
