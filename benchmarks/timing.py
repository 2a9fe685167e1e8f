"""Seconds of work on a device, which may still be busy when a call returns."""

import time
from collections.abc import Callable

import torch


def wait(device: str | torch.device) -> None:
    """Until a GPU has done all that it was told to."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str | torch.device) -> float:
    """What a call takes from an idle device to an idle device."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start
