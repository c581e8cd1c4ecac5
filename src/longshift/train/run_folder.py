"""The folder of a run: where everything lies, whether a run may start there, and why one of its ranks failed. Needs no torch.

config.yaml      resolved config
env.json         machine and versions
metrics.jsonl    a row per step
checkpoints/     step-N, whole or absent
LATEST           the newest checkpoint that is durable
errors/          rank-N.json: why rank N failed
"""

import json
import os
import platform
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from longshift import errors
from longshift.config import Config, parse_config
from longshift.errors import LongshiftError, PeerError, UsageError
from longshift.train.metrics import read_rows


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def latest(self) -> Path:
        return self.path / "LATEST"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    @property
    def shown(self) -> str:
        """The path as a person would type it from here."""
        return shlex.quote(os.path.relpath(self.path) if self.path.is_relative_to(Path.cwd()) else str(self.path))

    @property
    def export_command(self) -> str:
        return f"longshift export {self.shown} --to {self.shown}/export"

    @property
    def resume_command(self) -> str:
        return f"longshift train {self.shown}/config.yaml --resume"

    def steps_done(self) -> int:
        """The last step in the metrics; 0 before the first."""
        rows = read_rows(self.metrics)
        return rows[-1]["step"] if rows else 0


def prepare(config: Config, resume: bool) -> RunFolder:
    """Make the run folder, prove it writable, leave the resolved config in it. Every rank may do so: the outcome is the same.

    Raises UsageError when it cannot be written, holds a run without `resume` being given, or has nothing to resume."""
    folder = RunFolder(Path(config.save.dir))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        probe = folder.path / f".probe-{os.getpid()}"
        probe.write_bytes(b"longshift")
        probe.unlink()
    except OSError as fault:
        raise UsageError(f"the run folder {folder.path} cannot be written: {fault.strerror}; choose another with save.dir=...") from None
    if resume and not folder.latest.exists():
        raise UsageError(f"{folder.shown} holds no checkpoint to resume from; leave out --resume to start at step 1")
    if not resume and folder.latest.exists():
        raise UsageError(f"{folder.shown} already holds a run; continue it with --resume, or start another with save.dir=...")
    if not resume and folder.metrics.exists():
        raise UsageError(
            f"{folder.shown} holds a run that ended at step {folder.steps_done()}, before its first checkpoint; "
            f"remove it with: rm -r {folder.shown}  or start another with save.dir=..."
        )
    _replace(folder.config, config.to_yaml())
    _replace(folder.env, json.dumps(describe_machine(), indent=2) + "\n")
    return folder


def read_config(path: Path) -> Config:
    """The resolved config of a run folder. Raises UsageError where `path` is no run."""
    file = RunFolder(path).config
    if not file.is_file():
        raise UsageError(f"{path} is not a run folder: it holds no config.yaml")
    return parse_config(file.read_text(encoding="utf-8"), name=str(file))


def describe_machine() -> dict[str, object]:
    """The machine and the versions, for the record."""
    packages = {}
    for name in ("longshift", "torch", "numpy", "safetensors", "tokenizers", "datasets", "pyarrow"):
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


@dataclass(frozen=True)
class Cause:
    """Why a rank failed. `kind` is the class of the error; `trace` is empty for a person's mistake."""

    rank: int
    kind: str
    message: str
    exit_code: int
    time_s: float
    trace: str = ""


def write_cause(folder: RunFolder, rank: int, error: BaseException) -> Cause:
    """Leave this rank's error where the launcher looks for it."""
    known = isinstance(error, LongshiftError)
    trace = "" if known else "".join(traceback.format_exception(error))
    message = str(error) if known else f"{type(error).__name__}: {error}"
    cause = Cause(rank, type(error).__name__, message, error.exit_code if known else LongshiftError.exit_code, time.time(), trace)
    folder.errors.mkdir(exist_ok=True)
    _replace(folder.errors / f"rank-{rank}.json", json.dumps(asdict(cause), indent=2) + "\n")
    return cause


def read_causes(folder: RunFolder) -> list[Cause]:
    return [Cause(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.errors.glob("rank-*.json"))]


def clear_causes(folder: RunFolder) -> None:
    shutil.rmtree(folder.errors, ignore_errors=True)


def root_cause(causes: list[Cause], exit_codes: Mapping[int, int]) -> Cause:
    """The failure that began it. `exit_codes` by rank, negative for a signal.

    When one rank dies, the others fail because of it: they lose a peer (PeerError), abort in NCCL (SIGABRT) or are ended by the
    launcher (SIGTERM). So a rank's own error comes before those, and among equals the earliest."""
    told = {cause.rank for cause in causes}
    consequences = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)

    def order(cause: Cause) -> tuple[int, float]:
        if cause.kind == "Signal":
            return (4 if -exit_codes[cause.rank] in consequences else 1), cause.time_s
        if cause.kind == PeerError.__name__:
            return 3, cause.time_s
        return (2 if cause.trace else 0), cause.time_s

    silent = [_silent(rank, code) for rank, code in exit_codes.items() if code and rank not in told]
    return min([*causes, *silent], key=order)


def as_error(cause: Cause) -> LongshiftError:
    """The cause as the error that the launcher raises in its place."""
    kind = getattr(errors, cause.kind, None)
    if isinstance(kind, type) and issubclass(kind, LongshiftError):
        return kind(cause.message)
    if cause.kind == "Signal":
        return PeerError(cause.message)
    return LongshiftError(f"rank {cause.rank} failed: {cause.message}\n{cause.trace}".rstrip())


def _silent(rank: int, code: int) -> Cause:
    """The cause of a rank that ended without telling one."""
    if code >= 0:
        return Cause(rank, "Exit", f"ended with exit code {code} and no message", code, 0.0, trace="(none)")
    name = signal.Signals(-code).name
    hint = "; the kernel does this when memory runs out (see dmesg)" if name == "SIGKILL" else ""
    return Cause(rank, "Signal", f"rank {rank} was ended by {name}{hint}", PeerError.exit_code, 0.0)


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
