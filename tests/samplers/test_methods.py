"""Each method against its definition or a reference implementation."""

import math

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from scipy import stats

import noisewise
from noisewise import DDPM, EDM, PROCESSES, Flow, Objective
from noisewise.samplers import (
    Beta,
    Curriculum,
    GradientVariance,
    LogitNormal,
    LossMoment,
    Mix,
    Mode,
    SpeeD,
    Switch,
    Table,
    Uniform,
)
from noisewise.samplers.static import beta_cdf

V = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000


def table(spec, process=None):
    return noisewise.recipe(spec, process or DDPM.linear()).sampler.table.mass.double().numpy()


# Densities of SD3, against diffusers; its u indexes a descending list, so u there is 1 - u here ---------------------------


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.6), (-1.0, 1.5)])
def test_logit_normal_is_diffusers(mean, std):
    torch.manual_seed(0)
    theirs = compute_density_for_timestep_sampling("logit_normal", 50_000, logit_mean=mean, logit_std=std)
    ours = LogitNormal(Flow(), mean, std).sample(50_000).u
    assert stats.ks_2samp(ours.numpy(), theirs.numpy()).pvalue > 1e-3
    exact = torch.from_numpy(stats.norm.cdf((torch.logit(V).numpy() - mean) / std))
    inside = (exact > 1e-9) & (exact < 1 - 1e-9)  # beyond, doubles cannot tell quantiles apart
    torch.testing.assert_close(LogitNormal(Flow(), mean, std).quantile(exact)[inside], V[inside], atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1.29, 0.5, -0.8])
def test_mode_is_diffusers(scale):
    torch.manual_seed(0)
    theirs = compute_density_for_timestep_sampling("mode", 50_000, mode_scale=scale)
    ours = Mode(Flow(), scale).sample(50_000).u
    assert stats.ks_2samp(ours.numpy(), theirs.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("scale", [1.75, 1.29, 0.5, 0.0, -0.8, -0.99, -0.999, -1.0])
def test_the_density_of_mode_is_that_of_its_map(scale):
    sampler = Mode(Flow(), scale)
    slope = 1 + scale - scale * math.pi / 2 * torch.sin(math.pi * V)
    torch.testing.assert_close(sampler.density(sampler.quantile(V)), 1 / slope, rtol=1e-5, atol=0)
    inner = (V > 0.05) & (V < 0.95) & ((V - 0.5).abs() > 0.05 if scale == 1.75 else True)  # beyond, float32 is too coarse
    torch.testing.assert_close(
        sampler.density(sampler.quantile(V).float()).double()[inner], (1 / slope)[inner], rtol=1e-3, atol=0
    )
    draw = Mode(DDPM.linear(), scale, correction="unbiased").sample(20_000)
    assert draw.u.min() > 0
    assert draw.u.max() < 1
    assert draw.density.min() > 0
    assert abs(float(draw.weight.mean()) - 1) < 0.03


def test_cosmap_is_its_formula():
    sampler = noisewise.recipe("cosmap", Flow()).sampler
    torch.testing.assert_close(sampler.quantile(V), 1 - 1 / (torch.tan(math.pi / 2 * V) + 1), atol=1e-5, rtol=0)


# Densities with known distribution functions -----------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [(0.3, 5.0), (2.0, 2.0), (1.0, 1.0), (50.0, 0.5), (0.05, 0.05), (300.0, 200.0)])
def test_beta_is_scipys(a, b):
    x = torch.linspace(0, 1, 501, dtype=torch.float64)
    np.testing.assert_allclose(beta_cdf(x, a, b).numpy(), stats.beta(a, b).cdf(x.numpy()), atol=1e-12)
    mass = Beta(DDPM.linear(), a, b).table.mass.numpy()
    np.testing.assert_allclose(mass, np.diff(stats.beta(a, b).cdf(np.arange(1001) / 1000)), atol=1e-7)


def test_edm_log_normal_is_uniform_on_its_own_process_and_log_normal_on_others():
    np.testing.assert_allclose(table("edm", EDM()), 1e-3, rtol=1e-3)
    draw = noisewise.recipe("edm", Flow()).sampler.sample(50_000)
    log_sigma = -Flow().log_snr(draw.u.double()).numpy() / 2
    assert stats.kstest(log_sigma, stats.norm(-1.2, 1.2).cdf).statistic < 0.01


def test_laplace_over_log_snr():
    draw = noisewise.recipe("laplace", Flow()).sampler.sample(50_000)
    assert stats.kstest(Flow().log_snr(draw.u.double()).numpy(), stats.laplace(0, 0.5).cdf).statistic < 0.01


# SpeeD -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [700, 1, 1000])
def test_speed_is_its_formula(tau):
    k, steps = 5, 1000
    expected = np.where(np.arange(steps) < tau, k, 1) / (steps + tau * (k - 1))
    np.testing.assert_allclose(table(f"speed:tau={tau}"), expected, rtol=1e-5)


SCHEDULES = [(DDPM.linear, 642), (DDPM.quadratic, 829), (DDPM.cosine, 959)]


def mirror_images(t, m):
    return np.where(t < m, m - t, t - m)


def both_halves(p, m):
    """The mean of a density over timesteps and of its mirror image about m."""
    mirrored = np.zeros_like(p)
    np.add.at(mirrored, mirror_images(np.arange(len(p)), m), p)
    return (p + mirrored) / 2


@pytest.mark.parametrize(("make", "m"), SCHEDULES)
@pytest.mark.parametrize("tau", [None, 700])
def test_speed_mirrored_is_the_authors_later_code(make, m, tau):
    """Draws below tau, five times as many; m - t below m and t - m above, m from the schedule whatever tau is."""
    settings = "" if tau is None else f"tau={tau},"
    p = np.where(np.arange(1000) < (m - 1 if tau is None else tau), 5.0, 1.0)
    np.testing.assert_allclose(table(f"speed:{settings}mirror=true", make()), both_halves(p / p.sum(), m), rtol=1e-5)
    draw = SpeeD(make(), tau=tau, mirror=True).sample(64).time.numpy()
    first, second = draw[:32], draw[32:]
    assert ((mirror_images(first, m) == second) | (mirror_images(second, m) == first)).all()


def published_speed(process):
    """The first released code: its density, where it mirrors, and its weights."""
    bar = process.alphas_cumprod.numpy()
    increment = np.gradient(np.sqrt(1 - bar))
    p = np.tanh(1e6 * (increment - 1e-4)) + 1.5
    snr = 1 / (1 - bar) - 1
    return p / p.sum(), int(np.argmax(increment < 1e-4)) + 1, 1 / (1 + snr)


@pytest.mark.parametrize(("make", "expected"), SCHEDULES)
def test_published_speed_is_the_first_released_code(make, expected):
    p, m, weights = published_speed(make())
    assert m == expected
    recipe = noisewise.recipe("speed_published", make())
    np.testing.assert_allclose(recipe.sampler.table.drawn.mass.numpy(), p, rtol=1e-4)
    np.testing.assert_allclose(recipe.sampler.table.mass.numpy(), both_halves(p, m), rtol=1e-4)
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    np.testing.assert_allclose(recipe.weighting(Objective(make()), u).numpy(), weights, rtol=1e-6)


@pytest.mark.parametrize(("make", "m"), SCHEDULES)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 129])
def test_published_speed_draws_half_a_batch_and_one_and_mirrors_it(make, m, n):
    draw = noisewise.recipe("speed_published", make()).sampler.sample(n)
    t, first = draw.time.numpy(), n // 2 + 1
    np.testing.assert_array_equal(t[first:], mirror_images(t[:first], m)[: n - first])
    np.testing.assert_array_equal(t, (draw.u.double() * 1000).long().numpy())


def test_published_speed_draws_from_its_density():
    p, m, _ = published_speed(DDPM.linear())
    t = noisewise.recipe("speed_published", DDPM.linear()).sampler.sample(200_000).time.numpy()
    for part, density in ((t[:100_001], p), (t[100_001:], 2 * both_halves(p, m) - p)):
        counts = np.bincount(part, minlength=1000).reshape(50, 20).sum(1)
        cells = density.reshape(50, 20).sum(1) * len(part)
        assert stats.chisquare(counts[cells > 0], cells[cells > 0]).pvalue > 1e-4
        assert counts[cells == 0].sum() == 0


# Tables, combinations ----------------------------------------------------------------------------------------------------


def test_tables_of_all_kinds(tmp_path):
    values = [0.0, 1.0, 3.0, 0.0]
    np.save(tmp_path / "t.npy", np.array(values))
    for sampler in (Table(Flow(), values), Table(Flow(), file=tmp_path / "t.npy"), Table(Flow(), torch.tensor(values))):
        np.testing.assert_allclose(sampler.table.mass.numpy(), [0, 0.25, 0.75, 0])
        u = sampler.sample(5000).u
        assert bool(((u >= 0.25) & (u < 0.75)).all())
    mass = Table(DDPM.linear(), lambda u: u).table.mass
    np.testing.assert_allclose(mass.numpy(), (np.arange(1000) + 0.5) / 500_000, rtol=1e-5)


@pytest.mark.parametrize("values", [[-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [[1.0]], []])
def test_bad_tables_are_refused(values):
    with pytest.raises(ValueError, match=r"density|vector"):
        Table(Flow(), values)


def test_a_pickled_table_is_refused(tmp_path):
    np.save(tmp_path / "evil.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        Table(Flow(), file=tmp_path / "evil.npy")


def test_timesteps_without_mass_are_never_drawn():
    mass = torch.zeros(1000)
    mass[::2] = 1
    sampler = Table(DDPM.linear(), mass)
    assert not bool((sampler.sample(200_000).time % 2).any())


@pytest.mark.parametrize("spec", ["mix:of=({})", "curriculum:start=uniform,end=({})", "switch:first=uniform,then=({}),at=3"])
@pytest.mark.parametrize("correction", ["clipped(3)", "tempered(0.5)"])
def test_a_mixture_has_no_mean_weight_for_each_sample(spec, correction):
    with pytest.raises(ValueError, match="density depends on the data: use correction=unbiased or none, or policy=global"):
        noisewise.recipe(spec.format("adaptive:estimator=reinforce") + f",correction={correction}", DDPM.linear())
    noisewise.recipe(spec.format("adaptive:estimator=reinforce,policy=global") + f",correction={correction}", DDPM.linear())


def test_mix_bounds_the_importance_weight():
    sampler = Mix(Flow(), Beta(Flow(), 0.2, 8.0), floor=0.1, correction="unbiased")
    assert float(sampler.sample(100_000).weight.max()) <= 10.0001


def test_a_curriculum_reaches_its_end_and_stays():
    process = DDPM.linear()
    sampler = Curriculum(process, Uniform(process), SpeeD(process, k=5, tau=500), steps=10)
    low, high = torch.tensor([0.2]), torch.tensor([0.8])
    for step in range(30):
        share = min(step / 10, 1)
        expected = [(1 - share) + share * value / 3 for value in (5, 1)]
        assert [float(sampler.density(u)) for u in (low, high)] == pytest.approx(expected, rel=1e-4)
        with sampler.observe(sampler.sample(4)):
            pass


def test_a_switch_switches_once_and_the_second_part_starts_fresh():
    process = DDPM.linear()
    sampler = Switch(process, SpeeD(process), Uniform(process), at=3)
    densities = []
    for _ in range(6):
        densities.append(float(sampler.density(torch.tensor([0.9]))))
        with sampler.observe(sampler.sample(4)):
            pass
    assert densities[3:] == [1, 1, 1]
    assert max(densities[:3]) < 0.5
    assert (sampler.first.step, sampler.then.step) == (3, 3)


# Learners against references ---------------------------------------------------------------------------------------------


def test_loss_second_moment_is_the_published_algorithm():
    """Improved DDPM: the last ten losses of each timestep, uniform until all have ten, 0.1 % floor, weights 1 / (T p)."""
    steps, history = 12, 10
    sampler = LossMoment(DDPM.linear(steps))
    kept = [[] for _ in range(steps)]
    rng = np.random.default_rng(0)
    for _ in range(40):
        draw = sampler.sample(24)
        losses = rng.exponential(1 + draw.time.numpy()).astype(np.float32)
        for t, value in zip(draw.time.tolist(), losses, strict=True):
            kept[t] = [*kept[t], value][-history:]
        with sampler.observe(draw, torch.from_numpy(losses)):
            pass
        expected = np.full(steps, 1 / steps)
        if all(len(losses) == history for losses in kept):
            root = np.sqrt([np.mean(np.square(losses)) for losses in kept])
            expected = 0.999 * root / root.sum() + 0.001 / steps
        np.testing.assert_allclose(sampler.table.mass.numpy(), expected, rtol=1e-4)
    assert expected.max() > 1.5 * expected.min()
    draw = sampler.sample(5000)
    np.testing.assert_allclose(draw.weight.numpy(), 1 / (steps * expected[draw.time.numpy()]), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradient_variance_finds_the_closed_form(dtype):
    """loss = (theta . x_u) with x_u ~ N(0, s(u)^2): the gradient's variance is s^2 a dimension."""
    sampler = GradientVariance(Flow(), strata=4, every=1, rows=64, decay=0.9, floor=0.0)
    model = torch.nn.Linear(8, 1, bias=False, dtype=dtype)
    sampler.attach(model)
    spread = torch.tensor([0.5, 1.0, 2.0, 3.0])

    def loss_at(rows, u):
        x = torch.randn(len(u), 8) * spread[(u * 4).long()][:, None]
        return model(x.to(dtype)).squeeze(1)

    torch.manual_seed(0)
    for _ in range(160):
        torch.rand(1)
        draw = sampler.sample(torch.zeros(128, 1))
        with sampler.observe(draw, torch.ones(128), loss_at):
            pass
    expected = spread**2 / (spread**2).sum()
    torch.testing.assert_close(sampler.table.mass, expected, rtol=0.25, atol=0.01)


@pytest.mark.parametrize("process", PROCESSES)
def test_the_loss_adaptive_sampler_follows_the_loss_on_every_process(process):
    sampler = noisewise.recipe("loss_adaptive:warmup=0,every=1,floor=0", PROCESSES[process]()).sampler
    for _ in range(40):
        draw = sampler.sample(1024)
        with sampler.observe(draw, 0.1 + draw.u**2):
            pass
    u = torch.tensor([0.1, 0.5, 0.9])
    expected = (0.1 + u**2) / (0.1 + 1 / 3)
    torch.testing.assert_close(sampler.density(u), expected, rtol=0.12, atol=0)
