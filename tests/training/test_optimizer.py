"""The learning rate, clipping, and the step that is left out bit for bit when something is not finite."""

import pytest
import torch
from torch import nn

from noisewise.training.config import OptimizerConfig
from noisewise.training.optimizer import (
    clip_gradients,
    gradient_norm,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    step_if_finite,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def model_with_gradients(device="cpu", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(device)
    model(torch.randn(5, 4).to(device)).square().sum().backward()
    return model


def everything(model, optimizer):
    state = {
        f"{i}|{entry}": value.clone()
        for i, parameter in enumerate(model.parameters())
        for entry, value in optimizer.state.get(parameter, {}).items()
    }
    return state | {name: value.clone() for name, value in model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Learning rate


def test_the_learning_rate_rises_and_stays():
    config = OptimizerConfig(lr=0.8, warmup=4)
    rates = [learning_rate(config, step, 100) for step in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8], rel=1e-12)
    assert learning_rate(config, 10**9, 10**10) == 0.8


def test_the_learning_rate_falls_over_the_last_steps():
    config = OptimizerConfig(lr=0.8, warmup=2, cooldown=4)
    rates = [learning_rate(config, step, 8) for step in range(8)]
    assert rates == pytest.approx([0.4, 0.8, 0.8, 0.8, 0.8, 0.6, 0.4, 0.2], rel=1e-12)


def test_warm_up_and_cool_down_may_meet():
    config = OptimizerConfig(lr=1.0, warmup=4, cooldown=4)
    assert [learning_rate(config, step, 4) for step in range(4)] == [0.25, 0.5, 0.5, 0.25]
    assert learning_rate(config, 6, 4) == 0  # not below, whoever steps on


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_a_warm_up_it_is_the_same_from_the_first_step(warmup):
    assert learning_rate(OptimizerConfig(lr=0.3, warmup=warmup), 0, 10) == 0.3


def test_the_learning_rate_of_all_groups_is_set():
    model = model_with_gradients()
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 3.0}])
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_the_settings_reach_the_optimizer(name, kind):
    config = OptimizerConfig(name=name, lr=0.5, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.25)
    optimizer = make_optimizer(model_with_gradients().parameters(), config, torch.device("cpu"))
    group = optimizer.param_groups[0]
    assert type(optimizer) is kind
    assert {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.5,
        "betas": (0.1, 0.2),
        "eps": 1e-3,
        "weight_decay": 0.25,
    }


# Steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [0, 3])
def test_a_step_is_skipped_bit_for_bit(device, before):
    model = model_with_gradients(device)
    optimizer = make_optimizer(
        model.parameters(), OptimizerConfig(name="adamw", weight_decay=0.5, lr=0.1), torch.device(device)
    )
    for _ in range(before):
        step_if_finite(optimizer, torch.tensor(True, device=device))
    was = everything(model, optimizer)
    model[0].weight.grad[0, 0] = float("nan")
    step_if_finite(optimizer, torch.tensor(False, device=device))
    now = everything(model, optimizer)
    if before:
        assert equal(now, was)
    else:  # a state of zeros may have been made, which is what the first step begins with
        assert equal({name: now[name] for name in was}, was)
        assert not any(bool(value.any()) for name, value in now.items() if name not in was)


@pytest.mark.parametrize("device", DEVICES)
def test_other_steps_are_made_as_torch_makes_them(device):
    config = OptimizerConfig(name="adamw", weight_decay=0.5, lr=0.1)
    models = [model_with_gradients(device) for _ in range(2)]
    ours, plain = (make_optimizer(model.parameters(), config, torch.device(device)) for model in models)
    start = everything(models[0], ours)
    for good in (True, False, True, True):
        step_if_finite(ours, torch.tensor(good, device=device))
        if good:
            plain.step()
    assert equal(everything(models[0], ours), everything(models[1], plain))
    assert not torch.equal(models[0][0].weight, start["0.weight"])
    assert not hasattr(ours, "found_inf")


def test_the_fused_step_is_that_of_the_plain_formula():
    model, config = model_with_gradients(), OptimizerConfig(lr=0.1, betas=(0.5, 0.75), eps=1e-3)
    weight, gradient = model[0].weight.detach().double().clone(), model[0].weight.grad.double()
    step_if_finite(make_optimizer(model.parameters(), config, torch.device("cpu")), torch.tensor(True))
    # after one step both moments are corrected to the gradient and its square
    expected = weight - 0.1 * gradient / (gradient.abs() + 1e-3)
    torch.testing.assert_close(model[0].weight.double(), expected, rtol=1e-5, atol=1e-6)


# Clipping


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 0.01, 0.5, 1e9])
def test_norm_and_clipping_equal_those_of_torch(limit, device):
    ours, theirs = model_with_gradients(device), model_with_gradients(device)
    ours[0].bias.grad = theirs[0].bias.grad = None
    norm = gradient_norm(list(ours.parameters()))
    clip_gradients(list(ours.parameters()), norm, limit)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), float("inf") if limit is None else limit))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)


def test_without_gradients_the_norm_is_zero_and_there_is_nothing_to_clip():
    parameters = list(nn.Linear(2, 2).parameters())
    norm = gradient_norm(parameters)
    assert float(norm) == 0
    clip_gradients(parameters, norm, 1.0)
    assert all(parameter.grad is None for parameter in parameters)
