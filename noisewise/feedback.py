"""Measuring a training run without disturbing it: random state, gradients, buffers, parameters and optimizer are put back.

A change of the loss over one step is a thousandth of the loss itself, so it only shows when noise and dropout are the same
before and after: both evaluations start from the same random state.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def preserved_random_state(seed: int | None = None) -> Iterator[None]:
    """Leaves the caller's random state (torch on the CPU and the current accelerator, numpy, Python) as it was.

    With a seed the block runs from that seed; two blocks with one seed see the same noise and the same dropout.
    """
    cpu, py, npy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if cuda is not None:
                torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(py)
        np.random.set_state(npy)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextmanager
def preserved_buffers(model: nn.Module | None) -> Iterator[None]:
    """Puts running statistics (BatchNorm and the like) back after the block."""
    before = [] if model is None else [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def set_aside_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gives the block empty gradients and puts the caller's back, the very same tensors."""
    parameters = list(parameters)
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def without_gradient_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """For a DDP model: forward and backward without the all-reduce; nothing for other models."""
    no_sync = getattr(model, "no_sync", None)
    return no_sync() if no_sync is not None else nullcontext()


def check_evaluation(losses: Any, expected: Tensor) -> Tensor:
    """What `loss_at(rows, u)` returned, if it is one finite-typed loss for each u."""
    if not isinstance(losses, Tensor) or losses.shape != expected.shape:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"loss_at(rows, u) must return one loss for each u, {tuple(expected.shape)}, got {got}")
    return losses.float()
