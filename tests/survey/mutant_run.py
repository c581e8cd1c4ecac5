"""Which cases fail where the trainer has a known mistake.

    python tests/survey/mutant_run.py                    each mutant against the cases of `make test` that kill it
    python tests/survey/mutant_run.py --search ROWS --to KILLS      find cases that kill it, for the survey

A mutant of `tests/many/mutants.py` patches a process before it forks ranks, so that every rank has the mistake. The
one-process reference is computed by a rank that was forked earlier and has none. Each mutant has a process of its own,
forked from one that has imported what tests import.
"""

import argparse
import csv
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases.csv"
REPOSITORY = Path(__file__).parents[2]
REFERENCE = "trial:write_reference"
ENOUGH = 3  # cases that kill a mutant, after which a search looks no further
TRIES = 20  # cases, after which it gives up
CALL_S = 60.0  # after which ranks that a mistake has blocked are ended
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Target:
    """An entry of `mutants.CASES`: a mutant, and where it shows: in this family, under a layout with all words of one of
    `layouts`. `is_strict`: another entry has the same mutant, so that this one has to show there and nowhere else."""

    name: str
    mutant: str
    family: str
    layouts: tuple[frozenset[str], ...]
    is_strict: bool

    def likeness(self, row: dict) -> int:
        """How much the case of a row of the survey is what the target names: 2 in layout and family, 1 in layout."""
        trained = [words_of(layout) for _, layout, _ in row["calls"]]
        if not any(words <= others for words in self.layouts for others in trained):
            return 0
        return 2 if f"[{self.family}-" in row["case"] else 1


def words_of(layout: str) -> frozenset[str]:
    """The words of a layout without their numbers: `dp2.z3 > u2.chunk7` has dp, z3, u and chunk."""
    words = layout.replace(" > ", ".").replace(" | ", ".").split(".")
    return frozenset(word if word[:1] == "z" else word.split(":")[0].rstrip("0123456789") for word in words)


def targets() -> list[Target]:
    import mutants

    entries = Counter(case.mutant for case in mutants.CASES)
    ways_to_stream = {"disk", "host", "kv-offload", "fpdt"}
    of_streams = [Target(f"{mutant.__name__} streams", mutant.__name__, "", (), False) for mutant in mutants.STREAM_MUTANTS]
    return of_streams + [
        Target(
            name=f"{case.mutant.__name__} {case.family} {case.layouts[0]}",
            mutant=case.mutant.__name__,
            family=case.family,
            layouts=tuple(words_of(layout) - ways_to_stream for layout in case.layouts),
            is_strict=entries[case.mutant] > 1,
        )
        for case in mutants.CASES
    ]


class Mutant:
    """A pytest plugin: after collection this process has the mistake. `failed`: the cases that notice it."""

    def __init__(self, name: str):
        self.name, self.failed = name, []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        import caches
        import mutants

        from longshift.dist.fork import ForkedWorld

        reference, call = ForkedWorld(1), ForkedWorld.call
        reference._start()

        def call_one(world: ForkedWorld, function: str, deadline_s: float = CALL_S, **arguments: object) -> list:
            world = reference if function == REFERENCE else world
            return call(world, function, min(deadline_s, CALL_S), **arguments)

        ForkedWorld.call = call_one
        caches.clear()
        getattr(mutants, self.name)(pytest.MonkeyPatch())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def failing(mutant: str, cases: list[str], stop_at: int) -> list[str]:
    """Of `cases`, in this order, those that fail with the mistake, at most `stop_at`. Changes this process for good.
    Raises RuntimeError where pytest could not run them."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    plugin = Mutant(mutant)
    code = int(pytest.main(["-p", "no:cacheprovider", "--tb=no", f"--maxfail={stop_at}", *cases], plugins=[plugin]))
    if code not in (0, 1, 2):
        raise RuntimeError(f"{mutant}: pytest ended with code {code}")
    return plugin.failed


def run_all(tasks: Iterable[tuple[str, list[str], int]]) -> Iterator[list[str]]:
    """`failing` of each task, in order, two at a time, each in a process of its own."""
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        answers = [pool.apply_async(failing, task) if task[1] else None for task in tasks]
        for answer in answers:
            yield answer.get(DEADLINE_S * len(answers)) if answer else []


def known_kills() -> dict[str, list[str]]:
    """Cases of `make test` that kill a target, by its name, cheap ones first."""
    kills: dict[str, list[str]] = {}
    with CASES.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["chosen_for"]]
    for row in sorted(rows, key=lambda row: float(row["processor_s"])):
        for name in filter(None, row["kills"].split("; ")):
            kills.setdefault(name, []).append(row["case"])
    return kills


def verify() -> int:
    """Print which mutants die by the cases of `make test`; 1 where one does not."""
    begin_s, known, kills, num_dead = time.monotonic(), targets(), known_kills(), 0
    for target, failed in zip(known, run_all((target.mutant, kills.get(target.name, []), 1) for target in known)):
        num_dead += bool(failed)
        print(f"{'dies ' if failed else 'LIVES'}  {target.name}  {failed[0] if failed else ''}", flush=True)
    seconds = time.monotonic() - begin_s
    print(f"{num_dead} of {len(known)} mutants die by cases of `make test`, in {seconds:.0f} s")
    return 0 if num_dead == len(known) else 1


def patched_lines(mutant: str) -> set[tuple[str, int]]:
    """(path, line) of the bodies of the package's functions that a mutant replaces."""
    import mutants

    lines, patch = set(), pytest.MonkeyPatch()
    change = patch.setattr

    def record(target: object, name: str, *value: object, **named: bool) -> None:
        previous = getattr(target, name, None) if value else None
        code = getattr(getattr(previous, "__func__", previous), "__code__", None)
        if code is not None and str(REPOSITORY / "src") in code.co_filename:
            numbers = {line for _, _, line in code.co_lines() if line}
            lines.update((code.co_filename, line) for line in numbers - {code.co_firstlineno})
        change(target, name, *value, **named)

    patch.setattr = record  # pyright: ignore[reportAttributeAccessIssue]
    getattr(mutants, mutant)(patch)
    patch.undo()
    return lines


def candidates(target: Target, rows: list[dict], lines: dict[str, set[int]], offsets: dict[str, int]) -> list[str]:
    """Cases that may notice a mutant: they run what it replaces. First those that train what the target names; cheap ones first."""
    patched = {offsets[path] + line for path, line in patched_lines(target.mutant)}
    least = 2 if target.is_strict else 0 if patched else 1
    rows = [row for row in rows if not patched or patched & lines[row["case"]]]
    rows = [row for row in rows if target.likeness(row) >= least]
    rows = sorted(rows, key=lambda row: (-target.likeness(row), row["cpu_s"]))
    return [row["case"] for row in rows[:TRIES]]


def search(paths: list[Path], output: Path) -> None:
    """Append to `output` a row for each case that kills a mutant."""
    from choose_cases import lines_of, read_rows
    from line_trace import PACKAGE, line_offsets

    offsets, total = line_offsets(PACKAGE)
    rows = [row for row in read_rows(paths).values() if row["outcome"] == "passed" and "lines" in row]
    rows = [row for row in rows if not row.get("mutant") and "test_mutants.py" not in row["case"]]
    lines = {row["case"]: set(lines_of(row, total).nonzero()[0].tolist()) for row in rows}
    known = targets()
    tasks = ((target.mutant, candidates(target, rows, lines, offsets), ENOUGH) for target in known)
    for target, failed in zip(known, run_all(tasks)):
        print(f"{target.name}: {failed or 'no case kills it'}", flush=True)
        with output.open("a") as file:
            for case in failed:
                file.write(json.dumps({"case": case, "kills": [target.name]}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", nargs="+", type=Path, metavar="ROWS")
    parser.add_argument("--to", type=Path, metavar="KILLS")
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)
    sys.path[:0] = ["tests/many", "benchmarks"]
    if arguments.search:
        search(arguments.search, arguments.to)
        return 0
    return verify()


if __name__ == "__main__":
    sys.exit(main())
