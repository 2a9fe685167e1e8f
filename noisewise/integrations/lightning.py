"""Lightning: a callback that draws the noise levels and wraps each optimizer step. Guide: docs/lightning.md.

    def __init__(self):
        self.timesteps = TimestepCallback(AdaptiveSampler(objective))

    def configure_callbacks(self):
        return [self.timesteps]

    def training_step(self, x0, batch_idx):
        def loss_at(rows, u):
            return self.objective.losses(self.network, x0[rows], u)

        draw = self.timesteps.sample(x0)
        return self.timesteps.loss(draw, loss_at(slice(None), draw.u), loss_at)

Lightning runs `training_step` and the backward pass inside the optimizer's closure and calls `on_before_optimizer_step` after
them, when gradients are complete and no parameter has changed yet. There the sampler's block begins; it ends when the batch
does. With accumulation the hook comes once for several batches, which is when the sampler is to learn.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from noisewise.integrations.pending import Pending, StepSkipped, check_sampler
from noisewise.objective import Objective
from noisewise.recipes import Recipe
from noisewise.samplers import Draw, LossAt, Sampler
from noisewise.samplers.learning import Learner
from noisewise.weighting import NoWeight, Weighting

PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
"""Where a Callback class may come from, and the distribution that brings it."""
RUN = ("_trainer", "_pending", "_block", "_stepped", "_unhook", "_ever_drawn", "_trained", "_listed")
"""What belongs to one run of a trainer: new in every run and every copy."""
NOTHING_DRAWN = (
    "TimestepCallback is among the callbacks, but training_step drew nothing through it: call draw = timesteps.sample(x0) "
    "there, train at draw.u and return timesteps.loss(draw, losses, loss_at)"
)


class TimestepCallback:
    """Draws noise levels in `training_step` and lets the sampler learn around each optimizer step.

    It is a Callback of `lightning` or of `pytorch_lightning`, whichever is imported when it is made (of both, if both are).
    The sampler's state goes into Lightning's checkpoints and comes back with `ckpt_path`.

    Args:
        sampler: a Sampler, or the Recipe that `build` returns, whose weighting `loss` then applies.
        objective: what the losses measure; needed for a recipe with a weighting.
    """

    _named: type["TimestepCallback"]

    def __new__(cls, *args: Any, **settings: Any) -> "TimestepCallback":
        plain: Any = cls
        made: TimestepCallback = object.__new__(_as_callback(plain, _callback_classes()))
        return made

    def __init__(self, sampler: Sampler | Recipe, objective: Objective | None = None) -> None:
        weighting = sampler.weighting if isinstance(sampler, Recipe) else NoWeight()
        self.sampler = check_sampler(sampler.sampler if isinstance(sampler, Recipe) else sampler)
        self.weighting: Weighting | None = None if isinstance(weighting, NoWeight) else weighting
        self.objective = objective
        if self.weighting is not None and objective is None:
            raise ValueError("this recipe has a loss weighting, which depends on what the losses measure: pass objective=")
        self._attached = False
        self._begin_run(None)

    def _begin_run(self, trainer: Any) -> None:
        self._trainer = trainer
        self._pending = Pending("return timesteps.loss(draw, losses, loss_at)")
        self._block: AbstractContextManager[None] | None = None
        self._stepped: list[bool] = []
        self._unhook: Callable[[], None] | None = None
        self._ever_drawn = False
        self._trained: set[int] | None = None
        self._listed = trainer is not None and _is_among(self, trainer.callbacks)

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: value for name, value in vars(self).items() if name not in RUN}  # copies of a module copy no trainer
        return _remake, (self._named, kept)  # the class made on the fly cannot be found by its name

    # What training_step calls ---------------------------------------------------------------------------------------

    def sample(self, x0: Tensor | int, *, generator: torch.Generator | None = None) -> Draw:
        """Draw a noise level for each sample. Outside of training (validation, a tuner's trials) the draw leaves no trace."""
        if self._trainer is None:
            raise RuntimeError(
                "this callback is not one of the trainer's: pass it, Trainer(callbacks=[timesteps]), or return it from the "
                "module's configure_callbacks()"
            )
        if not self._in_training():
            micro = self.sampler.micro
            draw = self.sampler.sample(x0, generator=generator)
            self.sampler.micro = micro
            return draw
        self._end_block()  # manual optimisation may step several times in a batch
        self._pending.check_may_draw()
        draw = self.sampler.sample(x0, generator=generator)
        self._pending.drawn(draw)
        self._ever_drawn = True
        return draw

    def loss(self, draw: Draw, losses: Tensor, loss_at: LossAt | None = None) -> Tensor:
        """What `training_step` returns: the mean of draw.weight * losses, with the recipe's weighting.

        Args:
            draw: what `sample` returned for this batch.
            losses: one a sample, not weighted; they are kept for the sampler until the optimizer steps.
            loss_at: evaluates losses of this batch at other u, for samplers that probe the model.
        """
        if self._in_training():
            if not self._pending.draws and self._trainer is not None and len(self._trainer.optimizers) > 1:
                self._trained = _leaves(losses)
            self._pending.add(draw, losses, loss_at)
        if self.weighting is not None and self.objective is not None:
            losses = self.weighting.weighted(losses, self.objective, draw.u)
        return (draw.weight * losses).mean()

    def drop(self) -> None:
        """Forget the last draw, before a `training_step` that returns None."""
        if self._in_training():
            self._pending.drop()

    def _in_training(self) -> bool:
        """Whether what is drawn now is trained on: tuners take the callbacks away for their trials, and put the model back."""
        if self._trainer is None:
            return True  # with nothing drawn, what comes next is an error that says so
        taken_away = self._listed and not _is_among(self, self._trainer.callbacks)
        return self._trainer.training and not taken_away

    # What Lightning calls -------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Learn whose callback this is."""
        self._begin_run(trainer)
        if any(part is self.sampler for part in pl_module.modules()):
            raise ValueError(
                "the sampler is a submodule of the LightningModule, which would save it twice and hand it to DDP and the "
                "optimizer: keep it in the callback alone"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the set-up, and show the model to samplers that probe it."""
        if trainer.global_step > 0 and self.sampler.step == 0:
            warnings.warn(
                f"training resumes at step {trainer.global_step}, but the checkpoint holds no state of this timestep sampler "
                "(it was saved without TimestepCallback): the sampler starts anew",
                RuntimeWarning,
                stacklevel=2,
            )
        trained = {
            id(parameter) for optimizer in trainer.optimizers for g in optimizer.param_groups for parameter in g["params"]
        }
        if self.weighting is not None and any(id(parameter) not in trained for parameter in self.weighting.parameters()):
            raise ValueError(
                "the weighting has parameters that no optimizer trains: keep it in the module too (self.weighting = "
                "recipe.weighting) and hand its parameters to the optimizer"
            )
        learners = [part for part in self.sampler.modules() if isinstance(part, Learner)]
        if self._attached or all(learner.model is None for learner in learners):
            self.sampler.attach(pl_module, trainer.optimizers[0] if len(trainer.optimizers) == 1 else None)
            self._attached = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the sampler's block: gradients are there, parameters have not changed."""
        if pl_module.automatic_optimization:  # else this may be another model's step, before the draws or amid them
            if not self._ever_drawn and any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
                raise RuntimeError(NOTHING_DRAWN)
            if self._pending.waiting is not None:
                raise RuntimeError(
                    "training_step drew noise levels but handed no losses over: return timesteps.loss(draw, losses, loss_at), "
                    "or call timesteps.drop() if it returns None"
                )
        if not self._pending.draws or self._block is not None:  # a second optimizer's step belongs to the same block
            return
        if not self._trains_the_model(optimizer):
            return
        draws, losses, loss_at = self._pending.take()
        self._watch(optimizer)
        self._block = self.sampler.observe(draws, losses, loss_at and _in_context(trainer, loss_at))
        self._block.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the sampler's block; checkpoints are made after this."""
        self._end_block()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Manual optimisation must have drawn by now."""
        if not self._ever_drawn and not pl_module.automatic_optimization:
            raise RuntimeError(NOTHING_DRAWN)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave without learning."""
        self._end_block(exception)
        self._pending.clear()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the trainer."""
        self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        """All that the sampler has learned, for Lightning's checkpoint."""
        if self._stepped:  # another callback saves after the step, before the batch has ended for this one
            self._end_block()
        return dict(self.sampler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sampler's state from Lightning's checkpoint."""
        self.sampler.load_state_dict(state_dict)

    # The block around the optimizer step ----------------------------------------------------------------------------

    def _trains_the_model(self, optimizer: Any) -> bool:
        """Whether this optimizer is the one that the losses are for; each of them, if that cannot be told."""

        def owns(one: Any) -> bool:
            return any(id(parameter) in (self._trained or ()) for group in one.param_groups for parameter in group["params"])

        return owns(optimizer) or not any(owns(one) for one in self._trainer.optimizers)

    def _watch(self, optimizer: Any) -> None:
        """See whether the optimizer really steps: with fp16 it may not, and then nothing is to be learned."""
        self._stepped = []
        inner = getattr(optimizer, "_optimizer", optimizer)
        if isinstance(inner, torch.optim.Optimizer):
            self._unhook = inner.register_step_post_hook(lambda *_: self._stepped.append(True)).remove
        else:
            self._stepped.append(True)

    def _end_block(self, failure: BaseException | None = None) -> None:
        block, self._block = self._block, None
        if self._unhook is not None:
            self._unhook()
            self._unhook = None
        if block is None:
            return
        stepped, self._stepped = self._stepped, []
        if failure is None and stepped:
            block.__exit__(None, None, None)
            return
        stopped = failure or StepSkipped()
        try:
            block.__exit__(type(stopped), stopped, None)
        except type(stopped) as raised:
            if raised is not stopped:
                raise


def _is_among(one: Any, others: Iterable[Any]) -> bool:
    return any(other is one for other in others)


def _leaves(losses: Tensor) -> set[int]:
    """The ids of the parameters that the losses depend on, as far as autograd knows them."""
    found, seen, ahead = set(), set(), [losses.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [next_node for next_node, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
    return found


def _in_context(trainer: Any, loss_at: LossAt) -> LossAt:
    """`loss_at` in the precision of `training_step`, since hooks run outside of it."""

    @wraps(loss_at)
    def evaluated(rows: Any, u: Tensor) -> Tensor:
        with trainer.precision_plugin.train_step_context():
            return loss_at(rows, u)

    return evaluated


def _callback_classes() -> tuple[type, ...]:
    """The Callback classes of the packages that are imported, or of the first one installed."""
    names = [name for name in PACKAGES if name in sys.modules]
    names = names or [name for name, package in PACKAGES.items() if find_spec(package) is not None][:1]
    if not names:
        raise ImportError("TimestepCallback needs Lightning: pip install lightning, or pip install pytorch-lightning")
    return tuple(importlib.import_module(name).Callback for name in names)


@cache
def _as_callback(cls: Any, bases: tuple[Any, ...]) -> Any:
    """The class with Lightning's Callback below it: hooks that it does not define come from there."""
    about = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_named": cls}
    return type(cls.__name__, (cls, *bases), about)


def _remake(cls: type[TimestepCallback], state: dict[str, Any]) -> TimestepCallback:
    made = cls.__new__(cls)
    made.__dict__.update(state)
    made._begin_run(None)
    return made
