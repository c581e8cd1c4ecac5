"""Runs of two ranks whose ranks and launchers are killed at random moments, again and again, and that go on until they are done.

After each kill no process may be left, and the next start goes on from the checkpoint that LATEST named before. A run that is done has the
weights of an undisturbed one, bit for bit, a row of metrics for each step, and no other file.
"""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from disks import CONFIG, files, steps, weights
from launches import Ended, Launches

from longshift.trainer.run_folder import RunFolder

STEPS, DEADLINE_S = 16, 600.0
LAST = 4  # steps in which none is killed: a kill takes a moment, too
STARTING = 0.3  # share of kills that come before a step is awaited
LAYOUTS = {
    "dp2.z3": "dp2.z3",
    "pp2": "pp2",
    "u2": "u2",
    "ring2": "ring2",
    "dp2 > tp2": "[{upto: 40, use: dp2}, {upto: 64, use: tp2}]",
    "u2.chunk16.disk": "u2.chunk16.disk",
    "dp2, home on disk": "dp2\nhome: disk",
}


class Killed:
    """Runs of a layout, by its name in LAYOUTS. Mutable: `found` counts what came of them, `wrong` says what should not have."""

    def __init__(self, launches: Launches, place: Path, name: str):
        self.launches, self.place, self.name = launches, place, name
        self.found, self.wrong = Counter[str](), list[str]()
        run, began = self._folder("whole"), time.monotonic()
        ended = self._start(run)
        self.seconds = time.monotonic() - began
        assert ended.code == 0, ended
        self.weights, self.files = weights(run), files(run)

    def play(self, random_: random.Random, kills: int) -> int:
        """Start a run, with at most so many kills, until it is done; how many there were."""
        self.found["runs"] += 1
        run, killed, code = self._folder(str(self.found["runs"])), 0, None
        for start in range(kills + 1):
            code, victims = self._attempt(random_ if start < kills else None, run)
            killed += victims
            if code == 0:
                break
        same, differ = code == 0 and weights(run) == self.weights, sorted(files(run) ^ self.files)
        self.found["resumed_bitwise"] += same
        self.found["left_files"] += len(differ)
        if not same or differ or steps(run) != list(range(1, STEPS + 1)):
            self.wrong.append(f"{self.name}, {run.name}: ends with {code}, same weights: {same}, files {differ}, rows {steps(run)}")
        return killed

    def _attempt(self, random_: random.Random | None, run: Path) -> tuple[int | None, int]:
        """Begin a run or go on with it; its exit code, and how many were killed."""
        victims = list[str]()
        before, rows = RunFolder(run).steps_saved(), _rows(run)
        ended = self._start(run, lambda: victims.extend(self._kill(random_, run) if random_ else ()))
        self._count(run, ended, victims, _lost(before, RunFolder(run).steps_saved(), rows, _rows(run)))
        return ended.code, len(victims)

    def _count(self, run: Path, ended: Ended, victims: list[str], lost: int) -> None:
        for victim in victims:
            self.found[f"kills of a {victim}"] += 1
        self.found["orphans"] += len(ended.left)
        self.found["lost_steps"] += lost
        self.found["tracebacks"] += "Traceback" in ended.err
        self.found["hangs"] += ended.code is None
        ends = (0, 6, -signal.SIGKILL) if victims else (0,)
        if lost or ended.left or "Traceback" in ended.err or ended.code not in ends:
            killed = f"killed {victims}: code {ended.code}, {lost} steps lost, left {ended.left}"
            self.wrong.append(f"{self.name}, {run.name}, {killed}: {ended.err[-900:]}")

    def _kill(self, random_: random.Random, run: Path) -> list[str]:
        """Kill a rank or the launcher at a random moment. Which it was; nothing where the run was over before."""
        victim, saved = random_.choice(("rank", "rank", "launcher")), RunFolder(run).steps_saved()
        rows, rank = random_.randrange(min(saved, STEPS - LAST), STEPS - LAST + 1), random_.choice("01")
        if random_.random() < STARTING:
            self._wait(random_.uniform(0, self.seconds / 2), lambda: False)
        else:
            self._wait(DEADLINE_S, lambda: len(_rows(run)) >= rows)
            self._wait(random_.uniform(0, 0.1), lambda: False)
        while self.launches.runs:
            with suppress(psutil.Error):
                named = (process for process in self.launches.processes() if process.name() == f"longshift-r{rank}")
                if process := self.launches.launcher() if victim == "launcher" else next(named, None):
                    process.kill()
                    return [victim]
            time.sleep(0.05)
        return []

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.launches.runs and not done():
            time.sleep(min(left, 0.02))

    def _start(self, run: Path, meanwhile: Callable[[], object] = lambda: None) -> Ended:
        file = self.place / f"{run.name}.yaml"
        file.write_text(CONFIG.format(place=self.place, layout=LAYOUTS[self.name], name=run.name, steps=STEPS))
        return self.launches.run(["train", str(file), "--resume=auto"], {}, DEADLINE_S, meanwhile)

    def _folder(self, name: str) -> Path:
        return self.place / "run" / f"killed-{list(LAYOUTS).index(self.name)}-{name}"


def _rows(run: Path) -> list[dict]:
    """The whole rows of the metrics of a run that may be writing one."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _lost(before: int, saved: int, rows: list[dict], now: list[dict]) -> int:
    """Steps that were saved before a start and made again by it, or that are not in the newest checkpoint any more. Rows that are new are
    of this start, whose first says so."""
    new = [row for row in now if row not in rows]
    start = next((row["step"] - 1 for row in reversed(new) if row["first"]), before)
    return max(0, before - saved, before - start)
