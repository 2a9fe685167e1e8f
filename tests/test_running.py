"""Running losses and counts of bad ones against plain python loops."""

import copy
import math
import warnings
from functools import cache, partial

import numpy as np
import pytest
import torch

import noisewise
from noisewise.processes import DDPM
from noisewise.running import RunningLoss, Skipped, even_edges
from noisewise.samplers import AdaptiveSampler, LossMoment
from noisewise.samplers.adaptive import Estimator
from noisewise.spec import SpecError
from noisewise.weighting import Weighting


def batches(steps=30, n=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(n, generator=generator), torch.rand(n, generator=generator) * 3) for _ in range(steps)]


def plain_loop(batches, bins, decay):
    """(how many were seen, mean, second moment) of each interval, one loss at a time."""
    count, total, squares, seen = [0.0] * bins, [0.0] * bins, [0.0] * bins, [0] * bins
    for u, losses in batches:
        cells = [min(int(value * bins), bins - 1) for value in u.double().tolist()]
        for cell in set(cells):
            count[cell], total[cell], squares[cell] = count[cell] * decay, total[cell] * decay, squares[cell] * decay
        for cell, loss in zip(cells, losses.double().tolist(), strict=True):
            count[cell], total[cell], squares[cell] = count[cell] + 1, total[cell] + loss, squares[cell] + loss**2
            seen[cell] += 1
    means = [total[i] / count[i] if count[i] else sum(total) / sum(count) for i in range(bins)]
    moments = [squares[i] / count[i] if count[i] else sum(squares) / sum(count) for i in range(bins)]
    return seen, means, moments


def observe_nan(sampler, steps, share=1.0):
    for _ in range(steps):
        draw = sampler.sample(8)
        losses = torch.where(torch.arange(8) < share * 8, math.nan, 1.0)
        with sampler.observe(draw, losses):
            pass


@pytest.mark.parametrize("cells", [2**24, 100])
@pytest.mark.parametrize("decay", [0.9999, 0.9, 0.5])
@pytest.mark.parametrize("bins", [1, 4, 64])
def test_running_loss_is_a_plain_loop(bins, decay, cells, monkeypatch):
    monkeypatch.setattr("noisewise.running.CELLS", cells)
    running = RunningLoss(even_edges(bins), decay)
    data = batches()
    counts = sum(running.update(u, losses)[0] for u, losses in data)
    seen, means, moments = plain_loop(data, bins, decay)
    assert counts.tolist() == seen
    assert running.seen.tolist() == [count > 0 for count in seen]
    np.testing.assert_allclose(running.mean().numpy(), means, rtol=2e-6)
    np.testing.assert_allclose(running.second_moment().numpy(), moments, rtol=2e-6)


def test_an_update_returns_the_sums_of_its_batch():
    running, bins = RunningLoss(even_edges(5), 0.5), 5
    for i, (u, losses) in enumerate(batches(5)):
        losses[i] = math.nan
        expected = [[0.0] * bins for _ in range(4)]
        for value, loss in zip(u.double().tolist(), losses.double().tolist(), strict=True):
            cell = min(int(value * bins), bins - 1)
            for row, amount in enumerate([0, 0, 0, 1] if math.isnan(loss) else [1, loss, loss**2, 0]):
                expected[row][cell] += amount
        batch = running.update(u, losses)
        assert batch.shape == (4, bins)
        assert batch[[0, 3]].tolist() == [expected[0], expected[3]]
        np.testing.assert_allclose(batch.numpy(), expected, rtol=2e-6)


def test_sums_are_decayed_sums_of_the_batches():
    running, expected = RunningLoss(even_edges(3), 0.5), torch.zeros(3, 3)
    for u, losses in batches(10, n=4):
        batch = running.update(u, losses)
        expected = expected * torch.where(batch[0] > 0, 0.5, 1.0) + batch[:3]
    assert running.sums.shape == (3, 3)
    torch.testing.assert_close(running.sums, expected)


def test_an_interval_decays_only_when_it_is_seen():
    running = RunningLoss(even_edges(2), 0.5)
    running.update(torch.tensor([0.2]), torch.tensor([4.0]))
    for _ in range(50):
        running.update(torch.tensor([0.7]), torch.tensor([1.0]))
    assert running.mean().tolist() == [4.0, 1.0]
    running.update(torch.tensor([0.2]), torch.tensor([1.0]))
    assert running.mean()[0].item() == pytest.approx((0.5 * 4 + 1) / 1.5)


def test_unseen_intervals_take_the_mean_of_all():
    running = RunningLoss(even_edges(4))
    assert running.mean().tolist() == [0.0] * 4
    running.update(torch.tensor([0.1, 0.1, 0.9]), torch.tensor([1.0, 3.0, 5.0]))
    assert running.seen.tolist() == [True, False, False, True]
    assert running.mean().tolist() == [2.0, 3.0, 3.0, 5.0]
    np.testing.assert_allclose(running.second_moment().numpy(), [5, 35 / 3, 35 / 3, 25])


def test_uneven_intervals_and_their_edges():
    running = RunningLoss(torch.tensor([0.0, 0.1, 0.5, 1.0]))
    batch = running.update(torch.tensor([0.0, 0.099, 0.1, 0.499, 0.5, 1.0]), torch.ones(6))
    assert batch[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("steps", [10, 1000])
def test_left_edges_belong_to_their_timestep(steps):
    running = RunningLoss(even_edges(steps))
    batch = running.update(torch.arange(steps) / steps, torch.arange(steps).float())
    assert batch[0].tolist() == [1] * steps
    assert running.mean().tolist() == list(range(steps))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite_are_skipped_and_counted(bad):
    running, clean = RunningLoss(even_edges(4), 0.9), RunningLoss(even_edges(4), 0.9)
    counted = []
    for i, (u, losses) in enumerate(batches()):
        poisoned = losses.clone()
        poisoned[[0, 5]] = bad
        batch = running.update(u, poisoned if i % 2 else losses)
        counted.append(batch[3].sum().item())
        keep = torch.ones(16, dtype=torch.bool)
        keep[[0, 5]] = i % 2 == 0
        wanted = clean.update(u[keep], losses[keep])
        assert wanted[3].tolist() == [0] * 4
        assert batch[3].tolist() == torch.histc(u[~keep], 4, 0, 1).tolist()
        assert torch.equal(batch[0], wanted[0])
        torch.testing.assert_close(batch[:3], wanted[:3])
    assert counted == [0, 2] * 15
    torch.testing.assert_close(running.sums, clean.sums)
    torch.testing.assert_close(running.mean(), clean.mean())


def test_steps_with_bad_losses_in_a_row_are_counted():
    running, skipped = RunningLoss(even_edges(2)), Skipped()
    runs = []
    for loss in (1.0, math.nan, math.inf, 1.0, math.nan):
        skipped.count(running.update(torch.tensor([0.3, 0.6]), torch.tensor([loss, 1.0]))[3].sum())
        runs.append(skipped.run.item())
    assert runs == [0, 1, 2, 0, 1]
    assert skipped.total.item() == 3


@pytest.mark.parametrize("counts", [[], [0, 0], [3], [1, 2, 0], [1, 0, 4, 1], [2] * 5])
def test_skipped_is_a_plain_loop(counts):
    skipped, run = Skipped(), 0
    for bad in counts:
        skipped.count(torch.tensor(bad))
        run = run + 1 if bad else 0
    assert (skipped.total.item(), skipped.run.item()) == (sum(counts), run)


def test_skipped_warns_once_of_a_long_run():
    skipped = Skipped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in [7] * 99 + [0] + [2] * 99:
            skipped.count(torch.tensor(bad))
            skipped.warn()
    skipped.count(torch.tensor(2))
    with pytest.warns(RuntimeWarning, match=r"last 100 steps had losses that are not finite \(893 losses in all\)"):
        skipped.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skipped.warn()


def test_skipped_survives_a_checkpoint():
    skipped, resumed = Skipped(), Skipped()
    for bad in (4, 0, 1, 1):
        skipped.count(torch.tensor(bad))
    resumed.load_state_dict(skipped.state_dict())
    resumed.count(torch.tensor(5))
    assert (resumed.total.item(), resumed.run.item()) == (11, 3)


@pytest.mark.parametrize("name", ["adaptive", "loss_adaptive", "loss_moment", "mix:of=loss_moment"])
def test_learning_samplers_count_warn_and_go_on(name):
    sampler = noisewise.recipe(name, DDPM.linear(20)).sampler
    learner = getattr(sampler, "of", sampler)
    observe_nan(sampler, 10, share=0.25)
    assert (learner.skipped.total.item(), learner.skipped.run.item()) == (20, 10)
    observe_nan(sampler, 1, share=0)
    assert (learner.skipped.total.item(), learner.skipped.run.item()) == (20, 0)
    with pytest.warns(RuntimeWarning, match="training has diverged") as warned:
        observe_nan(sampler, 400)
    assert len(warned) == 1
    assert learner.skipped.run.item() == 400
    u = torch.linspace(0.01, 0.99, 50)
    assert bool(torch.isfinite(sampler.density(u)).all())


class Silent(Estimator):
    """A user's own, which looks at no losses."""

    def __init__(self, edges):
        super().__init__()
        self.running = RunningLoss(edges)


def test_an_estimator_of_ones_own_need_not_warn_itself():
    sampler = AdaptiveSampler(DDPM.linear(20), Silent)
    with pytest.warns(RuntimeWarning, match="training has diverged"):
        observe_nan(sampler, 100)
    sampler.estimator.running.beyond += 1000
    with pytest.warns(RuntimeWarning, match="ten times and more above"):
        observe_nan(sampler, 50)


@pytest.mark.parametrize("name", ["adaptive", "loss_moment"])
def test_when_to_stop_is_no_setting_of_a_sampler(name):
    with pytest.raises(SpecError, match=r"unknown setting of .* 'max_bad_steps'"):
        noisewise.recipe(f"{name}:max_bad_steps=3", DDPM.linear(20))


def test_a_step_of_nothing_but_nan_leaves_no_trace():
    running = RunningLoss(even_edges(2), 0.5)
    running.update(torch.tensor([0.1, 0.9]), torch.tensor([1.0, 2.0]))
    before = running.sums.clone()
    running.update(torch.tensor([0.1, 0.9]), torch.full((2,), math.nan))
    assert torch.equal(running.sums, before)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_wrong_decay(decay):
    with pytest.raises(ValueError, match=r"decay must lie in \(0, 1\)"):
        RunningLoss(even_edges(2), decay)


@pytest.mark.parametrize("bins", [1, 3, 10, 1000])
def test_even_edges(bins):
    edges = even_edges(bins)
    assert edges.tolist() == [np.float32(i / bins) for i in range(bins + 1)]
    assert (edges[0], edges[-1]) == (0, 1)


def test_no_bins():
    with pytest.raises(ValueError, match="bins must be >= 1, got 0"):
        even_edges(0)


def settled(bins=20, decay=0.98, n=128, steps=60, scale=1.0):
    """A running loss with a past, of losses that spread over a factor of about ten."""
    running, generator = RunningLoss(even_edges(bins), decay), torch.Generator().manual_seed(1)
    for _ in range(steps):
        u = torch.rand(n, generator=generator)
        running.update(u, scale * (0.02 + u) * torch.exp(torch.randn(n, generator=generator) / 2))
    return running, generator


@pytest.mark.parametrize("outlier", [1e3, 1e6, 1e14, 1e15, 1e20, 3e38])
@pytest.mark.parametrize("n", [8, 32, 128])
def test_one_outlier_moves_no_interval_by_more_than_a_tenth(outlier, n):
    running, _ = settled(n=n)
    before = running.mean(), running.second_moment()
    assert int(running.outliers) == 0
    batch = running.update(torch.tensor([0.52]), torch.tensor([outlier]))
    assert int(running.outliers) + int(batch[3].sum()) == 1
    for old, new in zip(before, (running.mean(), running.second_moment()), strict=True):
        change = new / old
        assert change[10] <= 1.1 + 1e-6
        assert torch.equal(change[:10], torch.ones(10))
    assert bool(torch.isfinite(running.sums).all())


def test_what_is_below_the_limit_is_taken_as_it_is():
    running, _ = settled()
    count, _, squares = running.sums[:, 10]
    limit = math.sqrt(float(((0.08 * count) ** 2 + 500 * count * (count - 4) ** -1.5) * squares / count))
    batch = running.update(torch.tensor([0.52]), torch.tensor([0.99 * limit]))
    assert batch[1, 10].item() == pytest.approx(0.99 * limit)
    assert int(running.outliers) == 0
    running, _ = settled()
    running.update(torch.tensor([0.52]), torch.tensor([1.01 * limit]))
    assert int(running.outliers) == 1


def test_a_level_that_stays_is_followed():
    running, generator = settled()
    for _ in range(350):
        running.update(torch.rand(128, generator=generator), 1000 * torch.ones(128))
    assert running.mean().min().item() == pytest.approx(1000, rel=0.02)


def test_losses_that_fall_fast_or_rise_tenfold_are_no_outliers():
    running, generator = settled()
    for scale in [0.5**i for i in range(20)] + [1e-5, 1e-4, 1e-3]:
        u = torch.rand(128, generator=generator)
        running.update(u, scale * (0.02 + u))
    assert int(running.outliers) == 0


@pytest.mark.parametrize("n", [1, 4, 16])
def test_an_outlier_at_the_very_first_is_bounded_by_its_batch(n):
    running = RunningLoss(even_edges(4))
    u = torch.tensor([0.1] + [0.6] * n)
    running.update(u, torch.tensor([1e6] + [0.5] * n))
    assert running.mean()[0].item() <= (10 * 0.5 if n > 1 else 1e6)


def test_an_outlier_is_bounded_by_its_batch_as_long_as_intervals_have_few_losses():
    """After 200 batches of 4, a thousand intervals have none, or one or two."""
    running, generator = settled(bins=1000, n=4, steps=200)
    running.update(torch.rand(4, generator=generator), torch.tensor([0.5, 0.5, 1e6, 0.5]))
    assert int(running.outliers) == 1
    assert float(running.mean().max()) < 100
    running.update(torch.empty(0), torch.empty(0))  # a rank without losses


def test_a_target_that_weighs_one_timestep_a_thousandfold_makes_no_outliers():
    running, generator = RunningLoss(even_edges(4)), torch.Generator().manual_seed(0)
    total = torch.zeros(4)
    for _ in range(200):
        u = torch.rand(16, generator=generator)
        losses = torch.rand(16, generator=generator)
        weights = torch.where(u > 0.99, 1000.0, 1.0)
        batch = running.update(u, losses, weights)
        total += batch[1]
        np.testing.assert_allclose(batch[1].sum(), (weights * losses).sum(), rtol=1e-5)
    assert int(running.outliers) == 0
    assert total[3] > 3 * total[:3].sum()


def even_losses(draw):
    return (1.02 - draw.u) * (1 + torch.arange(64) % 3)


@cache
def learned_from_even_losses(name):
    sampler = noisewise.recipe(name, DDPM.linear(100)).sampler
    for _ in range(499):
        draw = sampler.sample(64)
        with sampler.observe(draw, even_losses(draw)):
            pass
    return sampler


@pytest.mark.parametrize("name", ["adaptive", "loss_adaptive", "loss_moment:bins=20,history=4"])
@pytest.mark.parametrize("outlier", [1e4, 1e6, 1e14, 1e20])
@pytest.mark.filterwarnings("ignore:.*ten times and more")
def test_one_outlier_moves_no_stratum_of_a_density_by_more_than_a_tenth(name, outlier):
    clean, poisoned = (copy.deepcopy(learned_from_even_losses(name)) for _ in range(2))
    draw, same = clean.sample(64), poisoned.sample(64)
    bad = even_losses(same)
    bad[5] = outlier
    with clean.observe(draw, even_losses(draw)), poisoned.observe(same, bad):
        pass
    running = poisoned.running if name.startswith("loss_moment") else poisoned.estimator.running
    assert int(running.outliers) + int(poisoned.skipped.total) == 1
    assert (poisoned.table.mass / clean.table.mass).max() <= 1.1
    assert (poisoned.table.mass / clean.table.mass).min() >= 0.9
    assert all(bool(torch.isfinite(one).all()) for one in poisoned.state_dict().values())


def test_infonoise_takes_no_noisy_level_for_an_outlier():
    """The error in x0 is the loss times 1 / SNR, which is 20,000 where there is nearly nothing but noise."""
    sampler = noisewise.recipe("infonoise", DDPM.linear()).sampler
    for _ in range(100):
        draw = sampler.sample(128)
        with sampler.observe(draw, torch.ones(128)):
            pass
    assert int(sampler.running.outliers) == 0


@pytest.mark.parametrize("name", ["adaptive:every=1,warmup=0", "infonoise:every=1,warmup=0", "loss_moment:bins=20,history=4"])
def test_learning_samplers_tell_of_outliers(name):
    sampler = noisewise.recipe(name, DDPM.linear(100)).sampler

    def train(steps, outlier):
        for _ in range(steps):
            draw = sampler.sample(64)
            with sampler.observe(draw, torch.where(torch.arange(64) == 63, outlier, 1.0)):
                pass

    train(30, 1.0)
    with pytest.warns(RuntimeWarning, match="ten times and more above"):
        train(80, 1e6)


def test_outliers_are_told_of_once():
    running, _ = settled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(running.many - 1):
            running.update(torch.tensor([0.52]), torch.tensor([1e9]))
            running.warn()
    running.update(torch.tensor([0.52]), torch.tensor([1e9]))
    with pytest.warns(RuntimeWarning, match="10 losses so far were ten times and more above"):
        running.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.warn()


def test_a_few_outliers_in_a_long_training_are_usual():
    running = RunningLoss(even_edges(2))
    running.beyond += 10
    running.calls = 3000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.warn()
    running.calls = 2000
    with pytest.warns(RuntimeWarning, match="ten times and more above"):
        running.warn()


def test_a_loaded_state_judges_losses_as_the_one_that_was_saved():
    running, generator = settled(steps=RunningLoss.first, scale=1e-9)
    other = RunningLoss(even_edges(20))
    other.load_state_dict(running.state_dict())
    for one in (running, other):
        one.sums.zero_()  # so that nothing but a batch's median could set a limit
    u, losses = torch.rand(16, generator=generator), torch.ones(16)
    losses[3] = 1e6
    assert torch.equal(other.update(u, losses), running.update(u, losses))


def test_a_state_from_before_there_was_a_limit_is_taken():
    running, _ = settled()
    state = {name: value for name, value in running.state_dict().items() if name not in ("beyond", "_extra_state")}
    other = RunningLoss(even_edges(20))
    other.load_state_dict(state)
    assert torch.equal(other.sums, running.sums)
    assert int(other.outliers) == 0


def test_a_state_with_squares_of_their_own_is_taken():
    """Squares and outliers used to lie in a part of their own, beside squares of weighted losses."""
    running, _ = settled()
    state = running.state_dict()
    old = {name: value.clone() for name, value in state.items() if name not in ("beyond", "_extra_state")}
    old |= {"usual.sums": state["sums"][[2, 0]], "usual.counts": torch.full((20,), 3.0)}
    old["sums"][2] *= 1000
    other = RunningLoss(even_edges(20))
    other.load_state_dict(old)
    assert torch.equal(other.sums, running.sums)
    assert int(other.outliers) == 60


def test_a_loss_moment_with_squares_of_their_own_is_taken():
    sampler, other = (LossMoment(DDPM.linear(100), bins=4, history=2) for _ in range(2))
    for _ in range(10):
        draw = sampler.sample(16)
        with sampler.observe(draw, 1.5 - draw.u):
            pass
    state = sampler.state_dict()
    old = {name: value for name, value in state.items() if not name.startswith("running.")}
    other.load_state_dict(old | {"usual.sums": state["running.sums"][[2, 0]], "usual.counts": state["running.beyond"]})
    assert torch.equal(other.running.sums[[0, 2]], sampler.running.sums[[0, 2]])
    assert torch.equal(other.losses, sampler.losses)


@pytest.mark.parametrize("zeros", [0.6, 0.95])
def test_losses_that_are_mostly_zero_are_learned(zeros):
    running, generator = RunningLoss(even_edges(2)), torch.Generator().manual_seed(0)
    for _ in range(200):
        u, chance = torch.rand(2, 64, generator=generator)
        running.update(u, (chance > zeros).float())
    assert int(running.outliers) == 0
    np.testing.assert_allclose(running.mean().numpy(), [1 - zeros] * 2, rtol=0.3)


def test_an_interval_of_nothing_but_zeros_takes_what_comes():
    running = RunningLoss(even_edges(1))
    for loss in (0.0, 1.0):
        for _ in range(200):
            running.update(torch.rand(8), torch.full((8,), loss))
    assert running.mean().item() > 0.9


@pytest.mark.parametrize("weight", [math.inf, math.nan, 1e30])
@pytest.mark.parametrize("make", [AdaptiveSampler, partial(LossMoment, bins=4, history=2)])
def test_a_weight_that_is_not_finite_leaves_no_trace(make, weight):
    """Recipes refuse such weights, but a learned one may become infinite."""

    class Learned(Weighting):
        def __init__(self):
            super().__init__()
            self.value = torch.nn.Parameter(torch.ones(()))

        def forward(self, objective, u):
            return torch.where(u > 0.5, self.value, 1.0)

    weighting = Learned()
    sampler = make(DDPM.linear(100), weighting=weighting)
    for value in [1.0] * 20 + [weight] * 5 + [1.0] * 20:
        weighting.value.data.fill_(value)
        draw = sampler.sample(16)
        with sampler.observe(draw, 1.5 - draw.u):
            pass
    assert int(sampler.skipped.total) > 0
    assert all(bool(torch.isfinite(one).all()) for one in sampler.state_dict().values())


def test_a_batch_of_nothing_changes_nothing():
    running, _ = settled(steps=20)
    before = running.sums.clone()
    running.update(torch.empty(0), torch.empty(0))
    assert torch.equal(running.sums, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_and_a_recorded_update_bounds_outliers_too():
    running, _ = settled()
    there = RunningLoss(even_edges(20), 0.98)
    there.load_state_dict(running.state_dict())
    there.cuda()
    u, losses = torch.rand(64, device="cuda"), torch.rand(64, device="cuda")
    weights = 1 + u
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            there.update(u, losses, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.update(u, losses, weights)
    running.update(u.cpu(), losses.cpu(), weights.cpu())
    before = there.mean()
    for bad in (0.5, 1e6, math.nan, 1e20):
        losses[3] = bad
        graph.replay()
        running.update(u.cpu(), losses.cpu(), weights.cpu())
    assert float(there.outliers) == float(running.outliers) == 1
    assert (there.mean() / before).max().item() <= 1.2
    torch.testing.assert_close(there.sums.cpu(), running.sums, rtol=1e-4, atol=1e-5)
