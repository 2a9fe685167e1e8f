"""Weightings against the papers' formulas, diffusers and independent numpy versions."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr
from torch import nn

import noisewise
from noisewise.objective import LOSS_KINDS, PREDICTIONS, Objective
from noisewise.processes import DDPM, EDM, PROCESSES, VP, Flow
from noisewise.samplers import EDMLogNormal, Laplace
from noisewise.weighting import (
    P2,
    VLB,
    WEIGHTINGS,
    Bell,
    ChangeAware,
    CosMapWeight,
    Debiased,
    EDMWeight,
    Learned,
    MinSNR,
    NoWeight,
    OfLogSNR,
    SigmaSqrt,
    Simple,
    SoftMinSNR,
    vlb_coefficients,
)

SCHEDULES = ["linear", "scaled_linear", "squaredcos_cap_v2"]
T = torch.arange(1000)


def zero_terminal():
    return DDPM.from_diffusers(DDPMScheduler(rescale_betas_zero_snr=True))


def reference(schedule="linear"):
    """(process, u of every timestep, its SNR according to diffusers)."""
    scheduler = DDPMScheduler(beta_schedule=schedule)
    process = DDPM.from_diffusers(scheduler)
    return process, process.u_of_time(T), compute_snr(scheduler, T)


def inner(n=101):
    return torch.linspace(0.01, 0.99, n, dtype=torch.float64)


# Formulas of log SNR


def min_snr_formulas(snr, gamma):
    capped = snr.clamp(max=gamma)
    return {"eps": capped / snr, "x0": capped, "v": capped / (snr + 1)}


@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_min_snr(schedule, prediction, gamma):
    process, u, snr = reference(schedule)
    weights = MinSNR(gamma).weights(Objective(process, prediction), u)
    torch.testing.assert_close(weights, min_snr_formulas(snr, gamma)[prediction], rtol=2e-5, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_p2_debiased_and_soft_min_snr(schedule):
    process, u, snr = reference(schedule)
    objective = Objective(process)
    torch.testing.assert_close(P2()(objective, u), 1 / (1 + snr), rtol=2e-5, atol=0)
    torch.testing.assert_close(P2(k=2.0, gamma=0.5)(objective, u), (2 + snr) ** -0.5, rtol=2e-5, atol=0)
    torch.testing.assert_close(Debiased()(objective, u), snr**-0.5, rtol=2e-5, atol=0)
    torch.testing.assert_close(SoftMinSNR(5.0)(objective, u), 5 / (snr + 5), rtol=2e-5, atol=0)
    torch.testing.assert_close(SoftMinSNR(5.0).weights(Objective(process, "x0"), u), snr * 5 / (snr + 5), rtol=2e-5, atol=0)


@pytest.mark.parametrize("sigma_data", [0.5, 1.0, 2.0])
def test_edm_weight(sigma_data):
    process, u = EDM(), inner()
    sigma = process.scales(u)[1]
    expected = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
    weighting = EDMWeight(sigma_data)
    torch.testing.assert_close(weighting.weights(Objective(process, "x0"), u), expected)
    objective = Objective(process, "edm", sigma_data=sigma_data)
    for one in (
        weighting,
        EDMWeight(),
        noisewise.recipe("edm_weight", objective).weighting,
    ):  # which take it from the objective
        torch.testing.assert_close(one.weights(objective, u), torch.ones_like(u), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("weighting", "scheme"), [(SigmaSqrt, "sigma_sqrt"), (CosMapWeight, "cosmap")])
def test_sd3_weights_equal_diffusers(weighting, scheme):
    u = inner()
    weights = weighting().weights(Objective(Flow(), "flow"), u)
    expected = compute_loss_weighting_for_sd3(scheme, sigmas=u)
    torch.testing.assert_close(weights.float(), expected.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_bell_is_the_density_of_the_sampler_that_draws_it(name):
    process, u = PROCESSES[name](), inner()
    laplace = Laplace(process, location=-1.0, scale=1.5)
    torch.testing.assert_close(Bell(-1.0, 1.5)(Objective(process), u), laplace.density(u), rtol=0.02, atol=0.01)
    normal = EDMLogNormal(process, mean=0.5, std=1.0)
    torch.testing.assert_close(
        Bell(location=-1.0, scale=2.0, shape="normal")(Objective(process), u), normal.density(u), rtol=0.02, atol=0.01
    )


@pytest.mark.parametrize(("make", "prediction"), [(DDPM.linear, "eps"), (DDPM.cosine, "v"), (Flow, "flow"), (EDM, "edm")])
def test_a_bell_counts_the_same_log_snrs_on_every_process(make, prediction):
    """The share of the eps-loss's weight above each log SNR is that of the bell, whatever the process and the prediction."""
    objective, u = Objective(make(), prediction), (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    weight = objective.per_prediction(Bell(0.5, 1.0, "normal")(objective, u), u) / objective.per_prediction(
        torch.ones_like(u), u
    )
    for level in (-1.0, 0.5, 2.0):
        share = float(
            weight[objective.process.log_snr(u) > level].mean() * (objective.process.log_snr(u) > level).mean(dtype=u.dtype)
        )
        assert share == pytest.approx(0.5 * math.erfc((level - 0.5) / math.sqrt(2)), abs=0.01)


def test_a_bell_that_the_process_does_not_reach_is_an_error():
    with pytest.raises(ValueError, match="around log SNR 40 has no mass"):
        Bell(location=40.0)(Objective(DDPM.linear()), inner())
    with pytest.raises(ValueError, match="shape must be one of laplace, normal, got 'box'"):
        Bell(shape="box")


def test_simple_and_none_differ_only_by_prediction():
    process, u, snr = reference()
    torch.testing.assert_close(Simple().weights(Objective(process, "x0"), u), snr, rtol=2e-5, atol=0)
    torch.testing.assert_close(NoWeight().weights(Objective(process, "x0"), u), torch.ones(1000))
    torch.testing.assert_close(NoWeight()(Objective(process, "eps"), u), torch.ones(1000))


# The variational bound


def direct_vlb(process, variance):
    """c_t = beta^2 / (2 s^2 alpha (1 - abar)) in numpy, t = 0 left out for the posterior variance."""
    beta = process.betas.numpy()
    bar = np.cumprod(1 - beta)
    before = np.concatenate([[1.0], bar[:-1]])
    spread = beta if variance == "large" else beta * (1 - before) / (1 - bar)
    with np.errstate(divide="ignore"):
        return beta**2 / (2 * spread * (1 - beta) * (1 - bar))


@pytest.mark.parametrize("variance", ["large", "small"])
@pytest.mark.parametrize("make", [DDPM.linear, DDPM.quadratic, DDPM.cosine])
def test_vlb_is_the_direct_formula(make, variance):
    process, u = make(1000), (T.double() + 0.5) / 1000
    expected = direct_vlb(process, variance)
    weights = VLB(variance, normalise=False)(Objective(process), u).numpy()
    np.testing.assert_allclose(weights[1:], expected[1:], rtol=1e-10)
    assert np.isfinite(weights[0])
    if variance == "large":
        np.testing.assert_allclose(weights[0], expected[0], rtol=1e-10)
    normalised = VLB(variance)(Objective(process), u).numpy()
    np.testing.assert_allclose(normalised, weights / weights.mean(), rtol=1e-10)


def test_vlb_small_borrows_the_variance_of_the_second_timestep():
    process = DDPM.linear()
    beta, bar = process.betas, process.alphas_cumprod
    borrowed = beta[1] * (1 - bar[0]) / (1 - bar[1])
    expected = beta[0] ** 2 / (2 * borrowed * (1 - beta[0]) * (1 - bar[0]))
    torch.testing.assert_close(vlb_coefficients(process, "small")[0], expected)


@pytest.mark.parametrize("clip", [2.0, 5.0, 50.0])
@pytest.mark.parametrize("make", [DDPM.cosine, DDPM.linear, zero_terminal])
def test_vlb_clip_bounds_the_weight(make, clip):
    objective, u = Objective(make()), (T + 0.5) / 1000
    plain, clipped = VLB()(objective, u), VLB(clip=clip)(objective, u)
    assert clipped.mean().item() == pytest.approx(1, rel=1e-4)
    assert clipped.max().item() <= clip * (1 + 1e-4)
    kept = clipped < clip * (1 - 1e-3)
    ratio = clipped[kept] / plain[kept]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-3, atol=0)


@pytest.mark.parametrize("variance", ["large", "small"])
def test_vlb_at_zero_terminal_snr_takes_its_neighbours_weight(variance):
    process = zero_terminal()
    c = vlb_coefficients(process, variance).numpy()
    expected = direct_vlb(process, variance)
    assert np.isinf(expected[-1])
    np.testing.assert_allclose(c[1:-1], expected[1:-1], rtol=1e-10)
    assert c[-1] == c[-2]
    weights = VLB(variance)(Objective(process), (T + 0.5) / 1000)
    assert weights[-1] == weights[-2]
    assert weights.mean().item() == pytest.approx(1, rel=1e-4)


def test_vlb_in_continuous_time_is_half_the_rate():
    process, u = VP(), (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    weights = VLB(normalise=False)(Objective(process), u)
    torch.testing.assert_close(weights, -process.log_snr_rate(u) / 2, rtol=1e-10, atol=0)
    assert VLB()(Objective(process), u).mean().item() == pytest.approx(1)


@pytest.mark.parametrize("variance", ["large", "small"])
def test_vlb_of_ten_thousand_timesteps_is_near_the_continuous_one(variance):
    u, weighting = torch.linspace(0.05, 0.95, 50, dtype=torch.float64), VLB(variance, normalise=False)
    discrete = weighting(Objective(DDPM.linear(10_000, 1e-5, 2e-3)), u) * 10_000
    torch.testing.assert_close(discrete, weighting(Objective(VP()), u), rtol=0.01, atol=0)


def test_vlb_settings():
    with pytest.raises(ValueError, match='"large" or "small", got \'medium\''):
        VLB("medium")
    with pytest.raises(ValueError, match=r"clip .* must be >= 1"):
        VLB(clip=0.0)


# SpeeD's weight


def change_aware(bar, lam, tau=None):
    increment = np.gradient(1 - bar)
    increment = (increment - increment.min()) / (increment.max() - increment.min())
    tau = np.argmax(np.gradient(np.sqrt(1 - bar)) < 1e-4) if tau is None else tau
    return np.where(np.arange(len(bar)) < tau, (1 - lam) + (2 * lam - 1) * increment, 1.0), tau


@pytest.mark.parametrize("lam", [0.5, 0.6, 1.0])
@pytest.mark.parametrize("make", [DDPM.linear, DDPM.quadratic, DDPM.cosine])
def test_change_aware_is_the_papers(make, lam):
    process = make(1000)
    expected, tau = change_aware(process.alphas_cumprod.numpy(), lam)
    weights = ChangeAware(lam)(Objective(process), (T.double() + 0.5) / 1000).numpy()
    np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-8)
    assert ((weights[:tau] >= 1 - lam - 1e-9) & (weights[:tau] <= lam + 1e-9)).all()
    assert (weights[tau:] == 1).all()


@pytest.mark.parametrize("make", [DDPM.linear, DDPM.quadratic, DDPM.cosine])
def test_change_aware_is_cut_where_the_sampler_is(make):
    expected, _ = change_aware(make().alphas_cumprod.numpy(), 0.6, tau=700)
    weights = ChangeAware(tau=700)(Objective(make()), (T.double() + 0.5) / 1000).numpy()
    np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-8)


def test_change_aware_refuses_a_tau_of_nothing():
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        ChangeAware(tau=0)


@pytest.mark.parametrize("steps", [1000, 4000, 10_000])
@pytest.mark.parametrize("name", ["vlb", "change_aware"])
def test_tabled_weights_agree_with_the_timestep_at_its_edge(name, steps):
    process, t = DDPM.linear(steps), torch.arange(steps)
    weighting, objective = WEIGHTINGS[name](), Objective(process)
    torch.testing.assert_close(
        weighting(objective, t / steps), weighting(objective, (t + 0.5) / steps), rtol=0, atol=0
    )  # float32(t / T) is timestep t


@pytest.mark.parametrize("lam", [0.4, 1.1, 5.0, math.nan])
def test_change_aware_refuses_what_turns_it_negative(lam):
    with pytest.raises(ValueError, match=r"lam must lie in \[0.5, 1\]"):
        ChangeAware(lam)


def test_two_settings_on_one_process_do_not_share_a_table():
    objective, u = Objective(DDPM.linear()), (T + 0.5) / 1000
    assert not torch.equal(ChangeAware(0.6)(objective, u), ChangeAware(0.9)(objective, u))
    assert not torch.equal(VLB("large")(objective, u), VLB("small")(objective, u))


# Learned uncertainty and products


def test_learned_weights_are_as_exact_under_autocast_and_in_a_module_of_low_precision():
    learned, objective, u = Learned(), Objective(DDPM.linear()), (torch.arange(1000) + 0.5) / 1000
    with torch.no_grad():
        learned.coefficients.copy_(torch.randn(128, generator=torch.Generator().manual_seed(0)) / 10)
        expected = learned.weights(objective, u)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(learned.weights(objective, u), expected)
        for kind in (torch.bfloat16, torch.float16):
            nn.Sequential(learned).to(kind)
            assert torch.equal(learned.weights(objective, u), expected)


def test_learned_leaves_the_callers_random_state():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Learned()
    assert torch.equal(torch.get_rng_state(), before)


def test_learned_starts_at_one():
    learned = Learned()
    objective, u = Objective(Flow(), "eps"), inner().float()
    assert bool((learned(objective, u) == 1).all())
    torch.testing.assert_close(learned.weighted(u, objective, u), u)
    state = learned.state_dict()
    assert set(state) == {"frequencies", "phases", "coefficients"}
    assert torch.equal(Learned().frequencies, learned.frequencies)
    assert not torch.equal(Learned(seed=1).frequencies, learned.frequencies)


def test_learned_drives_every_level_to_one():
    learned, objective = Learned(), Objective(DDPM.linear())
    u = (torch.arange(64) + 0.5) / 64
    losses = torch.exp(2 * torch.sin(objective.process.log_snr(u) / 4))
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.03)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    for _ in range(600):
        optimizer.zero_grad()
        learned.weighted(losses, objective, u).mean().backward()
        optimizer.step()
        decay.step()
    scaled = learned(objective, u).detach() * losses
    assert losses.max() > 5 * losses.min()
    torch.testing.assert_close(scaled, torch.ones(64), rtol=0, atol=0.1)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_products_multiply(prediction):
    objective, u = Objective(DDPM.linear(), prediction), inner()
    product = MinSNR() * P2() * Debiased()
    expected = MinSNR()(objective, u) * P2()(objective, u) * Debiased()(objective, u)
    torch.testing.assert_close(product(objective, u), expected)
    torch.testing.assert_close(product.weighted(u, objective, u), objective.per_prediction(expected * u, u))


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(
    "compose", [lambda w: w * NoWeight(), lambda w: NoWeight() * w, lambda w: NoWeight() * (w * NoWeight())]
)
def test_none_is_neutral_in_a_product(compose, prediction):
    objective, u = Objective(DDPM.linear(), prediction), inner()
    for plain in (MinSNR(), Simple(), MinSNR() * P2()):
        torch.testing.assert_close(compose(plain).weights(objective, u), plain.weights(objective, u))
        torch.testing.assert_close(compose(plain).weighted(u, objective, u), plain.weighted(u, objective, u))


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_none_alone_stays_none_in_a_product(prediction):
    objective, u = Objective(DDPM.linear(), prediction), inner()
    torch.testing.assert_close((NoWeight() * NoWeight()).weighted(u, objective, u), u)


def warm_learned():
    learned = Learned()
    torch.nn.init.normal_(learned.coefficients, std=0.1, generator=torch.Generator().manual_seed(0))
    return learned


@pytest.mark.parametrize(
    "compose",
    [
        lambda learned: MinSNR() * P2() * learned,
        lambda learned: learned * MinSNR() * P2(),
        lambda learned: MinSNR() * learned * P2(),
        lambda learned: MinSNR() * (learned * P2()),
        lambda learned: P2() * (MinSNR() * learned),
    ],
    ids=["last", "first", "middle", "nested first", "nested last"],
)
def test_learned_acts_last_wherever_it_stands(compose):
    learned = warm_learned()
    objective, u = Objective(DDPM.linear()), inner().float()
    losses = u + 1
    s = learned.log_variance(objective.process.log_snr(u))
    expected = MinSNR()(objective, u) * P2()(objective, u) * losses * torch.exp(-s) + s
    torch.testing.assert_close(compose(learned).weighted(losses, objective, u), expected)


# Edges and bad input


EDGES = torch.tensor([0.0, 2.0**-24, 1e-3, 0.5, 1 - 1e-3, 1 - 2.0**-24, 1.0])


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("make", [*PROCESSES.values(), zero_terminal, lambda: DDPM.linear(1), lambda: DDPM(torch.ones(1))])
@pytest.mark.parametrize("name", WEIGHTINGS)
def test_weights_are_finite_and_never_negative(name, make, prediction):
    weighting = WEIGHTINGS[name]()
    process = make()
    if name == "bell" and process.steps == 1:
        with pytest.raises(ValueError, match="has no mass on the process"):
            weighting(Objective(process), EDGES)
        return
    for loss in LOSS_KINDS:
        objective = Objective(process, prediction, loss)
        for weights in (weighting(objective, EDGES), weighting.weights(objective, EDGES)):
            assert weights.shape == EDGES.shape
            assert bool(torch.isfinite(weights).all())
            assert bool((weights >= 0).all())
        assert bool(torch.isfinite(weighting.weighted(torch.ones_like(EDGES), objective, EDGES)).all())


def test_min_snr_at_zero_terminal_snr_is_the_limit():
    process, u = zero_terminal(), torch.ones(1)
    assert MinSNR().weights(Objective(process, "eps"), u).item() == 1
    assert MinSNR().weights(Objective(process, "x0"), u).item() == pytest.approx(0, abs=1e-12)
    assert MinSNR().weights(Objective(process, "v"), u).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_precision_and_gradient_of_the_losses_survive(name):
    objective, u = Objective(DDPM.linear(), "v"), torch.rand(5)
    losses = torch.rand(5, requires_grad=True)
    total = WEIGHTINGS[name]().weighted(losses, objective, u)
    assert total.dtype == torch.float32
    total.sum().backward()
    torch.testing.assert_close(losses.grad, WEIGHTINGS[name]().weights(objective, u).detach())


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_low_precision_u_is_refused(name):
    with pytest.raises(TypeError, match="u must be float32"):
        WEIGHTINGS[name]().weights(Objective(DDPM.linear()), torch.rand(3).bfloat16())


def test_a_function_of_ones_own():
    objective, u = Objective(Flow()), inner()
    torch.testing.assert_close(OfLogSNR(torch.sigmoid)(objective, u), torch.sigmoid(objective.process.log_snr(u)))
    with pytest.raises(ValueError, match="negative"):
        OfLogSNR(lambda lam: lam)
    with pytest.raises(ValueError, match="one weight a sample"):
        OfLogSNR(lambda lam: lam.exp().mean())(objective, u)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
@pytest.mark.parametrize(("make", "name"), [(MinSNR, "gamma"), (SoftMinSNR, "gamma"), (P2, "k"), (EDMWeight, "sigma_data")])
def test_settings_must_be_positive(make, name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        make(**{name: value})


def test_other_settings_that_cannot_be():
    with pytest.raises(ValueError, match="features must be >= 1"):
        Learned(features=0)
    with pytest.raises(ValueError, match="must be"):
        P2(gamma=math.nan)


@pytest.mark.parametrize(
    ("function", "prediction", "at_the_end"),
    [(lambda lam: (-lam).exp(), "flow", 1.0), (lambda lam: 1 + 0.5 * (1 + (-lam).exp()), "v", 0.5)],
)
def test_a_function_of_ones_own_has_its_limit_where_nothing_but_noise_is_left(function, prediction, at_the_end):
    """As the tables of migration have them, for SD3 and for v-predictions: the eps-weights grow without bound."""
    process = Flow() if prediction == "flow" else zero_terminal()
    weights = OfLogSNR(function).weights(Objective(process, prediction), torch.tensor([0.5, 1.0]))
    assert weights[1].item() == pytest.approx(at_the_end, rel=1e-5)
