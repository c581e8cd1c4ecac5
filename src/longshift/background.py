"""Work that goes on while a step computes. Apart from `files`, as it takes `logging` with it, which
the first line on the screen can do without."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Begin a piece of work in a thread of its own, which ends with it and never keeps the process
    alive. What the work raises is raised by `result`."""
    future = Future[T]()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except BaseException as fault:  # raised where the result is asked for
            future.set_exception(fault)

    Thread(target=fulfil, name="longshift-background", daemon=True).start()
    return future
