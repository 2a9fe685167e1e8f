"""The monitor against plain python loops."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import noisewise
from noisewise.looking.monitor import Monitor, mean_density, mean_objective
from noisewise.objective import Objective
from noisewise.processes import DDPM, Flow
from noisewise.samplers import Beta, Draw, LogitNormal, Uniform
from noisewise.spec import build_process
from tests.test_running import batches, plain_loop


def drawn(u, weight=None):
    return Draw(u, u, torch.ones_like(u) if weight is None else weight, torch.ones_like(u))


def snapshots_of(limit, calls):
    monitor, sampler = Monitor(bins=3, snapshots=limit), Uniform(Flow())
    for _ in range(calls):
        monitor.snapshot(sampler)
        sampler.advance()
    return monitor


def test_the_monitor_counts_too_and_does_not_raise():
    monitor = Monitor(bins=2)
    for _ in range(200):
        monitor.update(drawn(torch.tensor([0.2, 0.8])), torch.tensor([1.0, math.nan]))
    assert (monitor.skipped.total.item(), monitor.skipped.run.item()) == (200, 200)
    assert monitor.arrays()["skipped"] == 200


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda losses: losses.mean(), ValueError, r"one a sample, \(4,\), got \(\): this is the mean over the batch"),
        (lambda losses: losses[:3], ValueError, r"one a sample, \(4,\), got \(3,\): they belong to another batch"),
        (lambda losses: losses[:, None], ValueError, r"got \(4, 1\): average over a sample's elements"),
        (lambda losses: [0.1] * 4, TypeError, "one a sample, got list"),
    ],
)
def test_losses_that_are_not_one_a_sample_are_explained(made, error, message):
    monitor = Monitor(bins=4)
    with pytest.raises(error, match=message):
        monitor.update(Uniform(Flow()).sample(4), made(torch.rand(4)))
    assert int(monitor.counts.sum()) == 0


def test_the_monitors_counts_are_exact_and_do_not_decay():
    monitor, data = Monitor(bins=4, decay=0.5), batches()
    for u, losses in data:
        losses[0] = math.nan
        monitor.update(drawn(u), losses)
    assert monitor.counts.dtype == torch.int64
    assert monitor.counts.tolist() == plain_loop([(u[1:], losses[1:]) for u, losses in data], 4, 0.5)[0]
    monitor.counts.fill_(2**24)  # where float32 can no longer count
    monitor.update(drawn(torch.tensor([0.1])), torch.ones(1))
    assert monitor.arrays()["count"].tolist() == [2**24 + 1, 2**24, 2**24, 2**24]


def test_effective_share():
    monitor, weights = Monitor(bins=5), torch.rand(40, generator=torch.Generator().manual_seed(1))
    for part in weights.split(10):
        monitor.update(drawn(torch.rand(10), part), torch.ones(10))
    expected = weights.sum() ** 2 / (40 * (weights**2).sum())
    assert monitor.effective_share.item() == pytest.approx(expected.item(), rel=1e-6)
    plain = Monitor(bins=5)
    plain.update(drawn(torch.rand(7)), torch.ones(7))
    assert plain.effective_share.item() == 1


@pytest.mark.parametrize("calls", [1, 7, 8, 9, 40, 257])
@pytest.mark.parametrize("limit", [2, 3, 4, 5, 7, 8])
def test_snapshots_thin_out_evenly(limit, calls):
    monitor = snapshots_of(limit, calls)
    steps = monitor.arrays()["step"].tolist()
    assert steps == list(range(0, calls, monitor.spacing))
    assert len(steps) <= limit
    assert monitor.densities.shape == (limit, 3)
    assert monitor.spacing == 1 or 2 * len(steps) >= limit


def test_snapshots_keep_their_own_density():
    monitor = Monitor(bins=10, snapshots=4)
    samplers = [Beta(Flow(), 1.0 + i, 2.0) for i in range(9)]
    for i, sampler in enumerate(samplers):
        sampler.step = i
        monitor.snapshot(sampler)
    arrays = monitor.arrays()
    assert arrays["step"].tolist() == [0, 4, 8]
    for row, step in zip(arrays["density"], arrays["step"], strict=True):
        np.testing.assert_allclose(row, mean_density(samplers[step], 10).numpy(), rtol=1e-6)


def test_arrays():
    monitor, sampler = Monitor(bins=4), LogitNormal(DDPM.linear())
    monitor.update(drawn(torch.tensor([0.1, 0.2, 0.6])), torch.tensor([1.0, 3.0, math.nan]))
    monitor.snapshot(sampler)
    arrays = monitor.arrays()
    assert all(isinstance(value, np.ndarray) for value in arrays.values())
    assert arrays["edges"].tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert arrays["count"].tolist() == [2, 0, 0, 0]
    np.testing.assert_array_equal(arrays["loss"], [2, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(arrays["loss2"], [5, np.nan, np.nan, np.nan])
    assert arrays["skipped"] == 1
    assert arrays["density"].shape == (1, 4)
    assert arrays["step"].tolist() == [0]
    empty = Monitor(bins=4).arrays()
    assert (empty["density"].shape, empty["count"].sum(), np.isnan(empty["loss"]).all()) == ((0, 4), 0, True)


def test_low_precision_losses_are_taken_in_and_gradients_let_go():
    monitor = Monitor(bins=2)
    losses = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    monitor.update(drawn(torch.tensor([0.2, 0.8])), losses)
    assert monitor.arrays()["loss"].tolist() == [1.0, 2.0]
    assert not monitor.running.sums.requires_grad


def test_state_survives_a_checkpoint(tmp_path):
    def advance(monitor, sampler, data):
        for u, losses in data:
            monitor.update(drawn(u, u + 0.5), losses)
            monitor.snapshot(sampler)
            sampler.advance()

    data = batches(50)
    straight, sampler = Monitor(bins=6, snapshots=4), Uniform(Flow())
    advance(straight, sampler, data)
    first, again = Monitor(bins=6, snapshots=4), Uniform(Flow())
    advance(first, again, data[:23])
    with torch.device("meta"):  # somebody's default
        state = first.state_dict()
    torch.save(state, tmp_path / "monitor.pt")
    resumed = Monitor(bins=6, snapshots=4)
    resumed.load_state_dict(torch.load(tmp_path / "monitor.pt", weights_only=True))
    advance(resumed, again, data[23:])
    for name, value in straight.arrays().items():
        np.testing.assert_array_equal(resumed.arrays()[name], value, err_msg=name)
    assert (resumed.kept, resumed.spacing, resumed.calls) == (straight.kept, straight.spacing, straight.calls)


def test_low_precision_does_not_blur_the_monitor():
    monitor, same = Monitor(bins=10), Monitor(bins=10)
    sampler = Uniform(DDPM.linear())
    nn.Sequential(monitor).to(torch.bfloat16)
    for _ in range(50):
        draw = sampler.sample(32)
        for one in (monitor, same):
            one.update(draw, 1 + draw.u)
        sampler.advance()
    assert all(np.array_equal(value, monitor.arrays()[name]) for name, value in same.arrays().items())


def test_too_few_snapshots():
    with pytest.raises(ValueError, match="snapshots must be >= 2, got 1"):
        Monitor(snapshots=1)


def test_mean_density_over_data():
    class PerSample(Uniform):
        conditional = True

        def density(self, u, x0=None):
            return x0 * 2 * u + (1 - x0) * 2 * (1 - u)

    x0 = torch.tensor([1.0, 1.0, 1.0, 0.0])
    middles = (np.arange(5) + 0.5) / 5
    density = mean_density(PerSample(Flow()), 5, x0).numpy()
    np.testing.assert_allclose(density, 0.75 * 2 * middles + 0.25 * 2 * (1 - middles), rtol=1e-5)


@pytest.mark.parametrize("process", ["linear", "edm"])
def test_a_density_of_a_few_of_a_thousand_strata_has_the_mean_one(process):
    sampler = noisewise.recipe("paper_cifar10", Objective(build_process(process))).sampler
    mass = torch.full((1000,), 1e-6)
    mass[1:3] = 1
    sampler.propose(mass)
    density = mean_density(sampler, 50)
    torch.testing.assert_close(density.mean(), torch.tensor(1.0), rtol=1e-4, atol=0)
    assert density[0] > 49


@pytest.mark.parametrize(
    ("process", "prediction"), [("linear", "eps"), ("linear", "v"), ("cosine", "x0"), ("flow", "flow"), ("edm", "edm")]
)
def test_the_objective_of_uniform_sampling_without_weights_is_uniform_whatever_is_predicted(process, prediction):
    made = build_process(process)
    objective = Objective(made, prediction)
    recipe = noisewise.recipe("uniform", objective)
    torch.testing.assert_close(mean_objective(recipe.sampler, recipe.weighting, objective, 50), torch.ones(50))


def test_a_weight_shows_in_the_objective_and_an_importance_weight_undoes_a_density():
    process = build_process("linear")
    objective = Objective(process)
    weighted = noisewise.recipe("minsnr", objective)
    found = mean_objective(weighted.sampler, weighted.weighting, objective, 10)
    u = (torch.arange(1000) + 0.5) / 1000
    expected = weighted.weighting(objective, u).view(10, 100).mean(1)
    torch.testing.assert_close(found, expected / expected.mean(), rtol=1e-4, atol=1e-6)
    skewed = noisewise.recipe("beta:a=2,b=1", objective)
    torch.testing.assert_close(
        mean_objective(skewed.sampler, skewed.weighting, objective, 10), mean_density(skewed.sampler, 10), rtol=1e-3, atol=1e-3
    )
    corrected = noisewise.recipe("beta:a=2,b=1,correction=unbiased", objective)
    torch.testing.assert_close(
        mean_objective(corrected.sampler, corrected.weighting, objective, 10), torch.ones(10), rtol=1e-3, atol=1e-3
    )
