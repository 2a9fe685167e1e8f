"""A run's tensors, as a checkpoint holds them, under the names of the bare model.

Each rank of a sharded model saves its own rows and loads those that it has then, so the number of processes may change in
between. To `gather` them is a collective call, and gives every rank the whole.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from noisewise.distributed import from_rows, is_sharded, like, whole
from noisewise.training.checkpoint import CheckpointError
from noisewise.training.tensor_files import StoredPart


def module_tensors(module: nn.Module, gather: bool = True) -> dict[str, Tensor]:
    """Parameters, buffers and extra state of a module."""
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} of the {type(module).__name__} is {type(value).__name__}, and a checkpoint holds tensors alone: let "
                "get_extra_state() return one"
            )
    return named_tensors(state, gather)


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Put saved tensors into a module; they must fit it exactly."""
    own = module.state_dict()
    _check_names(own, tensors, what)
    values = {}
    for name in tensors:
        extra = name.rpartition(".")[2] == "_extra_state"
        values[name] = tensors[name] if extra else _placed(tensors, name, own[name], f"{what}: {name}")
    module.load_state_dict(values)


def named_tensors(values: Mapping[str, Tensor], gather: bool = True) -> dict[str, Tensor]:
    """A plain dict of tensors."""
    return {name: whole(value.detach()) if gather else value.detach() for name, value in values.items()}


@torch.no_grad()
def load_named(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors into those of a dict."""
    _check_names(values, tensors, what)
    for name, value in values.items():
        value.copy_(_placed(tensors, name, value, f"{what}: {name}"))


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], gather: bool = True
) -> dict[str, Tensor]:
    """The state of an optimizer as "parameter|entry"; learning rates and the like follow from the configuration."""
    found = {
        f"{names[cast(nn.Parameter, parameter)]}|{entry}": value if isinstance(value, Tensor) else torch.tensor(value)
        for parameter, entries in optimizer.state.items()
        for entry, value in entries.items()
    }
    return named_tensors(found, gather)


def load_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]) -> None:
    """Put saved state into an optimizer of the same parameters."""
    parameters = {name: parameter for parameter, name in names.items()}
    unknown = sorted({key.partition("|")[0] for key in tensors} - set(parameters))
    if unknown:
        raise CheckpointError(f"the checkpoint's optimizer has state for {unknown[0]}, which this model does not have")
    for key in tensors:
        name, _, entry = key.partition("|")
        parameter = parameters[name]
        if _shape(tensors, key):
            value = _laid_out_as(_placed(tensors, key, parameter, f"optimizer: {key}", keep_dtype=True), parameter)
        else:
            value = tensors[key]
        if not value.ndim and any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
            value = value.to(parameter.device)  # the step count of a fused optimizer lives where the parameter does
        optimizer.state[parameter][entry] = value.clone()


def _laid_out_as(value: Tensor, parameter: Tensor) -> Tensor:
    """In the order of the parameter's memory: kernels for many tensors walk through both side by side."""
    return value if value.stride() == parameter.stride() else torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _check_names(own: Mapping[str, object], saved: Mapping[str, object], what: str) -> None:
    missing, extra = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
    if missing or extra:
        first = f"{missing[0]} is missing" if missing else f"{extra[0]} is unknown"
        raise CheckpointError(
            f"the checkpoint's {what} does not fit: {first} ({len(missing)} missing, {len(extra)} unknown in all); "
            "was it made by another model or version?"
        )


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return tensors.shape(name) if isinstance(tensors, StoredPart) else tuple(tensors[name].shape)


def _placed(tensors: Mapping[str, Tensor], name: str, own: Tensor, what: str, keep_dtype: bool = False) -> Tensor:
    """A saved tensor in the place, type and sharding of one's own; of a sharded one only the rank's own rows are read."""
    shape = _shape(tensors, name)
    if shape != tuple(own.shape):
        raise CheckpointError(f"the checkpoint's {what} has shape {shape}, expected {tuple(own.shape)}")
    if isinstance(tensors, StoredPart) and is_sharded(own):
        return from_rows(lambda first, last: tensors.rows(name, first, last), own, keep_dtype)
    return like(tensors[name], own, keep_dtype)
