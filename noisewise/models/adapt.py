"""One way to call every model, ours or not."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

LABEL_NAMES = ("labels", "class_labels", "y")


def with_labels(model: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`call(x, time, labels)` for any module whose forward takes (x, time) first.

    Labels go to the parameter of its forward named "labels", "class_labels" or "y"; without labels the parameter is left
    out. The output is the tensor itself, out of diffusers' `.sample` or the first of a tuple.
    """
    keyword = _label_keyword(model)

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


def _label_keyword(model: nn.Module) -> str | None:
    parameters = inspect.signature(_innermost(model).forward).parameters
    return next((name for name in LABEL_NAMES if name in parameters), None)


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
