"""Damaged input by the thousand, each case in a process of its own with a deadline.

A case is accepted, or refused in a class of `longshift.errors` by a message that names what was read. Anything else is a failure: a
traceback, a hang, a death, a message without a place. Equal seeds give equal cases.

    python tests/faults/fuzz.py --cases 300 --json out.json
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshift.errors import LongshiftError

DEADLINE_S = 60.0
VERDICTS = ("accepted", "refused", "unlocated", "traceback", "death", "hang")
MOST_TOLD = 20_000  # characters of a message


@dataclass(frozen=True)
class Surface:
    """Something that is read. `make` writes good input into a folder, `damage` spoils it, `read` reads it with what `damage` gave. A
    message is located where it holds one of `places`."""

    name: str
    make: Callable[[Path], None]
    damage: Callable[[random.Random, Path], Any]
    read: Callable[[Path, Any], object]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    surface: str
    seed: int
    verdict: str
    said: str


def play(surface: Surface, seeds: Iterable[int], until: float = float("inf"), deadline_s: float = DEADLINE_S) -> list[Case]:
    """The cases of a surface, until the clock (monotonic) says so."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        good = Path(scratch, "good")
        good.mkdir()
        made, said = apart(lambda: surface.make(good), surface.places, deadline_s)
        assert made == "accepted", said
        for seed in seeds:
            if time.monotonic() > until:
                break
            folder = Path(scratch, f"case-{seed}")
            shutil.copytree(good, folder)
            spoiled = surface.damage(random.Random(f"{surface.name} {seed}"), folder)
            verdict, said = apart(lambda folder=folder, spoiled=spoiled: surface.read(folder, spoiled), surface.places, deadline_s)
            found.append(Case(surface.name, seed, verdict, said))
            shutil.rmtree(folder)
    return found


def apart(act: Callable[[], object], places: tuple[str, ...], deadline_s: float) -> tuple[str, str]:
    """The verdict on what `act` does in a forked process, and what it said."""
    with tempfile.TemporaryFile() as told:
        child = os.fork()
        if not child:
            _child(act, places, told.fileno())
        ended = time.monotonic() + deadline_s
        while True:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            if time.monotonic() > ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hang", f"nothing within {deadline_s:g} s"
            time.sleep(0.002)
        told.seek(0)
        said = told.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    if code in range(len(VERDICTS) - 2):
        return VERDICTS[code], said
    return "death", f"exit code {code}: {said[-500:]}"


def _child(act: Callable[[], object], places: tuple[str, ...], told: int) -> None:
    for stream in (1, 2):
        os.dup2(told, stream)
    verdict = "traceback"
    try:
        act()
        verdict = "accepted"
    except LongshiftError as fault:
        said = str(fault)
        verdict = "refused" if any(place in said for place in places) and len(said) < MOST_TOLD else "unlocated"
        os.write(told, said.encode(errors="backslashreplace"))
    except BaseException:
        os.write(told, traceback.format_exc()[-3000:].encode(errors="backslashreplace"))
    finally:
        os._exit(VERDICTS.index(verdict))


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    from surfaces import SURFACES

    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--cases", type=int, default=300, help="of every surface")
    asked.add_argument("--seconds", type=float, default=float("inf"), help="for every surface; then the next")
    asked.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    asked.add_argument("--only", choices=sorted(SURFACES))
    asked.add_argument("--json", type=Path)
    args = asked.parse_args()
    counts, failures, started = {}, [], time.monotonic()
    for name, surface in SURFACES.items():
        if args.only in (None, name):
            cases = play(surface, range(args.first, args.first + args.cases), time.monotonic() + args.seconds)
            counts[name] = Counter(case.verdict for case in cases)
            failures += [case for case in cases if case.verdict not in ("accepted", "refused")]
            print(f"{name:10}", *(f"{counts[name][verdict]:6} {verdict}" for verdict in VERDICTS), flush=True)
    for case in failures:
        print(f"\n{case.surface} seed {case.seed}: {case.verdict}\n{case.said}")
    if args.json:
        whole = {verdict: sum(count[verdict] for count in counts.values()) for verdict in VERDICTS}
        told = {"cases": args.cases, "first": args.first, "seconds": round(time.monotonic() - started, 1), "all": whole}
        told |= {"surfaces": counts, "failures": [vars(case) for case in failures]}
        args.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
