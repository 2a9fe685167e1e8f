"""The front door: a recipe draws noise levels, weighs their losses and learns from every optimizer step.

recipe = noisewise.recipe("adaptive", objective)
recipe.attach(optimizer)
for x0 in loader:
    draw = recipe.sample(x0)
    losses = objective.losses(model, x0, draw.u)  # or your own, one per sample
    recipe.loss(draw, losses).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from noisewise import distributed
from noisewise.levels import check_per_sample
from noisewise.listener import Listener, untraced
from noisewise.objective import Objective
from noisewise.processes import Process, check_same
from noisewise.running import KeepsPrecision, begun_on_cpu
from noisewise.samplers import AdaptiveSampler, Draw, LossAt, Sampler
from noisewise.samplers.learning import Learner, check_weighting, split_objective
from noisewise.sound import check_sound
from noisewise.spec import build_parts
from noisewise.weighting import WEIGHTINGS, NoWeight, Weighting, WeightProduct

TRAINING, VALIDATION, USED = "training", "validation", "used"


def recipe(spec: str, objective: Objective | Process, **settings: Any) -> "Recipe":
    """Make a recipe from a spec string such as "adaptive" or "logit_normal+minsnr:gamma=5" (docs/specs.md).

    Args:
        spec: a sampler, a weighting, or both, with their settings.
        objective: the noising process and what the model predicts; or only the process, if the prediction is its usual one.
        settings: settings of the sampler that the spec leaves open, such as seed=1.
    """
    if isinstance(spec, Sampler):
        raise TypeError(f"recipe makes the sampler, from a spec; {type(spec).__name__} is made already: Recipe(sampler)")
    if not isinstance(spec, str):
        raise TypeError(f"recipe takes the spec first, a string such as 'adaptive', then the objective; got {repr(spec)[:80]}")
    process, known = split_objective(objective, None, "second")
    sampler, weighting = build_parts(spec, process, known, settings)
    return Recipe(sampler, weighting, known, spec)


class Recipe(KeepsPrecision):
    """Draws noise levels, weighs their losses, and learns from them.

    Save `state_dict()`. `parameters()` are those of a learned weighting: give them to the optimizer, as in
    `Adam([*model.parameters(), *recipe.parameters()])`.

    Args:
        sampler: draws the noise levels.
        weighting: multiplies the losses; by default 1.
        objective: what the losses measure; by default the usual prediction of the sampler's process.
        spec: its name in messages.
    """

    @begun_on_cpu
    def __init__(
        self, sampler: Sampler, weighting: Weighting | None = None, objective: Objective | None = None, spec: str = ""
    ) -> None:
        super().__init__()
        if not isinstance(sampler, Sampler):
            raise TypeError(f"Recipe takes a Sampler, got {repr(sampler)[:80]}; noisewise.recipe(spec, objective) takes a spec")
        self.sampler = sampler
        self.weighting = NoWeight() if weighting is None else check_weighting(weighting, "weighting")
        self.objective = objective or Objective(sampler.process)
        check_same(sampler.process, self.objective.process, "the objective")
        self.spec = spec or type(sampler).__name__
        check_sound(sampler, self.weighting, self.objective, self.spec)
        self._probes = _any(sampler, "probes")
        self._begin()

    def _begin(self) -> None:
        """What belongs to this object and this process: never saved, never copied."""
        self._listener: Listener | None = None
        self._drawn: WeakKeyDictionary[Draw, str] = WeakKeyDictionary()
        self._looks = 0  # validation draws since the last one for training
        self.last: Draw | None = None  # for loops whose losses are computed far from where levels are drawn

    # What the training loop calls -----------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> "Recipe":
        """Listen to `optimizer.step()` through torch's hooks, so that the sampler learns from each step.

        Args:
            optimizer: trains the model; may be wrapped by Accelerate or Lightning.
            model: only needed by samplers that differentiate it or look ahead.
        """
        inner = _unwrapped(optimizer)
        if model is None and _any(self.sampler, "wants_model"):
            raise TypeError(f"{self.spec!r} looks into the model: call recipe.attach(optimizer, model)")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"the model must be an nn.Module, got {type(model).__name__}: call recipe.attach(optimizer, model)")
        self.detach()
        self._listener = Listener(self.sampler, inner, list(self.parameters()))
        if model is not None:
            self.sampler.attach(model, inner)
        return self

    def detach(self) -> None:
        """Stop listening, and forget the batches since the last step."""
        if self._listener is not None:
            self._listener.remove()
            self._listener = None

    @untraced
    def sample(self, x0: Tensor | int, *, generator: torch.Generator | None = None) -> Draw:
        """Draw a noise level for each sample of x0: `draw.time` for the model, `draw.u`, `draw.alpha`, `draw.sigma`.

        After `recipe.eval()` or under `torch.no_grad()` it is a draw for validation, which leaves no trace. `recipe.last`
        keeps the draw, for trainers that compute the losses in another function.
        """
        if not (self.training and torch.is_grad_enabled()):
            draw = self._look(x0, generator)
            self._drawn[draw] = VALIDATION
        else:
            if self._listener is not None:
                self._listener.check_bound()
            draw = self.sampler.sample(x0, generator=generator)
            self._drawn[draw] = TRAINING
            self._looks = 0
            if self._listener is not None:
                self._listener.waiting = True
        _move(self.weighting, draw.u.device)
        self.last = draw
        return draw

    def _look(self, x0: Tensor | int, generator: torch.Generator | None) -> Draw:
        """A draw of its own stream, so that training goes on as if it had not been."""
        micro = self.sampler.micro
        self._looks += 1
        self.sampler.micro = -self._looks
        try:
            return self.sampler.sample(x0, generator=generator)
        finally:
            self.sampler.micro = micro

    @untraced
    def loss(self, draw: Draw, losses: Tensor, loss_at: LossAt | None = None) -> Tensor:
        """The weighted mean of the losses, to call `.backward()` on.

        Args:
            draw: what `sample` returned for this batch.
            losses: one per sample, without any weight; the sampler learns from them when the optimizer steps.
            loss_at: `loss_at(rows, u)` returns losses of rows of this batch at other levels, for samplers that probe the model.
        """
        return self.weigh(draw, losses, loss_at).mean()

    @untraced
    def weigh(self, draw: Draw, losses: Tensor, loss_at: LossAt | None = None) -> Tensor:
        """The weighted losses, one per sample, for loops that average themselves. Call this or `loss`, once for each draw."""
        learns = self._check(draw, losses, loss_at)
        weighted = losses
        if not isinstance(self.weighting, NoWeight):
            weighted = self.weighting.weighted(losses, self.objective, draw.u)
        weighted = draw.weight * weighted
        if learns:
            self._drawn[draw] = USED
            if self._listener is not None:
                self._listener.hand(draw, losses, loss_at, weighted)
        return weighted

    def drop(self) -> None:
        """Forget the batches since the last step, because their gradients are thrown away."""
        if self._listener is not None:
            self._listener.clear()

    def _check(self, draw: Draw, losses: Tensor, loss_at: LossAt | None) -> bool:
        """Whether these losses are trained on; an error that says what to write if they cannot be."""
        if not isinstance(draw, Draw):
            raise TypeError(f"the draw that recipe.sample(x0) returned comes first, then the losses; got {type(draw).__name__}")
        state = self._drawn.get(draw)
        if state is None:
            raise ValueError("this draw is of another recipe or sampler: hand over what this recipe's sample(x0) returned")
        check_per_sample(losses, draw.u)
        if loss_at is not None and not callable(loss_at):
            raise TypeError(
                f"loss_at must be a function of (rows, u), got {type(loss_at).__name__}: factors of your own multiply what "
                "recipe.weigh(draw, losses) returns"
            )
        if state == VALIDATION:
            if losses.requires_grad and torch.is_grad_enabled() and self.training:
                raise RuntimeError(
                    "this draw was made under torch.no_grad() or recipe.eval(), so it is for validation: to train, call "
                    "recipe.sample(x0) outside of it"
                )
            return False
        if not (self.training and torch.is_grad_enabled()):
            return False
        if state == USED:
            raise RuntimeError("the losses of this draw were handed over before: write draw = recipe.sample(x0) for each batch")
        if self._listener is None and self._must_listen():
            raise RuntimeError(
                f"{self.spec!r} changes with the optimizer's steps and does not hear them: call recipe.attach(optimizer) once "
                "before the loop"
            )
        if loss_at is None and self._probes:
            raise TypeError(
                f"{self.spec!r} evaluates the model at other noise levels: write recipe.loss(draw, losses, loss_at), where "
                "loss_at(rows, u) gives losses of rows of this batch"
            )
        return True

    def _must_listen(self) -> bool:
        """Whether it learns or depends on the step; a learned weighting also has gradients to average over ranks."""
        alone = distributed.world_size() == 1
        return not self.sampler.constant or not (alone or next(self.parameters(), None) is None)

    # State ----------------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(self.spec.encode()), dtype=torch.uint8, device="cpu")  # a tensor: any format can hold it

    def set_extra_state(self, state: Tensor) -> None:
        """A saved spec is for messages only: the recipe stays what it was made as."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continue from a saved state; that of another recipe is an error, or with strict=False a warning and a fresh start."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict takes what state_dict() returned, got {type(state_dict).__name__}")
        if strict and (misfit := self._misfit(state_dict)):
            raise RuntimeError(f"{misfit}; load_state_dict(state, strict=False) starts it anew")
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        self.drop()
        self._drawn.clear()
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        if misfit := self._misfit(own):
            warnings.warn(f"{misfit}: it starts anew", RuntimeWarning, stacklevel=2)
            missing_keys.append(f"{prefix}* (of {self.spec!r})")  # a strict load of what holds this recipe is an error
            for name in own:
                del state_dict[prefix + name]
            state_dict.update({prefix + name: value for name, value in self.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)

    def _misfit(self, state: Mapping[str, Any]) -> str | None:
        """Why a state cannot be of this recipe, or None. Tried out on the parts, which are left as they were if it is not."""
        before = {name: value.clone() for name, value in self.state_dict().items()}
        try:
            self._load_parts(state)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            self._load_parts(before)
            first = str(error).splitlines()[:2][-1:]  # torch says what it was doing, then what does not fit
        else:
            return None
        if "_extra_state" not in state or not any(name.startswith("sampler.") for name in state):
            return f"the state holds no recipe, but this one is {self.spec!r}"
        spec = bytes(state["_extra_state"].tolist()).decode()
        if spec == self.spec:
            why = "".join(first).strip("\t .")
            return f"the state is of another {spec!r} (its process, data, settings or version differ): {why}"
        return f"the state is of the recipe {spec!r}, but this one is {self.spec!r}"

    def _load_parts(self, state: Mapping[str, Any]) -> None:
        for part in ("sampler", "weighting"):
            start = f"{part}."
            own = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
            self.get_submodule(part).load_state_dict(own)

    # Modules --------------------------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of a learned weighting: a sampler trains its own."""
        own = {id(one) for one in self.sampler.parameters()}
        return ((name, one) for name, one in super().named_parameters(*args, **kwargs) if id(one) not in own)

    def __getstate__(self) -> dict[str, Any]:
        left = ("_listener", "_drawn", "_looks", "last")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    if not TYPE_CHECKING:  # which knows by itself what a recipe has

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                parts = [part for part in ("sampler", "weighting") if hasattr(self._modules.get(part), name)]
                owner = parts[0] if parts and not name.startswith("_") else None
                hint = f": write recipe.{owner}.{name}" if owner else ""
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}") from None

    def __repr__(self) -> str:
        rows = {"density": self._density(), **self._learning(), "weight": self._weight(), "step": str(self.sampler.step)}
        listener = self._listener
        rows["attached"] = "no" if listener is None else f"to {type(listener.optimizer).__name__}"
        lines = [f"  {name:<9} {value}" for name, value in rows.items()]
        return "\n".join([f"Recipe({self.spec!r}) on {self.sampler.process}", *lines])

    def _density(self) -> str:
        sampler = self.sampler
        how = "fixed" if sampler.constant else "learned" if _learners(sampler) else "changes with the step"
        return f"{type(sampler).__name__}, {how}, {sampler.draws} draws"

    def _learning(self) -> dict[str, str]:
        """Target, floor and warm-up of what learns."""
        rows: dict[str, str] = {}
        for learner in _learners(self.sampler)[:1]:
            rows["target"] = "the losses as they are" if learner.target is None else _named(learner.target)
            rows["floor"] = f"{learner.floor:g}"
            warmup = getattr(learner.estimator, "warmup", None) if isinstance(learner, AdaptiveSampler) else None
            if warmup is not None:
                rows["warm-up"] = f"{warmup} steps"
        return rows

    def _weight(self) -> str:
        correction = self.sampler.correction
        importance = "" if correction.kind == "none" else f"importance weights ({correction})"
        loss = "" if isinstance(self.weighting, NoWeight) else _named(self.weighting)
        return " x ".join(filter(None, [importance, loss])) or "1"


def _any(sampler: Sampler, trait: str) -> bool:
    """Whether some part of it has the trait."""
    return any(getattr(part, trait, False) for part in sampler.modules())


def _learners(sampler: Sampler) -> list[Learner]:
    return [part for part in sampler.modules() if isinstance(part, Learner)]


def _named(weighting: Weighting) -> str:
    """As a spec names it, with the settings that can be seen."""
    if isinstance(weighting, WeightProduct):
        return "+".join(_named(factor) for factor in weighting.factors if isinstance(factor, Weighting))
    name = next((name for name, kind in WEIGHTINGS.items() if type(weighting) is kind), type(weighting).__name__)
    settings = getattr(getattr(weighting, "function", None), "keywords", {})
    return name + "".join(f"{':' if not i else ','}{key}={value:g}" for i, (key, value) in enumerate(settings.items()))


def _move(part: nn.Module, device: torch.device) -> None:
    """To the device of the batch, if it has anything to move."""
    tensor = next((one for group in (part.parameters(), part.buffers()) for one in group), None)
    if tensor is not None and tensor.device != device:
        part.to(device)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step torch's hooks hear: Accelerate's and Lightning's wrappers have none of their own."""
    inner = optimizer
    while isinstance(deeper := getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = deeper
    if isinstance(optimizer, nn.Module) and not isinstance(inner, torch.optim.Optimizer):
        raise TypeError("attach takes the optimizer first, then the model: recipe.attach(optimizer, model)")
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"{type(optimizer).__name__} has no step hooks of torch.optim.Optimizer, so its steps cannot be heard (DeepSpeed's "
            "engine is such a one): attach the torch optimizer inside it, or use sampler.observe around each step"
        )
    return inner
