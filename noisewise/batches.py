"""Batches of any make: where the data is in them, some of their rows, moving them, and sharing them out among processes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.levels import check_floating

Where = str | int | Callable[[Any], Tensor] | None
"""Where x0 is in a batch: its key or position, a function of the batch, or None for the batch itself or its first item."""


def data_of(batch: Any, where: Where = None) -> Tensor:
    """x0 of a batch, checked."""
    data: Any
    if callable(where):
        data = where(batch)
    elif where is not None:
        data = _item(batch, where)
    else:
        data = batch[0] if isinstance(batch, tuple | list) and len(batch) else batch
    if not isinstance(data, Tensor):
        hint = f" among {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise TypeError(
            f"a batch must be x0 or a tuple that begins with it, got {type(batch).__name__}: "
            f"say where x0 is with x0=KEY{hint}, or with a function of the batch"
        )
    check_floating(data)
    if not data.ndim or not data.numel():
        raise ValueError(f"x0 must hold at least one sample, got shape {tuple(data.shape)}")
    return data


def _item(batch: Any, where: str | int) -> Any:
    if isinstance(batch, Tensor):
        raise ValueError(f"x0={where!r}: a batch that is a tensor is x0 itself; leave x0= out")
    try:
        return batch[where]
    except (KeyError, IndexError, TypeError):
        known = (
            f"its keys are {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"it is a {type(batch).__name__}"
        )
        raise ValueError(f"x0={where!r}: there is no such item in a batch; {known}") from None


def moved(batch: Any, device: torch.device | str) -> Any:
    """The batch with all its tensors on a device; what has no `to` (text, numbers) is left as it is."""
    return batch.to(device) if hasattr(batch, "to") else _inside(batch, lambda part: moved(part, device))


def _inside(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A dict, tuple or list with its parts changed; anything else as it is."""
    if isinstance(batch, Mapping):
        return {key: change(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named one
        return type(batch)(*map(change, batch))
    return type(batch)(map(change, batch)) if isinstance(batch, tuple | list) else batch


def take(batch: Any, rows: Tensor | slice) -> Any:
    """Those rows of everything in a nested batch: tensors, dicts, tuples and lists of them, and lists of strings.

    None, plain numbers and tensors without dimensions stand for all rows and are passed through.

    Args:
        batch: every tensor in it has one row a sample.
        rows: a slice, or an index tensor that may name a row more than once, as `loss_at` gets it.
    """
    lengths = sorted(_lengths(batch))
    if len(lengths) > 1:
        raise ValueError(
            f"the parts of this batch have different numbers of rows, {', '.join(map(str, lengths))}: leave out what all "
            "samples share (position ids, say) and hand that to the model yourself"
        )
    return _take(batch, rows)


def _lengths(batch: Any) -> set[int]:
    if isinstance(batch, Tensor):
        return {len(batch)} if batch.ndim else set()
    if _is_strings(batch):
        return {len(batch)}
    if isinstance(batch, Mapping):
        return set().union(*map(_lengths, batch.values()))
    if isinstance(batch, (tuple, list)):
        return set().union(*map(_lengths, batch))
    if batch is None or isinstance(batch, (bool, int, float)):
        return set()
    raise TypeError(
        f"cannot take rows of {type(batch).__name__}: use tensors, dicts, tuples and lists of them, lists of strings"
    )


def _take(batch: Any, rows: Tensor | slice) -> Any:
    if isinstance(batch, Tensor):
        index = rows if isinstance(rows, slice) else rows.to(batch.device)
        return batch[index] if batch.ndim else batch
    if _is_strings(batch):
        return [batch[row] for row in (torch.arange(len(batch))[rows.cpu() if isinstance(rows, Tensor) else rows]).tolist()]
    return _inside(batch, lambda part: _take(part, rows))


def _is_strings(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) > 0 and all(isinstance(item, str) for item in batch)


def shares(batches: Iterable[Any], where: Where = None) -> Iterator[tuple[int, bool, Any]]:
    """This process's share of batches that all are handed: (number of the first sample, whether it counts, batch).

    Every n-th batch is its own. All processes get equally many, so that a model which communicates (FSDP, buffers under DDP) is
    called as often on each: where the last round is short, those left over repeat its first batch, which does not count.
    """
    rank, world = distributed.rank(), distributed.world_size()
    iterator, first = iter(batches), 0
    current = list(_one(iterator))
    _check_same_everywhere(data_of(current[0], where) if current else None)
    while current:
        mine: tuple[int, bool, Any] | None = None
        for place in range(world):
            if not current:
                break
            if place in (0, rank):
                mine = (first, place == rank, current[0])
            first += len(data_of(current[0], where))
            current = list(_one(iterator))
        assert mine is not None
        yield mine


def _one(iterator: Iterator[Any]) -> Iterator[Any]:
    """The next item, if there is one (it may be None)."""
    for item in iterator:
        yield item
        return


def _check_same_everywhere(data: Tensor | None) -> None:
    """All processes must see the same first batch: with shards most samples would silently be left out."""
    looked_at = torch.zeros(17, dtype=torch.float64)
    if data is not None:
        places = torch.arange(16) * (data.numel() - 1) // 15
        looked_at[0] = len(data)
        looked_at[1:] = data.detach().flatten()[places.to(data.device)].double().cpu().nan_to_num(0.0, 0.0, 0.0)
    seen = distributed.gather_rows(looked_at[None])
    if not bool((seen[:, 0] > 0).all()):
        raise ValueError("there are no batches: is the loader empty, or a generator that has been used up?")
    tolerance = 0.01 * float(seen[:, 1:].abs().max())  # an encoder may round differently on another device
    if not torch.allclose(seen, seen[:1].expand_as(seen), rtol=0, atol=tolerance):
        raise ValueError(
            "the processes were handed different batches: give all of them the same loader, not one that is sharded "
            "(without DistributedSampler, not through accelerator.prepare) and not shuffled; they share the work by themselves"
        )
