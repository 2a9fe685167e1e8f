"""Gradient variance: closed forms, agreement of the two methods, no bias, and a run that is not disturbed."""

from functools import partial

import pytest
import torch

from noisewise.analysis import gradients
from noisewise.analysis.gradients import by_micro_batches, by_single_gradients, choose_method, single_gradients
from noisewise.levels import middles
from noisewise.weighting import VLB, NoWeight
from tests.analysis.asking import OWN, SHORT, asked
from tests.analysis.linear_answers import Linear, Looks, closed_form, draw, losses
from tests.training.tiny import DIT, differing, own, tensors, tiny, trainer_of

LEVELS = (0.02, 0.3, 0.9)


@pytest.mark.parametrize("u", LEVELS)
def test_single_gradients_reach_the_closed_form_of_a_linear_model(u):
    model = Linear()
    variance, squared_mean, loss = closed_form(model.weight, u)
    found = by_single_gradients(model, losses, draw(20_000, u, seed=1))
    assert abs(found.variance - variance) < 4 * found.variance_error
    assert found.variance == pytest.approx(variance, rel=0.05)
    assert found.squared_mean == pytest.approx(squared_mean, rel=0.1, abs=4 * variance / 20_000)
    assert abs(found.loss - loss) < 4 * found.loss_error
    assert found.root_mean_square == pytest.approx((variance + squared_mean) ** 0.5, rel=0.03)
    assert 0 < found.norm < found.root_mean_square


@pytest.mark.parametrize("u", LEVELS)
def test_micro_batches_reach_the_same_closed_form(u):
    model = Linear()
    variance, _, loss = closed_form(model.weight, u)
    found = by_micro_batches(model, losses, draw(8_000, u, seed=2), size=8)
    assert abs(found.variance - variance) < 4 * found.variance_error
    assert found.variance == pytest.approx(variance, rel=0.1)
    assert abs(found.loss - loss) < 4 * found.loss_error


def test_the_two_methods_are_one_when_a_micro_batch_is_a_single_sample():
    model, samples = Linear(), draw(50, 0.4, seed=3)
    one, other = by_single_gradients(model, losses, samples), by_micro_batches(model, losses, samples, size=1)
    for field in ("variance", "squared_mean", "loss", "loss_error"):
        assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-5)


@pytest.mark.parametrize("method", [by_single_gradients, partial(by_micro_batches, size=2)], ids=["single", "micro"])
def test_estimates_from_few_samples_are_unbiased(method):
    """With n = 4 a variance divided by n would be a quarter (single) or a half (micro-batches) too small."""
    model = Linear()
    variance, squared_mean, _ = closed_form(model.weight, 0.3)
    found = [method(model, losses, draw(4, 0.3, seed=seed)) for seed in range(1500)]
    for field, answer in (("variance", variance), ("squared_mean", squared_mean)):
        values = torch.tensor([getattr(one, field) for one in found], dtype=torch.float64)
        error = float(values.std()) / len(values) ** 0.5
        assert error < 0.05 * variance
        assert abs(float(values.mean()) - answer) < 4 * error


def test_the_error_is_the_scatter_of_repeated_estimates():
    model = Linear()
    found = [by_single_gradients(model, losses, draw(200, 0.3, seed=seed)) for seed in range(100)]
    scatter = float(torch.tensor([one.variance for one in found]).std())
    told = sum(one.variance_error for one in found) / len(found)
    assert told == pytest.approx(scatter, rel=0.3)


def test_single_gradients_are_those_of_autograd():
    model, samples = Linear(), draw(5, 0.4, seed=5)
    (found,), values = single_gradients(model, losses, samples)
    for row in range(5):
        loss = losses(model, samples.part(slice(row, row + 1))).mean()
        torch.testing.assert_close(found[row], torch.autograd.grad(loss, model.weight)[0])
        torch.testing.assert_close(values[row], loss.detach())


@pytest.mark.parametrize("model", ["unet", "dit", "uvit"])
def test_both_methods_agree_on_every_model_of_the_trainer(model):
    options = {"unet": {"channels": 8, "multipliers": [1], "blocks": 1, "attention": []}, "dit": DIT, "uvit": DIT}[model]
    trainer = trainer_of(tiny(model=tiny().model.__class__(name=model, options=options)))
    for _ in range(2):
        trainer.training_step()  # parts that start at zero have no gradient before
    u = torch.tensor([0.1, 0.8])
    measure = partial(gradients.measure_levels, trainer, u, 96, NoWeight())
    for one, other in zip(measure("per_sample"), measure("micro_batches", size=1), strict=True):
        assert one.variance == pytest.approx(other.variance, rel=1e-3)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    for one, other in zip(measure("per_sample"), measure("micro_batches", size=4), strict=True):
        assert one.variance == pytest.approx(other.variance, rel=0.35)  # other batches of the same samples


def test_a_weight_multiplies_the_gradient():
    trainer = trainer_of(tiny(model=own("Own")))
    u = torch.tensor([0.05, 0.5])
    plain = gradients.measure_levels(trainer, u, 8, NoWeight(), "per_sample")
    vlb = gradients.measure_levels(trainer, u, 8, VLB(), "per_sample")
    for one, other, weight in zip(plain, vlb, VLB().weights(trainer.objective, u).tolist(), strict=True):
        assert other.loss == pytest.approx(weight * one.loss, rel=1e-5)
        assert other.variance == pytest.approx(weight**2 * one.variance, rel=1e-4)


def test_measuring_leaves_the_run_as_it_was_and_repeats_itself():
    trainer = trainer_of(tiny(model=own("Normed")))
    trainer.training_step()
    before, random = tensors(trainer), torch.get_rng_state()
    first = gradients.measure_levels(trainer, middles(3), 8, NoWeight(), "micro_batches", size=2, dropout=True)
    assert not differing(before, tensors(trainer))
    assert torch.equal(random, torch.get_rng_state())
    assert trainer.model.training
    assert first == gradients.measure_levels(trainer, middles(3), 8, NoWeight(), "micro_batches", size=2, dropout=True)


def test_dropout_is_off_unless_asked_for():
    trainer = trainer_of(tiny(model=own("Own", dropout=0.5)))
    measure = partial(gradients.measure_levels, trainer, torch.tensor([0.5]), 32, NoWeight(), "per_sample")
    silent, noisy = measure()[0], measure(dropout=True)[0]
    assert noisy.variance > 1.2 * silent.variance


def test_auto_holds_single_gradients_only_while_they_fit():
    assert choose_method("auto", torch.nn.Linear(10, 10), rows=100) == "per_sample"
    assert choose_method("auto", torch.nn.Linear(10, 10), rows=10_000_000) == "micro_batches"
    assert choose_method("per_sample", torch.nn.Linear(10, 10), rows=10_000_000) == "per_sample"


def test_a_model_that_cannot_be_vectorised_says_so():
    with pytest.raises(RuntimeError, match=r"vmap|item"):
        by_single_gradients(Looks(), losses, draw(4, 0.5, seed=0))
    assert by_micro_batches(Looks(), losses, draw(4, 0.5, seed=0), size=1).variance > 0


def test_too_few_samples_are_refused():
    for rows, size in ((4, 4), (6, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least 2 whole micro-batches"):
            by_micro_batches(Linear(), losses, draw(rows, 0.5, seed=0), size)


@pytest.mark.parametrize(("spec", "kind"), [("plain", NoWeight), ("vlb", VLB), ("vlb:clip=5", VLB)])
def test_objectives_are_named_by_word_or_spec(spec, kind):
    assert type(gradients.chosen_weighting(spec)) is kind


def test_the_analysis_has_a_row_for_each_moment_and_level():
    found = asked(gradients, *SHORT, "--levels", "3", "--rows", "8", *OWN)
    assert [(row["step"], row["u"]) for row in found.rows] == [(s, u) for s in (0, 2, 4) for u in (0.166667, 0.5, 0.833333)]
    assert {row["method"] for row in found.rows} == {"per_sample"}
    assert all(row["variance"] > 0 and row["loss"] > 0 for row in found.rows)
    assert "3 levels x 8 samples x 3 moments = 72 samples forward and backward" in found.says[-1]
    again = asked(gradients, *SHORT, "--levels", "3", "--rows", "8", *OWN)
    assert found.rows == again.rows


def test_the_analysis_falls_back_to_micro_batches_and_says_why():
    looking = [*SHORT, *OWN, "--model.name", "tests.analysis.test_gradients:LooksAtPictures", "--levels", "2", "--rows", "8"]
    found = asked(gradients, *looking)
    assert {row["method"] for row in found.rows} == {"micro_batches"}
    assert any("gives no single gradients" in sentence for sentence in found.says)
    with pytest.raises(RuntimeError):
        asked(gradients, *looking, "--method", "per_sample")


class LooksAtPictures(torch.nn.Module):
    """Decides by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, time):
        return x * self.scale if x.mean().item() < 1e9 else x


def test_micro_batches_that_nobody_asked_for_divide_the_rows():
    found = asked(gradients, *SHORT, "--rows", "50", "--levels", "2", "--method", "micro_batches", *OWN)
    assert {row["method"] for row in found.rows} == {"micro_batches"}
