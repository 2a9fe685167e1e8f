"""What a CUDA graph cannot hold, found out before it is recorded, and what to do after a recording that failed."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """In the block, anything that makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def host_chance_is_an_error() -> Iterator[None]:
    """In the block, random numbers of the host are an error: a graph would repeat for good what was decided by them."""
    before = _host_generators()
    yield
    moved = [name for name, state in _host_generators().items() if state != before[name]]
    if moved:
        raise RuntimeError(f"random numbers were drawn on the host ({moved[0]}), which a recording would do only once")


def _host_generators() -> dict[str, bytes]:
    states = {"random": random.getstate(), "numpy.random": np.random.get_state(), "torch": torch.get_rng_state().numpy()}
    return {name: pickle.dumps(state) for name, state in states.items()}


def recover(device: torch.device, pool: tuple[int, int]) -> None:
    """A recording into this pool failed; torch may believe that it still goes on."""
    recover_generator(device)
    recover_allocator(device, pool)


def recover_generator(device: torch.device) -> None:
    """If torch's generator is still recorded from, give it a state that is not.

    Only then, as this has a price: graphs recorded before would read the old state, and its seed, for good.
    """
    try:
        torch.rand((), device=device)
    except RuntimeError:
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())


def recover_allocator(device: torch.device, pool: tuple[int, int]) -> None:
    """If torch's allocator still serves the recording, end that, and let go of the pool: both are left out by torch where the
    end of a recording fails (pytorch issue 180395). Until then it gives no cached memory back, not even before it runs out."""
    index = torch.cuda.current_device() if device.index is None else device.index
    calls: Any = torch._C
    end = getattr(calls, "_cuda_endAllocateToPool", None) or calls._cuda_endAllocateCurrentStreamToPool  # before torch 2.8
    try:
        end(index, pool)
    except RuntimeError:  # torch has ended it
        return
    calls._cuda_releasePool(index, pool)
