"""Averages of weights: equal to their definitions, in float32, and taken off again without a trace."""

import pytest
import torch
from torch import nn

from noisewise.training.config import EMAConfig
from noisewise.training.ema import EMA, initial_share, mostly_initial, power_exponent


def walk(model, ema, steps, seed=0):
    """Let the weights wander, and list where they were."""
    generator = torch.Generator().manual_seed(seed)
    places = []
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        ema.update()
        places.append(model.weight.detach().double().clone())
    return torch.stack(places)


def model_and_ema(**settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, EMA(model, EMAConfig(**{"ramp": False, **settings}))


def test_a_constant_decay_is_its_closed_form():
    model, ema = model_and_ema(kind="constant", decay=0.9)
    start = model.weight.detach().double().clone()
    places = walk(model, ema, 30)
    weights = 0.1 * 0.9 ** torch.arange(29, -1, -1).double()
    expected = 0.9**30 * start + (weights[:, None, None] * places).sum(0)
    torch.testing.assert_close(ema.average["weight"].double(), expected, rtol=1e-5, atol=1e-5)
    assert ema.updates == 30


def test_a_ramp_rises_to_the_decay():
    _, ema = model_and_ema(decay=0.9, ramp=True)
    decays = []
    for _ in range(100):
        decays.append(ema.decay())
        ema.update()
    # the update after n others: (1 + n) / (10 + n)
    assert decays == [min(0.9, (1 + n) / (10 + n)) for n in range(100)]
    assert (decays[0], decays[-1]) == (0.1, 0.9)


@pytest.mark.parametrize(("std", "gamma"), [(0.05, 16.97), (0.10, 6.94)])
def test_the_exponent_is_the_published_one(std, gamma):
    assert power_exponent(std) == pytest.approx(gamma, abs=0.005)


@pytest.mark.parametrize("std", [0.001, 0.01, 0.05, 0.1, 0.2, 0.28])
def test_the_profile_is_as_wide_as_asked(std):
    gamma = power_exponent(std)
    t = (torch.arange(200_000).double() + 0.5) / 200_000
    weights = t**gamma / (t**gamma).sum()
    mean = (weights * t).sum()
    assert float((weights * (t - mean) ** 2).sum().sqrt()) == pytest.approx(std, rel=1e-3)


@pytest.mark.parametrize("std", [0.05, 0.1, 0.25])
def test_a_power_function_average_is_the_average_with_weights_t_to_the_gamma(std):
    """By their definition the weights are those that the recursion leaves on each step; they follow t^gamma as steps grow."""
    model, ema = model_and_ema(kind="power", std=std)
    n, gamma = 400, power_exponent(std)
    places = walk(model, ema, n)
    t = torch.arange(1, n + 1).double()
    # the integral of the profile over each step, normalised: what (1 - 1/n)^(gamma + 1) does exactly
    weights = (t / n) ** (gamma + 1) - ((t - 1) / n) ** (gamma + 1)
    expected = (weights[:, None, None] * places).sum(0)
    torch.testing.assert_close(ema.average["weight"].double(), expected, rtol=1e-4, atol=1e-4)
    # and the direct definition, up to the discretisation
    direct = t**gamma / (t**gamma).sum()
    assert float((weights - direct).abs().sum()) < 2 * (gamma + 1) / n
    assert float((places[-1] - expected).abs().max()) > 0.1  # the test can tell an average from the last weights


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_average_is_applied_and_taken_off_again_bit_for_bit(fails, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
    ema = EMA(model, EMAConfig(decay=0.5, ramp=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    ema.update()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    seen = {}
    try:
        with ema.applied():
            seen = {name: value.detach().clone() for name, value in model.named_parameters()}
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    for name, value in seen.items():
        assert torch.equal(value, ema.average[name].to(dtype))
        assert not torch.equal(value, own[name])
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_average_that_cannot_be_applied_leaves_the_model_alone():
    model, ema = model_and_ema()
    own = model.weight.detach().clone()
    ema.average["weight"] += 1
    ema.average["bias"] = torch.zeros(7)
    with pytest.raises(RuntimeError), ema.applied():
        pytest.fail("it cannot have been applied")
    assert torch.equal(model.weight, own)


def test_a_bfloat16_model_has_a_float32_average_that_moves_by_less_than_bfloat16_can():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = EMA(model, EMAConfig(decay=0.9999, ramp=False))
    assert all(value.dtype == torch.float32 for value in ema.average.values())
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(100):
        ema.update()
    torch.testing.assert_close(ema.average["weight"], torch.full((2, 3), 2 - 0.9999**100), rtol=1e-5, atol=0)


def test_the_average_is_its_own_from_the_start():
    model, ema = model_and_ema()
    before = {name: value.clone() for name, value in ema.average.items()}
    with torch.no_grad():
        model.weight.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in ema.average.items())
    assert not any(value.requires_grad for value in ema.average.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 1.0}, r"ema\.decay must lie in \[0, 1\), got 1\.0"),
        ({"decay": -0.1}, "got -0.1"),
        ({"decay": float("nan")}, "got nan"),
        ({"kind": "power", "std": 0.0}, r"ema\.std must lie between 0 and 0\.289"),
        ({"kind": "power", "std": 0.3}, r"got 0\.3"),
    ],
)
def test_impossible_averages_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        model_and_ema(**settings)


@pytest.mark.parametrize("settings", [{"ramp": False}, {"ramp": True}, {"ramp": True, "decay": 0.5}, {"kind": "power"}])
@pytest.mark.parametrize("updates", [0, 1, 7, 400])
def test_the_share_of_initial_weights_is_what_the_decays_leave(settings, updates):
    config = EMAConfig(**{"decay": 0.97, **settings})
    ema = EMA(nn.Linear(1, 1), config)
    expected = 1.0
    for _ in range(updates):
        expected *= ema.decay()
        ema.updates += 1
    assert initial_share(config, updates) == pytest.approx(expected, rel=1e-9)


def test_an_average_of_mostly_initial_weights_is_told_and_others_are_not():
    papers = EMAConfig(decay=0.9999, ramp=False)
    assert "99%" in (mostly_initial(papers, 84) or "")  # 0.9999^84
    assert mostly_initial(papers, 10_000) is None
    assert mostly_initial(EMAConfig(decay=0.9999), 84) is None  # the default has a ramp
    assert mostly_initial(papers, 0) is None  # nothing was trained: nobody takes it for a result
