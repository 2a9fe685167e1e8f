"""Curriculum Sampling and InfoNoise against their definitions."""

import pytest
import torch

import noisewise
from noisewise import DDPM, EDM, PROCESSES, Flow, Objective, Process
from noisewise.samplers import CurriculumSampling, InfoNoise, LogitNormal, Uniform
from noisewise.samplers.infonoise import even_log_snr_edges

SIGMA_DATA = 0.5
CASES = [
    (DDPM.linear(), "eps", "infonoise", lambda lam: lam.exp()),  # the weight of an error in x0, by log SNR
    (DDPM.cosine(), "v", "infonoise", lambda lam: 1 + lam.exp()),
    (DDPM.linear(), "x0", "infonoise", torch.ones_like),
    (DDPM.quadratic(), "eps", "infonoise+minsnr", lambda lam: lam.exp().clamp(max=5)),
    (EDM(), "edm", "infonoise", lambda lam: lam.exp() + 1 / SIGMA_DATA**2),
    (Flow(), "flow", "infonoise", lambda lam: (1 + (lam / 2).exp()) ** 2),
]


def gaussian_mmse(log_snr: torch.Tensor) -> torch.Tensor:
    """The least error in x0 of data from N(0, SIGMA_DATA^2)."""
    return SIGMA_DATA**2 / (1 + SIGMA_DATA**2 * log_snr.exp())


def learned(spec: str, objective: Objective, **settings: object) -> InfoNoise:
    """A sampler that was shown the losses of a perfect model of Gaussian data, evenly over u."""
    recipe = noisewise.recipe(spec, objective, warmup=0, every=1, floor=0.0, **settings)
    u = (torch.arange(40_000) + 0.5) / 40_000
    errors = gaussian_mmse(objective.process.log_snr(u).double()) * objective.process.log_snr(u).double().exp()
    losses = (errors / objective.per_prediction(torch.ones_like(u), u)).float()
    for _ in range(2):
        with recipe.sampler.observe(_drawn(recipe.sampler, u), losses):
            pass
    assert isinstance(recipe.sampler, InfoNoise)
    return recipe.sampler


def _drawn(sampler: noisewise.Sampler, u: torch.Tensor) -> noisewise.Draw:
    return noisewise.Draw(u, sampler.process.time(u), torch.ones_like(u), sampler.density(u), rows=len(u))


def exact_masses(process: Process, edges: torch.Tensor, weight_in_x0: object, pivot: float) -> torch.Tensor:
    """rho / w of the paper, integrated over intervals of u: over log SNR rho is SNR mmse / 2, times the gate."""
    fine = process.steps or 2**20
    grid = torch.arange(fine + 1, dtype=torch.float64) / fine
    lam = process.log_snr_edges(grid).clamp(-60, 60)
    middle = (lam[1:] + lam[:-1]) / 2 if process.steps is None else process.log_snr((grid[1:] + grid[:-1]) / 2)
    ratio = (-middle / 2).exp()
    rate = middle.exp() * gaussian_mmse(middle) / 2 * ratio**3 / (ratio**3 + pivot**3)
    mass = rate / weight_in_x0(middle) * -lam.diff()  # type: ignore[operator]
    mass = torch.where((ratio >= 0.002) & (ratio <= 80), mass, 0.0)
    cumulative = torch.cat([torch.zeros(1), mass.cumsum(0)])
    at = (edges.double() * fine).round().long()
    return cumulative[at].diff() / cumulative[-1]


@pytest.mark.parametrize(("process", "prediction", "spec", "weight"), CASES)
def test_draws_times_weight_follow_the_entropy_rate_of_gaussian_data(process, prediction, spec, weight):
    sampler = learned(spec, Objective(process, prediction, sigma_data=SIGMA_DATA))
    expected = exact_masses(process, sampler.table.edges, weight, 0.15)
    torch.testing.assert_close(sampler.table.mass.double(), expected, atol=4e-4, rtol=0.02)


def test_a_flow_is_drawn_by_t_times_one_minus_t_times_its_loss():
    """What rho / w comes to with the weight 1 on the velocity's loss, without the gate."""
    sampler = learned("infonoise:pivot=0", Objective(Flow(), sigma_data=SIGMA_DATA))
    u = torch.linspace(0.1, 0.9, 200)
    loss = gaussian_mmse(Flow().log_snr(u)) / u**2
    shape = u * (1 - u) * loss
    assert torch.allclose(sampler.density(u) / sampler.density(u).mean(), shape / shape.mean(), atol=0.1)


def test_the_published_rule_finds_where_information_begins():
    process = EDM()
    sampler = learned("infonoise:pivot=none", Objective(process, sigma_data=SIGMA_DATA))
    edges = sampler.table.edges
    lam = process.log_snr((edges[1:] + edges[:-1]) / 2).double()
    ratio = (-lam / 2).exp()
    over_ratio = gaussian_mmse(lam) / ratio**3
    pivot = float(ratio[over_ratio >= 0.002 * over_ratio.max()].max())
    assert 0.15 < pivot < 5
    expected = exact_masses(process, edges, lambda lam: lam.exp() + 1 / SIGMA_DATA**2, pivot)
    assert float((sampler.table.mass.double() - expected).abs().sum()) < 0.1


def test_an_error_above_the_variance_of_the_data_counts_as_the_variance():
    """At the most noise a young eps-model errs by far more than that in x0, and would get the whole batch."""
    sampler = noisewise.recipe("infonoise:warmup=0,every=1,floor=0", DDPM.linear()).sampler
    u = (torch.arange(4000) + 0.5) / 4000
    with sampler.observe(_drawn(sampler, u), torch.full_like(u, 0.1)):
        pass
    assert float(sampler.density(u).max()) < 4
    assert float(sampler.density(u).min()) < 0.01


@pytest.mark.parametrize("process", PROCESSES)
def test_strata_have_equal_log_snr_and_are_seen_by_uniform_draws(process):
    edges = even_log_snr_edges(PROCESSES[process](), 64)
    assert edges[0] == 0
    assert edges[-1] == 1
    assert float(edges.diff().min()) > 1e-5
    assert 25 < len(edges) <= 65


def test_the_gate_is_for_squared_errors():
    with pytest.raises(ValueError, match="squared error"):
        noisewise.recipe("infonoise", Objective(Flow(), loss="l1"))
    with pytest.raises(ValueError, match="pivot must be >= 0"):
        noisewise.recipe("infonoise:pivot=-1", Flow())
    with pytest.raises(ValueError, match="every must be >= 1"):
        noisewise.recipe("infonoise:every=0", Flow())


def test_curriculum_sampling_is_logit_normal_and_then_uniform():
    sampler = CurriculumSampling(Flow(), total=10)
    u = torch.linspace(0.05, 0.95, 50)
    seen = []
    for _ in range(10):
        seen.append(sampler.density(u))
        with sampler.observe(sampler.sample(4), torch.zeros(4)):
            pass
    first = LogitNormal(Flow(), 0.8, 1.0).density(u)
    assert all(torch.equal(one, first) for one in seen[:4])
    assert all(torch.equal(one, Uniform(Flow()).density(u)) for one in seen[4:])


@pytest.mark.parametrize("settings", ["total=0", "total=10,share=1.5", "share=0.5"])
def test_a_curriculum_without_a_length_is_refused(settings):
    with pytest.raises(ValueError, match=r"total|share"):
        noisewise.recipe(f"curriculum_sampling:{settings}", Flow())
