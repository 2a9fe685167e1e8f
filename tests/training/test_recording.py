"""What cannot be recorded, and what is done after a recording that failed, without a GPU."""

import random

import numpy as np
import pytest
import torch

from noisewise.training.fast.graphs import host_chance_is_an_error, recover_allocator

CUDA = torch.device("cuda", 1)
POOL = (0, 7)


@pytest.mark.parametrize(
    ("draw", "named"),
    [(random.random, "random"), (np.random.rand, "numpy.random"), (lambda: torch.rand(()), "torch")],
)
def test_chance_on_the_host_is_an_error(draw, named):
    with pytest.raises(RuntimeError, match=rf"random numbers were drawn on the host \({named}\)"), host_chance_is_an_error():
        draw()


def test_generators_of_ones_own_are_none_of_it():
    with host_chance_is_an_error():
        torch.rand((), generator=torch.Generator().manual_seed(0))
        np.random.default_rng(0).random()
        random.Random(0).random()


@pytest.fixture
def allocator(monkeypatch):
    """torch's allocator as far as it is asked; `under_way` holds the pools that recordings go into."""

    class Allocator:
        def __init__(self):
            self.under_way, self.released = [], []

        def end(self, index, pool):
            if (index, pool) not in self.under_way:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            self.under_way.remove((index, pool))

        def release(self, index, pool):
            self.released.append((index, pool))

    made = Allocator()
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    return made


def test_the_allocator_is_told_that_the_recording_has_ended_if_torch_has_not(allocator):
    allocator.under_way = [(1, (0, 3)), (1, POOL)]
    recover_allocator(CUDA, POOL)
    assert (allocator.under_way, allocator.released) == ([(1, (0, 3))], [(1, POOL)])


def test_a_recording_that_torch_has_ended_is_not_released_twice(allocator):
    recover_allocator(CUDA, POOL)
    assert allocator.released == []


def test_older_torch_has_another_name_for_it(allocator, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", allocator.end, raising=False)
    allocator.under_way = [(1, POOL)]
    recover_allocator(CUDA, POOL)
    assert (allocator.under_way, allocator.released) == ([], [(1, POOL)])
