"""Modules, optimizers and dicts of tensors go into a checkpoint and come back, or are refused by name."""

import pytest
import torch
from torch import nn

from noisewise.training.checkpoint import CheckpointError, load, save
from noisewise.training.config import OptimizerConfig
from noisewise.training.optimizer import make_optimizer
from noisewise.training.state import (
    load_module,
    load_named,
    load_optimizer,
    module_tensors,
    named_tensors,
    optimizer_tensors,
)


class Net(nn.Module):
    """Parameters, a 0-d parameter, a buffer, and one that is not saved."""

    def __init__(self, seed=0, width=4, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, width)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.to(dtype)

    def forward(self, x):
        return self.inner(x) * self.scale


def through_disk(tensors, tmp_path):
    return load(save(tmp_path, 1, {"part": tensors}, {})).tensors["part"]


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}


def trained(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def equal(first, second):
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


# Modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_comes_back_bit_for_bit(dtype, tmp_path):
    old, new = Net(1, dtype=dtype), Net(2, dtype=dtype)
    tensors = module_tensors(old)
    assert set(tensors) == {"inner.weight", "inner.bias", "scale", "count"}
    assert not any(value.requires_grad for value in tensors.values())
    scratch = new.scratch.clone()
    load_module(new, through_disk(tensors, tmp_path), "model")
    equal(new.state_dict(), old.state_dict())
    assert torch.equal(new.scratch, scratch)
    assert new.inner.weight.requires_grad


def test_a_loaded_module_shares_no_memory_with_what_was_loaded():
    old, new = Net(1), Net(2)
    load_module(new, module_tensors(old), "model")
    with torch.no_grad():
        new.inner.weight.zero_()
    assert old.inner.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("inner.bias"), r"model does not fit: inner\.bias is missing \(1 missing, 0 unknown"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), r"model does not fit: extra is unknown \(0 missing, 1 unknown"),
        (lambda tensors: tensors.clear(), r"count is missing \(4 missing, 0 unknown"),
        (lambda tensors: tensors.update(scale=torch.ones(1)), r"model: scale has shape \(1,\), expected \(\)"),
        (
            lambda tensors: tensors.update({"inner.weight": torch.ones(3, 4)}),
            r"inner\.weight has shape \(3, 4\), expected \(4, 3\)",
        ),
    ],
)
def test_a_module_that_does_not_fit_is_refused_by_name_and_left_alone(change, message):
    tensors, model = module_tensors(Net(1)), Net(2)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_module(model, tensors, "model")
    equal(model.state_dict(), Net(2).state_dict())


# Dicts


def test_a_dict_comes_back_into_the_same_tensors(tmp_path):
    old = {"a": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), "b": torch.tensor(5)}
    new = {"a": torch.zeros(3, 2), "b": torch.tensor(0)}
    places = {name: value.data_ptr() for name, value in new.items()}
    load_named(new, through_disk(named_tensors(old), tmp_path), "ema")
    equal(new, old)
    assert {name: value.data_ptr() for name, value in new.items()} == places


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({}, "ema does not fit: a is missing"),
        ({"a": torch.zeros(2), "c": torch.zeros(2)}, "ema does not fit: c is unknown"),
        ({"a": torch.zeros(3)}, r"ema: a has shape \(3,\), expected \(2,\)"),
    ],
)
def test_a_dict_that_does_not_fit_is_refused_by_name(saved, message):
    values = {"a": torch.ones(2)}
    with pytest.raises(CheckpointError, match=message):
        load_named(values, saved, "ema")
    assert torch.equal(values["a"], torch.ones(2))


# Optimizers


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_an_optimizer_goes_on_bit_for_bit(kind, tmp_path):
    config = OptimizerConfig(name=kind, lr=0.1, weight_decay=0.1 * (kind == "adamw"))
    old = Net(1)
    optimizer = make_optimizer(old.parameters(), config, torch.device("cpu"))
    trained(old, optimizer, 3)
    tensors = optimizer_tensors(optimizer, names_of(old))
    assert set(tensors) == {f"{name}|{entry}" for name in names_of(old).values() for entry in ("step", "exp_avg", "exp_avg_sq")}

    new = Net(2)
    load_module(new, module_tensors(old), "model")
    again = make_optimizer(new.parameters(), config, torch.device("cpu"))
    load_optimizer(again, names_of(new), through_disk(tensors, tmp_path))
    equal(optimizer_tensors(again, names_of(new)), tensors)
    for model, its_optimizer in [(old, optimizer), (new, again)]:
        trained(model, its_optimizer, 3, seed=1)
    equal(new.state_dict(), old.state_dict())


def test_the_order_of_parameters_does_not_matter():
    model = Net(1)
    optimizer = make_optimizer(model.parameters(), OptimizerConfig(), torch.device("cpu"))
    trained(model, optimizer, 2)
    again = make_optimizer(reversed(list(model.parameters())), OptimizerConfig(), torch.device("cpu"))
    load_optimizer(again, names_of(model), optimizer_tensors(optimizer, names_of(model)))
    for parameter in model.parameters():
        equal(again.state[parameter], optimizer.state[parameter])


def test_an_optimizer_that_has_made_no_step_has_nothing_to_save(tmp_path):
    model = Net(1)
    optimizer = make_optimizer(model.parameters(), OptimizerConfig(), torch.device("cpu"))
    assert optimizer_tensors(optimizer, names_of(model)) == {}
    load_optimizer(optimizer, names_of(model), through_disk({}, tmp_path))
    trained(model, optimizer, 1)


def test_the_state_of_a_float32_optimizer_of_a_bfloat16_model_stays_float32():
    model = Net(1, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    load_optimizer(optimizer, names_of(model), {"inner.bias|exp_avg": torch.full((4,), 0.1)})
    assert torch.equal(optimizer.state[model.inner.bias]["exp_avg"], torch.full((4,), 0.1))


def test_loaded_state_shares_no_memory_with_what_was_loaded():
    model, tensors = Net(1), {"inner.bias|exp_avg": torch.ones(4), "inner.bias|step": torch.tensor(1.0)}
    optimizer = torch.optim.Adam(model.parameters())
    load_optimizer(optimizer, names_of(model), tensors)
    for value in optimizer.state[model.inner.bias].values():
        value.zero_()
    assert torch.equal(tensors["inner.bias|exp_avg"], torch.ones(4))
    assert tensors["inner.bias|step"] == 1


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"outer.bias|exp_avg": torch.zeros(4)}, r"optimizer has state for outer\.bias, which this model does not have"),
        ({"inner.bias|exp_avg": torch.zeros(5)}, r"optimizer: inner\.bias\|exp_avg has shape \(5,\), expected \(4,\)"),
        ({"inner.weight|exp_avg": torch.zeros(3, 4)}, r"inner\.weight\|exp_avg has shape \(3, 4\), expected \(4, 3\)"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_by_name(saved, message):
    model = Net(1)
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(torch.optim.Adam(model.parameters()), names_of(model), saved)
