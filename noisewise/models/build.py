"""A model from its name and its options, for configurations written by people."""

import importlib
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from noisewise.models.dit import DiT
from noisewise.models.unet import UNet
from noisewise.models.uvit import UViT
from noisewise.words import unknown

MODELS: dict[str, Callable[..., nn.Module]] = {"unet": UNet, "dit": DiT, "uvit": UViT}

LARGEST = 2**16  # of the numbers of our networks: a depth of 1e9 would be built for days
FROM_DATA = ("shape", "classes")  # what the data decides, never the options


def build_model(name: str, options: Mapping[str, Any], *, shape: tuple[int, ...], classes: int = 0) -> nn.Module:
    """The model `name` with its `options`, for samples of `shape` (C, H, W).

    `name` is one of `MODELS`, or the import path of a class or function of yours ("package.module.Class" or
    "package.module:Class"), which is called with the options, and with `shape` and `classes` where it has such parameters.
    """
    maker = _imported(name) if is_import_path(name) else _registered(name)
    parameters = inspect.signature(maker).parameters
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    settable = [parameter for parameter in named if parameter not in FROM_DATA]
    for option in options:
        if option in FROM_DATA:
            raise ValueError(f"option {option!r} of model {name!r} comes from the data: leave it out of the model's options")
        if option not in settable and not open_ended:
            raise ValueError(_of_another(name, option, settable) or unknown(f"option of model {name}", option, settable))
        values = options[option] if isinstance(options[option], list | tuple) else [options[option]]
        if name in MODELS and any(isinstance(value, int | float) and not abs(value) <= LARGEST for value in values):
            raise ValueError(f"option {option!r} of model {name!r} must be at most {LARGEST:,}, got {options[option]}")
    from_data = {"shape": tuple(shape), "classes": classes}
    try:
        model = maker(**options, **{key: value for key, value in from_data.items() if key in named})
    except TypeError as error:
        if name not in MODELS:
            raise  # of somebody's own code
        raise ValueError(f"the options of model {name!r} are not of the kind that it takes: {error}") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {name!r} must give a torch.nn.Module, got {type(model).__name__}")
    return model


def _registered(name: str) -> Callable[..., nn.Module]:
    if name not in MODELS:
        raise ValueError(
            unknown("model", name, MODELS) + "; a model of your own is named by its import path, package.module.Class"
        )
    return MODELS[name]


def _imported(path: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = path.rpartition(":" if ":" in path else ".")
    if not module_name or not attribute:
        raise ValueError(f"{path!r} is no import path: write package.module.Class or package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ValueError(f"cannot import {module_name!r} for model {path!r}: is it installed, or on PYTHONPATH?") from error
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ValueError(unknown(f"name in module {module_name!r}", attribute, public))
    maker = getattr(module, attribute)
    if not callable(maker):
        raise TypeError(f"model {path!r} is a {type(maker).__name__}: name a class or a function that returns a model")
    return maker


def _of_another(name: str, option: str, settable: Iterable[str]) -> str | None:
    """What to say of an option that only other models have, as those of a preset are for its own model."""
    others = [other for other, maker in MODELS.items() if option in inspect.signature(maker).parameters]
    if not others:
        return None
    return (
        f"model {name!r} has no option {option!r}, but {', '.join(settable)}; choose a model that has it, --model.name "
        f"{' or '.join(others)}, or replace all options of a preset: --model.options '{{}}' or '{{name: value, ...}}'"
    )


# One way to call every model, ours or not -----------------------------------------------------------------------------


LABEL_NAMES = ("labels", "class_labels", "y")


def with_labels(model: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`call(x, time, labels)` for any module whose forward takes (x, time) first.

    Labels go to the parameter of its forward named "labels", "class_labels" or "y"; without labels the parameter is left
    out. The output is the tensor itself, out of diffusers' `.sample` or the first of a tuple.
    """
    parameters = inspect.signature(_innermost(model).forward).parameters
    keyword = next((name for name in LABEL_NAMES if name in parameters), None)

    def call(x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return _tensor(model(x, time))
        if keyword is None:
            raise ValueError(
                f"{type(_innermost(model)).__name__} was given labels, but its forward has no parameter named "
                f"{', '.join(LABEL_NAMES)}: rename its label parameter, or train without labels"
            )
        return _tensor(model(x, time, **{keyword: labels}))

    return call


def _innermost(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile and of data parallelism, whose own forward takes anything."""
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and _takes_anything(model):
            return _innermost(inner)
    return model


def _takes_anything(model: nn.Module) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    return kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _tensor(output: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
    if not isinstance(output, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}: it must return the predicted tensor")
    return output


# Whose word it takes to import a model --------------------------------------------------------------------------------


# A run folder may come from somebody else, and an import path in it names code. The user's own word is the command line, a
# file of settings, or Python. A name from a folder alone is imported only if the user repeats it (`--trust NAME`), or began a
# run with it on this machine: such names are remembered outside of all run folders.


class Untrusted(ValueError):
    """A folder names code that the user has not."""


def is_import_path(name: str) -> bool:
    """Whether a model's name is that of code to import, not of a network of this package."""
    return "." in name or ":" in name


def check_trusted(name: str, folder: Path, trust: Collection[str] = ()) -> None:
    """Raise Untrusted if a run folder names code that the user has given neither now nor to an earlier run."""
    if is_import_path(name) and name not in trust and name not in remembered():
        raise Untrusted(
            f"{folder} names the model {name!r}, which would be imported and called: it could do anything that you can. "
            f"If it is yours, or you have read it, say so with --trust {name!r}"
        )


def remember(name: str) -> None:
    """Keep a name that the user gave, so that runs made with it need no --trust; where that cannot be written, they do."""
    if is_import_path(name) and len(name.split()) == 1 and name not in remembered():
        try:
            file = memory()
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.write(f"{name}\n")
        except (OSError, RuntimeError):
            return


def remembered() -> set[str]:
    """The names that the user gave to earlier runs."""
    try:
        return set(memory().read_text().splitlines())
    except (OSError, RuntimeError, ValueError):
        return set()


def memory() -> Path:
    """The file of those names, in the user's state folder."""
    place = os.environ.get("XDG_STATE_HOME", "")
    return (Path(place) if os.path.isabs(place) else Path.home() / ".local" / "state") / "noisewise" / "trusted-models"
