"""A trained model, out of a run's folder: the averaged weights, ready to generate and to be evaluated."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from noisewise.generation.guidance import denoiser
from noisewise.generation.replay import Replay
from noisewise.generation.solvers import Denoise
from noisewise.models import build_model, with_labels
from noisewise.models.build import check_trusted
from noisewise.objective import Objective
from noisewise.training import checkpoint
from noisewise.training.config import Config
from noisewise.training.ema import mostly_initial
from noisewise.training.fast.fuse import compiler_options, fuse, unfuse
from noisewise.training.options import load_config
from noisewise.training.run_folder import settings_of
from noisewise.training.state import load_module, load_named
from noisewise.words import printable

WEIGHTS = ("ema", "model")


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, and what belongs to it."""

    config: Config
    folder: Path  # of the run
    step: int
    weights: str  # "ema", or "model" for the weights as they were at that step
    digest: str  # of the file that the weights came from
    model: nn.Module
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    objective: Objective
    shape: tuple[int, ...]
    classes: int
    image: bool
    latents: dict[str, Any] | None  # how to decode, if the samples are latents

    @property
    def clip(self) -> float | None:
        """The bound of samples on the way: 1 for images, none for latents."""
        return 1.0 if self.image else None

    def denoiser(self, labels: Tensor | None = None) -> Denoise:
        """The estimate of x0, without guidance."""
        return denoiser(self.call, self.objective, labels)


def load_trained(
    path: Path | str,
    *,
    step: int | None = None,
    weights: str = "ema",
    device: torch.device | str = "cpu",
    tell: Callable[[str], None] = lambda message: print(printable(message)),
    trust: Collection[str] = (),
    compiled: bool = False,
) -> Trained:
    """The model of a run; on CUDA with fused kernels where it can have them, and its forward pass recorded when it is repeated.

    Args:
        path: the run's folder, or one of its checkpoints.
        step: which checkpoint; the newest whole one by default.
        weights: "ema" for the averaged weights, "model" for the last ones.
        device: where to put it.
        tell: told of checkpoints that cannot be used.
        trust: import paths of models that the folder may name, besides those that you gave to runs on this machine.
        compiled: compile it on its first call, for the sake of many more; the same within rounding.
    """
    path = Path(path).absolute()
    if weights not in WEIGHTS:
        raise ValueError(f"unknown weights {weights!r}: choose one of {', '.join(WEIGHTS)}")
    if checkpoint.NAME.fullmatch(path.name):
        named = int(path.name.removeprefix("step-"))
        if step not in (None, named):
            raise ValueError(
                f"step {step} was asked for, but {path.name} is the checkpoint given: give the run's folder instead"
            )
        path, step = path.parent.parent, named
    settings = settings_of(path)
    config = load_config(settings)
    check_trusted(config.model.name, settings, trust)
    found = _found(path / "checkpoints", step, tell)
    about = _about(found)
    shape, classes = tuple(about["shape"]), about["classes"]
    model = build_model(config.model.name, config.model.options, shape=shape, classes=classes)
    load_module(model, found.tensors["model"], "model")
    if weights == "ema" and (warning := mostly_initial(config.ema, _updates(found))) is not None:
        tell(warning)
    if weights == "ema":  # by parameter: tied ones have two names in a state dict, and one average
        load_named(dict(model.named_parameters()), found.tensors["ema"], "ema")
    model = placed(model.eval().requires_grad_(False), shape, classes, device)
    return Trained(
        config,
        path,
        found.step,
        weights,
        found.digests[weights],
        model,
        Replay(compiled_call(model, tell) if compiled else with_labels(model), model),
        config.objective(),
        shape,
        classes,
        about["image"],
        about["latents"],
    )


def placed(model: nn.Module, shape: tuple[int, ...], classes: int, device: torch.device | str) -> nn.Module:
    """A model in evaluation mode on its device; on CUDA with fewer, larger kernels, the same within rounding, if they run."""
    model.to(device)
    if torch.device(device).type == "cuda" and fuse(model):
        try:
            label = torch.zeros(1, dtype=torch.int64, device=device) if classes else None
            with torch.no_grad():
                with_labels(model)(torch.zeros(1, *shape, device=device), torch.zeros(1, device=device), label)
        except Exception:  # Triton builds kernels at their first call, and may find no compiler or too old a GPU
            unfuse(model)
    return model


def compiled_call(model: nn.Module, tell: Callable[[str], None]) -> Callable[..., Tensor]:
    """The model, compiled for each shape of its inputs; where that fails it is called as it is, and `tell` is told."""
    quick = with_labels(cast(nn.Module, torch.compile(model, dynamic=False, options=compiler_options())))
    plain = with_labels(model)
    failed = False

    def call(*inputs: Any) -> Tensor:
        nonlocal failed
        if not failed:
            try:
                return quick(*inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # no compiler, or one that this model is too much for
                failed = True
                tell(f"the model is not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
        return plain(*inputs)

    return call


def _about(found: checkpoint.Checkpoint) -> dict[str, Any]:
    """What a checkpoint says about its data, if it says it all, and has weights at all."""
    about, reason = found.state.get("data"), None
    if lacking := [part for part in WEIGHTS if part not in found.tensors]:
        reason = f"it has no {lacking[0]}.safetensors"
    elif not isinstance(about, dict) or not {"shape", "classes", "image", "latents"} <= set(about):
        reason = "its state.json does not say what the data are"
    elif not isinstance(about["shape"], list) or not all(type(size) is int and 0 < size < 2**31 for size in about["shape"]):
        reason = f"the shape of its data is {about['shape']!r}"
    elif type(about["classes"]) is not int or not 0 <= about["classes"] < 2**31 or not isinstance(about["image"], bool):
        reason = f"its data have {about['classes']!r} classes, and are images: {about['image']!r}"
    elif about["latents"] is not None and not _are_latents(about["latents"]):
        reason = f"its data are latents of {about['latents']!r}"
    if reason is not None:
        raise checkpoint.CheckpointError(f"{found.path} cannot be used: {reason}")
    return dict(about or {})


def _are_latents(latents: Any) -> bool:
    kinds = {"autoencoder": str, "subfolder": str | None, "scale": int | float, "shift": int | float}
    return isinstance(latents, dict) and all(
        name in latents and isinstance(latents[name], kind) for name, kind in kinds.items()
    )


def _updates(found: checkpoint.Checkpoint) -> int:
    """How often the average was updated, as far as is known."""
    updates = found.state.get("ema_updates")
    return updates if type(updates) is int and 0 <= updates < 2**63 else 0


def _found(folder: Path, step: int | None, tell: Callable[[str], None]) -> checkpoint.Checkpoint:
    if step is not None:
        return checkpoint.named(folder, step)
    found = checkpoint.newest_for_all(folder, tell)
    if found is None:
        raise FileNotFoundError(f"{folder} has no checkpoint yet: let the run train for longer")
    return found
