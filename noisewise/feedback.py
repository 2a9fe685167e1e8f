"""Measuring a training run without disturbing it: random state, gradients, buffers, parameters and optimizer are put back.

A change of the loss over one step is a thousandth of the loss itself, so it only shows when noise and dropout are the same
before and after: both evaluations start from the same random state.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisewise import distributed
from noisewise.levels import check_per_sample
from noisewise.precision import full_float32, with_tf32


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
    tensors = list(tensors)
    before = copies(tensors)
    try:
        yield
    finally:
        write(tensors, before)


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


PRECISIONS = ("float32", "tf32", "bf16")


@contextmanager
def computing_in(precision: str | None, model: nn.Module | None) -> Iterator[None]:
    """The model computes in this precision inside the block, whatever autocast `loss_at` opens around a call of it.

    "float32" is without TF32: much of a change of the loss over one step is lost in rounding otherwise. A model whose weights
    are of lower precision keeps theirs. None leaves all as it is.
    """
    if precision is None:
        yield
        return
    contexts: list[torch.autocast] = []
    modules = [] if model is None else list(model.modules())
    device = "cpu" if model is None else next((one.device.type for one in model.parameters()), "cpu")

    def enter(module: nn.Module, arguments: Any) -> None:
        contexts.append(torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"))
        contexts[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    handles = [one.register_forward_pre_hook(enter, prepend=True) for one in modules]
    handles += [one.register_forward_hook(leave, always_call=True) for one in modules]
    products = {"float32": full_float32, "tf32": with_tf32, "bf16": nullcontext}[precision]
    try:
        with products():
            yield
    finally:
        for handle in handles:
            handle.remove()


def at_precision(
    loss_at: Callable[[Any, Tensor], Any], precision: str | None, model: nn.Module | None
) -> Callable[[Any, Tensor], Any]:
    """`loss_at` with the model computing in this precision; one that has an `at_precision` of its own sees to it itself."""
    if precision is None:
        return loss_at
    own = getattr(loss_at, "at_precision", None)
    if own is not None:
        return own(precision)

    def losses(rows: Any, u: Tensor) -> Any:
        with computing_in(precision, model):
            return loss_at(rows, u)

    return losses


def differentiate(
    loss_at: Callable[[Any, Tensor], Any], rows: Tensor, u: Tensor, weight: Tensor, backward: Callable[[Tensor], None]
) -> None:
    """Gradients of the weighted sum of losses, into `.grad` of the parameters: by the backward pass of `set_aside_gradients`.

    A `loss_at` that has `gradients` of its own, as on the trainer's fast path, is asked for them; they are valid until it is
    asked again.
    """
    own = getattr(loss_at, "gradients", None)
    found = None if own is None else own(rows, u, weight)
    if found is None:
        backward((weight * check_evaluation(loss_at(rows, u), u)).sum())
        return
    for parameter, gradient in found:
        parameter.grad = gradient


Replayer = Callable[..., Any]
"""(call, module, *tensors) -> call(*tensors), where the call reads nothing but the tensors and the module's weights."""

_replayer: ContextVar[Replayer | None] = ContextVar("replayer", default=None)


@contextmanager
def replaying(replayer: Replayer) -> Iterator[None]:
    """Inside the block, `replayed` leaves its calls to this: to a training loop that can record them."""
    token = _replayer.set(replayer)
    try:
        yield
    finally:
        _replayer.reset(token)


def replayed(call: Callable[..., Any], module: nn.Module, *tensors: Tensor) -> Any:
    """call(*tensors), which reads nothing else but the module's weights; as a recording where the loop makes them."""
    replayer = _replayer.get()
    return call(*tensors) if replayer is None else replayer(call, module, *tensors)


class KeptParameters:
    """A model's parameters as they are now, to be put back for a while after an optimizer step."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.kept = copies(self.parameters)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The kept parameters inside the block, today's after it, bit for bit."""
        with put_back(self.parameters):
            write(self.parameters, self.kept)
            yield


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of their values, in a few kernels."""
    if not all(_is_plain(one) for one in tensors):
        return [one.detach().clone() for one in tensors]
    made = [torch.empty_like(one, requires_grad=False) for one in tensors]
    write(made, tensors)
    return made


@torch.no_grad()
def write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Values into tensors, in a few kernels."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for one, value in zip(tensors, values, strict=True):
        if _is_plain(one) and _is_plain(value):
            targets, sources = alike.setdefault((one.device, one.dtype), ([], []))
            targets.append(one)
            sources.append(value)
        else:
            one.copy_(value)
    for targets, sources in alike.values():
        torch._foreach_copy_(targets, sources)


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of all of them together, also of sharded ones, in float32."""
    if all(_is_plain(one) for one in tensors):
        narrow = [one.float() if one.dtype == torch.float64 else one for one in tensors]  # the norm only ever widens
        return (torch.stack(torch._foreach_norm(narrow, dtype=torch.float32)) ** 2).sum()
    return torch.stack([distributed.whole((one.float() ** 2).sum()) for one in tensors]).sum()


def _is_plain(tensor: Tensor) -> bool:
    """Not sharded, nor anything else that torch's functions on lists may not know."""
    return type(tensor) in (Tensor, nn.Parameter)


class Snapshot:
    """Parameters, buffers and optimizer state, also that in its parameter groups, to be put back bit for bit after a trial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        for group in optimizer.param_groups:
            tensors.update({id(parameter): parameter for parameter in group["params"]})
        self.tensors = list(tensors.values())
        self.values = copies(self.tensors)
        self.state = {parameter: _copied(entries) for parameter, entries in optimizer.state.items()}
        self.groups = [_copied(group) for group in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; may be called more than once."""
        tensors, values = list(self.tensors), list(self.values)
        for parameter in list(self.optimizer.state):
            if parameter in self.state:
                _put_back(self.optimizer.state[parameter], self.state[parameter], tensors, values)
            else:
                del self.optimizer.state[parameter]
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            _put_back(group, before, tensors, values)
        write(tensors, values)


def _copied(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of an optimizer as they are now; its parameters are kept elsewhere."""
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in entries.items()
        if name != "params"
    }


def _put_back(entries: dict[str, Any], before: dict[str, Any], tensors: list[Tensor], values: list[Tensor]) -> None:
    """Entries as they were; tensors are collected with their values, to be written into their own memory."""
    for name, value in before.items():
        if isinstance(value, Tensor):
            tensors.append(entries[name])
            values.append(value)
        else:
            entries[name] = copy.deepcopy(value)
