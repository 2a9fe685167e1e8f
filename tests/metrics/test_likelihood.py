"""The variational bound against torch.distributions, against the papers' formulas, and against a likelihood known exactly."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from noisewise.data import Synthetic
from noisewise.data.source import ArraySource
from noisewise.generation.solver_methods import Level, model_variance
from noisewise.generation.spacing import default_spacing, grid
from noisewise.metrics.likelihood import decoder_nats, prior_kl, step_kl, variational_bound
from noisewise.processes import DDPM, EDM, VE, VP, Flow

PROCESSES = {"ddpm": DDPM.linear(20), "vp": VP(), "ve": VE(), "edm": EDM(), "flow": Flow()}
X0 = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
GUESS = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
SPREAD = 0.3


def level(process, t):
    return Level(*(float(s) for s in process.scales(torch.tensor((t + 0.5) / process.steps, dtype=torch.float64))))


@pytest.mark.parametrize("process", [DDPM.linear(), DDPM.cosine(), DDPM.linear(10)], ids=["linear", "cosine", "short"])
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
def test_a_step_is_the_divergence_of_the_papers_two_gaussians(process, variance):
    x = torch.randn(X0.shape, generator=torch.Generator().manual_seed(2)).double()
    for t in sorted({1, 2, 3, process.steps // 3, process.steps - 2, process.steps - 1}):
        beta, bar, before = process.betas[t], process.alphas_cumprod[t], process.alphas_cumprod[t - 1]
        of_x0, of_x = beta * before.sqrt() / (1 - bar), (1 - beta).sqrt() * (1 - before) / (1 - bar)
        tilde = beta * (1 - before) / (1 - bar)
        q = Normal(of_x0 * X0.double() + of_x * x, tilde.sqrt())
        p = Normal(of_x0 * GUESS.double() + of_x * x, (tilde if variance == "fixed_small" else beta).sqrt())
        now, then = level(process, t), level(process, t - 1)
        found = step_kl(X0, GUESS, now, then, model_variance(now, then, variance))
        torch.testing.assert_close(found, kl_divergence(q, p).flatten(1).sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PROCESSES)
def test_with_the_small_variance_a_step_is_half_the_fall_in_signal_to_noise_times_the_error(name):
    process = PROCESSES[name]
    u = grid(process, 12, default_spacing(process)).flip(0)
    levels = [Level(*pair) for pair in zip(*(s.tolist() for s in process.scales(u)), strict=True)]
    errors = (X0 - GUESS).double().square().flatten(1).sum(1)
    for then, now in itertools.pairwise(levels):
        fall = (then.alpha / then.sigma) ** 2 - (now.alpha / now.sigma) ** 2
        found = step_kl(X0, GUESS, now, then, model_variance(now, then, "fixed_small"))
        torch.testing.assert_close(found, 0.5 * fall * errors, rtol=1e-6, atol=0)


class Rescaled(VP):
    """VP in the coordinates of VE: the same states, divided by alpha."""

    def scales(self, u):
        alpha, sigma = super().scales(u)
        return torch.ones_like(alpha), sigma / alpha


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
def test_a_model_has_one_bound_in_whatever_coordinates(variance):
    def total(process):
        def estimate(x, u):
            return shrink(x / float(process.scales(u)[0]) * float(VP().scales(u)[0]), u)

        return variational_bound(estimate, process, Synthetic((1, 4, 4)), images=4, levels=12, variance=variance).total

    assert total(Rescaled()) == pytest.approx(total(VP()), rel=1e-5)


def test_the_prior_term_is_the_divergence_from_the_marginal_of_unit_data():
    for last in (Level(0.006, 0.99998), Level(1.0, 80.0), Level(0.0, 1.0), Level(0.5, 0.3)):
        q = Normal(last.alpha * X0.double(), last.sigma)
        p = Normal(torch.tensor(0.0, dtype=torch.float64), math.hypot(last.alpha, last.sigma))
        torch.testing.assert_close(prior_kl(X0, last), kl_divergence(q, p).flatten(1).sum(1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mean", [-1.4, -0.99, 0.1234, 1.0])
@pytest.mark.parametrize("scale", [0.002, 0.01, 0.5])
def test_the_256_bins_share_all_the_mass(mean, scale):
    pixels = (torch.arange(256).float() / 127.5 - 1).view(256, 1, 1, 1)
    mass = torch.exp(-decoder_nats(pixels, torch.full_like(pixels, mean), scale**2))
    assert float(mass.sum()) == pytest.approx(1, abs=1e-6)
    edges = torch.cat([torch.tensor([-math.inf]), (torch.arange(255).double() + 0.5) / 127.5 - 1, torch.tensor([math.inf])])
    below = Normal(torch.tensor(mean).double(), scale).cdf(edges)
    expected = below.diff()
    seen = expected > 1e-9  # below, the brute force loses its digits
    torch.testing.assert_close(mass[seen], expected[seen], rtol=1e-3, atol=1e-9)


def test_the_mass_far_in_a_tail_is_as_exact_above_the_mean_as_below():
    pixels = torch.tensor([-0.5, 0.5], dtype=torch.float64).view(2, 1, 1, 1)
    below, above = decoder_nats(pixels, torch.zeros(2, 1, 1, 1), 0.08**2).tolist()
    assert above == pytest.approx(below, abs=1e-9)
    assert 15 < above < 27  # six deviations out, where a difference of two numbers near 1 has lost its digits


@pytest.mark.parametrize("pixel", [-1.0, -155 / 255, 1 / 255, 1.0])
def test_a_pixel_that_the_model_thinks_impossible_costs_what_it_should_and_not_infinity(pixel):
    """Far out the mass of a tail is its density over its distance: with a least mass, bad models would be flattered."""
    mean = torch.full((1, 1, 1, 1), -pixel if abs(pixel) == 1 else 1.0)
    (found,) = decoder_nats(torch.full((1, 1, 1, 1), pixel), mean, 1e-6).tolist()
    edge = (abs(pixel - float(mean)) - 1 / 255) / 1e-3  # deviations to the near edge of the bin
    assert found == pytest.approx(edge**2 / 2 + math.log(edge * math.sqrt(2 * math.pi)), rel=1e-6)
    assert found > 1e5


class Normals:
    """8-bit pictures whose pixels are independent N(0, SPREAD^2), with the best denoiser there is."""

    values = np.random.default_rng(3).normal(0, SPREAD, (64, 1, 4, 4))
    source = ArraySource("normals", np.clip(np.round((values + 1) * 127.5), 0, 255).astype(np.uint8), image=True)

    @staticmethod
    def denoise(process):
        def estimate(x, u):
            alpha, sigma = (float(s) for s in process.scales(u))
            return x * (alpha * SPREAD**2 / (alpha**2 * SPREAD**2 + sigma**2))

        return estimate

    @classmethod
    def bits(cls):
        """What the true density gives the pictures' bins, in bits per dimension."""
        pixels = cls.source.decode(cls.source.read(np.arange(64))[0])
        return float(decoder_nats(pixels, torch.zeros_like(pixels), SPREAD**2).mean()) / 16 / math.log(2)


# The bound stays above the likelihood by what noise finer than the pixels' own grid costs: 0.0039 is half a pixel's bin, the
# first sigma / alpha is 0.01 for DDPM and VE, 0.002 for the others.
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
@pytest.mark.parametrize(("name", "excess"), [("ddpm", 0.05), ("ve", 0.1), ("vp", 0.4), ("edm", 0.4), ("flow", 0.4)])
def test_the_bound_of_the_best_model_comes_down_to_the_likelihood_as_levels_grow(name, excess, variance):
    process = DDPM.linear(1000) if name == "ddpm" else PROCESSES[name]
    settings = {"images": 64, "clip": None, "variance": variance}
    totals = [
        variational_bound(Normals.denoise(process), process, Normals.source, levels=levels, **settings).total
        for levels in (20, 100, 1000)
    ]
    truth = Normals.bits()
    assert truth == pytest.approx(0.5 * math.log2(2 * math.pi * math.e * SPREAD**2) + math.log2(127.5), abs=0.1)
    assert totals[0] > totals[1] > totals[2] > truth
    if (name, variance) != ("ddpm", "fixed_small"):  # its first step is coarse however many there are
        assert totals[2] < truth + excess


@pytest.mark.parametrize("name", ["vp", "ve", "edm", "flow"])
def test_the_terms_between_the_ends_come_down_to_the_information_gained(name):
    """The sum of 0.5 (fall in SNR) MMSE tends to 0.5 ln((1 + SNR_first s^2) / (1 + SNR_last s^2)) from above."""
    process, gaps = PROCESSES[name], []
    for levels in (50, 200, 800):
        bound = variational_bound(Normals.denoise(process), process, Normals.source, images=64, levels=levels, clip=None)
        first, last = (1 + float(process.log_snr(bound.u[end]).exp()) * SPREAD**2 for end in (0, -1))
        gaps.append(float(bound.terms[1:].sum()) - 0.5 * math.log2(first / last))
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2] > -0.1
    assert abs(gaps[2]) < 0.2


def shrink(x, u):
    return 0.9 * torch.tanh(x)


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
@pytest.mark.parametrize("name", PROCESSES)
def test_every_process_has_a_bound_with_a_term_for_each_level(name, variance):
    bound = variational_bound(shrink, PROCESSES[name], Synthetic((3, 4, 4)), images=6, levels=15, variance=variance)
    assert bound.terms.shape == bound.u.shape == (15,)
    assert bool(torch.isfinite(bound.terms).all())
    assert bool((bound.terms > 0).all())
    assert bound.prior >= 0
    assert bound.total == pytest.approx(float(bound.terms.sum()) + bound.prior)
    assert bool((PROCESSES[name].log_snr(bound.u).diff() < 0).all())
    assert bound.total > 7  # no model does well on noise: 8 bits is what uniform pixels have
    assert (bound.images, bound.error > 0) == (6, True)


def test_a_discrete_process_uses_all_its_timesteps_unless_told():
    times = []

    def denoise(x, u):
        times.append(int(PROCESSES["ddpm"].time(u)))
        return shrink(x, u)

    told = []
    bound = variational_bound(denoise, PROCESSES["ddpm"], Synthetic((1, 4, 4)), images=5, batch=3, progress=told.append)
    assert times == [*range(20), *range(20)]
    assert len(bound.terms) == 20
    assert told == [3] * 20 + [2] * 20


@pytest.mark.parametrize("name", PROCESSES)
def test_the_batch_size_does_not_matter(name):
    one, other = (
        variational_bound(shrink, PROCESSES[name], Synthetic((1, 4, 4)), images=11, levels=10, batch=batch) for batch in (4, 11)
    )
    assert one.total == pytest.approx(other.total, rel=1e-7)
    assert one.error == pytest.approx(other.error, rel=1e-6)
    torch.testing.assert_close(one.terms, other.terms, rtol=1e-6, atol=0)


def test_the_error_is_that_of_a_mean_over_images():
    totals = [
        variational_bound(shrink, VP(), OneOf(Synthetic((1, 4, 4)), row), images=1, levels=10, seed=row).total
        for row in range(30)
    ]
    bound = variational_bound(shrink, VP(), Synthetic((1, 4, 4)), images=30, levels=10)
    assert bound.total == pytest.approx(float(np.mean(totals)), abs=3 * bound.error)
    assert bound.error == pytest.approx(float(np.std(totals, ddof=1)) / math.sqrt(30), rel=0.3)


class OneOf(ArraySource):
    """One image of a source, alone."""

    def __init__(self, source, row):
        super().__init__("one", source.read(np.array([row]))[0].numpy(), image=True)


def test_estimates_beyond_the_range_of_pixels_are_cut_unless_told():
    def wild(x, u):
        return 5 * torch.sign(x)

    cut, kept = (
        variational_bound(wild, VP(), Synthetic((1, 4, 4)), images=4, levels=10, clip=clip).total for clip in (1.0, None)
    )
    assert cut < kept / 2


def test_another_seed_is_other_noise_and_the_same_seed_the_same_number():
    one, same, other = (
        variational_bound(shrink, VP(), Synthetic((1, 4, 4)), images=4, levels=10, seed=seed).total for seed in (0, 0, 1)
    )
    assert one == same != other


def test_bad_input_says_what_is_wrong():
    images = Synthetic((1, 4, 4))
    with pytest.raises(ValueError, match="unknown variance 'learned'"):
        variational_bound(shrink, VP(), images, variance="learned")
    with pytest.raises(ValueError, match="8-bit images"):
        variational_bound(shrink, VP(), Synthetic((1, 4, 4), floats=True))
    for settings in ({"images": 0}, {"images": -3}, {"batch": 0}, {"levels": 1}, {"levels": 0}):
        ((name, value),) = settings.items()
        with pytest.raises(ValueError, match=f"must be .*{name}={value}"):
            variational_bound(shrink, VP(), images, **settings)
    with pytest.raises(ValueError, match="only 20 timesteps"):
        variational_bound(shrink, PROCESSES["ddpm"], images, levels=21)
