"""Standard streams of a command: there or not, read or not."""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from longshift.errors import printable

UNREAD = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF)  # of a stream that nobody reads


def open_streams() -> None:
    """Give a process that was started without standard streams those of /dev/null, before files take their numbers."""
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
    """Let what is printed inside go on without a reader: a pipe that was closed, as by `head`, a full device or a terminal that is gone
    becomes /dev/null. `files`: other files are written inside too, and what they refuse is raised; so is a full device, since what a
    command prints is its product."""
    try:
        yield
    except OSError as fault:
        is_of_a_file = fault.filename or fault.errno == errno.ENOSPC or all(map(_is_open, (sys.stdout, sys.stderr)))
        if fault.errno not in UNREAD or (files and is_of_a_file):
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
                continue
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(line: str) -> None:
    """Tell the person a line, on standard error, whether somebody reads it or not."""
    with read_or_not():
        print(f"longshift: {printable(line)}", file=sys.stderr, flush=True)


def _is_open(stream: TextIO) -> bool:
    """Whether somebody reads a stream, or it is a file. That its disk is full does not show."""
    try:
        os.write(stream.fileno(), b"")
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return not any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
    except OSError:
        return False


def silent(line: str) -> None:
    """Tell nobody."""
