"""Which few timesteps stand for all of them: feature selection for the approximation of Delta (arXiv 2411.09998, Alg. 2).

A row of `changes` holds the decrease of the loss at each noise level over one step; the selected columns are those that best
explain the row sums.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class Selection(Protocol):
    """(n, K) changes to the indices of `size` columns, without waiting for the device."""

    def __call__(self, changes: Tensor, size: int) -> Tensor: ...


def correlations(columns: Tensor, target: Tensor) -> Tensor:
    """Pearson's r of each column with the target; 0 where a column or the target is constant."""
    columns = columns - columns.mean(0)
    target = target - target.mean()
    norm = columns.norm(dim=0) * target.norm()
    return torch.where(norm > 0, (target @ columns) / norm.clamp(min=1e-300), 0.0).clamp(-1, 1)


def by_f_statistic(changes: Tensor, size: int) -> Tensor:
    """The columns with the largest F-statistic, as published: r^2 / (1 - r^2) (n - 2), which grows with |r|."""
    changes = changes.double()
    return correlations(changes, changes.sum(1)).abs().topk(size).indices  # r tells ties apart at n = 2


def by_correlation(changes: Tensor, size: int) -> Tensor:
    """Greedily the column with the largest |r| to the sums, less its largest |r| to a column already chosen."""
    changes = changes.double()
    relevance = correlations(changes, changes.sum(1)).abs()
    redundancy = torch.zeros_like(relevance)
    taken = torch.zeros_like(relevance)
    chosen = []
    for _ in range(size):
        best = (relevance - redundancy - taken).argmax()
        chosen.append(best)
        taken = taken.index_fill(0, best, torch.inf)
        redundancy = torch.maximum(redundancy, correlations(changes, changes[:, best]).abs())
    return torch.stack(chosen)


def by_grid(changes: Tensor, size: int) -> Tensor:
    """Evenly spaced columns, whatever the changes."""
    bins = changes.shape[1]
    return ((torch.arange(size, device=changes.device) * 2 + 1) * bins) // (2 * size)


class BySelector:
    """Any object with scikit-learn's `fit(X, y)` and `get_support(indices=True)`; it runs on the CPU."""

    def __init__(self, selector: Any) -> None:
        if not hasattr(selector, "fit") or not hasattr(selector, "get_support"):
            raise TypeError(f"a selection needs fit(X, y) and get_support(), which {type(selector).__name__} has not")
        self.selector = selector

    def __call__(self, changes: Tensor, size: int) -> Tensor:
        rows = changes.double().cpu().numpy()
        self.selector.fit(rows, rows.sum(1))
        indices = torch.as_tensor(self.selector.get_support(indices=True), device=changes.device)
        if len(indices) != size:
            raise ValueError(f"the selection returned {len(indices)} timesteps instead of {size}; set its k to {size}")
        return indices


SELECTIONS: dict[str, Selection] = {"f_statistic": by_f_statistic, "correlation": by_correlation, "grid": by_grid}


def get_selection(selection: str | Any) -> Selection:
    """By name, or a selector object."""
    if isinstance(selection, str):
        if selection not in SELECTIONS:
            raise ValueError(f"unknown selection {selection!r}: use {', '.join(SELECTIONS)} or a selector object")
        return SELECTIONS[selection]
    return BySelector(selection)
