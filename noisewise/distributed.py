"""The only place that talks to torch.distributed. Everything is a no-op without a process group.

Feedback is gathered from all ranks and then applied by the same deterministic code everywhere, so ranks stay identical.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else 1


def _for_communication(tensor: Tensor) -> Tensor:
    """NCCL moves CUDA tensors only."""
    if dist.get_backend() == "nccl" and not tensor.is_cuda:
        return tensor.cuda()
    return tensor.contiguous()


def of_ranks(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, which have one shape, in rank order."""
    if world_size() == 1:
        return [tensor]
    mine = _for_communication(tensor)
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return [part.to(tensor.device) for part in parts]


def gather_sum(tensor: Tensor) -> Tensor:
    """The sum over ranks, added in rank order, so that every rank gets the same bits."""
    total, *others = of_ranks(tensor)
    for part in others:
        total = total + part
    return total


def gather_rows(tensor: Tensor) -> Tensor:
    """The rows of all ranks, in rank order; ranks may hold different numbers of rows."""
    if world_size() == 1:
        return tensor
    sizes = [int(size) for size in of_ranks(torch.tensor([len(tensor)], device=tensor.device))]
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return torch.cat([part[:size] for part, size in zip(of_ranks(padded), sizes, strict=True)])


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """What DDP does for the model, for the few parameters outside it (a learned weighting)."""
    if world_size() > 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(gather_sum(parameter.grad) / world_size())


def from_first_rank(tensor: Tensor) -> Tensor:
    """Rank 0's tensor, on every rank."""
    if world_size() == 1:
        return tensor
    shared = _for_communication(tensor).clone()
    dist.broadcast(shared, src=0)
    return shared.to(tensor.device)


def largest(number: int, device: torch.device) -> int:
    """The largest of the ranks' numbers."""
    if world_size() == 1:
        return number
    return int(torch.cat(of_ranks(torch.tensor([number], device=device))).max())


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor (FSDP2) put together; any other tensor as it is."""
    put_together = getattr(tensor, "full_tensor", None)
    return put_together() if put_together is not None else tensor


def like(tensor: Tensor, example: Tensor, keep_dtype: bool = False) -> Tensor:
    """A whole tensor, the same on all ranks, in the type, on the device and with the sharding of `example`."""
    placed = tensor.to(example.device, tensor.dtype if keep_dtype else example.dtype)
    mesh = getattr(example, "device_mesh", None)
    if mesh is None:
        return placed
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(placed, mesh, example.placements)  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Whether every rank holds some of its rows (FSDP2)."""
    return hasattr(tensor, "device_mesh")


def own_rows(tensor: Tensor) -> Tensor:
    """Those that this rank holds of a sharded tensor."""
    return tensor.to_local()  # type: ignore[attr-defined]


def rows_of_rank(rows: int, rank: int, world: int) -> tuple[int, int]:
    """Where a rank's rows of a sharded tensor begin, and where they end."""
    size = -(-rows // world)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def from_rows(read: Callable[[int, int], Tensor], example: Tensor, keep_dtype: bool = False) -> Tensor:
    """A tensor sharded as `example`; each rank reads its own rows."""
    from torch.distributed.tensor import DTensor

    first, last = rows_of_rank(len(example), rank(), world_size())
    local = read(first, last)
    local = local.to(own_rows(example).device, local.dtype if keep_dtype else example.dtype)
    mesh, placements = example.device_mesh, example.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=example.shape, stride=example.stride())


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """FSDP2: every rank keeps a part of the model, and each block is put together when it is needed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not is_initialized():
        raise ValueError("parallel=fsdp needs processes: start with torchrun --nproc-per-node=N -m noisewise train ...")
    mesh = init_device_mesh(device.type, (world_size(),))
    model.to(device)
    for module in reversed(list(model.modules())):  # inner ones first
        for block in module if isinstance(module, nn.ModuleList) else ():
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class FailedElsewhere(RuntimeError):
    """Another process has failed, so this one cannot go on."""


@contextmanager
def together() -> Iterator[None]:
    """What fails on one rank in the block fails on all of them after it, instead of leaving the others waiting."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if largest(int(failure is not None), torch.device("cpu")):
        raise failure or FailedElsewhere("another process has failed; its message says why")


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()
