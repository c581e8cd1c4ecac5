"""Disks that fill up and processes that are killed, at the N-th file operation of a small run, and what must come of it.

The run is made once, undisturbed. Then it is made again for each N; the N-th operation fails (`operations.c`), and:

- the run ends with a documented exit code, one last line that names the cause, no traceback and no process left;
- with room again, `--resume=auto` ends with the weights of the undisturbed run, bit for bit, with a row of metrics for each step, and
  with no file that the undisturbed run does not have.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launches import Ended, Launches

from longshift.documents.tokenizer import train as train_tokenizer

STEPS = 4
CONFIG = """
model: {{preset: tiny-llama}}
data:
  train: [{{path: {place}/text.txt}}]
  tokenizer: {place}/tokenizer.json
  max_len: 64
  overlong: split
  cache: {place}/run/cache-{name}
train: {{tokens_per_step: 128, steps: {steps}, lr: 1e-3, precision: float32}}
layout: {layout}
save: {{dir: {place}/run/{name}, every: 2, keep: 2}}
"""
KILL = 0  # in the place of an errno
CODES = (3, 4, 7)  # the token cache; the run folder; no room


@dataclass(frozen=True)
class Operation:
    name: str
    path: str


def library(place: Path) -> Path:
    """The counting library, compiled."""
    made = place / "operations.so"
    source = Path(__file__).with_name("operations.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], check=True)
    return made


def make_data(place: Path) -> None:
    text = Path(json.__file__).read_text()
    (place / "text.txt").write_text(text)
    train_tokenizer(iter([text]), 300).save(str(place / "tokenizer.json"))
    (place / "run").mkdir()


class Disk:
    """A run of `layout` on a disk that fails. `background`: how it saves. `operations` of the undisturbed run, in order."""

    def __init__(self, launches: Launches, place: Path, layout: str, background: bool = False):
        self.launches, self.place, self.layout, self.background = launches, place, layout, background
        self._count = 0
        whole, ended, self.operations = self.train(0, KILL)
        assert ended.code == 0, ended
        self.weights, self.files = weights(whole), files(whole)

    def train(self, at: int, how: int, folder: Path | None = None) -> tuple[Path, Ended, list[Operation]]:
        """Run folder, end and operations of a run, which begins in a new folder where none is given."""
        self._count += folder is None
        run = folder or self.place / "run" / f"{self.layout}-{'background-' * self.background}{self._count}"
        file, state, log = (self.place / f"case.{kind}" for kind in ("yaml", "state", "log"))
        config = CONFIG.format(place=self.place, layout=self.layout, name=run.name, steps=STEPS)
        file.write_text(config)
        state.write_bytes(bytes(16))
        log.unlink(missing_ok=True)
        names = {"UNDER": self.place / "run", "STATE": state, "LOG": log, "AT": at, "HOW": how}
        names |= {} if self.background else {"AT_ONCE": 1}
        ended = self.launches.run(["train", str(file), "--resume=auto"], {f"FAULTS_{name}": str(value) for name, value in names.items()})
        rows = [line.split(" ", 3) for line in log.read_text().splitlines()]
        return run, ended, [Operation(row[2], row[3]) for row in rows]

    def wrong(self, at: int, how: int) -> str:
        """What is wrong with a run whose operation `at` fails in this way, and with the one that goes on; empty where nothing is."""
        run, ended, _ = self.train(at, how)
        if ended.code == 0:  # what failed was not needed, or never came
            found = ["ends well, with other weights"] * (weights(run) != self.weights)
        else:
            found = self._ended_wrong(ended, how)
        _, after, _ = self.train(0, KILL, run)
        if after.code != 0 or "Traceback" in after.err:
            found.append(f"the run that goes on ends with {after.code}: {after.out[-300:]} {after.err[-600:]}")
        elif weights(run) != self.weights:
            found.append("other weights")
        else:
            found += [f"rows {steps(run)}"] * (steps(run) != list(range(1, STEPS + 1)))
            differ = sorted(files(run) ^ self.files) + [str(path) for path in cache(run).glob("*.building/[!.]*")]
            found += [f"files {differ}"] * bool(differ)
        if not found:
            shutil.rmtree(run)
            shutil.rmtree(cache(run))
        return "; ".join(found)

    def _ended_wrong(self, ended: Ended, how: int) -> list[str]:
        found = [f"left {ended.left}"] * bool(ended.left)
        if ended.code is None:
            return [*found, f"late: {ended.err[-600:]}"]
        if "Traceback" in ended.err:
            found.append(f"traceback: {ended.err[-1500:]}")
        if how == KILL:
            return found + [f"code {ended.code}: {ended.err[-300:]}"] * (ended.code not in (-signal.SIGKILL, 6))
        last = ended.err.splitlines()[-1:] or [""]
        if ended.code not in CODES:
            found.append(f"code {ended.code}: {ended.err[-600:]}")
        elif not (last[0].startswith("longshift: ") and os.strerror(how) in last[0]):
            found.append(f"does not name {errno.errorcode[how]}: {ended.err[-600:]}")
        return found


def weights(run: Path) -> dict[str, bytes]:
    """Bytes of the tensors of the newest checkpoint, by file."""
    folder = run / "checkpoints" / (run / "LATEST").read_text().strip()
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def files(run: Path) -> set[str]:
    """All that lies in a run folder. Left out: what ended ranks told, and metrics of a run without a checkpoint, which are put aside."""
    found = [path for path in run.rglob("*") if "errors" not in path.parts and not re.fullmatch(r"metrics\.[0-9]+\.jsonl", path.name)]
    return {str(path.relative_to(run)) for path in found}


def cache(run: Path) -> Path:
    """The token cache of a run."""
    return run.with_name(f"cache-{run.name}")


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(cases: int, bad: Sequence[Sequence]) -> dict[str, int]:
    """Counts of what was wrong with cases, by the words of `Disk.wrong`."""
    said = [why for *_, wrong in bad for why in wrong.split("; ")]

    def count(*begins: str) -> int:
        return sum(why.startswith(begins) for why in said)

    other = sum("other weights" in wrong or "the run that goes on ends" in wrong for *_, wrong in bad)
    counts = {"tracebacks": count("traceback"), "hangs": count("late"), "orphans": count("left"), "left_files": count("files")}
    return {"cases": cases, "resumed": cases, "resumed_bitwise": cases - other, "lost_steps": count("rows"), **counts}


def campaign(disk: Disk, cases: Sequence[tuple[int, int]]) -> list[list]:
    """Cases of which something is wrong: at, how, operation, what."""
    bad = []
    for at, how in cases:
        if wrong := disk.wrong(at, how):
            bad.append([at, errno.errorcode.get(how, "SIGKILL"), str(disk.operations[at - 1]), wrong])
    return bad
