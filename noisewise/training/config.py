"""The settings of a training run, as plain typed data.

`noisewise train --print-config` shows it as YAML; every value can be set in a YAML file or on the command line with its dotted
name (`--optimizer.lr 1e-4`). The names of samplers, weightings and processes are spec strings (docs/specs.md).
"""

import math
from dataclasses import dataclass, field, is_dataclass, replace
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from noisewise import recipes
from noisewise.objective import LossKind, Objective, Prediction
from noisewise.spec import build_process

AUTO = "auto"  # the model's name until the data are known


@dataclass
class DataConfig:
    """The data.

    Args:
        source: digits, cifar10, folder, array, latents or huggingface.
        path: where the data are (not for digits).
        options: settings of the source, such as size of an image folder.
        shape: shape of one sample; only needed for a dry run without the data, otherwise checked against them.
        classes: number of classes; as `shape`.
        flip: mirror half of the images.
        resident: keep all data on the device; null decides by their size.
        workers: reading processes for data that are not resident.
    """

    source: str = "digits"
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    flip: bool = False
    resident: bool | None = None
    workers: int = 2


@dataclass
class ModelConfig:
    """The network.

    Args:
        name: unet, dit, uvit, or the import path of any nn.Module called as model(x, time); auto is a U-Net that suits data
            and device.
        options: arguments of the network; with any of them, auto means unet.
        conditional: tell it the class of each sample.
        label_dropout: how often the class is withheld, for classifier-free guidance.
    """

    name: str = AUTO
    options: dict[str, Any] = field(default_factory=dict)
    conditional: bool = False
    label_dropout: float = 0.1


@dataclass
class OptimizerConfig:
    """The optimizer.

    Args:
        name: adam or adamw.
        lr: learning rate.
        betas: of Adam.
        eps: of Adam.
        weight_decay: of AdamW.
        warmup: steps in which the learning rate rises to lr.
        cooldown: last steps of the run, in which it falls to zero; may be set on resume.
        clip: largest norm of the gradient; null for none.
    """

    name: Literal["adam", "adamw"] = "adam"
    lr: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 0
    cooldown: int = 0
    clip: float | None = 1.0


@dataclass
class EMAConfig:
    """The average of the weights that generates images.

    Args:
        kind: constant (a fixed decay) or power (EDM2: a share of all of training).
        decay: of the constant kind.
        ramp: let the constant decay rise as (1 + n) / (10 + n), so that short runs forget their start; papers do not.
        std: width of the power kind, as a share of training.
    """

    kind: Literal["constant", "power"] = "constant"
    decay: float = 0.9999
    ramp: bool = True
    std: float = 0.1


@dataclass
class CheckpointConfig:
    """Checkpoints.

    Args:
        every: steps between two checkpoints.
        keep: how many of the newest to keep.
        keep_every: also keep those at multiples of this many steps; 0 for none.
    """

    every: int = 5000
    keep: int = 2
    keep_every: int = 0


@dataclass
class LogConfig:
    """What is logged during training.

    Args:
        every: steps between two rows of metrics.jsonl.
        trackers: names of Accelerate's trackers (tensorboard, wandb, mlflow, trackio, ...); metrics.jsonl needs none.
        samples_every: steps between two pictures of generated samples; 0 for none.
        samples: how many images a picture has.
        sample_steps: steps of their solver, unless `evaluation.quick_solver` is given.
    """

    every: int = 100
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    samples_every: int = 0
    samples: int = 64
    sample_steps: int = 50


@dataclass
class EvaluationConfig:
    """How a run is evaluated.

    Args:
        solver: such as "ddim:steps=200", for `noisewise evaluate`, `noisewise generate` and the headline figure of a
            comparison; null for the process's usual one.
        images: how many images to evaluate.
        quick_solver: for comparisons and pictures during training; null for the usual one with `log.sample_steps` steps.
        quick_images: how many images to evaluate in comparisons.
        data: real images, as SOURCE:PATH; by default those that the run is trained on; latents need it.
        data_options: settings of that source, such as size of an image folder.
        at_end: evaluate the run at the end of `noisewise train`, and measure the headline figure in comparisons.
    """

    solver: str | None = None
    images: int = 5000
    quick_solver: str | None = None
    quick_images: int = 1000
    data: str | None = None
    data_options: dict[str, Any] = field(default_factory=dict)
    at_end: bool = False


@dataclass
class Config:
    """A training run.

    Args:
        name: name of the run, and of its folder unless `out` is given.
        out: the run's folder; by default runs/NAME-SAMPLER-SEED.
        seed: of initial weights, data order, noise and timesteps.
        process: linear, cosine, quadratic, vp, ve, edm or flow, with settings as in "linear:steps=4000".
        prediction: what the model predicts: eps, x0, v, flow or edm.
        loss: mse, l1 or huber.
        huber_delta: where Huber turns from quadratic to linear.
        sigma_data: the standard deviation of the data, for the edm prediction.
        sampler: how timesteps are drawn and losses weighted, as in "logit_normal+minsnr".
        steps: optimizer steps; `noisewise train` makes 5,000 on a CPU, without a preset.
        epochs: passes over the data, instead of steps.
        seconds: end after this much time in training steps, if that comes first; null for no limit.
        batch: samples in one optimizer step, over all processes and accumulated micro-batches; on a CPU fewer of larger
            pictures, without a preset.
        accumulation: micro-batches in one optimizer step.
        precision: fp32, bf16, fp16, or auto (bf16 on a GPU that has it).
        device: auto, cpu or cuda.
        parallel: what several processes do: ddp (each holds the model) or fsdp (FSDP2: each holds a part).
        compile: torch.compile the model (the fast path always does).
        fast: on one CUDA device, use fused kernels, a compiled model and CUDA graphs: auto (where possible, else a line says
            why not), always (else an error) or never.
        deterministic: on the fast path, resume bit for bit; with false only up to rounding, and steps are faster.
        max_bad_steps: stop after this many steps in a row with a loss or gradient that is not finite.
        data: the data.
        model: the network.
        optimizer: the optimizer.
        ema: the average of the weights.
        checkpoint: checkpoints.
        log: what is logged.
        evaluation: how the run is evaluated.
    """

    name: str = "run"
    out: str | None = None
    seed: int = 0
    process: str = "linear"
    prediction: Prediction = "eps"
    loss: LossKind = "mse"
    huber_delta: float = 1.0
    sigma_data: float = 0.5
    sampler: str = "adaptive"
    steps: int = 100_000
    epochs: float | None = None
    seconds: float | None = None
    batch: int = 128
    accumulation: int = 1
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool = False
    fast: Literal["auto", "always", "never"] = "auto"
    deterministic: bool = True
    max_bad_steps: int = 20
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def check(self) -> None:
        """Raise ValueError for settings that cannot work, before anything is built."""
        for group in (self, *(part for part in vars(self).values() if is_dataclass(part))):
            for name, hint in get_type_hints(type(group)).items():
                if getattr(group, name) is None and NoneType not in get_args(hint):
                    raise ValueError(f"{name} must have a value, got null")
        for name in (*POSITIVE, *NOT_NEGATIVE):
            value, most = attrgetter(name)(self), LIMITS.get(name, 2**63)
            if value is None:
                continue
            if name in POSITIVE and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
            if isinstance(value, int) and value >= most:
                raise ValueError(f"{name} must be below {most:,}, got {value}")
        for name in ("images", "quick_images"):
            if getattr(self.evaluation, name) < 2:
                raise ValueError(f"evaluation.{name} must be >= 2 for a distance, got {getattr(self.evaluation, name)}")
        if not all(0 <= beta < 1 for beta in self.optimizer.betas):
            raise ValueError(f"optimizer.betas must lie in [0, 1), got {self.optimizer.betas}")
        if not 0 <= self.ema.decay < 1:
            raise ValueError(f"ema.decay must lie in [0, 1), got {self.ema.decay}")
        if self.batch % self.accumulation:
            raise ValueError(f"batch={self.batch} does not divide into accumulation={self.accumulation} micro-batches")
        if not 0 <= self.model.label_dropout < 1:
            raise ValueError(f"model.label_dropout must lie in [0, 1), got {self.model.label_dropout}")
        if self.optimizer.weight_decay and self.optimizer.name == "adam":
            raise ValueError("optimizer.weight_decay needs optimizer.name=adamw: Adam would mix it into the gradient")
        if self.optimizer.cooldown and self.seconds is not None:
            raise ValueError("optimizer.cooldown needs a run whose last step is known: give steps or epochs instead of seconds")
        if self.precision == "fp16" and any(name in self.sampler for name in ("lookahead", "gradient_variance")):
            raise ValueError(
                "precision=fp16 scales the loss, which samplers that differentiate do not; use bf16 or fp32 with them"
            )
        if self.evaluation.at_end and self.data.source == "latents" and self.evaluation.data is None:
            raise ValueError("evaluation.at_end needs real images to compare with: name them, --evaluation.data folder:images")
        objective = self.objective()
        recipes.recipe(self.sampler, objective)

    @property
    def micro_batch(self) -> int:
        """Samples of one gradient, over all processes."""
        return self.batch // self.accumulation

    def for_data(self, samples: int) -> "Config":
        """The configuration with the steps that its epochs are over so many samples; the last step may go beyond them."""
        return self if self.epochs is None else replace(self, steps=math.ceil(self.epochs * samples / self.batch))

    def objective(self) -> Objective:
        """What is trained: the process, what the model predicts, and the loss."""
        return Objective(build_process(self.process), self.prediction, self.loss, self.huber_delta, self.sigma_data)


PINNED = (
    *("seed", "process", "prediction", "loss", "huber_delta", "sigma_data", "sampler", "batch"),
    *("data", "model", "optimizer", "ema"),
)
"""Settings that a run keeps for life; the others may change when it is resumed."""

FREE_WITHIN = {"data": ("path", "resident", "workers", "shape", "classes"), "optimizer": ("lr", "cooldown", "clip")}
"""Parts of those that may change all the same: where the data lie, what a run that diverges needs, and how one ends."""

POSITIVE = (
    *("steps", "epochs", "seconds", "batch", "accumulation", "max_bad_steps", "huber_delta", "sigma_data"),
    *("checkpoint.every", "checkpoint.keep", "log.every", "log.sample_steps"),
    *("optimizer.lr", "optimizer.eps", "optimizer.clip"),
)
NOT_NEGATIVE = (
    *("seed", "optimizer.warmup", "optimizer.cooldown", "optimizer.weight_decay", "checkpoint.keep_every"),
    *("log.samples_every", "log.samples", "data.workers"),
)
LIMITS = {"batch": 10**7, "seed": 2**64}
"""Of whole numbers, where 64 bits are too many or too few."""
