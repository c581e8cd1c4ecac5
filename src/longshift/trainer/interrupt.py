"""Ctrl-C, and what else should: the first asks the run to stop after the step in hand, the second
ends the process."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType

from longshift.dist.launcher import end_with_parent
from longshift.terminal import Say, silent

LAUNCHER_GONE = signal.SIGUSR2
# What schedulers and terminals send before they end a process.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def not_ignored(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those that whoever started this process does not ignore: `nohup` ignores SIGHUP, and the run
    goes on when the terminal closes."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def stopping(number: int) -> str:
    again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return f"finishing this step, then saving; {again} again stops at once"


class Interrupt:
    """A flag that Ctrl-C sets, and signals: call it to ask whether the run should stop. Make it
    before torch is imported, which takes seconds. What a launcher has held back until then counts.
    `also`: signals beside SIGINT; `say` shows a line to the person. Mutable: one flag."""

    def __init__(self, *also: signal.Signals, say: Say = silent) -> None:
        self._asked = False
        self._say = say
        self._watched = (signal.SIGINT, *not_ignored(also))
        # Handlers first: a signal that was held back arrives as soon as it is let through.
        for number in self._watched:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._watched)

    def __call__(self) -> bool:
        return self._asked

    def end_with_launcher(self) -> None:
        """Stop the run, too, when the process that has started this one is gone. Its threads end
        one by one, and each sends a signal: that is one of its own, which may come again while the
        run saves."""
        signal.signal(LAUNCHER_GONE, self._on_launchers_end)
        end_with_parent(LAUNCHER_GONE)

    def _on_launchers_end(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._say("the launcher is gone, or SIGUSR2 was sent: finishing this step, then saving")
        self._asked = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._say(stopping(number))
        # The next signal ends the process, as if nobody watched.
        for watched in self._watched:
            signal.signal(
                watched, signal.default_int_handler if watched == signal.SIGINT else signal.SIG_DFL
            )


class StepInterrupt:
    """Ctrl-C of a Python program, which waits inside `with` until a step is over; a second one is
    raised at once. Where the program handles SIGINT itself, and in other threads, nothing changes.
    Mutable: `asked`, whether one came."""

    def __init__(self, say: Say) -> None:
        self.asked = False
        self._say = say
        self._watches = False

    def __enter__(self) -> None:
        self._watches = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._watches:
            signal.signal(signal.SIGINT, self._on_signal)

    def __exit__(self, *_: object) -> None:
        if self._watches:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._say(stopping(number))
