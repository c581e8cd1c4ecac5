"""Which lines of the package run, in this process and in every process that it forks or starts.

Lines are bytes of a file that all these processes map: a line that runs sets its byte, and no process needs to end
in good order. Python 3.12's `sys.monitoring` reports a line once and then leaves it at full speed, until `restart`.
"""

import ast
import mmap
import os
import sys
from pathlib import Path
from types import CodeType

REPOSITORY = Path(__file__).parents[2]
PACKAGE, BENCHMARKS = REPOSITORY / "src" / "longshift", REPOSITORY / "benchmarks"
VARIABLE = "LONGSHIFT_LINE_TRACE"  # the path of the mapped file, for processes that are started


def line_offsets(folder: Path, begin: int = 0) -> tuple[dict[str, int], int]:
    """Where the lines of each module of a folder begin, by path, and where they end. Line 1 is the byte after its module's begin."""
    offsets, end = {}, begin
    for path in sorted(folder.rglob("*.py")):
        offsets[str(path)] = end
        end += len(path.read_text().splitlines()) + 1
    return offsets, end


def benchmark_mains(offsets: dict[str, int]) -> dict[str, slice]:
    """Where the lines of each benchmark's `main` are, by the benchmark's name."""
    mains = {}
    for path, first in offsets.items():
        for node in ast.parse(Path(path).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                mains[Path(path).stem] = slice(first + node.body[0].lineno, first + (node.end_lineno or 0) + 1)
    return mains


class LineTrace:
    """Begin to record lines into the mapped file at `path`, which is made if it is not there."""

    def __init__(self, path: Path):
        if sys.version_info < (3, 12):
            sys.exit("which lines run is seen by sys.monitoring, which needs Python 3.12 or later")
        package, self.package_end = line_offsets(PACKAGE)
        benchmarks, end = line_offsets(BENCHMARKS, self.package_end)
        self.offsets, self.mains = package | benchmarks, benchmark_mains(benchmarks)
        with path.open("ab") as file:
            file.truncate(end)
        with path.open("r+b") as file:
            self.seen = mmap.mmap(file.fileno(), end)
        os.environ[VARIABLE] = str(path)
        self._monitoring = sys.monitoring
        self._monitoring.use_tool_id(self._monitoring.COVERAGE_ID, "longshift survey")
        self._monitoring.register_callback(self._monitoring.COVERAGE_ID, self._monitoring.events.LINE, self._record)
        self._monitoring.set_events(self._monitoring.COVERAGE_ID, self._monitoring.events.LINE)

    def restart(self) -> None:
        """Forget the lines so far."""
        self.seen[:] = bytes(len(self.seen))
        self._monitoring.restart_events()

    def package_lines(self) -> bytes:
        """A byte for each line of the package, 1 where it ran."""
        return self.seen[: self.package_end]

    def benchmarks(self) -> list[str]:
        """The benchmarks whose `main` ran."""
        return [name for name, place in self.mains.items() if any(self.seen[place])]

    def _record(self, code: CodeType, line: int) -> object:
        offset = self.offsets.get(code.co_filename)
        if offset is None:
            return self._monitoring.DISABLE
        self.seen[offset + line] = 1
        if code.co_name == "_serve":  # a rank of a world that stays: its next call may belong to another case
            self._monitoring.restart_events()
            return None
        return self._monitoring.DISABLE
