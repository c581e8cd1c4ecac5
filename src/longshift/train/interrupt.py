"""Ctrl-C, and what else should: the first asks the run to stop after the step in hand, the second ends the process."""

import signal
from types import FrameType


class Interrupt:
    """Call it to ask whether the run should stop. Make it before torch is imported, which takes seconds. `also`: signals beside SIGINT.
    Mutable: one flag."""

    def __init__(self, *also: signal.Signals) -> None:
        self._asked = False
        self._watched = (signal.SIGINT, *also)
        for number in self._watched:
            signal.signal(number, self._on_signal)

    def __call__(self) -> bool:
        return self._asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        for watched in self._watched:
            signal.signal(watched, signal.default_int_handler if watched == signal.SIGINT else signal.SIG_DFL)
