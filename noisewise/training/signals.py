"""Ending on request: SIGTERM, SIGUSR1 (Slurm's warning before the time limit) and Ctrl-C finish the step, save, and exit."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_OPEN: "list[StopRequest]" = []  # those whose signals only set a flag, the innermost last


class StopRequest:
    """A context in which those signals only set a flag; a second Ctrl-C interrupts, and one more kills."""

    noted = False  # whether any was asked in this command, and went on

    def __init__(self) -> None:
        self.name: str | None = None
        self.urgent = False  # asked twice
        self.hasty = False  # nothing would be lost by ending at once
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        try:
            self._before = {number: signal.signal(number, self._note) for number in ASKING}
            _OPEN.append(self)
        except ValueError:  # not in the main thread: the caller's program handles signals
            self._before = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set by Python
        if self in _OPEN:
            _OPEN.remove(self)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block there is nothing to save, so a request is not noted but ends it with a KeyboardInterrupt."""
        if self.requested:
            raise KeyboardInterrupt
        self.hasty = True
        try:
            yield
        finally:
            self.hasty = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.name is not None and number == signal.SIGINT
        self.urgent = self.urgent or again
        self.name = self.name if again else signal.Signals(number).name
        if again:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is still being tidied up may take long
        if again or self.hasty:
            raise KeyboardInterrupt
        StopRequest.noted = True

    @property
    def requested(self) -> bool:
        return self.name is not None


class Acknowledged:
    """A context in which the first Ctrl-C (or other request to stop) is answered on stderr at once.

    Python runs handlers of signals between two lines of Python, and a backward pass or a decomposition is a single one: it may
    take a minute. A thread waits for the signal's number instead.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._pipe: tuple[int, int] | None = None
        self._before = -1
        self._once = threading.Lock()
        self._answered = threading.Event()

    def __enter__(self) -> "Acknowledged":
        StopRequest.noted = False
        pipe = os.pipe()
        os.set_blocking(pipe[1], False)
        try:
            self._before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        except ValueError:  # not in the main thread
            for end in pipe:
                os.close(end)
            return self
        self._pipe = pipe
        threading.Thread(target=self._answer, args=(pipe[0],), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(self._before)
            os.close(self._pipe[1])  # ends the thread

    def _answer(self, end: int) -> None:
        while number := os.read(end, 1):
            if number[0] in ASKING:
                self.say(signal.Signals(number[0]))
            elif not number[0]:
                self._answered.set()
        os.close(end)

    @property
    def ending(self) -> bool:
        """Whether a request has come, and the work ends where it is."""
        if self._pipe is not None:  # the thread may not have come to it yet
            os.write(self._pipe[1], b"\0")
            self._answered.wait(1)
        return self.interrupted and not StopRequest.noted

    def say(self, number: signal.Signals = signal.SIGINT) -> None:
        """Answer, if that was not done yet; in the first process alone."""
        with self._once:
            first, self.interrupted = not self.interrupted, True
        if first and os.environ.get("RANK", "0") == "0":
            patient = _OPEN and not _OPEN[-1].hasty
            what = "finishing the step and saving; Ctrl-C once more ends without that" if patient else "ending"
            print(f"\nnoisewise: {'Ctrl-C' if number == signal.SIGINT else number.name}: {what}", file=sys.stderr, flush=True)
