"""A run's tensors, as a checkpoint holds them: whole (not sharded), on the CPU, under the names of the bare model.

Saving is a collective call for sharded models; loading shards again, so the number of processes may change in between.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from noisewise.distributed import like, whole
from noisewise.training.checkpoint import CheckpointError


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and extra state of a module."""
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} of the {type(module).__name__} is {type(value).__name__}, and a checkpoint holds tensors alone: let "
                "get_extra_state() return one"
            )
    return {name: whole(value.detach()) for name, value in state.items()}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Put saved tensors into a module; they must fit it exactly."""
    own = module.state_dict()
    _check_names(own, tensors, what)
    values = {}
    for name, value in tensors.items():
        extra = name.rpartition(".")[2] == "_extra_state"
        values[name] = value if extra else like(_of_shape(value, own[name], f"{what}: {name}"), own[name])
    module.load_state_dict(values)


def named_tensors(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A plain dict of tensors, whole."""
    return {name: whole(value.detach()) for name, value in values.items()}


@torch.no_grad()
def load_named(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors into those of a dict."""
    _check_names(values, tensors, what)
    for name, value in values.items():
        value.copy_(like(_of_shape(tensors[name], value, f"{what}: {name}"), value))


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
    """The state of an optimizer as "parameter|entry"; learning rates and the like follow from the configuration."""
    return {
        f"{names[cast(nn.Parameter, parameter)]}|{entry}": whole(value.detach())
        if isinstance(value, Tensor)
        else torch.tensor(value)
        for parameter, entries in optimizer.state.items()
        for entry, value in entries.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]) -> None:
    """Put saved state into an optimizer of the same parameters."""
    parameters = {name: parameter for parameter, name in names.items()}
    unknown = sorted({key.partition("|")[0] for key in tensors} - set(parameters))
    if unknown:
        raise CheckpointError(f"the checkpoint's optimizer has state for {unknown[0]}, which this model does not have")
    for key, value in tensors.items():
        name, _, entry = key.partition("|")
        parameter = parameters[name]
        if value.ndim:
            value = like(_of_shape(value, parameter, f"optimizer: {key}"), parameter, keep_dtype=True)
            value = _laid_out_as(value, parameter)
        elif any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
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


def _of_shape(value: Tensor, own: Tensor, name: str) -> Tensor:
    if value.shape != own.shape:
        raise CheckpointError(f"the checkpoint's {name} has shape {tuple(value.shape)}, expected {tuple(own.shape)}")
    return value
