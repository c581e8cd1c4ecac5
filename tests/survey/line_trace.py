"""Which lines of the package run, in this process and in every process that it forks or starts.

Lines are bytes of a file that all these processes map: a line that runs sets its byte, and no process needs to end
in good order. Python 3.12's `sys.monitoring` reports a line once and then leaves it at full speed, until `restart`.
"""

import mmap
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (REPOSITORY / "src" / "longshift", REPOSITORY / "benchmarks")
VARIABLE = "LONGSHIFT_LINE_TRACE"  # the path of the mapped file, for processes that are started


def line_offsets() -> tuple[dict[str, int], int]:
    """Where the lines of each module begin, by path, and how many there are in all. Line 1 is the byte after it."""
    offsets, total = {}, 0
    for path in sorted(path for folder in FOLDERS for path in folder.rglob("*.py")):
        offsets[str(path)] = total
        total += len(path.read_text().splitlines()) + 1
    return offsets, total


class LineTrace:
    """Begin to record lines into the mapped file at `path`, which is made if it is not there."""

    def __init__(self, path: Path):
        if sys.version_info < (3, 12):
            sys.exit("which lines run is seen by sys.monitoring, which needs Python 3.12 or later")
        self.offsets, total = line_offsets()
        with path.open("ab") as file:
            file.truncate(total)
        with path.open("r+b") as file:
            self.seen = mmap.mmap(file.fileno(), total)
        os.environ[VARIABLE] = str(path)
        self._monitoring = sys.monitoring
        self._monitoring.use_tool_id(self._monitoring.COVERAGE_ID, "longshift survey")
        self._monitoring.register_callback(self._monitoring.COVERAGE_ID, self._monitoring.events.LINE, self._record)
        self._monitoring.set_events(self._monitoring.COVERAGE_ID, self._monitoring.events.LINE)

    def restart(self) -> None:
        """Forget the lines so far."""
        self.seen[:] = bytes(len(self.seen))
        self._monitoring.restart_events()

    def _record(self, code, line: int):
        offset = self.offsets.get(code.co_filename)
        if offset is None:
            return self._monitoring.DISABLE
        self.seen[offset + line] = 1
        if code.co_name == "_serve":  # a rank of a world that stays: its next call may belong to another case
            self._monitoring.restart_events()
            return None
        return self._monitoring.DISABLE
