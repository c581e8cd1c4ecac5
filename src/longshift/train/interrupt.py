"""Ctrl-C: the first asks the run to stop after the step in hand, the second ends the process."""

import signal
from types import FrameType


class Interrupt:
    """Call it to ask whether the run should stop. Make it before torch is imported, which takes seconds. Mutable: one flag."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGINT, self._on_signal)

    def __call__(self) -> bool:
        return self._asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
