"""Lightning, both packages: the three lines unchanged; accumulation, precision, skipped steps, checkpoints, two processes."""

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.lightning_module import module_of, trainer_of
from tests.integrations.problem import BATCH, BATCHES, SPECS, assert_same_run, data, losses_of, plain

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")  # its advice on workers


def fit(pl, name, **settings):
    module = module_of(pl, name)
    trainer_of(pl, **settings).fit(module)
    return module


def parts(module):
    return module.recipe, module.draws, module.network


def test_either_package_runs_the_plain_loop_bit_for_bit(pl):
    assert_same_run(*parts(fit(pl, "adaptive")), plain("adaptive"))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SPECS)
def test_the_module_is_the_plain_loop_bit_for_bit(lightning, name, accumulate):
    """Also for samplers that measure before and after the step: Lightning runs training_step in the optimizer's closure."""
    module = fit(lightning, name, accumulate_grad_batches=accumulate)
    assert module.recipe.sampler.step == 2 * BATCHES // accumulate
    assert_same_run(*parts(module), plain(name, accumulate=accumulate))


@pytest.mark.parametrize("name", ["adaptive", "reinforce"])
def test_manual_optimisation_is_the_same(lightning, name):
    """Attached to what self.optimizers() gives, Lightning's wrapper."""
    module = module_of(lightning, name)
    module.automatic_optimization = False
    automatic = module.training_step
    module.configure_optimizers = lambda: torch.optim.Adam(module.network.parameters(), lr=1e-2)
    module.on_train_start = lambda: module.recipe.attach(module.optimizers())

    def training_step(batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(automatic(batch, batch_idx))
        optimizer.step()

    module.training_step = training_step
    trainer_of(lightning).fit(module)
    assert_same_run(*parts(module), plain(name))


def test_manual_optimisation_may_step_twice_in_a_batch(lightning):
    """As if each half had been a batch of its own."""
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


@pytest.mark.parametrize("when", ["before the draw", "before the losses", "before the backward pass", "last"])
def test_another_model_may_be_trained_at_any_time(lightning, when):
    """As a discriminator: only the attached optimizer's steps count."""
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
        draw = module.recipe.sample(batch[0])
        train_other("before the losses")
        loss = module.recipe.loss(draw, losses_of(module.network, batch[0], draw.u))
        train_other("before the backward pass")
        module.manual_backward(loss)
        module.optimizers()[0].step()
        train_other("last")
        module.draws.append(draw)

    module.training_step = training_step
    trainer_of(lightning).fit(module)
    assert float(other) < 0
    assert_same_run(*parts(module), plain("adaptive"))


@pytest.mark.parametrize("name", SPECS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(lightning, name, tmp_path):
    whole, first, second = fit(lightning, name), module_of(lightning, name), module_of(lightning, name)
    trainer = trainer_of(lightning, max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer_of(lightning).fit(second, ckpt_path=str(tmp_path / "half.ckpt"), weights_only=True)
    recipe, draws, network = parts(second)
    assert_same_run(recipe, first.draws + draws, network, parts(whole))


def test_checkpoints_are_made_after_the_recipe_has_learned(pl, tmp_path):
    module = module_of(pl, "adaptive")
    keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer_of(pl, max_epochs=1, enable_checkpointing=True, callbacks=[keep]).fit(module)
    states = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"] for step in (3, 6)]
    assert [int(state["recipe.sampler._extra_state"][0]) for state in states] == [3, 6]


def test_a_checkpoint_from_before_the_recipe(lightning, tmp_path):
    module = module_of(lightning, "adaptive")
    trainer = trainer_of(lightning, max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    kept = torch.load(tmp_path / "half.ckpt", weights_only=True)
    kept["state_dict"] = {name: value for name, value in kept["state_dict"].items() if not name.startswith("recipe.")}
    torch.save(kept, tmp_path / "half.ckpt")
    resumed = module_of(lightning, "adaptive")
    resumed.strict_loading = False
    with pytest.warns(RuntimeWarning, match="holds no recipe.*starts anew"):
        trainer_of(lightning).fit(resumed, ckpt_path=str(tmp_path / "half.ckpt"), weights_only=True)
    assert resumed.recipe.sampler.step == BATCHES


def test_probes_run_in_the_precision_of_training(lightning):
    module = module_of(lightning, "reinforce")
    kinds = []
    module.network[0].register_forward_hook(lambda part, inputs, output: kinds.append(output.dtype))
    trainer_of(lightning, precision="bf16-mixed", max_epochs=1).fit(module)
    assert set(kinds) == {torch.bfloat16}
    assert len(kinds) > BATCHES  # probes were made
    assert all(value.dtype != torch.bfloat16 for value in module.recipe.state_dict().values())


@pytest.mark.parametrize("name", ["adaptive", "reinforce", "lookahead"])
def test_a_step_that_the_scaler_skips_does_not_count(lightning, name):
    """A real gradient scaler, on the CPU, meets one batch whose gradient is infinite."""
    module = module_of(lightning, name)
    honest = module.training_step

    def training_step(batch, batch_idx):
        return honest(batch, batch_idx) * (float("inf") if batch_idx == 3 else 1.0)

    module.training_step = training_step
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision = lightning.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)
    seen, learn = [], module.recipe.sampler.feedback
    module.recipe.sampler.feedback = lambda draw, *rest: seen.append(len(draw.u)) or learn(draw, *rest)
    trainer_of(lightning, plugins=[precision], max_epochs=1).fit(module)
    assert scaler.get_scale() == 2.0  # halved once
    assert module.recipe.sampler.step == BATCHES - 1
    assert seen == [BATCH] * (BATCHES - 1)


def test_validation_leaves_no_trace(lightning):
    module = module_of(lightning, "adaptive")
    levels = []

    def validation_step(batch, batch_idx):
        draw = module.recipe.sample(batch)
        levels.append(draw.u)
        module.recipe.loss(draw, losses_of(module.network, batch, draw.u))

    module.validation_step = validation_step
    module.val_dataloader = lambda: DataLoader(torch.ones(16, 2), batch_size=8)
    trainer_of(lightning, accumulate_grad_batches=2, val_check_interval=3, num_sanity_val_steps=1).fit(module)
    assert len(levels) == 1 + 2 * 2 * 2
    assert_same_run(*parts(module), plain("adaptive", accumulate=2))


@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize("handed_over", [True, False])
def test_a_skipped_batch_leaves_those_that_were_accumulated(lightning, skipped, handed_over):
    """training_step returns None, with or without a loss it computed."""
    module = module_of(lightning, "reinforce")
    honest, seen, learn = module.training_step, [], module.recipe.sampler.feedback
    module.recipe.sampler.feedback = lambda draw, *rest: seen.append(len(draw.u)) or learn(draw, *rest)

    def training_step(batch, batch_idx):
        if batch_idx % 4 != skipped:
            return honest(batch, batch_idx)
        batch = [batch[0][:3]]  # a probe of it would have too few rows
        if handed_over:
            honest(batch, batch_idx)
        else:
            module.recipe.sample(batch[0])
        return None

    module.training_step = training_step
    trainer_of(lightning, max_epochs=1, accumulate_grad_batches=4).fit(module)
    assert seen == [3 * BATCH] * (BATCHES // 4)


def test_a_failed_step_can_be_followed_by_another_fit(lightning):
    module = module_of(lightning, "reinforce")
    honest = module.configure_optimizers

    def configure_optimizers():
        optimizer = honest()
        optimizer.register_step_pre_hook(lambda *_: 1 / 0 if module.global_step == 4 else None)
        return optimizer

    module.configure_optimizers = configure_optimizers
    with pytest.raises(ZeroDivisionError):
        trainer_of(lightning).fit(module)
    assert module.recipe.sampler.step == 4
    module.configure_optimizers = honest
    trainer_of(lightning, max_epochs=1).fit(module)
    assert module.recipe.sampler.step == 4 + BATCHES


def test_a_module_can_be_copied_at_any_moment_of_its_training(lightning):
    """As averaging weights does: the copy is not attached."""
    module, copies = module_of(lightning, "reinforce"), []

    class Copies(lightning.Callback):
        def on_train_batch_start(self, *_):
            copies.append(copy.deepcopy(module.recipe))

        on_before_optimizer_step = on_train_batch_end = on_train_batch_start

    trainer_of(lightning, callbacks=[Copies()], max_epochs=1).fit(module)
    assert [copied.sampler.step for copied in copies[:6]] == [0, 0, 1, 1, 1, 2]
    assert "attached  no" in repr(copies[-1])


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_search_for_the_batch_size_leaves_no_trace(pl, mode, little_garbage):
    module = module_of(pl, "adaptive")
    module.batch_size, honest = 2, module.training_step
    module.train_dataloader = lambda: DataLoader(TensorDataset(data()), batch_size=module.batch_size)

    def training_step(batch, batch_idx):
        if len(batch[0]) >= 16:
            module.recipe.sample(batch[0])
            raise RuntimeError("CUDA error: out of memory.")
        return honest(batch, batch_idx)

    module.training_step = training_step
    trainer = trainer_of(pl, max_epochs=1)
    tuner = importlib.import_module(f"{pl.__name__}.tuner").Tuner(trainer)
    found = tuner.scale_batch_size(module, mode=mode, init_val=2, max_trials=6)
    assert 8 <= found < 16
    assert (module.recipe.sampler.step, module.recipe.sampler.micro) == (0, 0)
    assert float(module.recipe.sampler.estimator.running.sums.sum()) == 0


def test_a_search_for_the_learning_rate_leaves_no_trace(pl):
    module = module_of(pl, "adaptive")
    module.lr = 1e-3

    def configure_optimizers():
        optimizer = torch.optim.Adam(module.network.parameters(), lr=module.lr)
        module.recipe.attach(optimizer)
        return optimizer

    module.configure_optimizers = configure_optimizers
    finder = importlib.import_module(f"{pl.__name__}.callbacks").LearningRateFinder(num_training_steps=6)
    trainer_of(pl, max_epochs=1, callbacks=[finder]).fit(module)
    assert module.recipe.sampler.step == BATCHES


@pytest.mark.slow
def test_two_ddp_processes_agree_and_resume(tmp_path):
    """Lightning starts the second process itself. gloo may abort at exit, so it is the results that count."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, str(HERE / "lightning_ranks.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    files = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), done.stderr[-6000:]
    first, second = (json.loads(file.read_text()) for file in files)
    assert first.keys() == second.keys() == SPECS.keys()
    for name in SPECS:
        assert (first[name]["rank"], second[name]["rank"]) == (0, 1)
        assert first[name]["state"] == second[name]["state"], name
        assert first[name]["network"] == second[name]["network"], name
        assert first[name]["steps"] == second[name]["steps"] == BATCHES
        assert first[name]["draws"] != second[name]["draws"], name
        for rank in (first, second):
            assert rank[name]["resumed"] == rank[name]["state"], name
