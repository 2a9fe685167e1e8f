"""Windows of noise levels and samplers by step."""

import pytest
import torch
from scipy import stats

import noisewise
from noisewise import DDPM, EDM, PROCESSES, Flow, Objective
from noisewise.samplers import AdaptiveSampler, LogitNormal, Piecewise, Table, Uniform, Window
from noisewise.samplers.window import window_of_u
from noisewise.weighting import MinSNR

U = (torch.arange(10_000) + 0.5) / 10_000


def test_a_window_is_the_density_cut_and_scaled():
    whole = LogitNormal(Flow(), 0.3, 0.8)
    inside = (U > 0.25) & (U < 0.75)
    window = Window(Flow(), whole, 0.25, 0.75)
    expected = torch.where(inside, whole.density(U), 0.0)
    torch.testing.assert_close(window.density(U), expected / expected.mean(), atol=5e-3, rtol=2e-3)
    draws = window.sample(20_000).u
    kept = whole.sample(60_000).u
    kept = kept[(kept > 0.25) & (kept < 0.75)]
    assert stats.ks_2samp(draws.numpy(), kept.numpy()).pvalue > 1e-3


def test_timesteps_from_low_to_below_high():
    time = noisewise.recipe("window:over=time,low=875", DDPM.linear()).sample(20_000).time
    assert (int(time.min()), int(time.max())) == (875, 999)
    time = noisewise.recipe("window:over=time,high=875,of=(logit_normal:std=4)", DDPM.linear()).sample(20_000).time
    assert (int(time.min()), int(time.max())) == (0, 874)
    only = noisewise.recipe("window:over=time,low=7,high=8", DDPM.linear()).sample(500).time
    assert torch.equal(only, torch.full((500,), 7))


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(("low", "high"), [(-4.0, 2.0), (None, 0.0), (1.0, None), (None, None)])
def test_a_window_of_log_snr_is_the_same_levels_on_every_process(process, low, high):
    process = PROCESSES[process]()
    draw = noisewise.recipe(f"window:over=log_snr,low={low},high={high}".lower(), process).sample(4000)
    found = draw.log_snr
    assert low is None or float(found.min()) >= low - 0.05
    assert high is None or float(found.max()) < high + 0.05
    if low == -4.0:
        assert float(found.min()) < -3.8
        assert float(found.max()) > 1.8


def test_both_directions_of_time():
    for process in (Flow(), Flow(data_at=1)):
        draw = noisewise.recipe("window:over=time,low=0.2,high=0.9", process).sample(5000)
        assert 0.2 <= float(draw.time.min()) < 0.21
        assert 0.89 < float(draw.time.max()) <= 0.9
        draw = noisewise.recipe("window:over=time,low=0.7", process).sample(5000)
        assert 0.7 <= float(draw.time.min()) < 0.71
        assert float(draw.time.max()) > 0.99


def test_unbiased_is_uniform_over_the_window():
    draw = noisewise.recipe("window:of=logit_normal,low=0.2,high=0.6,correction=unbiased,draws=stratified", Flow()).sample(
        2**15
    )
    assert float(draw.weight.mean()) == pytest.approx(1, abs=1e-3)
    assert float((draw.weight * draw.u).mean()) == pytest.approx(0.4, abs=1e-3)


def test_a_target_keeps_the_loops_mean_in_the_window():
    """adaptive trains Min-SNR's objective, here that of the window, at the learning rate of a plain loss."""
    sampler = noisewise.recipe("window:of=adaptive,low=0.05,high=0.3,draws=stratified", DDPM.linear()).sampler
    draw = sampler.sample(2**15)
    assert float(draw.weight.mean()) == pytest.approx(1, abs=5e-3)
    minsnr = MinSNR().weights(Objective(DDPM.linear()), draw.u)
    ratio = draw.weight / minsnr
    assert float(ratio.max() / ratio.min()) == pytest.approx(1, abs=1e-3)


def test_what_is_learned_inside_is_drawn_inside():
    part = AdaptiveSampler(DDPM.linear(), warmup=0, every=1, correction="none", strata=10, floor=0.0)
    sampler = Window(DDPM.linear(), part, 0.4, 0.8)
    for _ in range(3):
        draw = sampler.sample(256)
        assert float(draw.u.min()) >= 0.4
        assert float(draw.u.max()) <= 0.8
        with sampler.observe(draw, (draw.u > 0.6).float() + 0.1):
            pass
    density = sampler.density(torch.tensor([0.1, 0.5, 0.7, 0.9]))
    assert density[0] == density[3] == 0
    assert float(density[2] / density[1]) == pytest.approx(11, rel=0.01)


@pytest.mark.parametrize(
    ("process", "settings", "message"),
    [
        (Flow(), "low=0.5,high=0.5", "low must be below high"),
        (Flow(), "low=0.7,high=0.2", "low must be below high"),
        (Flow(), "low=nan", "low must be below high"),
        (Flow(), "low=1.5,high=2", "u runs from"),
        (DDPM.linear(), "low=2000,over=time", "time runs from 0 to 999"),
        (DDPM.linear(), "low=0.1001,high=0.1002", "has no noise levels"),
        (EDM(), "low=100,over=log_snr", "log_snr runs from"),
        (Flow(), "of=(laplace:scale=0.1),low=0.9", None),
        (DDPM.linear(), "low=0.5,over=sigma", "u or time or log_snr"),
    ],
)
def test_an_empty_window_is_one_clear_line(process, settings, message):
    if message is None:  # hardly anything is left, but something: it is drawn
        assert float(noisewise.recipe(f"window:{settings}", process).sample(10).u.min()) >= 0.9
        return
    with pytest.raises(ValueError, match=message) as raised:
        noisewise.recipe(f"window:{settings}", process)
    assert "\n" not in str(raised.value)


def test_a_window_that_its_density_never_reaches_is_refused():
    values = torch.cat([torch.ones(500), torch.zeros(500)])
    with pytest.raises(ValueError, match="draws no noise level of the window"):
        Window(Flow(), Table(Flow(), values), low=0.6)


def test_bounds_of_a_discrete_process_fall_on_timesteps():
    assert window_of_u(DDPM.linear(), 0.25, 0.5, "u") == (0.25, 0.5)
    assert window_of_u(DDPM.linear(), 0.2501, 0.5, "u") == (0.25, 0.5)
    assert window_of_u(Flow(), None, None, "u") == (0.0, 1.0)


def test_stages_follow_each_other_and_resume():
    spec = "piecewise:stages=(0=uniform,2=(beta:a=5,b=1),4=(window:low=0.3,high=0.5))"
    u = torch.tensor([0.1, 0.4, 0.9])
    recipe = noisewise.recipe(spec, Flow())
    seen = []
    for _ in range(6):
        seen.append(recipe.sampler.density(u))
        with recipe.sampler.observe(recipe.sampler.sample(4), torch.zeros(4)):
            pass
    assert torch.equal(seen[0], torch.ones(3))
    assert torch.equal(seen[0], seen[1])
    assert seen[2][2] > 1 > seen[2][0]
    assert torch.equal(seen[2], seen[3])
    torch.testing.assert_close(seen[5], torch.tensor([0.0, 5.0, 0.0]), atol=1e-3, rtol=0)
    again = noisewise.recipe(spec, Flow())
    again.load_state_dict(recipe.state_dict())
    assert torch.equal(again.sampler.density(u), seen[5])


@pytest.mark.parametrize(
    "stages", [None, [0], Uniform(Flow()), {"0": Uniform(Flow())}, {0: Uniform(Flow()), 5.5: Uniform(Flow())}]
)
def test_steps_must_be_whole(stages):
    with pytest.raises(TypeError, match="stages must be a dict"):
        Piecewise(Flow(), stages)


def test_parts_must_be_samplers():
    with pytest.raises(TypeError, match=r"made of samplers, such as .* got str"):
        Piecewise(Flow(), {0: "uniform"})
    with pytest.raises(TypeError, match=r"numbers or None, got '0\.1'"):
        Window(Flow(), low="0.1")


@pytest.mark.parametrize("stages", ["(5=uniform)", "(0=uniform,9=speed,3=uniform)", "uniform", "(0=)", "(a=uniform)", "(0=p2)"])
def test_stages_must_begin_at_zero_and_rise(stages):
    with pytest.raises(ValueError, match="stages"):
        noisewise.recipe(f"piecewise:stages={stages}", Flow())
