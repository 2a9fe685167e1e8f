"""Each estimator on the problems of tests/known_answers.py."""

from functools import cache, partial

import pytest
import torch

from noisewise import AdaptiveSampler, Flow, Uniform
from noisewise.samplers.adaptive.selection import SELECTIONS
from tests.known_answers import (
    Run,
    alike,
    by_loss,
    exact_gains,
    final_excess,
    independent,
    lookahead,
    lookahead_gains,
    loss_scores,
    reinforce_rewards,
    shared,
    spearman,
)


def loss(problem, **settings):
    return by_loss(problem, **{"warmup": 20, "every": 10, **settings})


def reinforce(problem, **settings):
    return AdaptiveSampler(Flow(), "reinforce", every=5, policy="global", correction="none", **settings)


ESTIMATORS = {
    "loss": loss,
    "lookahead": lookahead,
    "lookahead, horizon 8": partial(lookahead, horizon=8),
    "reinforce": reinforce,
}


@pytest.mark.slow
@pytest.mark.parametrize("problem", [independent, shared])
@pytest.mark.parametrize("horizon", [1, 8])
def test_lookahead_ranks_strata_as_the_exact_gains_do(problem, horizon):
    truth = exact_gains(problem(), horizon, share=0.5, trials=150)
    assert spearman(lookahead_gains(problem(), horizon), truth) >= 0.9


@pytest.mark.slow
def test_how_well_the_others_rank():
    """Not a goal but a record: the loss knows most of it, a policy gradient's rewards little (see docs/adaptive.md)."""
    truth = exact_gains(independent(), 1, share=0.5, trials=150)
    assert spearman(loss_scores(independent()), truth) > 0.6
    assert abs(spearman(reinforce_rewards(independent()), truth)) < 0.6


@pytest.mark.slow
def test_drawing_by_the_loss_beats_uniform_on_independent_strata():
    default = final_excess(lambda problem: by_loss(problem, strata=20, warmup=20, every=10), independent, 400, seeds=6, lr=0.5)
    uniform = final_excess(lambda problem: Uniform(Flow()), independent, 400, seeds=6, lr=0.5)
    assert default < 0.9 * uniform


@cache
def worst(name):
    """The largest excess loss of a stratum where they are shared, after a training in which none may be starved."""
    make = ESTIMATORS.get(name, lambda problem: Uniform(Flow()))
    runs = [Run(shared(), make(shared()), seed=seed).steps(400) for seed in range(3)]
    assert all(float(run.mass().min()) >= 0.2 / 8 - 1e-4 for run in runs)
    return float(torch.stack([run.problem.excess() for run in runs]).mean(0).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_shared_strata_are_not_starved(name):
    assert worst(name) < 1.5 * worst("uniform")


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_alike_strata_stay_uniform(name):
    for seed in range(3):
        mass = Run(alike(), ESTIMATORS[name](alike()), seed=seed).steps(400).mass()
        assert float((mass - 1 / 8).abs().sum() / 2) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "updates", "every"), [("loss", 15, 10), ("lookahead", 4, None)])
def test_the_density_follows_a_change(name, updates, every):
    """Stratum 1 matters, then stratum 6 does; the learned share follows within so many updates."""
    problem = alike()
    problem.noise.fill_(0.05)
    problem.optimum[1] *= 4
    sampler = ESTIMATORS[name](problem, **({"budget": 1.0, "decay": 0.3} if name == "lookahead" else {}))
    run = Run(problem, sampler, lr=0.02).steps(40)
    assert int(run.mass().argmax()) == 1
    with torch.no_grad():
        problem.theta.zero_()
        problem.optimum[[1, 6]] = problem.optimum[[6, 1]]
    interval = every or sampler.estimator.interval(64)
    run.steps(updates * interval)
    assert int(run.mass().argmax()) == 6


@pytest.mark.parametrize("name", ["f_statistic", "correlation"])
def test_planted_columns_are_found(name):
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(20, 2, generator=generator)
    changes = 0.1 * torch.randn(20, 50, generator=generator)
    planted = [7, 31]
    changes[:, planted] += 10 * signal
    chosen = SELECTIONS[name](changes, 2)
    assert set(chosen.tolist()) == set(planted)


def test_redundant_columns_are_passed_over():
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 30, generator=generator)
    changes = 0.01 * torch.randn(30, 20, generator=generator)
    changes[:, 3] += 3 * a
    changes[:, 4] += 2.9 * a  # the same news as column 3
    changes[:, 12] += 2 * b
    assert set(SELECTIONS["f_statistic"](changes, 2).tolist()) == {3, 4}
    assert 12 in SELECTIONS["correlation"](changes, 2).tolist()
