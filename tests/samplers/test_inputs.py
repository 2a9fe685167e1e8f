"""What samplers say to input that they cannot use, and what they make of unusual input that they can."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

import noisewise
from noisewise import DDPM, PROCESSES, SAMPLERS, WEIGHTINGS, Flow, Objective, Recipe, Sampler, SpecError
from noisewise.samplers import AdaptiveSampler, Laplace, Mix, Product, Uniform
from noisewise.weighting import MinSNR
from tests.samplers.specs import ALL_SPECS


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(2**63, -(2**63)), (2**64 + 3, 3), (-1, -1), (np.int64(3), 3), (np.uint32(3), 3), (torch.tensor(3), 3)],
)
def test_any_whole_number_is_a_seed(seed, expected):
    sampler, same = Uniform(DDPM.linear(), seed=seed), Uniform(DDPM.linear(), seed=expected)
    assert torch.equal(sampler.sample(5).u, same.sample(5).u)
    again = Uniform(DDPM.linear())
    again.load_state_dict(sampler.state_dict())
    assert again.seed == sampler.seed == expected


@pytest.mark.parametrize("seed", [None, 1.5, "3"])
def test_other_seeds_are_refused(seed):
    with pytest.raises(TypeError, match="a seed must be a whole number, got"):
        Uniform(DDPM.linear(), seed=seed)


MADE_OF_SAMPLERS = {"mix", "shift", "product", "curriculum", "switch", "piecewise", "pairs"}  # which have a process


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - MADE_OF_SAMPLERS))
@pytest.mark.parametrize("given", [DDPM.linear, "linear", None])
def test_what_is_no_process_is_refused_by_name(name, given):
    settings = {"table": {"values": [1.0]}, "curriculum_sampling": {"total": 10}}.get(name, {})
    with pytest.raises(
        TypeError, match=r"the first argument must be a Process, such as DDPM\.linear\(\)(, or an Objective)?, got"
    ):
        SAMPLERS[name](given, **settings)


@pytest.mark.parametrize("name", ["adaptive", "loss_moment", "gradient_variance", "loss_adaptive"])
def test_learning_samplers_take_an_objective(name):
    objective = Objective(DDPM.cosine(), "v")
    assert SAMPLERS[name](objective).objective is objective
    with pytest.raises(ValueError, match="the objective is given twice"):
        SAMPLERS[name](objective, objective=Objective(DDPM.cosine(), "eps"))


@pytest.mark.parametrize("spec", ["uniform", "adaptive"])
def test_a_name_is_no_process(spec):
    with pytest.raises(
        TypeError, match=r"the second argument must be a Process, .* or an Objective, got 'linear'; .*build_process"
    ):
        noisewise.recipe(spec, "linear")
    with pytest.raises(
        TypeError, match=r"the first argument must be a Process, .* got 'linear'; .*build_process\('linear'\) makes"
    ):
        Objective("linear", "eps")
    for given in (None, DDPM.linear, Objective(DDPM.linear())):
        with pytest.raises(TypeError, match="the first argument must be a Process"):
            Objective(given)


@pytest.mark.parametrize("name", ["adaptive", "loss_moment", "gradient_variance", "paper_cifar10"])
@pytest.mark.parametrize("setting", ["weighting", "target"])
def test_what_is_no_weighting_is_refused_when_the_sampler_is_made(name, setting):
    for given, hint in (("p2", r"'p2'; .*build_weighting\('p2'\) makes one"), (MinSNR, "class")):
        with pytest.raises(TypeError, match=rf"{setting} must be a Weighting, such as MinSNR\(\), got .*{hint}"):
            SAMPLERS[name](DDPM.linear(), **{setting: given})
    with pytest.raises(TypeError, match="weight must be a Weighting"):
        Product(DDPM.linear(), Uniform(DDPM.linear()), "p2")


@pytest.mark.parametrize("spec", ["uniform", "adaptive", "paper_cifar10", "mix:of=adaptive"])
def test_misspelt_settings_in_python_are_named(spec):
    with pytest.raises(SpecError, match=r"unknown setting of \w+ 'sed': did you mean 'seed'\? Known: .*draws.*seed"):
        noisewise.recipe(spec, DDPM.linear(), sed=1)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda losses: losses.tolist(), "list of float:"),
        (lambda losses: losses.numpy(), "ndarray of float32:"),
        (lambda losses: [losses[:2], losses[2:].numpy()], "list of ndarray:"),
        (lambda losses: 0.5, "float:"),
        (lambda losses: [], "list:"),
    ],
)
@pytest.mark.parametrize("spec", ["uniform", "adaptive"])
def test_losses_that_are_no_tensors_are_explained(spec, made, got):
    sampler = noisewise.recipe(spec, DDPM.linear()).sampler
    draw = sampler.sample(4)
    with (
        pytest.raises(TypeError, match=f"losses must be a tensor.*got {got}.*losses.detach"),
        sampler.observe(draw, made(torch.rand(4))),
    ):
        pass
    assert sampler.step == 0


@pytest.mark.parametrize(
    "made", [iter, tuple, lambda parts: dict(enumerate(parts)).values()], ids=["iterator", "tuple", "values"]
)
def test_losses_of_micro_batches_may_be_in_anything_that_holds_several(made):
    sampler = noisewise.recipe("adaptive", DDPM.linear()).sampler
    draws = [sampler.sample(2), sampler.sample(2)]
    with sampler.observe(draws, made([torch.rand(2), torch.rand(2)])):
        pass
    assert sampler.step == 1


def test_observing_tensors_is_explained():
    sampler = Uniform(DDPM.linear())
    draw = sampler.sample(4)
    for wrong in (draw.u, [draw.u]):
        with pytest.raises(TypeError, match="takes what sample"), sampler.observe(wrong, torch.zeros(4)):
            pass


@pytest.mark.parametrize("steps", [1000, 4000, 10_000])
@pytest.mark.parametrize("spec", ["adaptive:target=vlb", "product:of=uniform,weight=vlb,correction=clipped(5)"])
def test_weights_have_mean_one_on_long_schedules_with_a_steep_end(spec, steps):
    sampler = noisewise.recipe(spec, DDPM.cosine(steps)).sampler
    u = (torch.arange(steps) + 0.5) / steps
    density = sampler.density(u)
    assert float((density * sampler._weight(u, density)).mean()) == pytest.approx(1, abs=1e-3)


def test_one_sample_a_rank_is_stratified_over_the_ranks(monkeypatch):
    monkeypatch.setattr("noisewise.distributed.world_size", lambda: 8)
    sampler = Uniform(DDPM.linear(), draws="stratified")
    for step in range(20):
        sampler.step, found = step, []
        for rank in range(8):
            monkeypatch.setattr("noisewise.distributed.rank", lambda rank=rank: rank)
            found.append(float(sampler.sample(1).u))
            sampler.micro = 0
        assert sorted(int(8 * u) for u in found) == list(range(8))


@pytest.mark.parametrize(("schedule", "lr"), [("squaredcos_cap_v2", 1e-3), ("linear", 1e-2), ("scaled_linear", 1e-2)])
def test_the_papers_settings_know_the_cosine_schedule_of_diffusers(schedule, lr):
    process = DDPM.from_diffusers(DDPMScheduler(beta_schedule=schedule))
    assert noisewise.recipe("paper_cifar10", process).sampler.estimator.lr == lr
    assert noisewise.recipe("paper_cifar10", DDPM.cosine(50)).sampler.estimator.lr == 1e-3


def test_the_state_of_another_kind_of_policy_is_refused():
    one, other = (AdaptiveSampler(DDPM.linear(), "reinforce", policy=policy) for policy in ("global", "beta"))
    with pytest.raises(ValueError, match="the state is of policy=global, but this sampler has policy=beta"):
        other.load_state_dict(one.state_dict())
    other.sample(torch.zeros(2, 3))  # which builds its policy
    with pytest.raises(ValueError, match="the state is of policy=beta, but this sampler has policy=global"):
        one.load_state_dict(other.state_dict())


@pytest.mark.parametrize("other", [DDPM.cosine(), DDPM.linear(100), Flow()])
def test_parts_of_another_process_are_refused(other):
    process = DDPM.linear()
    for make in (
        lambda: AdaptiveSampler(process, objective=Objective(other)),
        lambda: noisewise.Recipe(Uniform(process), objective=Objective(other)),
        lambda: Mix(process, Laplace(other)),
        lambda: Product(process, Laplace(other), MinSNR()),
    ):
        with pytest.raises(
            ValueError, match=r"is of another process: the same u is another noise level on .* than on DDPM\(T=1000"
        ):
            make()


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
def test_a_process_that_is_made_twice_is_one(default):
    """Whatever torch's default is: Lightning's bf16-true sets it."""
    process, same = DDPM.linear(), DDPM.linear()
    torch.set_default_dtype(default)
    try:
        AdaptiveSampler(process, objective=Objective(same, "v"))
        Mix(process, Laplace(same))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("spec", [*ALL_SPECS, *WEIGHTINGS])
def test_a_recipe_is_made_alike_whatever_the_default_device(spec, tmp_path):
    """The classes see to it, so that it is true of samplers that are made without `noisewise.recipe` too."""
    np.save(tmp_path / "table.npy", np.linspace(0.2, 2.0, 50))
    spec, x0 = spec.replace("{table}", str(tmp_path / "table.npy")), torch.zeros(6, 3, 4, 4)
    expected = noisewise.recipe(spec, DDPM.linear())
    with torch.device("meta"):
        found = noisewise.recipe(spec, DDPM.linear())
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    first = expected.sample(x0)
    with torch.device("meta"):
        second = found.sample(x0)
    assert torch.equal(first.u, second.u)
    assert torch.equal(first.weight, second.weight)
    weights = (one.weighting.weights(one.objective, first.u) for one in (expected, found))
    assert torch.equal(*weights)


class Own(Sampler):
    def __init__(self, process):
        super().__init__(process, table=torch.linspace(1, 2, 8))


def test_a_sampler_of_ones_own_is_made_alike_too():
    with torch.device("meta"):
        found = Recipe(Own(DDPM.linear()))
    expected = Own(DDPM.linear())
    assert found.sampler.device == torch.device("cpu")
    assert torch.equal(found.sampler.sample(6).u, expected.sample(6).u)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_is_made_alike_whatever_the_default_device(name):
    u = torch.linspace(0.01, 0.99, 9)
    with torch.device("meta"):
        process = PROCESSES[name]()
        log_snr = process.log_snr(u)
    assert torch.equal(log_snr, PROCESSES[name]().log_snr(u))
    if isinstance(process, DDPM):
        with torch.device("meta"):
            again = DDPM.from_alphas_cumprod(process.alphas_cumprod)
        assert torch.equal(again.log_snr(u), log_snr)


@pytest.mark.parametrize(
    "spec", ["logit_normal:mean=nan", "logit_normal:mean=inf", "logit_normal:std=inf", "shift:of=uniform,shift=inf"]
)
def test_settings_must_be_finite(spec):
    with pytest.raises(ValueError, match="finite"):
        noisewise.recipe(spec, DDPM.linear())


def test_a_policy_that_looks_at_the_data_wants_them():
    sampler = noisewise.recipe("adaptive:estimator=reinforce,every=1", DDPM.linear()).sampler
    draw = sampler.sample(8)
    with pytest.raises(ValueError, match="draw with sample"), sampler.observe(draw, torch.ones(8), lambda rows, u: u):
        pass


def test_a_mean_in_a_list_of_losses_is_explained():
    sampler = noisewise.recipe("adaptive", DDPM.linear()).sampler
    draws = [sampler.sample(4), sampler.sample(4)]
    with (
        pytest.raises(ValueError, match="losses must be one a sample"),
        sampler.observe(draws, [torch.ones(()), torch.ones(())]),
    ):
        pass
