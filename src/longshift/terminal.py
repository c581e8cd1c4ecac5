"""Standard streams of a command: there or not, read or not."""

import errno
import io
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from typing import Any, TextIO

from longshift.errors import printable

Say = Callable[[str], None]  # tells a person a line, as `say` and `silent` do
UNREAD = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF)  # of a stream that nobody reads


def short_number(value: float, prefixes: Sequence[str] = ("", "k", "M", "G", "T", "P", "E")) -> str:
    """Three digits and a prefix, one for each power of a thousand: `"12.3 k"` of 12345."""
    power = 0
    # Above, three digits would need an exponent.
    while abs(value) >= 999.5 and power + 1 < len(prefixes):
        value /= 1000
        power += 1
    return f"{value:.3g} {prefixes[power]}"


def open_streams() -> None:
    """Give a process that was started without standard streams those of /dev/null, before files
    take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(
                sys,
                name,
                os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False),
            )
    for stream in (sys.stdout, sys.stderr):  # a terminal of another encoding shows question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def read_or_not(files: bool = False) -> Iterator[None]:
    """Let what is printed inside go on without a reader: a pipe that was closed, as by `head`, a
    full device or a terminal that is gone becomes /dev/null. `files`: other files are written
    inside too, and what they refuse is raised; so is a full device, since what a command prints is
    its product."""
    try:
        yield
    except OSError as fault:
        is_of_a_file = (
            fault.filename
            or fault.errno == errno.ENOSPC
            or all(map(_is_open, (sys.stdout, sys.stderr)))
        )
        if fault.errno not in UNREAD or (files and is_of_a_file):
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
                continue
            # Python flushes it once more at the end, and must not fail then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(line: str) -> None:
    """Tell the person a line, on standard error, whether somebody reads it or not."""
    with read_or_not():
        # In one write, or what another thread prints would stand inside the line.
        print(f"longshift: {printable(line)}\n", end="", file=sys.stderr, flush=True)


class NotebookBar:
    """A bar and a line in a notebook's cell, which change in place; nothing anywhere else. Mutable:
    what the notebook has of it."""

    def __init__(self):
        tools = sys.modules.get("IPython")  # a notebook has imported it
        shell = tools.get_ipython() if tools else None
        self._tools = tools if hasattr(shell, "kernel") else None
        self._handle: Any = None
        self._shown_s = 0.0

    def show(self, line: str, done: float, total: float | None) -> None:
        """Show a line and how much is done, at most ten times a second but for the last."""
        is_last = total is not None and done >= total
        if self._tools is None or (time.monotonic() - self._shown_s < 0.1 and not is_last):
            return
        self._shown_s = time.monotonic()
        extent = "" if total is None else f' value="{done}" max="{total}"'
        code = f'<code style="white-space: pre-wrap">{escape(line)}</code>'
        data = {"text/plain": line, "text/html": f"<progress{extent}></progress> {code}"}
        if self._handle is None:
            self._handle = self._tools.display.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _is_open(stream: TextIO) -> bool:
    """Whether somebody reads a stream, or it is a file. That its disk is full does not show."""
    try:
        os.write(stream.fileno(), b"")
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return not any(
            event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0)
        )
    except OSError:
        return False


def silent(line: str) -> None:
    """Tell nobody."""
