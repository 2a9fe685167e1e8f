"""How many tensor operations a draw and an update are: on a GPU each is a kernel, and a step has only milliseconds."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import noisewise
from noisewise import DDPM, EDM, Flow, Objective
from noisewise.samplers import draws

FREE = {  # another look at the same memory, or memory not yet written to
    *("view", "_unsafe_view", "detach", "slice", "select", "expand", "squeeze", "unsqueeze", "alias", "as_strided", "unbind"),
    *("empty", "empty_like", "new_empty", "lift_fresh"),
}


class Count(TorchDispatchMode):
    """Counts what is more than another look at the same memory."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in FREE:
            self.operations[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("spec", "process", "draw", "update"),
    [
        ("uniform", DDPM.linear(), 10, 0),
        ("uniform:draws=stratified", DDPM.linear(), 10, 0),
        ("adaptive", DDPM.linear(), 24, 42),
        ("adaptive:draws=independent+none", DDPM.linear(), 21, 42),
        ("adaptive", Flow(), 40, 58),
        ("adaptive", EDM(), 43, 57),
    ],
    ids=str,
)
def test_a_step_between_updates_takes_no_more_operations_than_it_did(spec, process, draw, update, monkeypatch):
    monkeypatch.setattr(draws, "_get_current_dispatch_mode", lambda: None)  # which the counter is
    sampler = noisewise.recipe(spec, Objective(process)).sampler
    x0, losses = torch.zeros(128, 3, 4, 4), torch.ones(128)
    for _ in range(301):  # past its warm-up and an update, with all tables in place
        drawn = sampler.sample(x0)
        with sampler.observe(drawn, losses):
            pass
    with Count() as drawing:
        drawn = sampler.sample(x0)
    with Count() as updating, sampler.observe(drawn, losses):
        pass
    assert drawing.operations.total() <= draw, drawing.operations
    assert updating.operations.total() <= update, updating.operations
