"""Measuring a training run without disturbing it: random state, gradients, buffers, parameters and optimizer are put back.

A change of the loss over one step is a thousandth of the loss itself, so it only shows when noise and dropout are the same
before and after: both evaluations start from the same random state.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisewise import distributed
from noisewise.levels import check_per_sample


def seed_torch(seed: int) -> None:
    """torch.manual_seed for the CPU and the current GPU: torch's own formats a stack trace for every other kind of device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


@contextmanager
def preserved_random_state(seed: int | None = None) -> Iterator[None]:
    """Leaves the caller's random state (torch on the CPU and the current accelerator, numpy, Python) as it was.

    With a seed the block runs from that seed; two blocks with one seed see the same noise and the same dropout.
    """
    cpu, py, npy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        if seed is not None:
            seed_torch(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(py)
        np.random.set_state(npy)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Tensors have their own values again after the block, bit for bit and in place."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def preserved_buffers(model: nn.Module | None) -> AbstractContextManager[None]:
    """Puts running statistics (BatchNorm and the like) back after the block."""
    return put_back(() if model is None else model.buffers())


@contextmanager
def set_aside_gradients(parameters: Iterable[Tensor]) -> Iterator[Callable[[Tensor], None]]:
    """Gives the block empty gradients and puts the caller's back, the very same tensors.

    What the block gets is its backward pass: it also sets aside those of tensors that are not among `parameters`, such as the
    weights of a text encoder with an optimizer of its own.
    """
    before: dict[Tensor, Tensor | None] = {}

    def set_aside(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in before:
                before[tensor], tensor.grad = tensor.grad, None

    def backward(loss: Tensor) -> None:
        set_aside(leaves(loss))
        loss.backward()

    set_aside(parameters)
    try:
        yield backward
    finally:
        for tensor, gradient in before.items():
            tensor.grad = gradient


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward pass from here gives gradients to."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        left += [one for one, _ in node.next_functions]
    return found


def check_evaluation(losses: Any, u: Tensor) -> Tensor:
    """What `loss_at(rows, u)` returned, if it is one loss for each u."""
    return check_per_sample(losses, u, "the losses of loss_at(rows, u)").float()


@torch.no_grad()
def evaluate(
    loss_at: Callable[[Any, Tensor], Any], rows: Tensor, u: Tensor, *, most: int, seed: int, model: nn.Module | None
) -> Tensor:
    """The losses of those rows at those u, in calls of equal size with at most that many samples each.

    One seed gives one noise and one dropout, so a difference between two calls is due to the parameters alone; the caller's
    random state and the model's buffers stay as they were. All ranks make the same number of calls.
    """
    n = len(u)
    calls = distributed.largest(-(-n // most), u.device)
    size = -(-n // calls)
    wrapped = torch.arange(calls * size, device=u.device) % n  # the last call is filled up
    rows, u = rows[wrapped], u[wrapped]
    with preserved_random_state(seed), preserved_buffers(model):
        parts = [check_evaluation(loss_at(r, v), v) for r, v in zip(rows.split(size), u.split(size), strict=True)]
    return torch.cat(parts)[:n]


def check_pairing(once: Tensor, again: Tensor) -> None:
    """Warn if the same rows and u gave other losses the second time: a generator of the caller's own is not rewound."""
    difference = float((again - once).abs().mean() / once.abs().mean().clamp(min=1e-12))
    if difference > 1e-3:
        warnings.warn(
            f"loss_at gave losses that differ by {difference:.1%} on the same rows and u: its noise does not come from the "
            "global random state of torch, numpy or Python, so changes cannot be told from noise. Draw noise with "
            "torch.randn_like, or fix it for the batch before the step",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def in_float32(model: nn.Module | None) -> Iterator[None]:
    """The model computes in float32 inside the block, without TF32, whatever autocast `loss_at` opens around a call of it.

    A change of the loss over one step is lost in the rounding of bfloat16. A model whose weights are of lower precision
    keeps theirs.
    """
    contexts: list[torch.autocast] = []
    modules = [] if model is None else list(model.modules())
    device = "cpu" if model is None else next((one.device.type for one in model.parameters()), "cpu")

    def enter(module: nn.Module, arguments: Any) -> None:
        contexts.append(torch.autocast(device, enabled=False))
        contexts[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    handles = [one.register_forward_pre_hook(enter, prepend=True) for one in modules]
    handles += [one.register_forward_hook(leave, always_call=True) for one in modules]
    try:
        with full_float32():
            yield
    finally:
        for handle in handles:
            handle.remove()


class KeptParameters:
    """A model's parameters as they are now, to be put back for a while after an optimizer step."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = [(one, one.detach().clone()) for one in model.parameters() if one.requires_grad]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The kept parameters inside the block, today's after it, bit for bit."""
        with put_back(one for one, _ in self.kept):
            with torch.no_grad():
                for one, value in self.kept:
                    one.copy_(value)
            yield


class Snapshot:
    """Parameters, buffers and optimizer state, also that in its parameter groups, to be put back bit for bit after a trial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        for group in optimizer.param_groups:
            tensors.update({id(parameter): parameter for parameter in group["params"]})
        self.tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self.state = {parameter: _copied(entries) for parameter, entries in optimizer.state.items()}
        self.groups = [_copied(group) for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; may be called more than once."""
        for tensor, value in self.tensors:
            tensor.copy_(value)
        for parameter in list(self.optimizer.state):
            if parameter in self.state:
                _put_back(self.optimizer.state[parameter], self.state[parameter])
            else:
                del self.optimizer.state[parameter]
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            _put_back(group, before)


def _copied(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of an optimizer as they are now; its parameters are kept elsewhere."""
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in entries.items()
        if name != "params"
    }


def _put_back(entries: dict[str, Any], before: dict[str, Any]) -> None:
    """Entries as they were, tensors in their own memory."""
    for name, value in before.items():
        if isinstance(value, Tensor):
            entries[name].copy_(value)
        else:
            entries[name] = copy.deepcopy(value)


def _switches() -> list[tuple[Any, str, Any]]:
    """(where, attribute, value without TF32)."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(convolutions, "conv"):  # torch 2.9 and later
        return [(convolutions.conv, "fp32_precision", "ieee"), (products, "fp32_precision", "ieee")]
    return [(convolutions, "allow_tf32", False), (products, "allow_tf32", False)]


@contextmanager
def full_float32() -> Iterator[None]:
    """Convolutions and matrix products without TF32 inside the block; the caller's settings return after it."""
    before = [(where, name, getattr(where, name)) for where, name, _ in _switches()]
    try:
        for where, name, value in _switches():
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
