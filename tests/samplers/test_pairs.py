"""Pairs (r, t): the joint density, its shares and marginals."""

import pytest
import torch
from scipy import stats

import noisewise
from noisewise import DDPM, Draw, Flow
from noisewise.samplers import LogitNormal, Pairs, Uniform

N = 60_000


def apart(draw):
    """The pairs with r < t."""
    return draw.r[draw.r < draw.u].numpy(), draw.u[draw.r < draw.u].numpy()


@pytest.mark.parametrize("equal", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("how", ["sorted", "below"])
def test_the_share_of_equal_pairs_is_exact_and_r_is_never_above_t(equal, how):
    draw = Pairs(Flow(), LogitNormal(Flow(), -0.4), equal, how).sample(1000)
    assert int((draw.r == draw.u).sum()) == round(equal * 1000)
    assert bool((draw.r <= draw.u).all())
    assert bool((draw.r > 0).all())


def test_small_batches_keep_the_share_on_average():
    sampler = Pairs(Flow(), Uniform(Flow()), 0.75)
    counts = torch.tensor([float((draw.r == draw.u).sum()) for draw in (sampler.sample(2) for _ in range(2000))])
    assert float(counts.mean()) == pytest.approx(1.5, abs=0.04)
    assert sorted(counts.unique().tolist()) == [1.0, 2.0]


def test_sorted_pairs_of_uniform_draws_have_the_known_marginals():
    r, t = apart(Pairs(Flow(), Uniform(Flow()), 0.0).sample(N))
    assert stats.kstest(t, lambda x: x**2).pvalue > 1e-3  # the larger of two
    assert stats.kstest(r, lambda x: 1 - (1 - x) ** 2).pvalue > 1e-3
    assert stats.kstest(r / t, "uniform").pvalue > 1e-3


def test_sorted_pairs_are_two_draws_of_meanflows_density_in_order():
    draw = Pairs(Flow(), LogitNormal(Flow(), -0.4, 1.0), 0.25).sample(N)
    generator = torch.Generator().manual_seed(0)
    two = torch.sigmoid(torch.randn(2, N, generator=generator) - 0.4)
    r, t = apart(draw)
    larger, smaller = two.max(0).values.numpy(), two.min(0).values.numpy()
    assert stats.ks_2samp(t, larger).pvalue > 1e-3
    assert stats.ks_2samp(r, smaller).pvalue > 1e-3
    assert stats.ks_2samp(t - r, larger - smaller).pvalue > 1e-3
    assert stats.ks_2samp(draw.u[draw.r == draw.u].numpy(), larger).pvalue > 1e-3  # as published: t is the larger there too


@pytest.mark.parametrize("how", ["sorted", "below"])
def test_draws_follow_the_joint_density(how):
    sampler = Pairs(Flow(), LogitNormal(Flow(), -0.4), 0.5, how)
    cells, fine = 6, 240
    grid = (torch.arange(fine) + 0.5) / fine
    r, t = torch.meshgrid(grid, grid, indexing="ij")
    joint = sampler.joint(r.flatten(), t.flatten()).view(fine, fine).double()
    assert float(joint.mean()) == pytest.approx(0.5, abs=0.02)
    expected = joint.view(cells, fine // cells, cells, fine // cells).sum((1, 3))
    draw = sampler.sample(N)
    rs, ts = apart(draw)
    at = torch.from_numpy((rs * cells).astype(int) * cells + (ts * cells).astype(int))
    observed = torch.bincount(at, minlength=cells * cells).double().view(cells, cells)
    assert float(observed.tril(-1).sum()) == 0
    share, found = expected / expected.sum(), observed / observed.sum()
    assert float((share - found).abs().max()) < 0.01


def test_a_density_of_rs_own_is_that_of_the_authors_later_settings():
    """t and r by themselves, r = t in a share, and nowhere above t, in this order."""
    sampler = Pairs(Flow(), LogitNormal(Flow(), -0.6, 1.6), 0.25, r=LogitNormal(Flow(), -4.0, 1.6))
    draw = sampler.sample(N)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, N, generator=generator) * 1.6
    t, r = torch.sigmoid(z[0] - 0.6), torch.sigmoid(z[1] - 4)
    r = torch.minimum(t, torch.where(torch.rand(N, generator=generator) < 0.25, t, r))
    assert float((draw.r == draw.u).float().mean()) == pytest.approx(float((r == t).float().mean()), abs=0.01)
    assert stats.ks_2samp(draw.u.numpy(), t.numpy()).pvalue > 1e-3
    assert stats.ks_2samp(draw.r.numpy(), r.numpy()).pvalue > 1e-3
    assert stats.ks_2samp((draw.u - draw.r).numpy(), (t - r).numpy()).pvalue > 1e-3
    at = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.5, 0.7, 0.2])
    alone = LogitNormal(Flow(), -4.0, 1.6).density(at[0]) * LogitNormal(Flow(), -0.6, 1.6).density(at[1]) * 0.75
    torch.testing.assert_close(sampler.joint(*at), alone * torch.tensor([1.0, 1.0, 0.0]), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    "settings", ["r=uniform,how=below", "r=adaptive", "r=(shift:of=uniform,shift=flux)", "r=(pairs:of=uniform)"]
)
def test_what_cannot_be_rs_density_is_refused(settings):
    with pytest.raises(ValueError, match=r"fixed density|depends on the data|outermost"):
        noisewise.recipe(f"pairs:of=uniform,{settings}", Flow())


def test_below_keeps_the_marginal_of_t():
    sampler = Pairs(Flow(), LogitNormal(Flow(), 0.5), 0.3, "below")
    draw = sampler.sample(N)
    u = torch.linspace(0.05, 0.95, 50)
    torch.testing.assert_close(sampler.density(u), LogitNormal(Flow(), 0.5).density(u), rtol=0.01, atol=0.01)
    assert stats.kstest(torch.logit(draw.u).numpy() - 0.5, "norm").pvalue > 1e-3
    r, t = apart(draw)
    assert stats.kstest(r / t, "uniform").pvalue > 1e-3


def test_a_learned_density_moves_the_pairs():
    recipe = noisewise.recipe("pairs:of=(adaptive:warmup=0,every=1,strata=10,floor=0.0),how=below,equal=0.5", Flow())
    sampler = recipe.sampler
    for _ in range(3):
        draw = sampler.sample(256)
        with sampler.observe(draw, (draw.u > 0.5).float() + 0.01):
            pass
    draw = sampler.sample(20_000)
    density = sampler.of.density((torch.arange(1000) + 0.5) / 1000)
    above = float(density[500:].sum() / density.sum())
    assert above > 0.9
    assert float((draw.u > 0.5).float().mean()) == pytest.approx(above, abs=0.02)


def test_unbiased_weights_make_t_uniform():
    draw = noisewise.recipe("pairs:of=(logit_normal:mean=-0.4),correction=unbiased,draws=stratified", Flow()).sample(2**16)
    assert float((draw.weight * draw.u**2).mean()) == pytest.approx(1 / 3, abs=0.01)


def test_the_second_time_is_in_the_models_terms():
    draw = noisewise.recipe("pairs:of=uniform", DDPM.linear()).sample(64)
    assert torch.equal(draw.r_time, DDPM.linear().time(draw.r))
    assert bool((draw.r_time <= draw.time).all())
    backwards = noisewise.recipe("pairs:of=uniform", Flow(data_at=1)).sample(64)
    assert bool((backwards.r_time >= backwards.time).all())
    with pytest.raises(ValueError, match="this draw is no pair"):
        _ = noisewise.recipe("uniform", Flow()).sample(4).r_time


def test_pairs_are_joined_and_repeat():
    recipe = noisewise.recipe("pairs:of=uniform,seed=3", Flow())
    first, second = recipe.sampler.sample(4), recipe.sampler.sample(4)
    both = Draw.cat([first, second])
    assert torch.equal(both.r, torch.cat([first.r, second.r]))
    again = noisewise.recipe("pairs:of=uniform,seed=3", Flow()).sampler
    assert torch.equal(again.sample(4).r, first.r)
    draws = [again.sample(4, generator=torch.Generator().manual_seed(1)).r for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize(
    "spec",
    [
        "window:of=(pairs:of=uniform),low=0.5",
        "mix:of=(pairs:of=uniform)",
        "piecewise:stages=(0=(pairs:of=uniform),9=uniform)",
        "product:of=(pairs:of=uniform),weight=minsnr",
        "pairs:of=(pairs:of=uniform)",
    ],
)
def test_a_sampler_around_pairs_would_lose_r_and_is_refused(spec):
    with pytest.raises(ValueError, match="put pairs outermost"):
        noisewise.recipe(spec, Flow())


@pytest.mark.parametrize("settings", ["equal=1.5", "equal=-0.1", "how=above"])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"equal|how"):
        noisewise.recipe(f"pairs:of=uniform,{settings}", Flow())
