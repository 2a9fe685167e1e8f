"""Names and defaults of the code. Most tables have a column of words that stays as the page has it."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
import yaml

from noisewise import DDPM, PROCESSES, SAMPLERS, WEIGHTINGS, AdaptiveSampler, Sampler
from noisewise.data import SOURCES
from noisewise.generation.solvers import default_solver
from noisewise.models import build_model
from noisewise.samplers.adaptive import ESTIMATORS
from noisewise.samplers.learning import Learner
from noisewise.spec import _parameters, build_process
from noisewise.training.config import Config
from noisewise.training.options import load_preset, plain, preset_names

from . import DOCS, table

Rows = list[dict[str, str]]
"""The lines of a table, by heading."""
SHARED = ("correction", "draws", "seed")  # by all samplers
PRESET = "paper_cifar10"  # its card has all settings of the presets
REQUIRED = "required"
OWN = "the estimator's own"  # how a card writes correction=None and floor=None: `none` is a correction, or looks like no floor


def fill(rows: Rows, defaults: dict[str, str | None], needed: Collection[str] | None = None) -> None:
    """Write the defaults of the names in the first column (None: as the page has it); names must be those of the code."""
    names = [next(iter(row.values())).strip("`") for row in rows]
    for name in defaults if needed is None else sorted(needed):
        if name not in names:
            raise ValueError(f"{name} is missing: add a line that says what it means")
    for name, row in zip(names, rows, strict=True):
        if name not in defaults or names.count(name) > 1:
            raise ValueError(f"{name} is not in the code, or twice in the table: remove a line")
        if (default := defaults[name]) is not None:
            row["default"] = default


# Cards -----------------------------------------------------------------------------------------------------------------


def sampler_or_weighting(rows: Rows, name: str) -> None:
    """The settings of a card."""
    maker = {**SAMPLERS, **WEIGHTINGS}[name]
    fill(rows, {key: _code(value) for key, value in code_defaults(maker).items()}, must_be_listed(maker))


def estimators(rows: Rows) -> None:
    """What each estimator of `adaptive` sets of the sampler's."""
    if (names := [row["estimator"].strip("`") for row in rows]) != list(ESTIMATORS):
        raise ValueError(f"the estimators are {', '.join(ESTIMATORS)}, not {', '.join(names)}")
    for name, row in zip(names, rows, strict=True):
        row |= {key: _code(getattr(ESTIMATORS[name], key)) for key in ("strata", "floor", "correction")}


def estimator(rows: Rows, name: str) -> None:
    """The settings of an estimator of `adaptive`."""
    parameters = inspect.signature(ESTIMATORS[name]).parameters
    fill(rows, {key: _code(parameter.default) for key, parameter in parameters.items() if key != "edges"})


def _code(value: Any) -> str:
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text if text in (REQUIRED, OWN) else f"`{text}`"


def is_preset(maker: Callable[..., Any]) -> bool:
    """Whether it is a function that sets up an adaptive sampler."""
    return inspect.isfunction(maker) and inspect.signature(maker).return_annotation is AdaptiveSampler


def preset_values(maker: Callable[..., Any]) -> dict[str, Any]:
    """What a preset sets, as found on a sampler that it has built."""
    sampler = maker(DDPM.linear())
    estimator = sampler.estimator
    values = {name: getattr(estimator, name) for name in ("every", "hidden", "depth", "lr", "entropy", "normalise", "chosen")}
    values |= {"queue": len(estimator.queue), "strata": len(estimator.edges) - 1}
    values |= {"floor": sampler.floor, "correction": str(sampler.correction), "collapse": sampler.collapse}
    values["target"] = next(
        name for name, kind in WEIGHTINGS.items() if isinstance(kind, type) and isinstance(sampler.target, kind)
    )
    return values


def code_defaults(maker: Callable[..., Any]) -> dict[str, Any]:
    """Every setting's default; a partial's keywords win, then the class, its estimator, what learners and all share."""
    if is_preset(maker):
        return preset_values(maker)
    target, fixed = getattr(maker, "func", maker), getattr(maker, "keywords", {})
    sources = [target]
    if hasattr(target, "option_sources"):
        kind = ESTIMATORS[fixed.get("estimator", inspect.signature(target).parameters["estimator"].default)]
        sources.append(kind)
    if inspect.isclass(target):
        sources += [base for base in (Learner, Sampler) if issubclass(target, base)]
    defaults = dict(fixed)
    for source in sources:
        for parameter in inspect.signature(source).parameters.values():
            defaults.setdefault(parameter.name, REQUIRED if parameter.default is parameter.empty else parameter.default)
    for name in ("correction", "floor") if hasattr(target, "option_sources") else ():
        if defaults[name] is None:
            defaults[name] = getattr(kind, name) if "estimator" in fixed else OWN
    known = _parameters(maker)
    return {name: value for name, value in defaults.items() if name in known and name not in ("args", "kwargs")}


def must_be_listed(maker: Callable[..., Any]) -> set[str]:
    """Settings of the method itself, and shared ones whose default it changes; `adaptive` has those of all that learn.

    A variant of another method (a preset of the paper's, a partial) lists what it changes there.
    """
    if is_preset(maker):
        values, first = preset_values(maker), preset_values(SAMPLERS[PRESET])
        return {name for name in values if maker is SAMPLERS[PRESET] or values[name] != first[name]}
    if keywords := getattr(maker, "keywords", None):
        return set(keywords)
    defaults, shared = code_defaults(maker), code_defaults(Sampler)
    own = set(inspect.signature(maker).parameters)
    if maker is AdaptiveSampler:
        own |= set(inspect.signature(Learner).parameters)
    differing = {name for name in SHARED if name in defaults and defaults[name] != shared[name]}
    return {name for name in defaults if name in own and name not in SHARED} | differing


# The command line ------------------------------------------------------------------------------------------------------


def options(rows: Rows, group: str = "") -> None:
    """The configuration: of the groups with a page of their own all, of the others those that the page names."""
    apart, found = ("data", "model", "checkpoint"), {}
    for name, value in plain(Config()).items():
        if name == group or (not group and name not in apart):
            found |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    fill(rows, {name: _yaml(value) for name, value in found.items()}, None if group else ())


def options_of(rows: Rows, name: str) -> None:
    """The options of a source of data."""
    parameters = inspect.signature(SOURCES[name]).parameters.values()
    fill(rows, {p.name: _yaml(p.default) for p in parameters if p.name not in ("path", "split")})


def _yaml(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def presets(rows: Rows) -> None:
    """How many parameters the network of each preset has."""
    names = [row["preset"].strip("`") for row in rows]
    if sorted(names) != preset_names():
        raise ValueError(f"the presets are {', '.join(preset_names())}")
    for name, row in zip(names, rows, strict=True):
        config = load_preset(name)
        classes = (config.data.classes or 0) if config.model.conditional else 0
        row["parameters"] = parameters(config.model.name, config.model.options, config.data.shape, classes)


def networks(rows: Rows) -> None:
    """How many parameters networks with some options have."""
    for row in rows:
        shape = tuple(int(size) for size in row["sample"].split("×"))
        row["parameters"] = parameters(row["network"], yaml.safe_load(row["options"]), shape, int(row["classes"]))


def parameters(name: str, options: dict[str, Any], shape: Any, classes: int) -> str:
    """The number of a network's parameters."""
    with torch.device("meta"):
        return f"{sum(p.numel() for p in build_model(name, options, shape=shape, classes=classes).parameters()):,}"


# Without words of the page ---------------------------------------------------------------------------------------------


def processes() -> str:
    """Every process with its settings."""
    lines = []
    for name, maker in PROCESSES.items():
        settings = (f"{p.name}={p.default:g}" for p in inspect.signature(maker).parameters.values())
        lines.append([f"`{name}`", f"`{','.join(settings)}`"])
    return table(["process", "settings and defaults"], lines)


def usual_solvers() -> str:
    """What generates images of each process unless told otherwise."""
    found: dict[str, list[str]] = {}
    for name in PROCESSES:
        found.setdefault(default_solver(build_process(name)).spec, []).append(name)
    return table(["process", "usual solver"], ([", ".join(names), f"`{solver}`"] for solver, names in found.items()))


def example(name: str) -> str:
    """The first class of an example, with what belongs to it."""
    text = (DOCS.parent / "examples" / f"{name}.py").read_text()
    return f"```python\n{text[text.index('class ', text.index('import')) : text.index('def train')].strip()}\n```"
