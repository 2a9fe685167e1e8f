"""Ending on request: SIGTERM, SIGUSR1 (Slurm's warning before the time limit) and Ctrl-C finish the step, save, and exit."""

import signal
from types import FrameType, TracebackType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """A context in which those signals only set a flag; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.urgent = False  # asked twice
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        try:
            self._before = {number: signal.signal(number, self._note) for number in ASKING}
        except ValueError:  # not in the main thread: the caller's program handles signals
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            self.urgent = True
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    @property
    def requested(self) -> bool:
        return self.name is not None
