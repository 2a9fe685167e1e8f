"""From a diffusers scheduler to a noising process and what the model predicts.

==========================================================  ====================  =========================
scheduler                                                   process               prediction
==========================================================  ====================  =========================
any with `alphas_cumprod`: DDPM, DDIM, Euler, DPM-Solver..  DDPM                  eps, x0 or v
FlowMatch*, or another with `use_flow_sigmas`               ShiftedFlow           flow
EDMEuler, EDMDPMSolverMultistep                             EDM                   edm
==========================================================  ====================  =========================
"""

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisewise.objective import WORDS, Objective, Prediction
from noisewise.processes import DDPM, EDM, Discrete

FLOW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler")
EDM_STYLE = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")
CONFIG_FILE = "scheduler_config.json"


def read_scheduler(
    scheduler: Any,
    *,
    shift: float | None = None,
    mu: float | None = None,
    mean: float | None = None,
    std: float | None = None,
) -> Objective:
    """The training process and the prediction of a diffusers scheduler, as an `Objective`.

    Args:
        scheduler: the scheduler; or its saved configuration: a dict, a scheduler_config.json, or a folder that holds one
            (itself or under scheduler/). Files are read as JSON and nothing in them is run.
        shift: flow only: use this shift instead of the configured one.
        mu: flow with dynamic shifting only: the shift as the pipeline computes it from the resolution.
        mean: EDM only: of the training density ln sigma ~ N(mean, std^2), which a scheduler does not hold; by default that of
            the EDM paper, -1.2.
        std: EDM only: of the same density; 1.2 by default.
    """
    if isinstance(scheduler, str | Path):
        scheduler = _load(Path(scheduler))
    if isinstance(scheduler, Mapping):
        scheduler = _make(scheduler)
    config = getattr(scheduler, "config", None)
    config = config if isinstance(config, Mapping) else {}
    if _is_a(scheduler, FLOW) or (config.get("use_flow_sigmas") and "flow_shift" in config):
        _refuse(scheduler, mean=mean, std=std)
        return _flow(scheduler, config, shift, mu)
    if _is_a(scheduler, EDM_STYLE):
        _refuse(scheduler, shift=shift, mu=mu)
        return _edm(scheduler, config, mean, std)
    if not inspect.isclass(scheduler) and isinstance(getattr(scheduler, "alphas_cumprod", None), Tensor):
        _refuse(scheduler, shift=shift, mu=mu, mean=mean, std=std)
        return _ddpm(scheduler, config)
    raise _unknown(scheduler)


def _ddpm(scheduler: Any, config: Mapping[str, Any]) -> Objective:
    if config.get("timestep_type") == "continuous":
        raise ValueError(
            f"{type(scheduler).__name__} with timestep_type='continuous' feeds its model ln(sigma)/4, not timesteps: "
            "use Objective(EDM(mean, std), 'edm', sigma_data=1.0) and negate the output of a v_prediction model"
        )
    return Objective(DDPM.from_diffusers(scheduler), table_prediction(scheduler))


def table_prediction(scheduler: Any) -> Prediction:
    """What the model of a scheduler with alphas_cumprod predicts."""
    kind = getattr(getattr(scheduler, "config", None), "prediction_type", None)
    if kind not in WORDS:
        raise ValueError(
            f"{type(scheduler).__name__} has prediction_type={kind!r}, but with alphas_cumprod only "
            f"{', '.join(WORDS)} are known: set it with scheduler.register_to_config(prediction_type=...), or use "
            "Objective(DDPM.from_diffusers(scheduler), 'eps')"
        )
    return WORDS[kind]


def _flow(scheduler: Any, config: Mapping[str, Any], shift: float | None, mu: float | None) -> Objective:
    name = type(scheduler).__name__
    if config.get("prediction_type", "flow_prediction") != "flow_prediction":
        raise ValueError(
            f"{name} has use_flow_sigmas with prediction_type={config['prediction_type']!r}: "
            "only 'flow_prediction' (noise - x0) goes with flow sigmas here"
        )
    if config.get("invert_sigmas"):
        raise ValueError(
            f"{name} has invert_sigmas, so its model is fed (1 - sigma) T: use Objective(Flow(time_scale=T, data_at=1))"
        )
    if shift is not None and mu is not None:
        raise ValueError(f"give shift or mu, not both, got {shift} and {mu}")
    dynamic, exponential = config.get("use_dynamic_shifting", False), config.get("time_shift_type") != "linear"
    if mu is not None and not dynamic:
        raise ValueError(f"mu is for dynamic shifting, which this {name} does not use: give shift= to change its shift")
    if mu is not None:
        shift = math.exp(mu) if exponential else mu
    if shift is None and dynamic:
        raise ValueError(
            f"{name} shifts its noise levels dynamically, by the resolution of the images, which is not in the scheduler: "
            "give mu=, as your pipeline's calculate_shift(...) returns it, or shift=; shift=1.0 trains on the unshifted "
            "levels, as diffusers' own Flux scripts do"
        )
    configured = config["flow_shift"] if "flow_shift" in config else config.get("shift", 1.0)
    return Objective(ShiftedFlow(config["num_train_timesteps"], configured if shift is None else shift), "flow")


EDM_DENSITY = (-1.2, 1.2)
OUTSIDE = 0.05


def _edm(scheduler: Any, config: Mapping[str, Any], mean: float | None, std: float | None) -> Objective:
    name, kind = type(scheduler).__name__, config["prediction_type"]
    if kind not in ("epsilon", "v_prediction"):
        raise ValueError(f"{name} has prediction_type={kind!r}, but EDM schedulers know epsilon and v_prediction alone")
    if mean is None and std is None:
        outside = _mass_outside(config["sigma_min"], config["sigma_max"], *EDM_DENSITY)
        if outside > OUTSIDE:
            raise ValueError(
                f"{name} generates from sigma {config['sigma_max']:g} to {config['sigma_min']:g}, but {outside:.0%} of the EDM "
                "paper's training density lies outside: give the mean= and std= of ln sigma that this model trains with"
            )
    process = EDM(EDM_DENSITY[0] if mean is None else mean, EDM_DENSITY[1] if std is None else std)
    maker = Objective if kind == "epsilon" else NegatedObjective
    return maker(process, "edm", sigma_data=config["sigma_data"])


def _mass_outside(low: float, high: float, mean: float, std: float) -> float:
    below, above = ((math.log(sigma) - mean) / (std * math.sqrt(2)) for sigma in (low, high))
    return (math.erfc(-below) + math.erfc(above)) / 2


@dataclass(frozen=True)
class NegatedObjective(Objective):
    """For networks that predict the negative of the objective's target, as EDM schedulers with "v_prediction" assume."""

    def target(self, x0: Tensor, noise: Tensor, u: Tensor) -> Tensor:
        return -super().target(x0, noise, u)

    def denoised(self, output: Tensor, x_u: Tensor, u: Tensor) -> Tensor:
        return super().denoised(-output, x_u, u)


# Configurations -------------------------------------------------------------------------------------------------------


def _load(path: Path) -> dict[str, Any]:
    """The configuration in a scheduler_config.json, or in a folder with one."""
    candidates = [path] if path.is_file() else [path / CONFIG_FILE, path / "scheduler" / CONFIG_FILE]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"no {CONFIG_FILE} at {path} or in its folder scheduler/: scheduler.save_pretrained(folder) writes one "
            "(the hub is never asked)"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): scheduler.save_pretrained(folder) writes a good one") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not the settings of a scheduler")
    return config


def _make(config: Mapping[str, Any]) -> Any:
    """The scheduler of a saved configuration; only diffusers' own classes are looked up."""
    name = config.get("_class_name")
    if not isinstance(name, str):
        raise ValueError("this configuration has no _class_name: hand over the scheduler itself, or what it saved")
    try:
        import diffusers
    except ImportError:
        raise ImportError("reading a saved scheduler needs diffusers: pip install diffusers") from None
    kind = getattr(diffusers, name, None) if name.endswith("Scheduler") else None
    if not inspect.isclass(kind) or not issubclass(kind, diffusers.SchedulerMixin):
        raise TypeError(f"{name!r} is not a scheduler of diffusers {diffusers.__version__}. {_supported()}")
    try:
        return kind.from_config(dict(config))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"diffusers cannot make a {name} of this configuration: {error}") from error


def _is_a(scheduler: Any, names: tuple[str, ...]) -> bool:
    """By name, so that nothing needs to be imported; a class of the user's own may inherit."""
    return any(base.__name__ in names for base in type(scheduler).__mro__)


def _refuse(scheduler: Any, **options: float | None) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} does not apply to {type(scheduler).__name__}; leave it out")


def _supported() -> str:
    return (
        f"Supported: schedulers with alphas_cumprod (DDPMScheduler, DDIMScheduler and most others), {', '.join(FLOW)}, "
        f"{', '.join(EDM_STYLE)}. Otherwise name the process yourself: Objective(DDPM(betas=...), 'eps'), "
        "Objective(Flow(time_scale=1000), 'flow'), Objective(EDM(), 'edm'), or VP() and VE()"
    )


def _unknown(scheduler: Any) -> TypeError:
    if inspect.isclass(scheduler):
        return TypeError(f"got the class {scheduler.__name__}: hand over an instance, such as {scheduler.__name__}()")
    if hasattr(scheduler, "scheduler"):
        return TypeError(f"got a {type(scheduler).__name__}: hand over its scheduler, as in pipeline.scheduler")
    return TypeError(f"cannot read the noise levels of a {type(scheduler).__name__}. {_supported()}")


class ShiftedFlow(Discrete):
    """x = (1 - sigma) x0 + sigma noise on T shifted noise levels; uniform u is diffusers' `weighting_scheme="none"`.

    Args:
        steps: the number T of noise levels (`num_train_timesteps`).
        shift: above 1 more of them are at much noise (3 for SD3); 1 spaces them evenly.
    """

    usual_prediction = "flow"

    def __init__(self, steps: int = 1000, shift: float = 1.0) -> None:
        if steps < 1:
            raise ValueError(f"a schedule needs at least one timestep, got {steps}")
        if not 0 < shift < float("inf"):
            raise ValueError(f"shift must be positive and finite, got {shift}")
        self.shift = shift
        even = torch.arange(1, steps + 1, dtype=torch.float32) / steps
        sigma = shift * even / (1 + (shift - 1) * even)
        exact = sigma.double()
        below = exact.clamp(max=1)  # some shifts round the last level to just above
        log_snr = 2 * (torch.log1p(-below) - torch.log(below))  # -inf at the last level, which is all noise
        self._tabulate(1 - exact, exact, log_snr, time=sigma * steps)

    def time(self, u: Tensor) -> Tensor:
        return self._at("time", u)

    def u_of_time(self, time: Tensor) -> Tensor:
        if time.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"timesteps of a flow are float32, got {time.dtype}, which cannot tell them apart")
        sigma = time / self.steps
        even = sigma / (self.shift - (self.shift - 1) * sigma)
        return ((even * self.steps).round() - 0.5).clamp(0.5, self.steps - 0.5) / self.steps

    def __repr__(self) -> str:
        return f"ShiftedFlow(T={self.steps}, shift={self.shift:g})"
