"""Choose the cases of `make test` from what the survey knows, and write `cases.csv`.

    python tests/survey/choose_cases.py ROWS...

1. A case is needed if it is the cheapest way to reach something: a mutant that it kills, a layout word, a model family, a
   pair of axes, a command, an exit code, a benchmark. Greedy cover, then cases that others make superfluous go again.
2. Cases under `CHEAP_S` are all kept: together they take less than a minute.
3. More cases are added, most new lines for a second first, until the choice runs at most `LINES_BELOW` of the package's
   lines fewer than the whole suite.
Cases of the files in KEPT are all chosen: what they hold has no mutant and no line of its own that says so.
Rows without lines (a run of `make test-all` or `make test` with `--survey` alone, on any Python) renew what cases cost and
reach: mutants that a case has killed, and lines or a benchmark that it was chosen for, stay; cases without a row stay as they were.
All other cases are `long`. ROWS are files of `case_survey.py` and of `mutant_run.py --search`; a later row of a case adds
to an earlier one. Of its seconds the lowest count: other work on a machine only adds to them.
"""

import argparse
import csv
import json
import re
import sys
import zlib
from base64 import b85decode
from collections.abc import Container
from pathlib import Path
from types import CodeType

import numpy as np
from line_trace import PACKAGE, line_offsets
from mutant_run import targets, words_of

CASES = Path(__file__).parent / "cases.csv"
LINES_BELOW = 0.009  # of the package's lines with code
CHEAP_S = 0.1
DEAR_S = 3.0  # a case above it is chosen for what no cheaper case reaches
DEAREST_S = 10.0  # no case of `make test` costs more
OVERHEAD_S = 0.05  # a case's share of what pytest does
LINES_A_SECOND = 10  # of a case that has become dear and stays
CHEAPEST = "cheapest of its test"  # a reason
LONGEST_NAME = 2000  # letters
KEPT = {  # files, and why all their cases are chosen
    "tests/thinking/test_architecture.py": "rule of the rooms",
    "tests/one/test_exported_folder.py": "new kinds of records, files and exports",
    "tests/one/test_file_kinds.py": "new kinds of records, files and exports",
    "tests/one/test_record_fields.py": "new kinds of records, files and exports",
    "tests/one/test_template_process.py": "limits of a template",
}
AXES = ("dp", "tp", "u", "ring", "pp")
COMMANDS = ("init", "data", "train", "check", "plan", "profile", "calibrate", "report", "export")
EXIT_CODES = (0, 2, 3, 4, 5, 6, 7, 130)


def read_rows(paths: list[Path]) -> dict[str, dict]:
    """By case."""
    rows: dict[str, dict] = {}
    for path in paths:
        for line in path.open():
            row = json.loads(line)
            if len(row["case"]) > LONGEST_NAME:  # a text of a megabyte as a parameter; such cases are cheap, and run as unknown ones
                continue
            known = rows.setdefault(row["case"], {"case": row["case"], "kills": []})
            seconds = [each["cpu_s"] for each in (known, row) if "cpu_s" in each]
            known |= {key: value for key, value in row.items() if key != "kills"} | ({"cpu_s": min(seconds)} if seconds else {})
            known["kills"] += row.get("kills", [])
    charge_fixtures(rows)
    return rows


def charge_fixtures(rows: dict[str, dict]) -> None:
    """Add to each case's seconds what the shared fixtures that it uses cost, whichever case was the first to ask."""
    costs: dict[tuple[str, str], float] = {}
    for case, row in rows.items():
        for name, seconds in row.get("setup_s", {}).items():
            costs[case.split("::")[0], name] = seconds
    for case, row in rows.items():
        row["cpu_s"] += sum(costs.get((case.split("::")[0], name), 0.0) for name in row.get("fixtures", ()))


def reached(row: dict) -> set[str]:
    """What a case reaches, as names of things that some case has to reach."""
    found = {f"mutant {name}" for name in row["kills"]} | {f"benchmark {name}" for name in row.get("benchmarks", ())}
    if row.get("mutant"):  # a case that makes the mistake itself
        found.add(f"mutant {row['mutant']}")
    for _, layout, family in row.get("calls", ()):
        found |= {f"family {family}"} - {"family "}
        for part in re.split(r" [>|] ", layout):
            words = words_of(part) - {"", "None"}
            found |= {f"word {word}" for word in words}
            degrees = {word for word in AXES if re.search(rf"(^|\.){word}[2-9]", part)}
            found |= {f"axes {a} x {b}" for a in degrees for b in degrees if a < b}
    if "test_parity.py::test_a_layout_is_one_process[" in row["case"]:
        found.add("family " + re.split(r"-(?=[a-z]+[0-9])", row["case"].split("[")[1])[0])
    for kind, arguments, code in row.get("commands", ()):
        words = arguments if isinstance(arguments, list) else arguments.split()
        at = next((n for n, word in enumerate(words) if word in COMMANDS), None)
        if at is not None and (kind == "main" or any("longshift" in word for word in words[:at])):
            found |= {f"command {words[at]}", f"exit code {code or 0}"}
    return found


def lines_of(row: dict, total: int) -> np.ndarray:
    """Whether each line ran, bool [total]."""
    if "lines" not in row:
        return np.zeros(total, dtype=bool)
    return np.frombuffer(zlib.decompress(b85decode(row["lines"])), dtype=np.uint8).astype(bool)


class Choice:
    """A growing set of cases. `reasons`: what each is chosen for, by its name."""

    def __init__(self, rows: dict[str, dict], lines: dict[str, np.ndarray]):
        self.rows = {name: row for name, row in rows.items() if row["outcome"] == "passed" and row["cpu_s"] <= DEAREST_S}
        self.lines, self.reasons = lines, dict[str, str]()
        self.reached = {name: reached(row) for name, row in self.rows.items()}

    def seconds(self) -> float:
        return sum(self.rows[name]["cpu_s"] for name in self.reasons if name in self.rows)

    def add_needed(self, needed: set[str]) -> None:
        """Cover `needed`: of all cases that with the most new things for a second, until nothing is left; then drop superfluous ones."""
        missing = set(needed)
        while missing:
            gains = {name: len(things & missing) / (OVERHEAD_S + self.rows[name]["cpu_s"]) for name, things in self.reached.items()}
            name = max(gains, key=lambda name: gains[name])
            self.reasons[name] = ""
            missing -= self.reached[name]
        for name in sorted(self.reasons, key=lambda name: -self.rows[name]["cpu_s"]):
            others = set().union(*(self.reached[other] for other in self.reasons if other != name))
            if self.reached[name] & needed <= others:
                del self.reasons[name]
        for name in self.reasons:
            others = set().union(*(self.reached[other] for other in self.reasons if other != name))
            self.reasons[name] = "; ".join(sorted(self.reached[name] & needed - others))

    def add_kept(self) -> None:
        for name in self.rows:
            if why := KEPT.get(name.split("::")[0]):
                self.reasons.setdefault(name, why)

    def add_cheap(self) -> None:
        for name, row in self.rows.items():
            if row["cpu_s"] < CHEAP_S:
                self.reasons.setdefault(name, "cheap")

    def add_cheapest(self, known: Container[str]) -> None:
        """Of each test that has no case among the `known` ones, add the cheapest case."""
        tested = {name.split("[")[0] for name in self.rows if name in known}
        for name in sorted(self.rows, key=lambda name: self.rows[name]["cpu_s"]):
            if (test := name.split("[")[0]) not in tested:
                tested.add(test)
                self.reasons.setdefault(name, CHEAPEST)

    def add_lines(self, target: np.ndarray, limit: int, dearest_s: float) -> None:
        """Add cases of up to `dearest_s`, most new lines for a second first, until at most `limit` lines of `target` are not run."""
        missing = target & ~np.any([self.lines[name] for name in self.reasons], axis=0)
        names = [name for name, row in self.rows.items() if name not in self.reasons and row["cpu_s"] <= dearest_s]
        matrix = np.stack([self.lines[name] for name in names])
        cost = np.array([OVERHEAD_S + self.rows[name]["cpu_s"] for name in names])
        while missing.sum() > limit:
            gains = (matrix & missing).sum(axis=1)
            best = int(np.argmax(gains / cost))
            if gains[best] == 0:
                break
            self.reasons[names[best]] = f"{gains[best]} lines{' that no cheaper case runs' if dearest_s > DEAR_S else ''}"
            missing &= ~matrix[best]


def last_choice() -> dict[str, dict[str, str]]:
    """The rows of `cases.csv`, by case."""
    with CASES.open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def kept_reason(reason: str, seconds: float) -> str | None:
    """Why a case stays chosen that was chosen for lines or a benchmark, and costs so much now; None where it does not: where it has become
    dear, and runs few lines a second of which nobody knows whether a cheaper case runs them."""
    lines = re.match(r"(\d+) lines$", reason)
    if lines and seconds > DEAR_S:
        return f"{reason} when it was cheaper" if int(lines[1]) >= LINES_A_SECOND * seconds else None
    return reason if re.search(rf"\d+ lines|benchmark|^{CHEAPEST}$", reason) else None


def needed_things(rows: dict[str, dict]) -> set[str]:
    """What some case of `make test` has to reach: all that some case of the suite reaches, and what is listed above."""
    from longshift.layout.layout import _FLAGS, number_fields  # pyright: ignore[reportPrivateUsage]

    words = {*number_fields(), *_FLAGS, "chunk", "chunk-auto", "z0", "z1", "z2", "z3"} - {"z"}
    things = {thing for row in rows.values() if row["outcome"] == "passed" for thing in reached(row)}
    things = {thing for thing in things if not thing.startswith(("word ", "exit code ")) or thing.removeprefix("word ") in words}
    things |= {f"exit code {code}" for code in EXIT_CODES} | {f"command {name}" for name in COMMANDS}
    return things | {f"mutant {target.name}" for target in targets()}


def code_lines(offsets: dict[str, int], total: int) -> np.ndarray:
    """Whether each line is one of the package with code, bool [total]."""
    has_code = np.zeros(total, dtype=bool)
    for path, first in offsets.items():
        codes = [compile(Path(path).read_text(), path, "exec")]
        while codes:
            code = codes.pop()
            has_code[[first + line for _, _, line in code.co_lines() if line]] = True
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return has_code


def write_cases(rows: dict[str, dict], reasons: dict[str, str], others: dict[str, dict[str, str]]) -> None:
    with CASES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "processor_s", "chosen_for", "kills"])
        for name in sorted({*rows, *others}):
            if name in others:
                writer.writerow(others[name].values())
            else:
                kills = "; ".join(sorted(set(rows[name]["kills"])))
                writer.writerow([name, f"{rows[name]['cpu_s']:.2f}", reasons.get(name, ""), kills])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()

    rows, (offsets, total), before = read_rows(arguments.rows), line_offsets(PACKAGE), last_choice()
    if not any("lines" in row for row in rows.values()):
        for name in rows.keys() & before.keys():
            rows[name]["kills"] += filter(None, before[name]["kills"].split("; "))
    lines = {name: lines_of(row, total) for name, row in rows.items()}
    choice = Choice(rows, lines)

    # 1. Everything that has to be reached, as far as a case that is not too dear reaches it.
    needed = needed_things(rows)
    possible = set().union(*choice.reached.values())
    for thing in sorted(needed - possible):
        print(f"no case up to {DEAREST_S:.0f} s reaches {thing}")
    choice.add_needed(needed & possible)
    print(f"{len(choice.reasons)} cases reach {len(needed & possible)} things in {choice.seconds():.0f} processor seconds")

    # 2. Files that are kept, cheap cases, and those that need what this machine does not have.
    choice.add_kept()
    choice.add_cheap()
    choice.reasons |= {name: "skipped where it was surveyed" for name, row in rows.items() if row["outcome"] == "skipped"}
    print(f"{len(choice.reasons)} with cheap ones, {choice.seconds():.0f} s")
    if not any(line.any() for line in lines.values()):
        for name in choice.rows.keys() & before.keys():
            if reason := kept_reason(before[name]["chosen_for"], choice.rows[name]["cpu_s"]):
                choice.reasons.setdefault(name, reason)
        choice.add_cheapest(known=before)
        print(f"{len(choice.reasons)} with new tests, lines and benchmarks, {choice.seconds():.0f} s")
        report_and_write(rows, choice, arguments.write, {name: row for name, row in before.items() if name not in rows})
        return

    # 3. Lines.
    has_code = code_lines(offsets, total)
    every = np.any(list(lines.values()), axis=0) & has_code
    for dearest_s in (DEAR_S, DEAREST_S):
        choice.add_lines(every, int(LINES_BELOW * has_code.sum()), dearest_s)
    chosen = every & np.any([lines[name] for name in choice.reasons], axis=0)
    print(f"{len(choice.reasons)} with more lines, {choice.seconds():.0f} s")
    print(f"of {has_code.sum()} lines all cases run {every.sum()}, the chosen ones {chosen.sum()}, beside those of imports")
    report_and_write(rows, choice, arguments.write, {})


def report_and_write(rows: dict[str, dict], choice: Choice, write: bool, others: dict[str, dict[str, str]]) -> None:
    """`others`: rows of `cases.csv` that stay as they were."""
    for name in sorted(choice.reasons, key=lambda name: -rows[name]["cpu_s"]):
        if rows[name]["cpu_s"] > DEAR_S:
            print(f"{rows[name]['cpu_s']:6.1f} s  {name}  {choice.reasons[name]}")
    if write:
        write_cases(rows, choice.reasons, others)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "many"), str(Path(__file__).parents[2] / "benchmarks")]
    main()
