"""A recipe that makes no sense is refused when it is made, in one line, before anything large is allocated."""

import resource

import pytest
import torch

import noisewise
from noisewise.objective import Objective
from noisewise.processes import DDPM, EDM, VE, VP, Flow
from noisewise.recipes import Recipe
from noisewise.samplers import SAMPLERS, Sampler, Uniform
from noisewise.sound import integral
from noisewise.weighting import WEIGHTINGS, OfLogSNR
from tests.test_spec import NEEDED

ALL_PROCESSES = [DDPM.linear(), DDPM.cosine(), DDPM.linear(10), Flow(), EDM(), VP(), VE()]


@pytest.mark.parametrize("process", [DDPM.linear(), DDPM.cosine(), Flow(), EDM()], ids=str)
@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("lognormal:mean=50", "the density of LogitNormal integrates to 0, not 1"),
        ("lognormal:std=10", r"the density of LogitNormal integrates to 0.889, not 1"),
        ("lognormal:std=1e-9", "the density of LogitNormal integrates to"),
        ("mix:of=(lognormal:mean=50)", "the density of Mix integrates to 0.1, not 1"),
        ("shift:of=(shift:of=uniform,shift=1e4),shift=1e4", "the density of Shift integrates to"),
        ("p2:gamma=1e5", "the loss weights are 0 for"),
        ("minsnr:gamma=1e-320", "the loss weights are 0 for 100.0% of the draws"),
        ("minsnr:gamma=1e-30", "the loss weights have a mean of"),
        ("bell:scale=1e-8", "the loss weights are 0 for"),
        ("edm_weight:sigma_data=1e30", "the loss weights are not finite"),
        ("adaptive:target=(minsnr:gamma=1e-320)", "the weights of the target are 0 for 100.0% of the draws"),
    ],
)
def test_nonsense_is_refused(spec, why, process):
    with pytest.raises(ValueError, match=why) as refused:
        noisewise.recipe(spec, process)
    assert "\n" not in str(refused.value)
    assert spec in str(refused.value)


@pytest.mark.parametrize(
    "spec",
    [
        "adaptive:strata=1e9",
        "adaptive:strata=1e9,over=log_snr",
        "paper_imagenet:strata=1e8",
        "gradient_variance:strata=1e9",
        "loss_moment:bins=1e9",
        "loss_moment:history=1e9",
        "adaptive:estimator=reinforce,queue=1e9",
        "learned:features=1e9",
        "beta:a=1e308",
    ],
)
def test_tables_that_nothing_can_hold_are_refused_before_they_are_made(spec):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="at most"):
        noisewise.recipe(spec, Flow())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # kilobytes


def test_schedules_have_a_size():
    with pytest.raises(ValueError, match=r"steps must be at most 100,000, got 1e\+12"):
        noisewise.spec.build_process("cosine:steps=1e12")


@pytest.mark.parametrize("process", ALL_PROCESSES, ids=str)
def test_every_name_makes_sense_on_every_process(process):
    for name in [*SAMPLERS, *WEIGHTINGS]:
        if name not in NEEDED:
            noisewise.recipe(name, process)


@pytest.mark.parametrize("values", [torch.rand(777), torch.arange(777) % 2.0, torch.tensor([1.0, 0.0])])
def test_a_combination_with_a_table_of_any_length_makes_sense(values):
    table = SAMPLERS["table"](Flow(), values=values)
    for name in ("mix", "shift"):
        Recipe(SAMPLERS[name](Flow(), of=table))


class Halved(Sampler):
    """Draws from the lower half, and says it draws from all."""

    def density(self, u, x0=None):
        return torch.ones_like(u) / 2

    def quantile(self, v, x0=None):
        return v / 2


def test_a_density_that_is_none_is_refused():
    assert integral(Uniform(Flow())) == (pytest.approx(1, abs=1e-5), pytest.approx(0, abs=1e-3))
    with pytest.raises(ValueError, match=r"the density of Halved integrates to 0\.5, not 1"):
        Recipe(Halved(Flow()))


class Rising(Sampler):
    """q(u) = 2u, drawn as `how` says."""

    def __init__(self, process, how, density=lambda u: 2 * u):
        super().__init__(process)
        self.how, self.q = how, density

    def density(self, u, x0=None):
        return self.q(u)

    def quantile(self, v, x0=None):
        return self.how(v)


@pytest.mark.parametrize("process", [DDPM.linear(), DDPM.linear(10), Flow()], ids=str)
def test_draws_that_are_not_of_the_density_are_refused(process):
    with pytest.raises(ValueError, match=r"not that of its draws: .* differ by up to 0\.2.* quantile\(\)"):
        Recipe(Rising(process, lambda v: v))
    Recipe(Rising(process, torch.sqrt))
    Recipe(Rising(process, lambda v: (1 - v).sqrt()))  # any order will do
    if process.steps:  # and any place within a timestep
        Recipe(Rising(process, lambda v: (v.sqrt() * process.steps).floor() / process.steps))
        Recipe(Rising(process, lambda v: ((v.sqrt() * process.steps).floor() + 0.5) / process.steps))


@pytest.mark.parametrize("process", [DDPM.linear(), DDPM.linear(1)], ids=str)
def test_draws_may_all_be_of_a_few_timesteps(process):
    """As those of a student that takes few steps."""
    chosen = torch.tensor([0, 250, 500, 999]) % process.steps
    mass = torch.bincount(chosen, minlength=process.steps) * (process.steps / len(chosen))

    def density(u):
        return mass[(u * process.steps).long()]

    Recipe(Rising(process, lambda v: (chosen[(4 * v).long()] + 0.5) / process.steps, density))
    if process.steps > 1:
        with pytest.raises(ValueError, match=r"not that of its draws: .* differ by up to 0\.5"):
            Recipe(Rising(process, lambda v: (chosen[(4 * v).long()] // 2 + 0.5) / process.steps, density))


@pytest.mark.parametrize("process", [DDPM.linear(), DDPM.linear(1), Flow()], ids=str)
def test_draws_that_are_no_noise_levels_are_refused(process):
    for how in (lambda v: 2 * v, lambda v: v * torch.nan):
        with pytest.raises(ValueError, match=r"Rising drew what is no noise level: u must lie in \[0, 1\], got"):
            Recipe(Rising(process, how))
    for how, got in ((lambda v: v[:1], r"torch.Size\(\[1\]\)"), (lambda v: 0.5, "0.5")):
        with pytest.raises(TypeError, match=rf"Rising\.quantile\(v, x0\) must be a tensor of the shape of v, got {got}"):
            Recipe(Rising(process, how))


class OfData(Uniform):
    """Looks at the data, and does not say so."""

    def quantile(self, v, x0=None):
        return v * x0.flatten(1).mean(1).sigmoid()


class WithoutData(Uniform):
    def density(self, u):
        return torch.ones_like(u)


def test_methods_that_cannot_be_asked_are_named():
    with pytest.raises(TypeError, match=r"OfData\.quantile\(v, x0\) fails without data, .* set conditional = True"):
        Recipe(OfData(Flow()))
    with pytest.raises(TypeError, match=r"WithoutData\.density\(u, x0\) fails without data, .* 3 were given"):
        Recipe(WithoutData(Flow()))


class BackwardBeta(SAMPLERS["beta"]):
    """Methods of its own beside a table."""

    def quantile(self, v, x0=None):
        return super().quantile(self.turned(v))

    def turned(self, v):
        return 1 - v


class SameBeta(BackwardBeta):
    def turned(self, v):
        return v


def test_methods_that_differ_from_the_table_are_refused():
    with pytest.raises(ValueError, match=r"the density of BackwardBeta is a table, and drawn from it, but quantile\(\)"):
        Recipe(BackwardBeta(Flow(), a=2))
    Recipe(SameBeta(Flow(), a=2))


def test_a_density_that_is_negative_or_no_tensor_is_refused():
    with pytest.raises(ValueError, match=r"the density of Rising is negative at u = .*: -1"):
        Recipe(Rising(Flow(), lambda v: v, lambda u: 4 * u - 1))
    with pytest.raises(TypeError, match=r"Rising\.density\(u, x0\) must be a tensor of the shape of u, got 1"):
        Recipe(Rising(Flow(), lambda v: v, lambda u: 1.0))


def test_weights_count_where_the_sampler_draws():
    window = OfLogSNR(lambda log_snr: (log_snr > 3).float())
    with pytest.raises(ValueError, match=r"the loss weights are 0 for 81\.\d% of the draws"):
        Recipe(Uniform(Flow()), window)
    Recipe(SAMPLERS["laplace"](Flow(), location=5), window)


def test_the_callers_random_state_and_gradients_are_left_alone():
    before = torch.get_rng_state()
    recipe = noisewise.recipe("mix:of=lognormal+learned", Objective(Flow()))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(one.grad is None for one in recipe.parameters())
    with torch.inference_mode():
        noisewise.recipe("lognormal+minsnr", DDPM.linear())
