"""What ranks tell one another; tests/samplers/test_two_ranks.py has real processes."""

import pytest
import torch

from noisewise import distributed


@pytest.fixture
def asked(monkeypatch):
    """Three ranks, of which this is the first; the k-th has k more of everything."""
    calls = []

    def all_gather(parts, mine):
        calls.append(mine.shape)
        for k, part in enumerate(parts):
            part.copy_(mine + k)

    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(distributed.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(distributed.dist, "all_gather", all_gather)
    return calls


def test_a_number_is_agreed_upon_in_one_message(asked):
    assert distributed.largest(5, torch.device("cpu")) == 7
    assert torch.equal(distributed.gather_sum(torch.tensor([1.0, 2.0])), torch.tensor([6.0, 9.0]))
    assert asked == [(1,), (2,)]


def test_rows_of_ranks_with_different_numbers_of_them_are_put_in_order(asked):
    rows = distributed.gather_rows(torch.tensor([[10.0], [20.0]]))
    assert rows.flatten().tolist() == [10, 20, 11, 21, 1, 12, 22, 2, 2]
    assert asked == [(1,), (4, 1)]
