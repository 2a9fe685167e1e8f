"""The quality of the approximate gain: answers known in advance, and measurements that leave the run alone."""

import pytest
import torch
from scipy import stats

from noisewise.analysis import predictor
from noisewise.analysis.moments_of_training import fixed_noise
from noisewise.analysis.predictor import (
    CHOICES,
    Without,
    credit_of,
    leave_one_out,
    pearson,
    qualities,
    quality,
    rolling_sets,
    spearman,
)
from tests.analysis.asking import OWN, SHORT, asked
from tests.training.tiny import advance, differing, own, tensors, tiny, trainer_of

STEPS, LEVELS, IMAGES, QUEUE = 200, 30, 12, 20


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found_by(changes, sizes=(1, 3), **settings):
    return {(one.selection, one.size): one for one in qualities(changes, list(sizes), QUEUE, **settings)}


def test_when_one_level_drives_the_gain_the_f_statistic_finds_it():
    changes = torch.full((STEPS, LEVELS, IMAGES), 0.01, dtype=torch.float64)
    changes[:, 17] += noise(STEPS, 1)
    assert (rolling_sets(changes, 1, QUEUE, 1, CHOICES["f_statistic"]) == 17).all()
    found = found_by(changes)
    for size in (1, 3):
        assert found["f_statistic", size].few_pearson == pytest.approx(1)
        assert found["f_statistic", size].one_pearson == pytest.approx(1)
        assert found["largest_variance", size].few_spearman == pytest.approx(1)
    assert found["grid", 1].few_pearson == pytest.approx(0, abs=1e-9)  # level 15 never changes


def test_independent_noise_correlates_as_a_part_with_its_whole_and_one_sample_not_at_all():
    found = found_by(noise(1500, 100, IMAGES), sizes=(1, 4))
    for name in ("f_statistic", "grid", "random", "largest_variance"):
        for size, chance in ((1, 0.1), (4, 0.2)):
            assert found[name, size].chance == pytest.approx(chance)
            assert found[name, size].few_pearson == pytest.approx(chance, abs=0.08)
            assert found[name, size].one_pearson == pytest.approx(0, abs=0.03)


def test_a_common_gain_under_noise_is_found_as_well_as_theory_says():
    """delta = gain + noise: over |S| levels of all samples the noise shrinks by sqrt(|S| samples)."""
    gain = noise(1500, 1, 1, seed=1)
    changes = gain + 4 * noise(1500, LEVELS, IMAGES, seed=2)
    found = found_by(changes, sizes=(3,))["grid", 3]
    few, every, both = (1 + 16 / (3 * IMAGES)), (1 + 16 / (LEVELS * IMAGES)), (1 + 16 / (LEVELS * IMAGES))
    assert found.few_pearson == pytest.approx(both / (few * every) ** 0.5, abs=0.02)
    others = 1 + 16 / (LEVELS * (IMAGES - 1))
    assert found.one_pearson == pytest.approx(1 / ((1 + 16 / 3) * others) ** 0.5, abs=0.02)


def test_a_set_is_selected_from_the_steps_before_alone():
    changes = noise(60, LEVELS, IMAGES)
    sets = rolling_sets(changes, 3, QUEUE, 2, CHOICES["f_statistic"])
    assert sets.shape == (40, 3)
    later = changes.clone()
    later[50:] = noise(10, LEVELS, IMAGES, seed=9)
    changed = rolling_sets(later, 3, QUEUE, 2, CHOICES["f_statistic"])
    assert torch.equal(sets[:31], changed[:31])  # up to step 50 itself, which is row 30
    assert not torch.equal(sets[31:], changed[31:])


def test_the_queue_takes_other_samples_at_every_step():
    changes = torch.zeros(8, 2, 3, dtype=torch.float64)
    changes[:, 0] = torch.arange(3).double()  # level 0 tells which sample it is
    seen = []
    rolling_sets(changes, 1, 6, 1, lambda rows, size: seen.append(rows[:, 0].tolist()) or torch.tensor([0]))
    assert seen == [[0, 1, 2, 0, 1, 2], [1, 2, 0, 1, 2, 0]]


def test_correlations_equal_scipys():
    a, b = noise(40, 2), noise(40, 2, seed=1) + noise(40, 2)
    a[3] = a[5]  # ties
    for column in range(2):
        assert float(pearson(a, b)[column]) == pytest.approx(stats.pearsonr(a[:, column], b[:, column])[0])
        assert float(spearman(a, b)[column]) == pytest.approx(stats.spearmanr(a[:, column], b[:, column])[0])
    assert float(pearson(torch.ones(5, 1), torch.arange(5.0)[:, None])[0]) == 0


def test_quality_is_that_of_the_sets_it_is_given():
    changes = noise(50, LEVELS, IMAGES)
    sets = torch.tensor([[2, 5]]).expand(50, 2)
    few = changes[:, [2, 5]].mean((1, 2))
    assert quality(changes, sets, "mine").few_pearson == pytest.approx(stats.pearsonr(few, changes.mean((1, 2)))[0])
    one = [
        stats.pearsonr(changes[:, [2, 5], i].mean(1), changes[:, :, [j for j in range(IMAGES) if j != i]].mean((1, 2)))[0]
        for i in range(IMAGES)
    ]
    assert quality(changes, sets, "mine").one_pearson == pytest.approx(sum(one) / IMAGES)


def test_steps_are_measured_and_taken_back():
    looked_at, undisturbed = (trainer_of(tiny(sampler="adaptive:warmup=2,every=2", model=own("Normed"))) for _ in range(2))
    for trainer in (looked_at, undisturbed):
        trainer.training_step()
    before = tensors(looked_at)
    fixed = fixed_noise(looked_at, levels=4, images=5, tell=print)
    start = fixed.losses(looked_at)
    changes = predictor.step_changes(looked_at, fixed, steps=3)
    leave_one_out(looked_at, fixed, torch.ones(4, dtype=torch.float64), count=5)
    assert changes.shape == (3, 4, 5)
    assert not differing(before, tensors(looked_at))
    advance(undisturbed, 4)  # the three steps themselves
    torch.testing.assert_close(start - changes.sum(0), fixed.losses(undisturbed))
    assert advance(looked_at, 12)[-1] == advance(undisturbed, 12)[-1]
    assert not differing(tensors(looked_at), tensors(undisturbed))


def test_leaving_a_sample_out_gives_it_no_weight_in_the_first_batch_only():
    trainer = trainer_of(tiny())
    x0, _ = trainer.batches.get(0)
    sampler = Without(trainer.sampler, row=3)
    first, second = sampler.sample(x0), sampler.sample(x0)
    assert first.weight.tolist() == [float(i != 3) for i in range(16)]
    assert second.weight.tolist() == [1.0] * 16


def test_a_sample_without_a_gradient_caused_nothing_and_the_others_something():
    """The scale of this model acts below timestep 500 only: samples drawn above it cannot move it."""
    name = "tests.analysis.test_predictor:Lower"
    trainer = trainer_of(tiny(model=tiny().model.__class__(name=name), optimizer=tiny().optimizer.__class__(clip=None)))
    drawn = trainer.sampler.sample(trainer.batches.get(0)[0]).time
    trainer.sampler.micro = 0
    fixed = fixed_noise(trainer, levels=4, images=8, tell=print)
    rewards, caused = leave_one_out(trainer, fixed, torch.ones(4, dtype=torch.float64), count=16)
    above = drawn >= 500
    assert 0 < int(above.sum()) < 16
    assert torch.equal(caused[above], torch.zeros(int(above.sum()), dtype=torch.float64))
    assert (caused[~above] != 0).any()
    assert torch.equal(rewards[:, 2:], torch.zeros(16, 2, dtype=torch.float64))  # its loss up there cannot change
    assert (rewards[:, :2] != 0).all()


class Lower(torch.nn.Module):
    """Multiplies by a learned scale where there is little noise, and gives zero above."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((64,), 0.1))

    def forward(self, x, time):
        return x * self.scale.view(1, 1, 8, 8) * (time < 500).view(-1, 1, 1, 1)


def test_credit_is_the_correlation_over_samples():
    rewards = noise(50, 8)
    credit = credit_of(rewards, rewards[:, [1, 4]].sum(1), torch.tensor([4, 1]))
    assert credit.few == pytest.approx((1, 1))
    assert credit.every[0] == pytest.approx(stats.pearsonr(rewards.mean(1), rewards[:, [1, 4]].sum(1))[0])
    assert [row["size"] for row in credit.rows()] == [2, 8]


SMALL = (
    *SHORT,
    "--points",
    "1",
    *OWN,
    "--levels",
    "6",
    "--images",
    "4",
    "--steps",
    "12",
    "--queue",
    "5",
    "--sizes",
    "3,1",
    "--credit",
    "5",
)


@pytest.mark.parametrize("target", ["plain", "vlb"])
def test_the_analysis_has_a_row_for_each_moment_selection_and_size(target):
    found = asked(predictor, *SMALL, "--target", target)
    rows = {(row["step"], row["selection"], row["size"]) for row in found.rows}
    names = [*CHOICES, "random"]
    assert rows == {
        (step, name, size)
        for step in (0, 4)
        for name, sizes in [*((name, (1, 3)) for name in names), ("all", (6,)), ("credit", (3, 6))]
        for size in sizes
    }
    assert len({tuple(row) for row in found.rows}) == 1  # the same keys
    assert all(row["few_pearson"] == pytest.approx(1) for row in found.rows if row["selection"] == "all")
    # 2 moments x (12 steps + 1 whole and 5 partial ones) x 16; 2 x ((13 + 6) x 24 + 2 x 5 x 6)
    assert "Cost: 576 samples forward and backward, and 1,032 forward" in found.says[-1]
    assert found.rows == asked(predictor, *SMALL, "--target", target).rows


def test_no_more_samples_are_credited_than_a_batch_has():
    found = asked(predictor, *SMALL, "--batch", "4")
    # 2 moments x (12 steps + 1 whole and 4 partial ones) x 4; 2 x ((13 + 5) x 24 + 2 x 4 x 6)
    assert "Cost: 136 samples forward and backward, and 960 forward" in found.says[-1]
