"""Accelerate: the plain loop's numbers, accumulation, skipped steps, precision, checkpoints, two processes, errors."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

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
    recipe_of,
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

    def __init__(self, name, accumulate=1, attach_first=False, **settings):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)
        model, self.recipe = network(), recipe_of(name)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(data()), batch_size=BATCH)
        if attach_first:
            self.recipe.attach(optimizer, model)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if not attach_first:
            self.recipe.attach(self.optimizer, self.model)
        self.accelerator.register_for_checkpointing(self.recipe)
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

    def parts(self):
        return self.recipe, self.draws, self.model


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SPECS)
def test_the_loop_is_the_plain_loop_bit_for_bit(name, accumulate):
    run = Run(name, accumulate).epochs(2)
    assert run.recipe.sampler.step == 2 * BATCHES // accumulate
    assert_same_run(*run.parts(), plain(name, accumulate=accumulate))


def test_the_optimizer_may_be_attached_before_it_is_prepared():
    assert_same_run(*Run("adaptive", 2, attach_first=True).epochs(2).parts(), plain("adaptive", accumulate=2))


@pytest.mark.parametrize("name", [name for name in SPECS if name != "uniform"])
def test_learning_samplers_have_learned_in_these_tests(name):
    """Without this the comparisons would be between two uniform densities."""
    grid = (torch.arange(100) + 0.5) / 100
    recipe, draws, _ = plain(name)
    density = recipe.sampler.marginal(grid, draws[-1].x0)
    assert float(density.max() / density.min()) > 1.01


@pytest.mark.parametrize("name", SPECS)
def test_save_state_and_load_state_continue_bit_for_bit(name, tmp_path):
    whole = Run(name).epochs(2)
    first = Run(name).epoch(0)
    first.accelerator.save_state(str(tmp_path / "state"))
    second = Run(name)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.epoch(1)
    assert_same_run(second.recipe, first.draws + second.draws, second.model, whole.parts())


def test_loading_a_state_forgets_what_was_drawn_after_it(tmp_path):
    """As a run that is rolled back in the middle of an accumulation, perhaps between a draw and its losses."""
    run = Run("adaptive", accumulate=BATCHES)
    run.accelerator.save_state(str(tmp_path))
    accelerated_batch(run, data()[:BATCH])
    run.recipe.sample(data()[:BATCH])
    run.optimizer.optimizer.zero_grad()
    run.accelerator.load_state(str(tmp_path))
    run.epoch(0)
    assert_same_run(*run.parts(), Run("adaptive", accumulate=BATCHES).epoch(0).parts())


def test_the_last_batches_of_an_epoch_are_a_step_of_their_own():
    """Eight batches, three to a step: Accelerate steps at the end of the data, with two."""
    run = Run("adaptive", accumulate=3).epochs(2)
    assert run.recipe.sampler.step == 2 * 3
    assert run.recipe.sampler.micro == 0


def test_a_checkpoint_without_the_recipe_is_not_loaded_silently(tmp_path):
    run = Run("adaptive")
    run.accelerator._custom_objects.clear()
    run.accelerator.save_state(str(tmp_path / "state"))
    with pytest.raises(RuntimeError, match=r"Found checkpoints: 0\n.*Registered objects: 1"):
        Run("adaptive").accelerator.load_state(str(tmp_path / "state"))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", [name for name in SPECS if name != "uniform"])
def test_a_skipped_step_does_not_count_and_teaches_nothing(name, accumulate):
    """A real gradient scaler, on the CPU, meets losses whose gradients are infinite."""
    run = Run(name, accumulate)
    run.accelerator.scaler = run.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.optimizer.__setstate__(run.optimizer.__getstate__())  # as prepare() does with a scaler
    x0 = data()[:BATCH]

    def loss_at(rows, u):
        return losses_of(run.model, x0[rows], u)

    steps = []
    for step, factor in enumerate([1.0, torch.inf, 1.0, torch.inf, torch.inf, 1.0]):
        before, learned = [one.clone() for one in run.model.parameters()], state_of(run.recipe)
        for micro in range(accumulate):
            seed(step, micro)
            with run.accelerator.accumulate(run.model):
                draw = run.recipe.sample(x0)
                loss = run.recipe.loss(draw, loss_at(slice(None), draw.u), loss_at)
                run.accelerator.backward(loss * factor)
                run.optimizer.step()
                run.optimizer.zero_grad()
        assert run.accelerator.optimizer_step_was_skipped == (factor == torch.inf)
        assert all(map(torch.equal, before, run.model.parameters())) == (factor == torch.inf)
        steps.append(run.recipe.sampler.step)
        if factor == torch.inf:
            after = state_of(run.recipe)
            assert all(torch.equal(after[key], learned[key]) for key in learned if key != "sampler._extra_state")
    assert steps == [1, 1, 2, 2, 2, 3]


def state_of(recipe):
    return {key: value.clone() for key, value in recipe.state_dict().items()}


def test_mixed_precision_trains_in_bfloat16_and_learns_in_float32():
    kinds = []

    class Watched(Run):
        def epoch(self, number):
            inner = self.accelerator.unwrap_model(self.model)
            inner[0].register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
            return super().epoch(number)

    run = Watched("reinforce", mixed_precision="bf16").epoch(0)
    assert set(kinds) == {torch.bfloat16}  # training and probes alike
    assert all(value.dtype != torch.bfloat16 for value in run.recipe.state_dict().values())
    assert int(run.recipe.sampler.estimator.filled) == 3


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


def test_an_optimizer_that_steps_elsewhere_is_refused():
    """As Accelerate wraps DeepSpeed's, which is none of torch's."""

    class Engine:
        param_groups, state_dict = (), dict

    Accelerator(cpu=True)
    wrapped = AcceleratedOptimizer(Engine(), device_placement=False)
    with pytest.raises(TypeError, match="AcceleratedOptimizer has no step hooks"):
        recipe_of("adaptive").attach(wrapped)
