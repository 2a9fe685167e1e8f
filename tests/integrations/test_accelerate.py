"""Accelerate: the plain loop's numbers, accumulation, skipped steps, precision, checkpoints, two processes, errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

import noisewise
from noisewise import DDPM, Draw
from noisewise.integrations.accelerate import Accelerated
from tests.integrations.problem import (
    BATCH,
    BATCHES,
    SPECS,
    accelerated_batch,
    assert_same_run,
    data,
    losses_of,
    network,
    plain,
    sampler_of,
    seed,
)
from tests.torchrun import run_ranks


@pytest.fixture(autouse=True)
def a_new_accelerator():
    """Accelerate keeps its settings for the life of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """The loop of docs/accelerate.md on the common problem."""

    def __init__(self, name, accumulate=1, **settings):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(data()), batch_size=BATCH)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.sampler = Accelerated(self.accelerator, sampler_of(name)).attach(self.model, self.optimizer)
        self.draws = []

    def epoch(self, number):
        for batch, (x0,) in enumerate(self.loader):
            seed(number, batch)
            draw = accelerated_batch(self, x0)
            self.draws.append(draw)
        return self

    def epochs(self, count):
        for number in range(count):
            self.epoch(number)
        return self


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SPECS)
def test_the_loop_is_the_plain_loop_bit_for_bit(name, accumulate):
    run = Run(name, accumulate).epochs(2)
    assert run.sampler.sampler.step == 2 * BATCHES // accumulate
    assert_same_run(run.sampler.sampler, run.draws, run.model, plain(name, accumulate=accumulate))


@pytest.mark.parametrize("name", [name for name in SPECS if name != "uniform"])
def test_learning_samplers_have_learned_in_these_tests(name):
    """Without this the comparisons would be between two uniform densities."""
    grid = (torch.arange(100) + 0.5) / 100
    sampler, draws, _ = plain(name)
    density = sampler.marginal(grid, draws[-1].x0)
    assert float(density.max() / density.min()) > 1.01


def test_accumulated_micro_batches_teach_what_one_large_batch_teaches():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCHES)
    model = accelerator.prepare(network())
    sampler = Accelerated(accelerator, sampler_of("adaptive"))
    draws, losses = [], []
    for x0 in data().split(BATCH):
        with accelerator.accumulate(model):
            draws.append(sampler.sample(x0))
            losses.append(losses_of(model, x0, draws[-1].u).detach())
            with sampler.observe(draws[-1], losses[-1]):
                pass
    large = sampler_of("adaptive")
    with large.observe(Draw.cat(draws), torch.cat(losses)):
        pass
    assert sampler.sampler.step == large.step == 1
    state, expected = sampler.sampler.state_dict(), large.state_dict()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert float(state["estimator.running.sums"][0].sum()) == BATCH * BATCHES


@pytest.mark.parametrize("name", SPECS)
def test_save_state_and_load_state_continue_bit_for_bit(name, tmp_path):
    whole = Run(name).epochs(2)
    first = Run(name).epoch(0)
    first.accelerator.save_state(str(tmp_path / "state"))
    second = Run(name)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.epoch(1)
    assert_same_run(
        second.sampler.sampler,
        first.draws + second.draws,
        second.model,
        (whole.sampler.sampler, whole.draws, whole.model),
    )


def test_loading_a_state_forgets_what_was_drawn_after_it(tmp_path):
    """As a run that is rolled back in the middle of an accumulation, perhaps between a draw and its losses."""
    run = Run("adaptive", accumulate=BATCHES)
    run.accelerator.save_state(str(tmp_path))
    x0 = data()[:BATCH]
    with run.accelerator.accumulate(run.model):
        draw = run.sampler.sample(x0)
        with run.sampler.observe(draw, losses_of(run.model, x0, draw.u)):
            run.optimizer.step()
    run.sampler.sample(x0)
    run.optimizer.zero_grad()
    run.accelerator.load_state(str(tmp_path))
    run.epoch(0)
    fresh = Run("adaptive", accumulate=BATCHES).epoch(0)
    assert_same_run(run.sampler.sampler, run.draws, run.model, (fresh.sampler.sampler, fresh.draws, fresh.model))


def test_the_last_batches_of_an_epoch_are_a_step_of_their_own():
    """Eight batches, three to a step: Accelerate steps at the end of the data, with two."""
    run = Run("adaptive", accumulate=3).epochs(2)
    assert run.sampler.sampler.step == 2 * 3
    assert run.sampler.sampler.micro == 0


def test_without_accelerate_the_import_says_what_to_install():
    code = "import sys; sys.modules['accelerate'] = None; import noisewise.integrations.accelerate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install accelerate" in done.stderr.splitlines()[-1]


def test_a_checkpoint_without_the_sampler_is_not_loaded_silently(tmp_path):
    run = Run("adaptive")
    run.accelerator._custom_objects.clear()
    run.accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(RuntimeError, match=r"Found checkpoints: 0\n.*Registered objects: 1"):
        Run("adaptive").accelerator.load_state(str(tmp_path / "state"))


def test_a_sampler_is_registered_for_checkpoints_once():
    accelerator, sampler = Accelerator(cpu=True), sampler_of("adaptive")
    accelerator.register_for_checkpointing(sampler)
    Accelerated(accelerator, sampler)
    assert accelerator._custom_objects == [sampler]


def test_a_skipped_step_does_not_count_and_teaches_nothing():
    """A real gradient scaler, on the CPU, meets a loss whose gradient is infinite."""
    run = Run("reinforce")
    run.accelerator.scaler = run.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.optimizer.__setstate__(run.optimizer.__getstate__())  # as prepare() does with a scaler
    sampler, x0 = run.sampler, data()[:BATCH]
    for step, factor in enumerate([1.0, float("inf"), 1.0]):
        before = [parameter.clone() for parameter in run.model.parameters()]
        state = {key: value.clone() for key, value in sampler.sampler.state_dict().items()}
        draw = sampler.sample(x0)
        losses = losses_of(run.model, x0, draw.u)
        run.accelerator.backward(losses.mean() * factor)
        with sampler.observe(draw, losses, lambda rows, u: losses_of(run.model, x0[rows], u)):
            run.optimizer.step()
        run.optimizer.zero_grad()
        skipped = step == 1
        assert run.accelerator.optimizer_step_was_skipped == skipped
        assert all(map(torch.equal, before, run.model.parameters())) == skipped
        assert sampler.sampler.step == [1, 1, 2][step]
        if skipped:
            after = sampler.sampler.state_dict()
            assert all(torch.equal(after[key], state[key]) for key in state if key != "_extra_state")
            assert sampler.sampler.micro == 1  # so that the next draw is another one


def test_mixed_precision_trains_in_bfloat16_and_learns_in_float32():
    kinds = []

    class Watched(Run):
        def epoch(self, number):
            inner = self.accelerator.unwrap_model(self.model)
            inner[0].register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
            return super().epoch(number)

    run = Watched("reinforce", mixed_precision="bf16").epoch(0)
    assert set(kinds) == {torch.bfloat16}  # training and probes alike
    assert all(value.dtype != torch.bfloat16 for value in run.sampler.sampler.state_dict().values())
    assert int(run.sampler.sampler.estimator.filled) == 3


@pytest.mark.slow
def test_two_processes_agree_and_resume(tmp_path):
    first, second = run_ranks(Path(__file__).parent / "accelerate_ranks.py", tmp_path)
    weightings = first.pop("learned"), second.pop("learned")
    assert weightings[0] == weightings[1], "a weighting that learns is the same on both"
    assert weightings[0][0] != weightings[0][1], "and has learned"
    assert first.keys() == second.keys() == SPECS.keys()
    for name in SPECS:
        assert first[name]["states"] == second[name]["states"], name
        assert first[name]["draws"] != second[name]["draws"], name
        assert first[name]["ranks"] == second[name]["ranks"] == 2
        for rank in (first, second):  # a run that was interrupted after half the steps
            assert rank[name]["resumed"] == rank[name]["states"][-1], name


def one_step(sampler):
    x0 = data()[:BATCH]
    draw = sampler.sample(x0)
    return draw, losses_of(network(), x0, draw.u)


@pytest.fixture
def sampler():
    return Accelerated(Accelerator(cpu=True), sampler_of("adaptive"))


def test_drawing_twice_names_the_missing_observe(sampler):
    draw, _ = one_step(sampler)
    with pytest.raises(RuntimeError, match=r"with sampler.observe\(draw, losses, loss_at\): optimizer.step\(\)"):
        sampler.sample(8)
    sampler.drop()
    assert sampler.sample(8).u.shape == draw.u.shape


def test_a_dropped_batch_leaves_those_that_were_accumulated():
    run = Run("adaptive", accumulate=2)
    seen, learn = [], run.sampler.sampler.feedback
    run.sampler.sampler.feedback = lambda draw, *rest: seen.append(len(draw.u)) or learn(draw, *rest)
    for batch, x0 in enumerate(data().split(BATCH)):
        run.sampler.sample(x0)  # of a batch that turns out to be of no use
        run.sampler.drop()
        seed(0, batch)
        accelerated_batch(run, x0)
    assert seen == [2 * BATCH] * (BATCHES // 2)


def test_observing_twice_or_without_a_draw_is_an_error(sampler):
    draw, losses = one_step(sampler)
    with sampler.observe(draw, losses):
        pass
    with pytest.raises(RuntimeError, match="without a draw"), sampler.observe(draw, losses):
        pass


def test_losses_of_another_draw_are_an_error(sampler):
    other, losses = one_step(Accelerated(Accelerator(cpu=True), sampler_of("adaptive")))
    one_step(sampler)
    with pytest.raises(ValueError, match="not the draw of the last sample"), sampler.observe(other, losses):
        pass


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda losses: losses.mean(), ValueError, "mean over the batch"),
        (lambda losses: losses[:3], ValueError, "part of this one"),
        (lambda losses: losses[:, None].expand(-1, 2), ValueError, r"flatten\(1\)"),
        (lambda losses: 0.5, TypeError, "got float"),
        (lambda losses: None, TypeError, "got NoneType"),
    ],
)
def test_losses_of_a_wrong_shape_name_the_fix(sampler, spoil, error, match):
    draw, losses = one_step(sampler)
    with pytest.raises(error, match=match), sampler.observe(draw, spoil(losses)):
        pass
    with sampler.observe(draw, losses):  # nothing was taken: the right ones still can be
        pass
    assert sampler.sampler.step == 1


def test_what_is_no_bare_sampler_is_refused():
    accelerator, recipe = Accelerator(cpu=True), noisewise.recipe("adaptive+minsnr", DDPM.linear())
    with pytest.raises(TypeError, match=r"recipe\.sampler"):
        Accelerated(accelerator, recipe)
    with pytest.raises(TypeError, match="wrapped in DataParallel"):
        Accelerated(accelerator, torch.nn.DataParallel(recipe.sampler))
    with pytest.raises(TypeError, match="got Linear"):
        Accelerated(accelerator, torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"accelerate\.Accelerator"):
        Accelerated(recipe.sampler, accelerator)
    with pytest.raises(ValueError, match=r"accelerator\.prepare"):
        Accelerated(accelerator, accelerator.prepare(recipe.sampler))
