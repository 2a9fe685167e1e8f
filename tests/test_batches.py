"""`take` picks the same rows of everything in a nested batch."""

from collections import namedtuple

import pytest
import torch

from noisewise.batches import _check_same_everywhere, take

Pair = namedtuple("Pair", ["a", "b"])
ROWS = torch.tensor([2, 0, 2])
X = torch.arange(12).view(4, 3)


def test_every_kind_of_batch_is_indexed() -> None:
    batch = {"x": X, "pair": Pair(X[:, 0], None), "list": [X, (X,)], "captions": ["a", "b", "c", "d"], "scale": 7.5}
    taken = take(batch, ROWS)
    assert torch.equal(taken["x"], X[ROWS])
    assert torch.equal(taken["pair"].a, X[ROWS, 0])
    assert taken["pair"].b is None
    assert torch.equal(taken["list"][0], X[ROWS])
    assert isinstance(taken["list"][1], tuple)
    assert torch.equal(taken["list"][1][0], X[ROWS])
    assert taken["captions"] == ["c", "a", "c"]
    assert taken["scale"] == 7.5


def test_a_slice_takes_all_rows() -> None:
    taken = take((X, ["a", "b", "c", "d"], torch.tensor(3.0)), slice(None))
    assert torch.equal(taken[0], X)
    assert taken[1] == ["a", "b", "c", "d"]
    assert float(taken[2]) == 3


def test_parts_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="different numbers of rows, 1, 4: leave out what all samples share"):
        take({"text": X, "positions": torch.zeros(1, 3)}, ROWS)


def test_large_batches_are_looked_at_within_their_bounds() -> None:
    for count in (1, 2, 15, 16, 2**24 + 2):
        _check_same_everywhere(torch.ones(1, dtype=torch.uint8).expand(1, count))


def test_what_has_no_rows_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot take rows of object"):
        take({"text": X, "model": object()}, ROWS)
