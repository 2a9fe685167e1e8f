"""What a configuration describes, built: process, objective, data, model."""

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from noisewise.data import Source, Synthetic, open_data
from noisewise.data.latents import Latents
from noisewise.models import build_model
from noisewise.objective import Objective
from noisewise.streams import stream_key
from noisewise.training.config import AUTO, Config

LATENT_FACTS = ("autoencoder", "subfolder", "scale", "shift")
INIT, STEP = 1, 2  # the streams of one seed: initial weights; noise and dropout of a step


@dataclass(frozen=True)
class Parts:
    """The pieces of a run that do not depend on how it is launched."""

    objective: Objective
    source: Source
    model: nn.Module
    classes: int  # that the model is told; 0 for none

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def other_data(self, before: dict[str, Any]) -> dict[str, str]:
        """How the data differ from those of an earlier description; empty if they do not, or if it does not say."""
        now = self.description()
        told = [name for name in ("samples", "fingerprint") if name in before]
        return {name: f"{name} {before[name]} -> {now[name]}" for name in told if before[name] != now[name]}

    def check_same_data(self, before: dict[str, Any]) -> None:
        """An error if there are more or fewer samples than in a description, a warning if they do not look the same."""
        found = self.other_data(before)
        difference = ", ".join(found.values())
        if "samples" in found:
            raise ValueError(f"the data are not those that it was trained on ({difference}): begin a new run with --out")
        if found:
            warnings.warn(
                f"the data are not those that the run was trained on, or are stored in another way ({difference}): if they are "
                "others, it is no longer one run, and should be begun anew with --out",
                stacklevel=2,
            )

    @property
    def latents(self) -> dict[str, Any] | None:
        """How to decode samples, if they are latents."""
        return {name: getattr(self.source, name) for name in LATENT_FACTS} if isinstance(self.source, Latents) else None

    def description(self) -> dict[str, Any]:
        """What has to be known of the data to use the model without them, and to recognise them."""
        source = self.source
        return {
            "shape": list(source.shape),
            "classes": self.classes,
            "image": source.image,
            "name": source.name,
            "latents": self.latents,
            "samples": len(source),
            "fingerprint": self.fingerprint,
        }


def build_parts(config: Config, *, synthetic: bool = False) -> Parts:
    """Build the pieces; the model is on the CPU with initial weights that depend on the seed alone."""
    source = synthetic_source(config) if synthetic else open_source(config)
    classes = classes_of(config, source)
    torch.manual_seed(stream_key(config.seed, INIT) >> 1)
    network = with_network(config, source.shape).model
    model = build_model(network.name, network.options, shape=source.shape, classes=classes)
    return Parts(config.objective(), source, model, classes)


def classes_of(config: Config, source: Source) -> int:
    """How many classes the model is told; 0 if it is told none."""
    if config.model.conditional and not source.classes:
        raise ValueError(f"model.conditional=true, but the data ({source.name}) have no labels")
    return source.classes if config.model.conditional else 0


def device_of(config: Config) -> torch.device:
    """Where a configuration trains on this machine."""
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def with_network(config: Config, shape: tuple[int, ...] | None = None) -> Config:
    """The configuration with a network in the place of "auto"; without a `shape` the data are opened to see theirs."""
    if config.model.name != AUTO:
        return config
    options = config.model.options
    if not options:
        shape = shape or synthetic_source(config).shape
        if len(shape) != 3:
            raise ValueError(
                f"no network is picked for samples of shape {shape}, only for (channels, height, width): name your own with "
                "--model.name package.module.Class"
            )
        options = usual_network(shape, on_gpu=device_of(config).type == "cuda")
    return replace(config, model=replace(config.model, name="unet", options=options))


def usual_network(shape: tuple[int, ...], on_gpu: bool) -> dict[str, Any]:
    """Options of a U-Net that learns something in the first minutes: on a CPU a tenth of a second a step for small images.

    On 8 x 8 digits and a CPU it is the network of the preset `digits`, on 32 x 32 and a GPU that of `cifar10-small`.
    """
    side, levels = min(shape[1:]), 1
    while levels < 4 and side % 2 == 0 and side > 4 and all(size % 2**levels == 0 for size in shape[1:]):
        side, levels = side // 2, levels + 1
    multipliers = [1, *[2] * (levels - 1)]
    if not on_gpu:
        return {"channels": 16, "multipliers": multipliers, "blocks": 1, "attention": [], "dropout": 0.0}
    channels = 64 if max(shape[1:]) <= 32 else 128
    return {"channels": channels, "multipliers": multipliers, "blocks": 2, "dropout": 0.1}


CPU_PIXELS = 2**16  # in a batch: about a second a step with the usual network, on two cores
CPU_BATCH, CPU_STEPS = 8, 5000


def usual_on_cpu(config: Config) -> dict[str, Any]:
    """What takes the place of the defaults on a CPU, which are a GPU's: 128 pictures of 48 x 64 would take ten seconds a step.

    Empty on a GPU, with several processes, and where micro-batches were chosen.
    """
    if device_of(config).type == "cuda" or config.accumulation > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return {}
    fitting = CPU_PIXELS // math.prod(synthetic_source(config).shape[1:])
    batch = max(CPU_BATCH, min(Config().batch, 2 ** max(0, fitting.bit_length() - 1)))
    steps = {} if config.epochs or config.seconds else {"steps": CPU_STEPS}
    return {"batch": batch, **steps, "checkpoint.every": 500, "log.every": 50}


def said_picked(picked: Mapping[str, Any]) -> str:
    """What to say of such settings; nothing of those that few will want to know."""
    told = [name for name in ("batch", "steps") if name in picked]
    ours = " and ".join(f"--{name} {picked[name]}" for name in told)
    theirs = " and ".join(str(getattr(Config(), name)) for name in told)
    return f"a CPU is slow, so {ours} instead of {theirs}; give your own to change that" if told else ""


def open_source(config: Config, split: str = "train") -> Source:
    """The data, checked against the shape and the classes that the configuration names."""
    data = config.data
    source = open_data(data.source, data.path, split=split, options=data.options)
    if data.shape is not None and tuple(data.shape) != source.shape:
        raise ValueError(f"data.shape is {tuple(data.shape)}, but the samples of {source.name} are {source.shape}")
    if data.classes is not None and data.classes != source.classes:
        raise ValueError(f"data.classes is {data.classes}, but {source.name} has {source.classes}")
    return source


def synthetic_source(config: Config) -> Source:
    """Noise of the shape of the data, which need not be there."""
    if config.data.shape is not None:
        return Synthetic(tuple(config.data.shape), config.data.classes or 0)
    source = open_source(config)
    return Synthetic(source.shape, source.classes)
