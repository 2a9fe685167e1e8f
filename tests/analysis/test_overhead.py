"""The cost model: the paper's figures, and every sampler's samples through a real model, counted. Times are not tested."""

import random
from dataclasses import replace

import pytest

import noisewise
from noisewise.analysis import cost_model, overhead
from noisewise.analysis.cost_model import PAPER_STEP, by_samples, interval, published, update
from noisewise.analysis.moments_of_training import opened
from noisewise.analysis.overhead import (
    LEAST,
    Times,
    configured,
    counted,
    counting,
    recipes,
    section_9,
    settings,
    step,
)
from noisewise.processes import DDPM
from noisewise.training.options import load_preset
from tests.analysis.asking import asked
from tests.training.tiny import tiny


@pytest.fixture(scope="module")
def trainer():
    with opened(tiny(process="linear:steps=50")) as made:
        yield made


def test_the_papers_account_of_its_own_settings():
    """Section 9: t_iter = 4, the policy 1, an update "approximately 21" and 4 for the policy, once in 40 steps: 5.63, 1.41."""
    assert update(1000, 128) == 21.625
    assert published(1000, 128, rounded=True) == 4 + 1 + (21 + 4) / 40 == 5.625
    assert round(published(1000, 128, rounded=True) / PAPER_STEP, 2) == 1.41
    assert published(1000, 128) == pytest.approx(5.640625)
    assert round(published(1000, 128) / PAPER_STEP, 2) == 1.41


def test_the_same_by_samples_through_the_model():
    """21.6 forwards once in 40 steps: 0.54 a step of 3."""
    assert by_samples(1000, 128) == pytest.approx(1.1802, abs=1e-4)
    assert by_samples(1000, 128, step=1) == pytest.approx(1.5406, abs=1e-4)


def test_the_analysis_says_the_papers_figure_and_ours():
    said = section_9()
    assert [figure in said for figure in ("5.625", "5.641", "1.41", "1.18")] == [True] * 4


@pytest.mark.parametrize(("steps", "batch"), [(1000, 128), (512, 64), (100, 100)])
def test_our_version_of_the_published_method_costs_what_the_formula_says(steps, batch):
    sampler = noisewise.recipe("paper_cifar10", DDPM.linear(steps)).sampler
    assert cost_model.overhead(sampler, batch) == pytest.approx(by_samples(steps, batch), rel=2e-3)  # but for filled-up calls
    exact = noisewise.recipe(f"paper_cifar10:probe_batch={steps + 3 * batch}", DDPM.linear(steps)).sampler
    assert cost_model.overhead(exact, batch) == pytest.approx(by_samples(steps, batch), rel=1e-12)


SPECS = [
    "uniform",
    "speed+minsnr",
    "loss_moment",
    "adaptive",
    "loss_adaptive",
    "paper_cifar10",
    "adaptive:estimator=reinforce,strata=20,chosen=2,every=3",
    "adaptive:estimator=reinforce,strata=33,probe_batch=20",
    "adaptive:estimator=lookahead,strata=3,horizon=2,probe=40",
    "adaptive:estimator=lookahead,strata=2,horizon=1,probe=300",
    "gradient_variance",
    "gradient_variance:rows=3,every=4",
    "mix:of=(gradient_variance:rows=2),floor=0.5",
    "curriculum:start=uniform,end=(adaptive:estimator=reinforce,strata=10)",
]


@pytest.mark.parametrize("spec", SPECS)
def test_predicted_samples_are_those_that_go_through_the_model(trainer, spec):
    uniform, other = recipes(trainer, spec)
    step(trainer, uniform)
    predicted = cost_model.costs(other.sampler, trainer.config.batch)
    samples = (sum(cost.forward for cost in predicted), sum(cost.trained for cost in predicted))
    assert [counted(trainer, other) for _ in range(2)] == [samples, samples]
    with counting(trainer.model) as counter:
        step(trainer, other, update=False)
    assert (counter["forward"], counter["trained"]) == (0, trainer.config.batch)


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ("adaptive:estimator=reinforce,strata=20,every=5", 20),
        ("gradient_variance:every=4,rows=4", 12),
        ("adaptive:estimator=lookahead,strata=2,horizon=1,probe=16,budget=0.5,warmup=1", 12),
    ],
)
def test_updates_come_as_often_in_training_as_predicted(trainer, spec, steps):
    """Whole intervals of ordinary training, nothing held."""
    _, other = recipes(trainer, spec)
    (cost,) = cost_model.costs(other.sampler, trainer.config.batch)
    assert cost.every == interval(other.sampler, trainer.config.batch)
    assert steps % cost.every == 0
    trainer.sampler, trainer.weighting = other.sampler, other.weighting
    with counting(trainer.model) as counter:
        for _ in range(steps):
            trainer.training_step()
    spent = counter["forward"] + 3 * (counter["trained"] - steps * trainer.config.batch)
    assert spent == pytest.approx(cost.a_step() * steps)
    assert 1 + spent / (3 * steps * trainer.config.batch) == pytest.approx(
        cost_model.overhead(other.sampler, trainer.config.batch)
    )


def test_a_look_ahead_stays_within_its_budget():
    sampler = noisewise.recipe("adaptive:estimator=lookahead,budget=0.05", DDPM.linear()).sampler
    assert 1.04 < cost_model.overhead(sampler, 128) <= 1.05


def test_two_intervals_in_one_sampler_are_refused():
    sampler = noisewise.recipe("switch:first=(adaptive:every=10),then=(adaptive:every=20),at=5", DDPM.linear()).sampler
    with pytest.raises(ValueError, match="every 10 and 20 steps"):
        interval(sampler, 16)


def test_updates_count_for_as_much_as_they_are_frequent():
    times = Times([1.0, 1.0, 9.0], [1.1, 1.1, 1.1], [3.1, 3.1, 0.5], every=10)
    assert times.ratio() == pytest.approx(1.1 + 2 / 10)
    assert times.spread() == times.spread()


def test_the_spread_holds_the_ratio_and_shrinks_with_more_steps():
    chance = random.Random(1)

    def noisy(n):
        return Times(*([mean * chance.uniform(0.8, 1.2) for _ in range(n)] for mean in (1.0, 1.1, 3.0)), every=10)

    few, many = noisy(5), noisy(500)
    for times in (few, many):
        assert times.spread()[0] <= times.ratio() <= times.spread()[1]
    assert many.spread()[1] - many.spread()[0] < few.spread()[1] - few.spread()[0]
    assert many.ratio() == pytest.approx(1.1 + 1.9 / 10, abs=0.03)


def test_one_list_is_varied_at_a_time():
    found = list(settings({"a": [1, 2, 3], "b": [4], "c": [5, 6]}))
    assert [name for name, _ in found] == ["none", "a", "a", "c"]
    assert [tuple(sizes.values()) for _, sizes in found] == [(2, 4, 6), (1, 4, 6), (3, 4, 6), (2, 4, 5)]


def test_sizes_reach_the_configuration():
    made = configured(replace(load_preset("digits"), process="cosine:offset=0.01"), 24, 48, 77)
    assert (made.model.options["channels"], made.batch, made.process) == (24, 48, "cosine:offset=0.01,steps=77")
    with pytest.raises(ValueError, match="needs a process with timesteps"):
        configured(replace(load_preset("digits"), process="edm"), 8, 8, 8)
    with pytest.raises(ValueError, match="needs a model of unet"):
        configured(replace(load_preset("digits"), model=replace(load_preset("digits").model, name="mine.Model")), 8, 8, 8)


def test_the_analysis_measures_every_sampler_at_every_setting():
    sizes = ["--widths", "16", "--batches", "4,8", "--steps-of-process", "20,40"]
    model = ["--model.name", "dit", "--model.options", '{"patch": 4, "depth": 1, "heads": 2}', "--seconds", "1e-6"]
    result = asked(overhead, "--samplers", "adaptive,paper_cifar10", *sizes, *model)
    assert [(row["varied"], row["sampler"], row["batch"], row["T"]) for row in result.rows[::2]] == [
        ("none", "adaptive", 8, 40),
        ("batch", "adaptive", 4, 40),
        ("T", "adaptive", 8, 20),
    ]
    for row in result.rows:
        assert row["counted"] == pytest.approx(row["predicted"])
        assert row["low"] <= row["measured"] <= row["high"]
        paper = published(row["T"], row["batch"]) / PAPER_STEP if row["sampler"] == "paper_cifar10" else None
        assert row["published"] == paper
        assert row["rounds"] == LEAST
    assert len(result.figure.axes) == 4
    assert [said.partition(":")[0] for said in result.says[:2]] == ["adaptive", "paper_cifar10"]
