"""Which draws an optimizer step belongs to: torch's own step hooks, and what was handed over since the last step.

A step closes all draws whose backward pass came since the step before, so accumulation needs no list. A step that a GradScaler
skips fires no hook and looks like accumulation, until the gradients are zeroed: when the next backward pass begins, draws
whose gradients are gone are forgotten.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from noisewise import distributed
from noisewise.samplers import Draw, LossAt, Sampler

MOST = 500  # batches without a step: nobody accumulates so many
UNHEARD = 100  # times in a row that gradients were zeroed without a step: a GradScaler finds its scale in far fewer
SCALING = ("grad_scale", "found_inf")  # what GradScaler sets on an optimizer that handles overflow itself

# torch.compile goes around what depends on the step, which it would compile anew each time. torch.compiler.disable would do
# the same, but import the compiler at once.
untraced = _disable_dynamo


class StepSkipped(Exception):
    """Leaves the sampler's block without teaching it anything."""


@dataclass
class Handed:
    """What the loop handed over for one draw."""

    draw: Draw
    losses: Tensor
    loss_at: LossAt | None
    begun: bool = False  # its backward pass
    done: bool = False


class Listener:
    """Hears an optimizer's steps on behalf of a sampler.

    Args:
        sampler: what learns.
        optimizer: any that calls torch's step hooks.
        parameters: of a learned weighting, whose gradients are averaged over ranks.
    """

    def __init__(self, sampler: Sampler, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self.sampler, self.optimizer, self.parameters = sampler, optimizer, parameters
        self._unseen = parameters  # groups may still be added before the first step
        self.block: AbstractContextManager[None] | None = None
        self.learning = False  # steps made meanwhile are trials of the sampler
        self._unheard = 0
        self.clear()
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        """Stop listening."""
        self._abandon()
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Forget what was handed over."""
        self.pending: list[Handed] = []
        self.waiting = False  # for the losses of a draw
        self._witness: nn.Parameter | None = None  # one that has a gradient of these draws
        self._version = 0

    # What the recipe calls ------------------------------------------------------------------------------------------

    def check_bound(self) -> None:
        """An error if no step was heard for very long."""
        if len(self.pending) >= MOST:
            raise RuntimeError(
                f"{len(self.pending)} losses were handed over and {type(self.optimizer).__name__} never stepped: the "
                "parameters are updated elsewhere (an engine, a fused backward pass). Attach the optimizer that really steps, "
                "or use sampler.observe around the update"
            )

    def hand(self, draw: Draw, losses: Tensor, loss_at: LossAt | None, weighted: Tensor) -> None:
        """Keep the losses of a draw until the step; `weighted` is what the backward pass goes through."""
        self.waiting = False
        handed = Handed(draw, losses.detach().float(), loss_at and _as_now(loss_at, draw.u.device.type))
        if weighted.requires_grad:
            weighted.register_hook(partial(self._backward_begins, handed))
        else:
            handed.begun = handed.done = True  # whatever is done with these losses, it cannot be seen
        self.pending.append(handed)

    # Backward passes ------------------------------------------------------------------------------------------------

    @untraced
    def _backward_begins(self, handed: Handed, _: Tensor) -> None:
        if self._gradients_are_gone():
            self.pending = [one for one in self.pending if one is handed or not one.done]
            self._count_unheard()
        handed.begun = True
        Variable._execution_engine.queue_callback(self._backward_ends)

    def _count_unheard(self) -> None:
        """Warn, once, where gradients come and go without a step of this optimizer."""
        self._unheard += 1
        if self._unheard == UNHEARD:
            made = type(self.optimizer).__name__
            warnings.warn(
                f"gradients were zeroed {UNHEARD} times in a row and the {made} that the recipe listens to never stepped, so "
                "nothing is learned: attach the optimizer that really steps, or see why every step is skipped",
                RuntimeWarning,
                stacklevel=2,
            )

    def _backward_ends(self) -> None:
        for one in self.pending:
            one.done = one.begun
        for one in [one for one in self.pending if one.done][:-1]:
            one.loss_at = None  # only the last batch is ever evaluated again
        distributed.average_gradients(self.parameters)
        self._witness = next(self._with_gradients(), None)
        if self._witness is not None and self._witness.grad is not None:
            self._version = self._witness.grad._version

    def _gradients_are_gone(self) -> bool:
        """Whether gradients of earlier draws were zeroed; waits for the device only if somebody has touched them."""
        if self._witness is None or not any(one.done for one in self.pending):
            return False
        gradient = self._witness.grad
        if gradient is None:
            return True
        if gradient._version == self._version:
            return False
        return not any(bool(one.grad.any()) for one in self._with_gradients() if one.grad is not None)

    def _with_gradients(self) -> Any:
        groups = self.optimizer.param_groups
        return (one for group in groups for one in group["params"] if one.grad is not None)

    # Steps ----------------------------------------------------------------------------------------------------------

    @untraced
    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.learning:
            return None
        self._abandon()  # of a step that raised
        self._unheard = 0
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._open()
            return None
        once = self._once(closure)  # it computes the gradients, so the block begins when it returns
        return ((args[0], once, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": once})

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        called = False

        @wraps(closure)
        def once() -> Any:
            nonlocal called
            if called:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} calls its closure more than once in a step, so the draws cannot be told "
                    "apart: use an optimizer that needs one backward pass a step"
                )
            called = True
            result = closure()
            self._open()
            return result

        return once

    def _open(self) -> None:
        """Begin the sampler's block: gradients are complete, no parameter has changed."""
        trained = [one for one in self.pending if one.done]
        self._look_for_parameters()
        found = getattr(self.optimizer, "found_inf", None)
        overflowed = isinstance(found, Tensor) and bool(found)
        if not trained:
            self._check_forgotten()
        elif not overflowed:
            draws, losses = [one.draw for one in trained], [one.losses for one in trained]
            block = self.sampler.observe(draws, losses, trained[-1].loss_at)
            block.__enter__()
            self.block = block
            return
        self.clear()

    def _look_for_parameters(self) -> None:
        """Warn, once, of a learned weighting that this optimizer does not train."""
        own = {id(one) for group in self.optimizer.param_groups for one in group["params"]} if self._unseen else set()
        if any(id(one) not in own for one in self._unseen):
            warnings.warn(
                f"{type(self.optimizer).__name__} does not train the weighting, which learns: hand it the parameters, as in "
                "Adam([*model.parameters(), *recipe.parameters()])",
                RuntimeWarning,
                stacklevel=4,
            )
        self._unseen = []

    @untraced
    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the sampler's block: it learns."""
        if self.learning or self.block is None:
            return
        block, self.block, self.learning = self.block, None, True
        own = vars(self.optimizer)
        aside = {name: own.pop(name) for name in SCALING if name in own}  # trials have gradients of their own
        try:
            block.__exit__(None, None, None)
        finally:
            own.update(aside)
            self.learning = False
            self.clear()

    def _abandon(self) -> None:
        block, self.block = self.block, None
        if block is not None:
            skipped = StepSkipped()
            block.__exit__(StepSkipped, skipped, None)

    def _check_forgotten(self) -> None:
        """An error if this step trains on a draw whose losses went another way."""
        if not (self.pending or self.waiting) or next(self._with_gradients(), None) is None:
            return
        waiting, made = self.waiting and not self.pending, type(self.optimizer).__name__
        begun = any(one.begun for one in self.pending)
        self.clear()
        if waiting:
            raise RuntimeError(
                f"{made} steps, but the losses of the last draw were never handed over: write recipe.loss(draw, losses)"
            )
        if begun:
            raise RuntimeError(
                f"{made} steps before the backward pass has told its end: step after backward(), not in a hook of it; "
                "compiled autograd never tells it, so run backward() outside of that"
            )
        raise RuntimeError(
            f"{made} steps, but no backward pass went through what recipe.loss returned: write "
            "recipe.loss(draw, losses).backward() instead of losses.mean().backward()"
        )


def _as_now(loss_at: LossAt, device: str) -> LossAt:
    """`loss_at` under the autocast of this moment: hooks run outside of it."""
    if not torch.is_autocast_enabled(device):
        return loss_at
    dtype = torch.get_autocast_dtype(device)

    @wraps(loss_at)
    def evaluated(rows: Any, u: Tensor) -> Tensor:
        with torch.autocast(device, dtype):
            return loss_at(rows, u)

    return evaluated
