"""What every sampler of the registry owes its users, on every process and with every correction."""

import copy
import gc
import io
import pickle
import random
import tracemalloc
import warnings
from contextlib import contextmanager, nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from scipy import stats
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import noisewise
from noisewise import DDPM, PROCESSES, SAMPLERS, Flow, Objective, Sampler
from noisewise.samplers import Window
from noisewise.samplers.correction import Correction
from tests.samplers.specs import ALL_SPECS, CORRECTIONS, LEARNERS, SPECS
from tests.samplers.toy import Toy

GRID = 8000  # a multiple of the 1,000 timesteps, so that no cell straddles two of them
FINE = (torch.arange(GRID) + 0.5) / GRID


@pytest.fixture(scope="session")
def table_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.npy"
    np.save(path, np.linspace(0.2, 2.0, 50))
    return path


@pytest.fixture
def fill(table_file):
    return lambda spec: spec.replace("{table}", str(table_file))


def make(spec, process, **settings):
    """A sampler that has trained a little, so that a learned density is not flat."""
    return Toy(spec, process, **settings).run(15 if spec in LEARNERS else 3).sampler


def test_every_sampler_of_the_registry_is_under_contract():
    assert set(SPECS) == set(SAMPLERS)
    for name, specs in SPECS.items():
        assert all(spec.startswith(name) for spec in specs)


def test_samplers_are_at_most_three_classes_deep():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    ours = [kind for kind in below(Sampler) if kind.__module__.startswith("noisewise.")]
    assert len(ours) > 15
    assert {kind.__name__ for kind in ours if kind.__mro__.index(Sampler) > 2} == set()


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("spec", ALL_SPECS)
def test_density_is_one_and_draws_follow_it(spec, process, fill):
    sampler = make(fill(spec), PROCESSES[process]())
    density = sampler.density(FINE).double()
    assert (density >= 0).all()
    assert float(density.mean()) == pytest.approx(1, abs=2e-3)
    draws = sampler.sample(20_000)
    assert draws.u.dtype == torch.float32
    assert ((draws.u > 0) & (draws.u < 1)).all()
    observed, expected = cells(draws.u, density)
    assert stats.chisquare(observed, expected).pvalue > 1e-4
    torch.testing.assert_close(draws.density, sampler.density(draws.u))
    assert torch.equal(draws.time, sampler.process.time(draws.u))


def cells(u, density, n=25):
    """Counts of draws and their expectation in cells of about equal probability."""
    cumulative = density.cumsum(0) / density.sum()
    places = (cumulative * n).floor().long()
    if density[-1] > 0:  # what is left where the sum has been rounded up to 1 is too little for a cell of its own
        places = places.clamp(max=n - 1)
    edges = torch.unique(places, return_counts=True)[1].cumsum(0)[:-1]
    observed = torch.bincount(torch.bucketize((u.double() * GRID).long(), edges, right=True), minlength=len(edges) + 1)
    expected = torch.stack([part.sum() for part in density.tensor_split(edges.tolist())])
    keep = expected > 1e-9
    assert int(observed[~keep].sum()) == 0
    expected = expected[keep] / expected[keep].sum() * len(u)
    return observed[keep].numpy(), expected.numpy()


def weight_cases():
    """Every pair of two things is met: each correction on a discrete and on a continuous process, and on each other process
    one correction, another for each sampler. What a sampler learns depends on both, the weight on its density alone.
    """
    for i, spec in enumerate(ALL_SPECS):
        for j, process in enumerate(PROCESSES):
            several = CORRECTIONS if process in ("linear", "flow") else [CORRECTIONS[(i + j) % 4]]
            yield from ((spec, process, one) for one in several)


def test_the_cases_of_weights_cover_every_pair():
    cases = list(weight_cases())
    for first, second in ((ALL_SPECS, PROCESSES), (ALL_SPECS, CORRECTIONS), (PROCESSES, CORRECTIONS)):
        assert {pair for case in cases for pair in product(case, case)} >= set(product(first, second))
    assert {PROCESSES[name]().steps is None for name in ("linear", "flow")} == {True, False}


@pytest.mark.parametrize(("spec", "process", "correction"), list(weight_cases()))
def test_weights_have_mean_one_and_unbiased_ones_recover_uniform(spec, process, correction, fill):
    sampler = make(fill(spec), PROCESSES[process](), correction=correction)
    density = sampler.density(FINE)
    weight = sampler._weight(FINE, density)
    share = (density / density.mean()).double()
    inside = (density.double() / 1e-12).clamp(max=1)  # where a density is zero no weight can make up for it
    if isinstance(sampler, Window):  # whose weights are of a training on the window alone
        inside = inside / inside.mean()
    mean = float(inside.mean()) if correction == "unbiased" else 1
    assert float((share * weight).mean()) == pytest.approx(mean, abs=5e-3)
    assert (weight >= 0).all()
    if correction == "unbiased":
        f = 1 + torch.sin(5 * FINE.double()) + 3 * FINE.double()
        assert float((share * weight * f).mean()) == pytest.approx(float((f * inside).mean()), rel=5e-3)
    draw = sampler.sample(64)
    torch.testing.assert_close(draw.weight, sampler._weight(draw.u, draw.density))
    assert 0 < float(draw.effective_sample_size()) <= 64.001


@pytest.mark.parametrize("draws", ["stratified", "antithetic"])
@pytest.mark.parametrize("spec", ["uniform", "logit_normal", "speed:tau=700,mirror=true", "mix:of=(beta:a=0.3,b=5),floor=0.2"])
def test_paired_draws_keep_the_marginal_of_every_position(spec, draws):
    sampler = noisewise.recipe(spec, DDPM.linear(), draws=draws).sampler
    batches = torch.stack([sampler.sample(7).u for _ in range(3000)])
    density = sampler.density(FINE).double()
    for position in (0, 3, 6):
        assert stats.chisquare(*cells(batches[:, position], density)).pvalue > 1e-4
    assert stats.chisquare(*cells(batches.flatten()[:9000], density)).pvalue > 1e-6


def test_stratified_draws_put_one_in_each_part():
    u = noisewise.recipe("uniform", DDPM.linear(), draws="stratified").sampler.sample(64).u
    assert torch.equal((u * 64).long().sort().values, torch.arange(64))


def test_the_adaptive_sampler_draws_in_strata_and_so_does_what_is_made_of_it():
    process = DDPM.linear()
    for spec in ("adaptive", "switch:first=uniform,then=adaptive,at=0", "curriculum:start=uniform,end=adaptive"):
        u = noisewise.recipe(spec, process).sampler.sample(64).u  # nothing is learned yet, so that u is the probability
        assert sorted((u * 64).long().tolist()) == list(range(64))
    assert noisewise.recipe("mix:of=adaptive,floor=0.5", process).sampler.draws == "stratified"
    assert noisewise.recipe("mix:of=adaptive,draws=independent", process).sampler.draws == "independent"
    for spec in ("loss_adaptive", "paper_cifar10", "mix:of=logit_normal"):
        assert noisewise.recipe(spec, process).sampler.draws == "independent"


def test_antithetic_draws_come_in_pairs():
    u = noisewise.recipe("uniform", DDPM.linear(), draws="antithetic").sampler.sample(9).u.double()
    partners = (u[:, None] + u[None, :] == 1).sum()
    assert int(partners) == 8


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_resume_is_bitwise(spec, how, fill):
    whole = Toy(fill(spec), DDPM.cosine(), seed=3).run(9)
    state = copy.deepcopy(whole.state())
    if how == "torch":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    else:
        state["sampler"] = safetensors_load(safetensors_save(state["sampler"]))
    resumed = Toy(fill(spec), DDPM.cosine(), seed=99).load(state)
    for _ in range(9):
        (first, losses), (second, again) = whole.step(), resumed.step()
        assert torch.equal(first.u, second.u)
        assert torch.equal(first.weight, second.weight)
        assert torch.equal(losses, again)
    mine, theirs = whole.sampler.state_dict(), resumed.sampler.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_the_callers_random_state_is_undisturbed(spec, fill):
    toy = Toy(fill(spec), DDPM.linear()).run(3)
    x0 = torch.zeros(16, 2)

    def loss_at(rows, u):
        return toy.objective.losses(toy.predict, x0[rows], u)

    for _ in range(6):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        draw = toy.sampler.sample(x0)
        with toy.sampler.observe(draw, torch.rand(16, generator=torch.Generator().manual_seed(1)), loss_at):
            pass
        after = torch.rand(3), random.random(), np.random.rand()
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        assert torch.equal(after[0], torch.rand(3))
        assert after[1:] == (random.random(), np.random.rand())


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_draws_are_a_function_of_seed_step_and_micro_batch(spec, fill):
    def sequence(seed):
        toy = Toy(fill(spec), DDPM.linear(), seed=seed)
        return [toy.sampler.sample(8).u for _ in range(2)] + [toy.step()[0].u, toy.sampler.sample(8).u]

    first, again, other = sequence(1), sequence(1), sequence(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[3])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("draws", ["independent", "stratified", "antithetic"])
def test_numbers_made_ahead_are_those_of_their_step(draws):
    sizes = [8] * 40 + [5, 8, 8, 8] + [5, 8] * 3  # the last batch of an epoch is smaller; then buckets
    one = noisewise.recipe(f"uniform:draws={draws}", DDPM.linear()).sampler
    for step, size in enumerate(sizes):
        other = noisewise.recipe(f"uniform:draws={draws}", DDPM.linear()).sampler
        other.step = step
        drawn = one.sample(size).u
        assert torch.equal(drawn, other.sample(size).u)
        drawn.zero_()  # it is the caller's
        one.micro = 0
        if step == 20:
            one = copy.deepcopy(one)
        again = one.sample(size).u
        other.micro = 0
        assert torch.equal(again, other.sample(size).u)
        one.advance()


def test_numbers_made_ahead_are_neither_copied_nor_taken_from_fake_tensors():
    sampler = noisewise.recipe("uniform", Flow()).sampler
    with FakeTensorMode(allow_non_fake_inputs=True):
        sampler.sample(torch.empty(2000, 3))
    before = len(pickle.dumps(sampler))
    for _ in range(3):
        sampler.advance()
        assert type(sampler.sample(torch.zeros(2000, 3)).u) is torch.Tensor
    assert len(pickle.dumps(sampler)) == before


@pytest.mark.parametrize("draws", ["independent", "stratified", "antithetic"])
@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_generator_of_the_callers_is_used(spec, draws, fill):
    sampler = make(fill(spec), DDPM.linear(), draws=draws)
    draws = [sampler.sample(16, generator=torch.Generator().manual_seed(seed)).u for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_memory_does_not_grow(spec, fill, little_garbage):
    toy = Toy(fill(spec), DDPM.linear(), batch=8).run(30)
    size = {key: value.shape for key, value in toy.sampler.state_dict().items()}
    gc.collect()
    gc.freeze()  # the first steps have imported torch's compiler
    tracemalloc.start()
    toy.run(6)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    toy.run(36)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert {key: value.shape for key, value in toy.sampler.state_dict().items()} == size
    assert grown < 12_000  # 333 bytes a step


@pytest.mark.parametrize("spec", LEARNERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_losses_that_are_not_finite_are_skipped_and_counted(spec, value, fill):
    toy = Toy(fill(spec), DDPM.linear()).run(8)
    x0 = torch.zeros(16, 2)
    for _ in range(8):
        draw = toy.sampler.sample(x0)
        losses = torch.ones(16)
        losses[::3] = value
        with toy.sampler.observe(draw, losses, lambda rows, u: toy.predict(x0[rows], u).sum(1) * value):
            pass
    state = toy.sampler.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in state.values() if tensor.is_floating_point())
    assert sum(int(value) for key, value in state.items() if key.endswith("skipped.total")) > 0
    assert torch.isfinite(toy.sampler.sample(64).weight).all()


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_data_of_any_type_and_shape(spec, dtype, fill):
    for shape in ((5,), (5, 3), (5, 7, 2), (5, 3, 8, 8), (5, 3, 64, 32), (5, 2, 4, 6, 6), (1, 4)):
        sampler = noisewise.recipe(fill(spec), DDPM.linear()).sampler
        draw = sampler.sample(torch.zeros(shape, dtype=dtype))
        assert draw.u.shape == shape[:1]
        assert draw.u.dtype == draw.weight.dtype == torch.float32


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_empty_batches_are_refused(spec, fill):
    sampler = noisewise.recipe(fill(spec), DDPM.linear()).sampler
    for nothing in (torch.zeros(0, 3), torch.zeros(()), 0):
        with pytest.raises(ValueError, match="empty batch"):
            sampler.sample(nothing)


@pytest.mark.parametrize("spec", [spec for spec in ALL_SPECS if "tau=700" not in spec])
def test_one_timestep_is_enough(spec, fill):
    toy = Toy(fill(spec), DDPM(torch.tensor([0.5])))
    draw, losses = toy.run(12).step()
    assert torch.equal(draw.time, torch.zeros(32, dtype=torch.long))
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_precision_of_the_state_survives_casts(spec, fill):
    sampler = make(fill(spec), DDPM.linear())
    before = {key: value.clone() for key, value in sampler.state_dict().items()}
    buffers = {key: value.clone() for key, value in sampler.named_buffers()}
    nn.Sequential(sampler).to(torch.bfloat16).half().double()
    after = sampler.state_dict()
    assert all(after[key].dtype == value.dtype and torch.equal(after[key], value) for key, value in before.items())
    assert all(torch.equal(value, buffers[key]) for key, value in sampler.named_buffers())


@contextmanager
def default(chosen):
    """Torch's default type or device within the block, if one is chosen."""
    kind = torch.float32 if chosen is None or isinstance(chosen, torch.device) else chosen
    torch.set_default_dtype(kind)
    try:
        with chosen if isinstance(chosen, torch.device) else nullcontext():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_and_states_do_not_depend_on_the_default_dtype(spec, dtype, fill):
    """Lightning's bf16-true sets it, and a run may go on without."""
    spec = fill(spec)
    before = noisewise.recipe(spec, DDPM.linear()).sampler
    expected = before.sample(64)
    with default(dtype):
        sampler = noisewise.recipe(spec, DDPM.linear()).sampler
        draw = sampler.sample(64)
    states = before.state_dict(), sampler.state_dict()
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []
    assert draw.u.dtype == draw.weight.dtype == torch.float32
    assert torch.equal(draw.time, expected.time)
    torch.testing.assert_close(draw.weight, expected.weight)


@pytest.mark.parametrize("spec", LEARNERS)
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64, torch.device("meta")], ids=str)
def test_learning_does_not_depend_on_the_defaults(spec, other, fill):
    """Lightning's bf16-true and 64-true set the type for the training step, where policies are made and losses are taken in."""
    learned = []
    for chosen in (None, other):
        torch.manual_seed(0)
        model, x0 = nn.Linear(1, 1), torch.randn(16, 3, 8, 8)
        sampler = noisewise.recipe(fill(spec), DDPM.linear()).sampler.attach(
            model, torch.optim.SGD(model.parameters(), lr=1e-2)
        )

        def loss_at(rows, u, model=model):
            return model(u[:, None]).squeeze(1) ** 2 + u

        with default(chosen):
            for _ in range(12):
                draw = sampler.sample(x0)
                with sampler.observe(draw, loss_at(slice(None), draw.u).detach(), loss_at):
                    pass
            learned.append(sampler.state_dict())
            sampler.load_state_dict(learned[-1])
    assert learned[0].keys() == learned[1].keys()
    assert [key for key, value in learned[0].items() if not torch.equal(value, learned[1][key])] == []


@pytest.mark.parametrize("spec", LEARNERS)
def test_gradient_accumulation_counts_as_one_step(spec, fill):
    toy = Toy(fill(spec), DDPM.linear())
    x0 = torch.zeros(8, 2)
    draws = [toy.sampler.sample(x0) for _ in range(3)]
    assert len({tuple(draw.u.tolist()) for draw in draws}) == 3
    with toy.sampler.observe(draws, [torch.rand(8) for _ in draws], lambda rows, u: toy.predict(x0[rows], u).sum(1)):
        pass
    assert toy.sampler.step == 1


@pytest.mark.parametrize("spec", LEARNERS)
def test_wrong_feedback_is_explained(spec, fill):
    toy = Toy(fill(spec), DDPM.linear()).run(8)
    draw = toy.sampler.sample(8)
    with pytest.raises(ValueError, match="one a sample"), toy.sampler.observe(draw, torch.zeros(())):
        pass
    with pytest.raises((ValueError, RuntimeError), match="observe"), toy.sampler.observe(draw):
        pass


def test_an_exception_in_the_block_passes_and_counts_no_step():
    toy = Toy("loss_adaptive", DDPM.linear())
    draw = toy.sampler.sample(8)
    with pytest.raises(KeyError), toy.sampler.observe(draw, torch.zeros(8)):
        raise KeyError
    assert toy.sampler.step == 0


@pytest.mark.parametrize("text", ["clipped", "none(3)", "clipped(0.5)", "tempered(2)", "clipped(x)", "exact", ""])
def test_wrong_corrections_are_explained(text):
    with pytest.raises(ValueError, match=r"correction|clipped|tempered"):
        Correction.parse(text)


def test_a_forgotten_observe_is_noticed():
    sampler = noisewise.recipe("adaptive", DDPM.linear()).sampler
    for _ in range(999):
        sampler.sample(2)
    with pytest.warns(RuntimeWarning, match=r"none was observed, so it cannot learn: attach its recipe"):
        sampler.sample(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in ("uniform", "adaptive"):
            sampler = noisewise.recipe(spec, DDPM.linear()).sampler
            for _ in range(1001):
                draw = sampler.sample(2)
                with sampler.observe(draw, draw.u) if spec == "adaptive" else nullcontext():
                    pass


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", ["uniform:draws=stratified", "adaptive", "logit_normal:correction=clipped(5)"])
def test_draws_do_not_depend_on_the_default_type(spec, kind):
    """Lightning's bf16-true sets it during training_step."""
    expected = noisewise.recipe(spec, Objective(DDPM.linear())).sampler.sample(16)
    sampler = noisewise.recipe(spec, Objective(DDPM.linear())).sampler
    torch.set_default_dtype(kind)
    try:
        draw = sampler.sample(16)
    finally:
        torch.set_default_dtype(torch.float32)
    for field in ("u", "weight", "density"):
        assert torch.equal(getattr(draw, field), getattr(expected, field)), field


@pytest.mark.parametrize("batch", [[torch.zeros(4, 2)], (torch.zeros(4, 2), torch.zeros(4)), {"images": torch.zeros(4, 2)}])
def test_a_batch_that_is_no_tensor_is_told_to_pick_the_data(batch):
    with pytest.raises(TypeError, match=r"x0 = batch\[0\]"):
        noisewise.recipe("adaptive", DDPM.linear()).sampler.sample(batch)


@pytest.mark.parametrize("spec", LEARNERS)
def test_draws_of_a_validation_in_inference_mode_do_not_spoil_training(spec, fill, monkeypatch):
    """Nor does a move to another device there, which is where a sampler on a GPU meets its first batch."""
    toy, moved = Toy(fill(spec), DDPM.linear()), Toy(fill(spec), DDPM.linear())
    with torch.inference_mode():
        x0 = torch.randn(8, 2)
        toy.objective.losses(toy.predict, x0, toy.sampler.sample(x0).u)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(type(moved.sampler), "device", torch.device("meta"))
            elsewhere.setattr(moved.sampler, "to", lambda device: moved.sampler._apply(torch.clone))
            moved.sampler.sample(x0)
    for one in (toy, moved):
        assert one.run(12).sampler.step == 12
