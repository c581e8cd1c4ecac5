"""A piece of work in a thread of its own, for what waits on files while a step computes."""

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Work that began in a thread of its own when this was made. The thread ends with the work, and
    never keeps the process alive. What the work raises is raised by `result`. Mutable."""

    def __init__(self, work: Callable[[], T]):
        self._results: list[T] = []
        self._fault: BaseException | None = None
        self._thread = Thread(
            target=self._do, args=(work,), name="longshift-background", daemon=True
        )
        self._thread.start()

    def _do(self, work: Callable[[], T]) -> None:
        try:
            self._results.append(work())
        except BaseException as fault:  # raised where the result is asked for
            self._fault = fault

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the work has ended, however it does."""
        self._thread.join()

    def result(self) -> T:
        """What the work returned, when it has ended. Raises what it raised."""
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        return self._results[0]
