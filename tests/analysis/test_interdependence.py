"""Training some noise levels and looking at all: models with a known answer, and everything put back bit for bit."""

import numpy as np
import pytest
import torch

from noisewise import DDPM
from noisewise.analysis import interdependence
from noisewise.analysis.interdependence import Matrix, matrix_of, strata_ranges, try_ranges
from noisewise.analysis.moments_of_training import FixedNoise, RangeSampler, fixed_noise, rewound
from noisewise.training.config import DataConfig, ModelConfig, OptimizerConfig
from tests.analysis.asking import OWN, SHORT, asked
from tests.training.tiny import advance, differing, own, tensors, tiny, trainer_of


def known(name: str, **changes):
    """A trainer with one of the models with known answers."""
    model = ModelConfig(name=f"tests.analysis.linear_answers:{name}")
    return trainer_of(tiny(model=model, optimizer=OptimizerConfig(lr=1e-2, warmup=0), **changes))


@pytest.mark.parametrize("moment", [0, 7])
def test_the_matrix_of_independent_parameters_is_diagonal(moment):
    trainer = known("Blocks")
    for _ in range(moment):
        trainer.training_step()
    fixed = fixed_noise(trainer, levels=20, images=16, tell=print)
    matrix = matrix_of(try_ranges(trainer, fixed, strata_ranges(10), steps=3))
    off = matrix.change - matrix.change.diagonal().diag()
    assert torch.equal(off, torch.zeros_like(off))
    assert (matrix.change.diagonal() < 0).all()
    assert matrix.off_diagonal() == 0
    assert matrix.harmed() == 0


def test_a_parameter_that_all_share_helps_all_alike():
    trainer = known("Shared")
    fixed = fixed_noise(trainer, levels=10, images=32, tell=print)
    matrix = matrix_of(try_ranges(trainer, fixed, strata_ranges(5), steps=2))
    assert (matrix.change < 0).all()
    assert matrix.off_diagonal() == pytest.approx(0.8, abs=0.02)  # the first steps of Adam are alike: 4 of 5 strata


def test_the_change_is_the_one_that_the_parameter_implies():
    """eps(x) = w x at sigma = sigma_u: the loss of fixed samples is a parabola in w, and w after the trial is known."""
    trainer = known("Shared")
    fixed = fixed_noise(trainer, levels=4, images=8, tell=print)
    (trial,) = try_ranges(trainer, fixed, [(0.0, 1.0)], steps=1)
    trainer.model.scale.data.fill_(1e-2)  # Adam's first step is lr in the direction of the gradient
    torch.testing.assert_close(trial.after, fixed.losses(trainer), rtol=1e-5, atol=0)
    assert (trial.error > 0).all()


def test_trials_count_noise_levels_as_the_run_does():
    """The target of `adaptive` is in its draws, not in a weighting: trials have draws of their own, and count by it too."""
    changes = {}
    for sampler in ("uniform", "minsnr", "adaptive", "adaptive+minsnr", "adaptive+none"):
        adam = OptimizerConfig(lr=1e-3, warmup=0, clip=None)
        trainer = trainer_of(tiny(model=own("Own"), sampler=sampler, optimizer=adam))
        fixed = fixed_noise(trainer, levels=10, images=8, tell=print)
        changes[sampler] = matrix_of(try_ranges(trainer, fixed, [(0.0, 1.0)], steps=4)).change
    assert torch.equal(changes["adaptive+none"], changes["uniform"])
    assert torch.equal(changes["adaptive+minsnr"], changes["minsnr"])
    assert not torch.equal(changes["adaptive"], changes["uniform"])
    torch.testing.assert_close(changes["adaptive"], changes["minsnr"], rtol=1e-3, atol=1e-7)  # Adam knows no scale


@pytest.mark.parametrize(
    "sampler",
    [
        "uniform",
        "adaptive:warmup=2,every=2",
        "adaptive:estimator=reinforce,every=2,strata=10",
        "gradient_variance:every=2",
        "minsnr+learned",
    ],
)
@pytest.mark.parametrize("moment", [0, 5])
def test_trials_leave_no_trace(sampler, moment):
    looked_at, undisturbed = (trainer_of(tiny(sampler=sampler, model=own("Normed"))) for _ in range(2))
    for trainer in (looked_at, undisturbed):
        for _ in range(moment):
            trainer.training_step()
    before, state, random = tensors(looked_at), looked_at.state(), torch.get_rng_state()
    fixed = fixed_noise(looked_at, levels=4, images=4, tell=print)
    try_ranges(looked_at, fixed, [(0.0, 0.2), (0.5, 1.0)], steps=3, share=0.5)
    assert not differing(before, tensors(looked_at))
    assert state == looked_at.state()
    assert torch.equal(random, torch.get_rng_state())
    assert advance(looked_at, 12) == advance(undisturbed, 12)
    assert not differing(tensors(looked_at), tensors(undisturbed))


def test_what_was_tried_is_taken_back_even_after_an_error():
    trainer = trainer_of(tiny(sampler="adaptive:warmup=2,every=2"))
    trainer.training_step()
    before, sampler = tensors(trainer), trainer.sampler

    def interrupted() -> None:
        with rewound(trainer):
            trainer.sampler = RangeSampler(trainer.objective.process, 0.0, 0.1)
            trainer.training_step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not differing(before, tensors(trainer))
    assert trainer.sampler is sampler


def test_trials_repeat_themselves_and_differ_between_ranges():
    trainer = trainer_of(tiny())
    trainer.training_step()
    fixed = fixed_noise(trainer, levels=4, images=4, tell=print)
    low, high, again = try_ranges(trainer, fixed, [(0.0, 0.2), (0.8, 1.0), (0.0, 0.2)], steps=2)
    assert torch.equal(low.after, again.after)
    assert not torch.equal(low.after, high.after)
    assert torch.equal(low.before, high.before)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_range_gets_its_share_of_the_draws(share):
    u = RangeSampler(DDPM.linear(), 0.3, 0.5, share).sample(20_000).u
    inside = ((u >= 0.3) & (u < 0.5)).double().mean()
    assert float(inside) == pytest.approx(share + (1 - share) * 0.2, abs=0.02)
    timesteps = DDPM.linear().index(u)
    if share == 1:
        assert (int(timesteps.min()), int(timesteps.max())) == (300, 499)


def test_the_share_off_the_diagonal_is_counted_over_relative_changes():
    matrix = Matrix(torch.tensor([[-0.2, 0.1], [0.0, -0.1]]), torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(matrix.relative, torch.tensor([[-0.1, 0.2], [0.0, -0.2]]))
    assert matrix.off_diagonal() == pytest.approx(0.2 / 0.5)
    assert matrix.harmed() == 0.5


def test_fixed_noise_gives_the_losses_of_its_own_noise_in_any_batches():
    trainer = trainer_of(tiny(model=own("Own", dropout=0.5)))
    fixed = fixed_noise(trainer, levels=5, images=7, tell=print)
    losses = fixed.losses(trainer)
    assert losses.shape == (5, 7)
    assert fixed.size == 35
    torch.testing.assert_close(fixed.losses(trainer, most=7), losses)
    assert trainer.network.training
    fewer = FixedNoise(fixed.x0[:3], None, fixed.u, True, fixed.seed)
    torch.testing.assert_close(fewer.losses(trainer), losses[:, :3])


def test_fixed_samples_are_none_of_the_trainings_where_there_is_a_test_set():
    trainer = trainer_of(tiny())
    fixed = fixed_noise(trainer, levels=1, images=20, tell=print)
    train = trainer.parts.source.decode(trainer.parts.source.read(torch.arange(len(trainer.parts.source)).numpy())[0])
    assert fixed.held_out
    assert not (fixed.x0[:, None] == train[None]).flatten(2).all(2).any()


def test_the_analysis_has_the_matrix_and_the_ranges_at_each_moment():
    small = ["--points", "1", "--levels", "5", "--images", "4", "--strata", "2", "--steps", "2"]
    found = asked(interdependence, *SHORT, *small, "--range", "0,0.5", "--range", "0.2,0.3", *OWN)
    matrix = [row for row in found.rows if row["kind"] == "stratum"]
    ranges = [row for row in found.rows if row["kind"] == "range"]
    assert len(matrix) == 2 * 2 * 2  # moments, trained, affected
    assert len(ranges) == 2 * 2 * 6  # 5 levels become 6, 3 in each stratum
    assert {(row["trained_low"], row["trained_high"]) for row in ranges} == {(0.0, 0.5), (0.2, 0.3)}
    assert all(row["relative_change"] == pytest.approx(row["change"] / row["loss_before"]) for row in found.rows)
    first = [row["change"] for row in ranges if row["step"] == 4 and row["trained_high"] == 0.5]
    mean = next(row["change"] for row in matrix if row["step"] == 4 and row["trained_low"] == 0 and row["affected_low"] == 0)
    assert mean == pytest.approx(sum(first[:3]) / 3)
    assert "6 trials of 2 steps = 192 samples forward and backward, and 192 forward" in found.says[-1]


def test_without_a_test_set_training_samples_take_its_place_and_that_is_told(tmp_path):
    np.save(tmp_path / "vectors.npy", np.random.default_rng(0).normal(size=(40, 1, 4, 4)).astype(np.float32))
    data = DataConfig(source="array", path=str(tmp_path / "vectors.npy"))
    trainer = trainer_of(tiny(data=data, model=own("Own")))
    told = []
    fixed = fixed_noise(trainer, levels=2, images=4, tell=told.append)
    assert not fixed.held_out
    assert "no test set" in told[0]
    assert torch.isfinite(fixed.losses(trainer)).all()
