"""A pytest plugin: `--survey FILE` appends a row a case, of what it costs and of what it reaches.

cpu_s       processor seconds of this process, of all that it has started, and of worlds of ranks that stay
setup_s     those of shared fixtures that the case was the first to ask for, by name; they are not in `cpu_s`
fixtures    names of all shared fixtures that it uses
calls       [function, layout, family] of each call of a world of ranks
commands    ["main" or "process", words, exit code] of each command line
mutant      the mistake that the case makes itself
lines       with --survey-lines: which lines of the package and of the benchmarks run (`line_trace.py`)
"""

import json
import os
import subprocess
import sys
import time
import zlib
from base64 import b85encode
from collections.abc import Iterator
from pathlib import Path

import pytest

STARTED = Path(__file__).parent / "started"  # on the path of processes that cases start, so that they trace lines too
TICK_S = 1 / os.sysconf("SC_CLK_TCK")

# Of the session's configuration: by case whether `make test` runs it, and the mistake that it makes itself.
COLLECTED = pytest.StashKey[dict[str, tuple[bool, str | None]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--survey", type=Path, help="append a row a case to this file: processor seconds, outcome, what it reaches")
    parser.addoption("--survey-lines", action="store_true", help="also which lines run (Python 3.12 or later)")


def pytest_configure(config: pytest.Config) -> None:
    runs_cases = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)  # not what hands them to workers
    if (path := config.getoption("--survey")) and runs_cases:
        config.pluginmanager.register(Survey(path, with_lines=config.getoption("--survey-lines")))


def processor_seconds() -> float:
    """Of this process, of its children that have ended, and of those that live."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    waiting = child_pids(os.getpid())
    while waiting:
        pid = waiting.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        waiting += child_pids(pid)
        seconds += sum(map(int, fields[11:15])) * TICK_S  # utime, stime and those of its ended children
    return seconds


def child_pids(pid: int) -> list[int]:
    pids = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:  # it has just ended
        pass
    return pids


def case_name(nodeid: str) -> str:
    """Without the group that pytest-xdist appends."""
    name, _, group = nodeid.rpartition("@")
    return name if name and "]" not in group else nodeid


def mutant_of(item: pytest.Item) -> str | None:
    """The mistake that a case makes itself: the value of its parameter `mutant`, with the test's name."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if "mutant" not in params:
        return None
    value = params["mutant"]
    return f"{item.path.stem}.{item.originalname} {getattr(value, '__name__', value)}"


class Recorder:
    """What cases call, by wrapping the places that calls go through."""

    def __init__(self):
        self.calls: list[tuple[str, str, str]] = []
        self.commands: list[tuple[str, list[str], subprocess.Popen | int | str | None]] = []

    def install(self) -> None:
        from longshift import cli
        from longshift.dist.fork import ForkedWorld

        call, main, start = ForkedWorld.call, cli.main, subprocess.Popen.__init__

        def recorded_call(world: ForkedWorld, function: str, *rest, **arguments) -> list:
            layout = arguments.get("layout", arguments.get("layouts", ""))
            trial = arguments.get("trial")
            family = trial["spec"]["family"] if isinstance(trial, dict) and "spec" in trial else ""
            self.calls.append((function, str(layout), family))
            return call(world, function, *rest, **arguments)

        def recorded_main() -> None:
            code: int | str | None = 0
            try:
                main()
            except SystemExit as end:
                code = end.code
                raise
            finally:
                self.commands.append(("main", sys.argv[1:], code))

        def recorded_start(process: subprocess.Popen, args, *rest, **options) -> None:
            self.commands.append(("process", [args] if isinstance(args, str) else [*map(str, args)], process))
            start(process, args, *rest, **options)

        ForkedWorld.call, cli.main, subprocess.Popen.__init__ = recorded_call, recorded_main, recorded_start

    def take(self) -> dict[str, list]:
        """What was recorded since the last time."""
        commands = [(kind, words, end.returncode if isinstance(end, subprocess.Popen) else end) for kind, words, end in self.commands]
        row = {"calls": sorted(set(self.calls)), "commands": commands}
        self.calls, self.commands = [], []
        return row


class Survey:
    """Measures cases and writes their rows."""

    def __init__(self, path: Path, with_lines: bool):
        self.path, self.trace, self.recorder = path, None, Recorder()
        if with_lines:
            from line_trace import LineTrace

            self.trace = LineTrace(path.with_suffix(f".{os.getpid()}.map"))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTED), os.environ.get("PYTHONPATH")]))
        self.outcomes: dict[str, str] = {}
        self.setup_s: dict[str, float] = {}
        self.shared: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.recorder.install()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.trace:
            self.trace.restart()
        self.setup_s = {}
        begin_s, begin_wall_s = processor_seconds(), time.monotonic()
        answer = yield
        cpu_s = processor_seconds() - begin_s - sum(self.setup_s.values())
        row = {
            "case": case_name(item.nodeid),
            "outcome": self.outcomes.pop(item.nodeid, "passed"),
            "cpu_s": round(cpu_s, 3),
            "wall_s": round(time.monotonic() - begin_wall_s, 3),
            "setup_s": {name: round(seconds, 3) for name, seconds in self.setup_s.items()},
            "fixtures": [name for name in getattr(item, "fixturenames", ()) if name in self.shared],
            "mutant": mutant_of(item),
            **self.recorder.take(),
        }
        if self.trace:
            row["lines"] = b85encode(zlib.compress(self.trace.package_lines())).decode()
            row["benchmarks"] = self.trace.benchmarks()
        with self.path.open("ab", buffering=0) as file:  # one write a row: other workers append too
            file.write(json.dumps(row).encode() + b"\n")
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        """Charges a shared fixture with what it costs beside the shared ones that it asks for."""
        if fixturedef.scope == "function":
            return (yield)
        self.shared.add(fixturedef.argname)
        begin_s, inner_s = processor_seconds(), sum(self.setup_s.values())
        value = yield
        inner_s = sum(self.setup_s.values()) - inner_s
        self.setup_s[fixturedef.argname] = processor_seconds() - begin_s - inner_s
        return value

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
