"""Lightning, both packages: the plain loop's numbers, accumulation, precision, skipped steps, checkpoints, errors."""

import copy
import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import noisewise
from noisewise import DDPM, Objective
from noisewise.integrations.lightning import TimestepCallback
from tests.integrations.lightning_module import module_of, trainer_of
from tests.integrations.problem import BATCHES, SPECS, assert_same_run, data, losses_of, plain, sampler_of

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers


def fit(pl, name, **settings):
    module = module_of(pl, name)
    trainer_of(pl, **settings).fit(module)
    return module


def parts(module):
    return module.timesteps.sampler, module.draws, module.network


def test_one_package_runs_the_plain_loop_bit_for_bit(pl):
    assert_same_run(*parts(fit(pl, "adaptive")), plain("adaptive"))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SPECS)
def test_the_callback_is_the_plain_loop_bit_for_bit(lightning, name, accumulate):
    """Also for samplers that measure before and after the step, and for those that need the model and the optimizer."""
    module = fit(lightning, name, accumulate_grad_batches=accumulate)
    assert module.timesteps.sampler.step == 2 * BATCHES // accumulate
    assert_same_run(*parts(module), plain(name, accumulate=accumulate))


@pytest.mark.parametrize("name", ["adaptive", "reinforce"])
def test_manual_optimisation_with_one_optimizer_is_the_same(lightning, name):
    module = module_of(lightning, name)
    module.automatic_optimization = False
    automatic = module.training_step

    def training_step(batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(automatic(batch, batch_idx))
        optimizer.step()

    module.training_step = training_step
    trainer_of(lightning).fit(module)
    assert_same_run(*parts(module), plain(name))


def test_manual_optimisation_may_step_twice_in_a_batch(lightning):
    """As if each half had been a batch of its own: the sampler's block ends when the next noise levels are drawn."""
    module = module_of(lightning, "reinforce")
    module.automatic_optimization = False
    automatic = module.training_step

    def training_step(batch, batch_idx):
        for half in (0, 1):
            optimizer = module.optimizers()
            optimizer.zero_grad()
            module.manual_backward(automatic([batch[0][8 * half : 8 * half + 8]], 2 * batch_idx + half))
            optimizer.step()

    module.training_step = training_step
    trainer_of(lightning).fit(module, DataLoader(TensorDataset(data()), batch_size=16))
    assert_same_run(*parts(module), plain("reinforce"))


@pytest.mark.parametrize("name", SPECS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(lightning, name, tmp_path):
    whole, first, second = fit(lightning, name), module_of(lightning, name), module_of(lightning, name)
    trainer = trainer_of(lightning, max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer_of(lightning).fit(second, ckpt_path=str(tmp_path / "half.ckpt"), weights_only=True)
    sampler, draws, network = parts(second)
    assert_same_run(sampler, first.draws + draws, network, parts(whole))


def test_lightnings_own_checkpoints_are_made_after_the_sampler_has_learned(pl, tmp_path):
    module = module_of(pl, "adaptive")
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer_of(pl, max_epochs=1, enable_checkpointing=True, callbacks=[keep]).fit(module)
    states = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=True) for step in (3, 6)]
    assert [int(state["callbacks"]["TimestepCallback"]["_extra_state"][0]) for state in states] == [3, 6]
    assert not any("timesteps" in key for state in states for key in state["state_dict"])


def test_a_callback_that_saves_before_ours_saves_what_was_learned(lightning):
    module, steps = module_of(lightning, "reinforce"), []

    class Saves(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            saved = module.timesteps.state_dict()["_extra_state"]
            steps.append((trainer.global_step, saved.tolist()))

    trainer_of(lightning, callbacks=[Saves()]).fit(module)
    assert steps == [(step, [step, 0, 0]) for step in range(1, 2 * BATCHES + 1)]
    assert_same_run(*parts(module), plain("reinforce"))


@pytest.mark.parametrize("when", ["before the draw", "before the losses", "before the backward pass", "last"])
def test_manual_optimisation_may_train_another_model_at_any_time(lightning, when):
    """As a discriminator: its steps neither end nor begin anything that changes the numbers."""
    module = module_of(lightning, "adaptive")
    module.automatic_optimization = False
    own, other = module.configure_optimizers(), torch.nn.Parameter(torch.zeros(1))
    module.configure_optimizers = lambda: [own, torch.optim.SGD([other], lr=1.0)]

    def training_step(batch, batch_idx):
        def train_other(now):
            if now == when:
                module.manual_backward(other.sum())
                module.optimizers()[1].step()

        module.optimizers()[0].zero_grad()
        torch.manual_seed(1000 * module.current_epoch + batch_idx)
        train_other("before the draw")
        draw = module.timesteps.sample(batch[0])
        train_other("before the losses")
        loss = module.timesteps.loss(draw, losses_of(module.network, batch[0], draw.u))
        train_other("before the backward pass")
        module.manual_backward(loss)
        module.optimizers()[0].step()
        train_other("last")
        module.draws.append(draw)

    module.training_step = training_step
    trainer_of(lightning).fit(module)
    assert float(other) < 0
    assert_same_run(*parts(module), plain("adaptive"))


def test_a_checkpoint_without_the_sampler_is_said_to_have_none(lightning, tmp_path):
    module = module_of(lightning, "adaptive")
    trainer = trainer_of(lightning, max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=True)
    del checkpoint["callbacks"]["TimestepCallback"]
    torch.save(checkpoint, tmp_path / "half.ckpt")
    with pytest.warns(RuntimeWarning, match="no state of this timestep sampler"):
        trainer_of(lightning).fit(module_of(lightning, "adaptive"), ckpt_path=str(tmp_path / "half.ckpt"), weights_only=True)


def test_probes_run_in_the_precision_of_training(lightning):
    module = module_of(lightning, "reinforce")
    kinds = []
    module.network[0].register_forward_hook(lambda part, inputs, output: kinds.append(output.dtype))
    trainer_of(lightning, precision="bf16-mixed", max_epochs=1).fit(module)
    assert set(kinds) == {torch.bfloat16}
    assert len(kinds) > BATCHES  # probes were made
    assert all(value.dtype != torch.bfloat16 for value in module.timesteps.sampler.state_dict().values())


def test_a_step_that_the_scaler_skips_does_not_count(lightning):
    """A real gradient scaler, on the CPU, meets one batch whose gradient is infinite."""
    module = module_of(lightning, "reinforce")
    honest = module.training_step

    def training_step(batch, batch_idx):
        return honest(batch, batch_idx) * (float("inf") if batch_idx == 3 else 1.0)

    module.training_step = training_step
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision = lightning.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)
    trainer_of(lightning, plugins=[precision], max_epochs=1).fit(module)
    assert scaler.get_scale() == 2.0  # halved once
    assert module.timesteps.sampler.step == BATCHES - 1
    draws = [draw.u for draw in module.draws]
    assert not any(torch.equal(a, b) for a, b in pairwise(draws))


def test_validation_leaves_no_trace(lightning):
    module = module_of(lightning, "adaptive")
    levels = []

    def validation_step(batch, batch_idx):
        draw = module.timesteps.sample(batch)
        levels.append(draw.u)
        module.timesteps.loss(draw, losses_of(module.network, batch, draw.u))

    module.validation_step = validation_step
    module.val_dataloader = lambda: DataLoader(torch.ones(16, 2), batch_size=8)
    trainer_of(lightning, accumulate_grad_batches=2, val_check_interval=3, num_sanity_val_steps=1).fit(module)
    assert len(levels) == 1 + 2 * 2 * 2
    assert_same_run(*parts(module), plain("adaptive", accumulate=2))


def test_a_recipes_weighting_is_applied_and_not_shown_to_the_sampler(lightning):
    process = DDPM.linear(100)
    objective = Objective(process)
    recipe = noisewise.recipe("adaptive+minsnr", objective)
    callback = TimestepCallback(recipe, objective)
    callback._trainer = trainer_of(lightning)
    draw, losses = callback.sample(8), torch.linspace(0.5, 1.5, 8)
    expected = (draw.weight * recipe.weighting.weights(objective, draw.u) * losses).mean()
    assert torch.equal(callback.loss(draw, losses), expected)
    with pytest.raises(ValueError, match="pass objective="):
        TimestepCallback(recipe)


def test_a_learned_weighting_must_be_trained(lightning):
    process = DDPM.linear(100)
    module = module_of(lightning, "adaptive")
    module.timesteps = TimestepCallback(noisewise.recipe("adaptive+learned", process), Objective(process))
    with pytest.raises(ValueError, match=r"self\.weighting = recipe\.weighting"):
        trainer_of(lightning).fit(module)


def test_the_callback_belongs_to_the_package_that_is_imported(pl):
    callback = TimestepCallback(sampler_of("adaptive"))
    assert isinstance(callback, pl.Callback)
    assert isinstance(callback, TimestepCallback)
    assert callback.state_key == "TimestepCallback"


@pytest.mark.slow
def test_pytorch_lightning_alone_is_enough():
    """The processes of the test below import `lightning` alone, and say so."""
    code = """if True:
        import sys, pytorch_lightning as pl
        from noisewise.integrations.lightning import TimestepCallback
        from tests.integrations.lightning_module import module_of, trainer_of
        module = module_of(pl, "adaptive")
        trainer_of(pl, max_epochs=1).fit(module)
        assert isinstance(module.timesteps, pl.Callback) and isinstance(module.timesteps, TimestepCallback)
        print(module.timesteps.sampler.step, "lightning.pytorch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent.parent, check=False)
    assert done.stdout.strip().splitlines()[-1] == f"{BATCHES} False", done.stderr


def test_a_callback_can_be_copied_and_pickled(lightning):
    callback = TimestepCallback(plain("adaptive")[0])
    callback.sampler._model = callback.sampler._optimizer = ()
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert isinstance(copied, lightning.Callback)
        assert copied.sampler is not callback.sampler
        state, expected = copied.state_dict(), callback.state_dict()
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_a_module_can_be_copied_at_any_moment_of_its_training(lightning):
    """As averaging weights does: no trainer is copied, nor the block that is open after the step."""
    module, copies = module_of(lightning, "reinforce"), []

    class Copies(lightning.Callback):
        def on_train_batch_start(self, *_):
            copies.append(copy.deepcopy(module.timesteps))

        def on_before_optimizer_step(self, *_):
            copies.append(copy.deepcopy(module.timesteps))

        on_train_batch_end = on_train_batch_start

    trainer = trainer_of(lightning, callbacks=[Copies()], max_epochs=1)
    trainer.fit(module)
    assert len(copies) == 3 * BATCHES
    assert all(copied._trainer is None and copied.sampler is not module.timesteps.sampler for copied in copies)
    assert [copied.sampler.step for copied in copies[:6]] == [0, 0, 0, 1, 1, 1]


# Mistakes -----------------------------------------------------------------------------------------------------------


def failing(lightning, training_step, match, error=RuntimeError):
    module = module_of(lightning, "adaptive")
    module.training_step = lambda batch, batch_idx: training_step(module, batch[0])
    with pytest.raises(error, match=match):
        trainer_of(lightning).fit(module)


def test_a_callback_that_nothing_is_drawn_through_says_so(lightning):
    failing(lightning, lambda module, x0: losses_of(module.network, x0, torch.rand(len(x0))).mean(), "drew nothing through it")


def test_manual_optimisation_that_draws_nothing_says_so(lightning):
    def training_step(module, x0):
        module.manual_backward(losses_of(module.network, x0, torch.rand(len(x0))).mean())
        module.optimizers().step()

    module = module_of(lightning, "adaptive")
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: training_step(module, batch[0])
    with pytest.raises(RuntimeError, match="drew nothing through it"):
        trainer_of(lightning).fit(module)


def test_a_batch_may_be_skipped_before_anything_was_drawn(lightning):
    module = module_of(lightning, "adaptive")
    honest = module.training_step
    module.training_step = lambda batch, batch_idx: honest(batch, batch_idx) if batch_idx else None
    trainer_of(lightning, max_epochs=1).fit(module)
    assert module.timesteps.sampler.step == BATCHES - 1


def test_losses_that_are_not_handed_over_are_missed(lightning):
    def training_step(module, x0):
        draw = module.timesteps.sample(x0)
        return (draw.weight * losses_of(module.network, x0, draw.u)).mean()

    failing(lightning, training_step, "handed no losses over")


def test_losses_that_are_not_handed_over_are_missed_when_accumulating(lightning):
    module = module_of(lightning, "adaptive")

    def training_step(batch, batch_idx):
        return losses_of(module.network, batch[0], module.timesteps.sample(batch[0]).u).mean()

    module.training_step = training_step
    with pytest.raises(RuntimeError, match=r"return timesteps\.loss"):
        trainer_of(lightning, accumulate_grad_batches=4).fit(module)


def test_a_scalar_loss_is_refused(lightning):
    def training_step(module, x0):
        draw = module.timesteps.sample(x0)
        return module.timesteps.loss(draw, losses_of(module.network, x0, draw.u).mean())

    failing(lightning, training_step, "mean over the batch", ValueError)


def test_the_trainer_does_not_know_the_callback(lightning):
    module = module_of(lightning, "adaptive")
    module.configure_callbacks = list
    with pytest.raises(RuntimeError, match=r"callbacks=\[timesteps\]"):
        trainer_of(lightning).fit(module)


def test_a_sampler_inside_the_module_is_refused(lightning):
    module = module_of(lightning, "adaptive")
    module.sampler = module.timesteps.sampler
    with pytest.raises(ValueError, match="keep it in the callback alone"):
        trainer_of(lightning).fit(module)


def test_a_failed_step_can_be_followed_by_another_fit(lightning):
    module = module_of(lightning, "reinforce")
    honest = module.configure_optimizers

    def configure_optimizers():
        optimizer = honest()
        optimizer.register_step_post_hook(lambda *_: module.global_step == 4 and 1 / 0)
        return optimizer

    module.configure_optimizers = configure_optimizers
    with pytest.raises(ZeroDivisionError):
        trainer_of(lightning).fit(module)
    assert module.timesteps.sampler.step == 4
    module.configure_optimizers = honest
    trainer_of(lightning, max_epochs=1).fit(module)
    assert module.timesteps.sampler.step == 4 + BATCHES


def test_batches_may_be_skipped(lightning):
    module = module_of(lightning, "adaptive")
    honest = module.training_step

    def training_step(batch, batch_idx):
        loss = honest(batch, batch_idx)
        if batch_idx % 2:
            return loss
        module.timesteps.drop()
        return None

    module.training_step = training_step
    trainer_of(lightning, max_epochs=1).fit(module)
    assert module.timesteps.sampler.step == BATCHES // 2


# Two processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ddp_processes_agree_and_resume(tmp_path):
    """Lightning starts the second process itself. gloo may abort at exit, so it is the results that count."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, str(HERE / "lightning_ranks.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    files = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), done.stderr[-6000:]
    first, second = (json.loads(file.read_text()) for file in files)
    assert [rank.pop("packages") for rank in (first, second)] == [["lightning.pytorch"]] * 2
    assert first.keys() == second.keys() == SPECS.keys()
    for name in SPECS:
        assert (first[name]["rank"], second[name]["rank"]) == (0, 1)
        assert first[name]["state"] == second[name]["state"], name
        assert first[name]["network"] == second[name]["network"], name
        assert first[name]["steps"] == second[name]["steps"] == BATCHES
        assert first[name]["draws"] != second[name]["draws"], name
        for rank in (first, second):
            assert rank[name]["resumed"] == rank[name]["state"], name
