"""The loop itself, in this process: exact resumption for every method, skipped steps, equal conditions for all samplers."""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from noisewise.looking.monitor import mean_density
from noisewise.training.checkpoint import CheckpointError
from noisewise.training.config import EMAConfig, ModelConfig, OptimizerConfig
from noisewise.training.guard import Diverged
from noisewise.training.parallel import make_accelerator
from tests.samplers.specs import ALL_SPECS, LEARNERS
from tests.training.tiny import DIT, advance, differing, own, saved, tensors, tiny, trainer_of

PLAIN = ["uniform+minsnr", "uniform+learned", "speed:k=5+change_aware", "adaptive:warmup=2,every=2+learned"]
SETTINGS = {
    **{spec: {"sampler": spec} for spec in [*ALL_SPECS, *PLAIN]},
    "flow": {"process": "flow", "prediction": "flow", "sampler": "adaptive:warmup=2,every=2"},
    "edm": {"process": "edm", "prediction": "edm", "sampler": "adaptive:warmup=2,every=2"},
    "v and Huber": {"process": "cosine", "prediction": "v", "loss": "huber"},
    "conditional": {"model": ModelConfig(name="dit", options=DIT, conditional=True, label_dropout=0.3)},
    "accumulation": {"accumulation": 4, "sampler": "adaptive:warmup=2,every=2+learned"},
    "power EMA": {"ema": EMAConfig(kind="power", std=0.1)},
    "ramped EMA": {"ema": EMAConfig(decay=0.99, ramp=True)},
    "AdamW without clipping": {"optimizer": OptimizerConfig(name="adamw", weight_decay=0.1, clip=None)},
    "dropout": {"model": own("Own", dropout=0.3)},
    "some steps skipped": {"model": own("Poisoned", low=300, high=340), "sampler": "adaptive:warmup=2,every=2"},
    "bf16": {"precision": "bf16"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.npy"
    np.save(path, np.linspace(0.2, 2.0, 50))
    return str(path)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps the precision of its first use for the whole process."""
    from accelerate.state import AcceleratorState, PartialState

    yield
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(settings, table, tmp_path):
    settings = settings | {"sampler": settings.get("sampler", "uniform").replace("{table}", table)}
    config = tiny(**settings)
    straight = trainer_of(config)
    expected = advance(straight, 12)

    first = trainer_of(config)
    rows = advance(first, 6)  # between two log points
    second = trainer_of(config)
    torch.manual_seed(123)  # no random state is part of a checkpoint
    second.load(saved(first, tmp_path))
    assert (second.step, second.samples) == (6, 96)
    rows += advance(second, 12)

    assert differing(tensors(straight), tensors(second)) == []
    assert rows == expected
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert (second.samples, second.ema.updates) == (straight.samples, straight.ema.updates) == (192, straight.ema.updates)
    assert differing(tensors(straight, "model"), tensors(first, "model")) != []


def test_another_seed_is_another_run():
    one, other = (trainer_of(tiny(seed=seed)) for seed in (0, 1))
    assert differing(tensors(one, "model"), tensors(other, "model"))
    assert not torch.equal(one.batches.get(0)[0], other.batches.get(0)[0])


def test_samplers_of_one_seed_share_initial_weights_data_and_noise():
    """x = alpha x0 + sigma noise, with alpha and sigma of the timesteps that the model saw: so noise can be worked out."""
    runs = {}
    for spec in ("uniform", "speed:k=5", "adaptive:warmup=1,every=1"):
        trainer = trainer_of(tiny(sampler=spec, model=own("Recording"), accumulation=2))
        start = tensors(trainer, "model")
        data = [trainer.batches.get(position)[0] for position in range(0, 80, 8)]
        advance(trainer, 5)
        table = trainer.objective.process
        noises = []
        seen = trainer.model.seen[1:]  # the first is the warm-up
        for x0, (x, time) in zip(data, seen, strict=True):
            alpha, sigma = (value.view(-1, 1, 1, 1) for value in table.scales((time + 0.5) / table.steps))
            noises.append((x - alpha * x0) / sigma)
        runs[spec] = (start, data, noises, [time for _, time in seen])
    start, data, noises, times = runs.pop("uniform")
    assert not torch.equal(noises[0], noises[1])
    torch.testing.assert_close(torch.cat(noises).std(), torch.tensor(1.0), atol=0.05, rtol=0)
    for other in runs.values():
        assert differing(start, other[0]) == []
        assert all(torch.equal(a, b) for a, b in zip(data, other[1], strict=True))
        for mine, theirs in zip(noises, other[2], strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=0)  # divided by a sigma of 0.01 at the least
        assert not torch.equal(torch.cat(times), torch.cat(other[3]))


def test_accumulation_sees_the_same_samples_in_the_same_order():
    whole, parts = (trainer_of(tiny(accumulation=number)) for number in (1, 4))
    together = torch.cat([parts.batches.get(16 + 4 * micro)[0] for micro in range(4)])
    assert torch.equal(whole.batches.get(16)[0], together)
    advance(whole, 3)
    advance(parts, 3)
    assert whole.samples == parts.samples == 48
    assert parts.sampler.step == whole.sampler.step == 3


def test_accumulated_gradients_are_the_mean_over_all_micro_batches():
    """Against one backward pass through the same draws and the same noise, without dropout."""
    config = tiny(accumulation=4, optimizer=OptimizerConfig(clip=None), sampler="speed:k=5+minsnr")
    trainer, reference = trainer_of(config), trainer_of(config)
    kept = []
    loss_at = trainer.loss_at

    def keeping(x0, labels):
        def losses(rows, u):
            state = torch.get_rng_state()
            kept.append((x0, u, torch.randn_like(x0)))
            torch.set_rng_state(state)
            return loss_at(x0, labels)(rows, u)

        return losses

    trainer.arithmetic.loss_at = keeping
    trainer.training_step()
    x0, u, noise = (torch.cat(values) for values in zip(*kept, strict=True))
    weight = torch.cat([reference.sampler.sample(x0[4 * i : 4 * i + 4]).weight for i in range(4)])
    losses = reference.objective.losses(reference.model, x0, u, noise)
    (weight * reference.weighting.weighted(losses, reference.objective, u)).mean().backward()
    for mine, theirs in zip(trainer.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert trainer.guard.loss_sum > 0


def test_a_step_that_is_not_finite_leaves_model_and_optimizer_as_they_were():
    trainer = trainer_of(tiny(model=own("Poisoned", low=300, high=340), steps=60, sampler="adaptive:warmup=2,every=2"))
    skipped = 0
    for _ in range(40):
        before, count = tensors(trainer, "model", "optimizer"), int(trainer.guard.skipped)
        trainer.training_step()
        after, bad = tensors(trainer, "model", "optimizer"), int(trainer.guard.skipped) - count
        if bad:
            assert differing(before, after) == []
        else:
            assert len(after) > len(before) or differing(before, after)
        skipped += bad
    assert 5 < skipped < 35  # each of 16 timesteps hits the 40 of 1000 with 4 %
    assert trainer.step == 40
    assert all(torch.isfinite(value).all() for value in tensors(trainer).values())
    rows = advance(trainer, 44)
    assert rows[-1]["skipped"] == int(trainer.guard.skipped) >= skipped


def test_a_skipped_step_puts_the_statistics_of_batch_norm_back():
    """One batch of NaN would make the running mean NaN for ever, though no weight has changed."""
    trainer = trainer_of(tiny(model=own("Normed")))
    for _ in range(3):
        trainer.training_step()
    before = tensors(trainer, "model", "optimizer")
    assert {name for name in before if "norm." in name} >= {f"model/norm.{name}" for name in ("running_mean", "running_var")}
    get = trainer.batches.get
    trainer.batches.get = lambda position: (torch.full_like(get(position)[0], torch.nan), get(position)[1])
    trainer.training_step()
    after = tensors(trainer, "model", "optimizer")
    assert int(trainer.guard.skipped) == 1
    assert differing(before, after) == []
    assert all(torch.isfinite(value).all() for value in after.values())
    assert int(after["model/norm.num_batches_tracked"]) == 3
    trainer.batches.get = get
    trainer.training_step()
    changed = [name for name, value in tensors(trainer, "model").items() if not torch.equal(value, before[name])]
    assert {"model/norm.running_mean", "model/norm.running_var", "model/norm.num_batches_tracked"} <= set(changed)


def test_one_bad_micro_batch_undoes_the_statistics_of_the_good_ones_too():
    trainer = trainer_of(tiny(model=own("Normed"), accumulation=4))
    trainer.training_step()
    before = tensors(trainer, "model")
    get = trainer.batches.get
    trainer.batches.get = lambda position: (get(position)[0] * (torch.nan if position == 16 + 8 else 1.0), get(position)[1])
    trainer.training_step()
    assert int(trainer.guard.skipped) == 1
    assert differing(before, tensors(trainer, "model")) == []


def test_the_warm_up_leaves_no_trace():
    trainer = trainer_of(tiny(model=own("Normed"), sampler="adaptive:warmup=2,every=2+learned"))
    before = tensors(trainer)
    trainer.warm_up()
    assert differing(before, tensors(trainer)) == []
    assert all(parameter.grad is None for parameter in trainer.parameters)
    assert (trainer.step, trainer.samples, trainer.seconds) == (0, 0, 0.0)


def test_the_warm_up_comes_once_before_the_first_step_and_not_when_there_is_none():
    trainer = trainer_of(tiny(model=own("Recording"), steps=2))
    calls = trainer.model.seen
    steps = trainer.run()
    next(steps)
    assert len(calls) == 2
    assert [len(x) for x, _ in calls] == [16, 16]
    list(steps)
    assert len(calls) == 3
    list(trainer.run())
    assert len(calls) == 3


def test_a_row_without_any_step_has_no_loss():
    trainer = trainer_of(tiny(model=own("Poisoned")))
    trainer.model.high = 1000
    row = advance(trainer, 4)[0]
    assert (row["loss"], row["gradient_norm"], row["skipped"]) == (None, None, 4)
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    trainer.model.high = 0
    row = advance(trainer, 8)[0]
    assert row["loss"] > 0
    assert row["gradient_norm"] > 0


@pytest.mark.parametrize("spec", LEARNERS)
def test_steps_without_any_finite_loss_do_not_disturb_the_sampler(spec):
    """Its density stays a density; where it follows losses, it stays what it was."""
    trainer = trainer_of(tiny(sampler=spec, model=own("Poisoned"), steps=40))
    for _ in range(8):
        trainer.training_step()
    before = mean_density(trainer.sampler, 20)
    trainer.model.high = 1000
    for _ in range(6):
        trainer.training_step()
    assert int(trainer.guard.skipped) == 6
    after = mean_density(trainer.sampler, 20)
    assert torch.isfinite(after).all()
    torch.testing.assert_close(after.mean(), before.mean(), rtol=0.01, atol=0)
    if "reinforce" not in spec and not spec.startswith(("paper", "switch")):  # a policy's Adam has momentum
        torch.testing.assert_close(after, before)
    trainer.model.high = 0
    count = int(trainer.guard.skipped)
    for _ in range(8):
        trainer.training_step()
    assert int(trainer.guard.skipped) == count
    assert all(torch.isfinite(value).all() for value in tensors(trainer, "sampler", "model").values())


def test_steps_that_keep_failing_raise_with_the_timesteps_and_the_last_checkpoint_goes_on(tmp_path):
    config = tiny(model=own("Poisoned"), steps=100, max_bad_steps=5)
    trainer = trainer_of(config)
    advance(trainer, 7)
    good = saved(trainer, tmp_path)
    trainer.model.high = 1000
    with pytest.raises(Diverged, match=r"5 steps in a row.*not finite at timesteps \d+, \d+.*16 of 16") as raised:
        advance(trainer, 100)
    assert trainer.step == 12
    named = {int(number) for number in re.findall(r"timesteps ([\d, ]+)", str(raised.value))[0].strip(", ").split(", ")}
    assert all(0 <= time < 1000 for time in named)
    assert len(named) > 5
    again = trainer_of(config)
    again.load(good)
    advance(again, 12)
    assert int(again.guard.skipped) == 0


@pytest.mark.parametrize("sampler", ["uniform", "adaptive", "mix:of=adaptive,floor=0.1"])
def test_how_many_steps_may_fail_is_the_same_for_every_sampler(sampler):
    trainer = trainer_of(tiny(model=own("Poisoned", high=1000), sampler=sampler, steps=300, max_bad_steps=120))
    with pytest.raises(Diverged, match="120 steps in a row"):
        advance(trainer, 300)


def test_a_model_without_a_place_for_withheld_classes_is_refused_before_the_first_step():
    model = replace(own("Classed", more=0), conditional=True, label_dropout=0.001)
    with pytest.raises(ValueError, match=r"fails with the label 10.*must take 11 labels, or --model.label_dropout 0"):
        trainer_of(tiny(model=model)).warm_up()
    for fine in (replace(model, label_dropout=0.0), replace(model, options={"more": 1})):
        advance(trainer_of(tiny(model=fine)), 12)
    other = trainer_of(tiny(model=replace(model, options={"more": 1})))
    other.model.into = torch.nn.Conv2d(7, 8, 3)
    with pytest.raises(RuntimeError, match="to have 7 channels"):  # and nothing of labels
        other.warm_up()


def test_another_device_or_precision_in_one_process_is_an_error(monkeypatch):
    make_accelerator(tiny())
    with pytest.raises(ValueError, match=r"device=cpu, precision=bf16: this process has used others before"):
        make_accelerator(tiny(precision="bf16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"device=cuda, precision=fp32: this process has used others.*a process of its own"):
        make_accelerator(tiny(device="cuda"))


def test_the_message_names_only_the_timesteps_that_failed():
    trainer = trainer_of(tiny(model=own("Poisoned", low=500, high=1000), steps=100, max_bad_steps=3))
    with pytest.raises(Diverged) as raised:
        advance(trainer, 100)
    named = re.findall(r"timesteps? ([\d, ]+)", str(raised.value))[0].strip(", ").split(", ")
    assert all(500 <= int(number) < 1000 for number in named)


def test_the_parameters_of_a_learned_weighting_train_and_are_saved(tmp_path):
    trainer = trainer_of(tiny(sampler="uniform+learned"))
    before = tensors(trainer, "weighting")
    advance(trainer, 6)
    assert differing(before, tensors(trainer, "weighting"))
    kept = saved(trainer, tmp_path)
    assert any(name.startswith("weighting.") for name in kept.tensors["optimizer"])


@pytest.mark.parametrize("part", ["model", "ema", "optimizer", "sampler", "weighting", "monitor", "guard"])
def test_a_checkpoint_without_one_of_its_parts_is_refused(part, tmp_path):
    trainer = trainer_of(tiny())
    advance(trainer, 4)
    kept = saved(trainer, tmp_path)
    assert part in kept.tensors
    del kept.tensors[part]
    with pytest.raises(CheckpointError, match=rf"step-00000004 does not fit this run: KeyError: '{part}'"):
        trainer_of(tiny()).load(kept)


def test_a_checkpoint_whose_monitor_keeps_squares_apart_is_taken(tmp_path):
    """As it was written before the limit of an outlier was one of each interval."""
    trainer, other = trainer_of(tiny()), trainer_of(tiny())
    advance(trainer, 4)
    kept = saved(trainer, tmp_path)
    monitor = kept.tensors["monitor"] = dict(kept.tensors["monitor"])
    monitor |= {"running.usual.sums": monitor["running.sums"][[2, 0]], "running.usual.counts": monitor.pop("running.beyond")}
    other.load(kept)
    assert torch.equal(other.monitor.running.sums, trainer.monitor.running.sums)
    assert other.step == 4


@pytest.mark.parametrize("key", ["step", "samples", "seconds", "ema_updates"])
@pytest.mark.parametrize("value", ["missing", None, "many"])
def test_a_checkpoint_without_one_of_its_numbers_is_refused(key, value, tmp_path):
    trainer = trainer_of(tiny())
    advance(trainer, 4)
    kept = saved(trainer, tmp_path)
    kept.state[key] = value
    if value == "missing":
        del kept.state[key]
    with pytest.raises(CheckpointError, match="step-00000004 does not fit this run: "):
        trainer_of(tiny()).load(kept)


@pytest.mark.parametrize("part", ["model", "ema", "sampler", "weighting", "monitor", "guard"])
def test_a_checkpoint_without_one_of_its_tensors_is_refused(part, tmp_path):
    config = tiny(sampler="adaptive:warmup=2,every=2+learned")
    trainer = trainer_of(config)
    advance(trainer, 4)
    kept = saved(trainer, tmp_path)
    name = next(iter(kept.tensors[part]))
    del kept.tensors[part][name]
    with pytest.raises(CheckpointError, match=re.escape(name)):
        trainer_of(config).load(kept)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trainer = trainer_of(tiny())
    advance(trainer, 4)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint's model does not fit: .* was it made by another model or version"
    ):
        trainer_of(tiny(model=own("Own"))).load(saved(trainer, tmp_path))


def test_a_budget_in_seconds_ends_the_run_with_a_row_of_metrics():
    trainer = trainer_of(tiny(seconds=1e-9, steps=1000))
    rows = [row for row in trainer.run() if row is not None]
    assert trainer.step == 1
    assert [row["step"] for row in rows] == [1]
    assert list(trainer.run()) == []


def test_the_clock_counts_steps_alone():
    trainer = trainer_of(tiny())
    advance(trainer, 3)
    seconds = trainer.seconds
    trainer.tensors()
    trainer.batches.get(0)
    assert trainer.seconds == seconds > 0


def test_a_compiled_model_trains_as_it_does_without(monkeypatch):
    """With the backend that runs the captured graph as it is; whether kernels agree is torch's business."""
    plain = trainer_of(tiny())
    advance(plain, 4)
    compiler = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **settings: compiler(self, backend="eager", **settings))
    compiled = trainer_of(tiny(compile=True))
    advance(compiled, 4)
    assert compiled.model._compiled_call_impl is not None
    for name, value in tensors(plain, "model", "ema").items():
        torch.testing.assert_close(tensors(compiled)[name], value, rtol=1e-4, atol=1e-5)


def test_the_learning_rate_of_a_row_is_the_one_of_its_last_step():
    rows = advance(trainer_of(tiny(optimizer=OptimizerConfig(lr=1.0, warmup=8))), 12)
    assert [row["lr"] for row in rows] == [0.5, 1.0, 1.0]


def test_the_loss_of_a_row_is_the_mean_since_the_row_before():
    config = tiny()
    each = [row["loss"] for row in advance(trainer_of(replace(config, log=replace(config.log, every=1))), 12)]
    rows = advance(trainer_of(config), 12)
    np.testing.assert_allclose([row["loss"] for row in rows], np.reshape(each, (3, 4)).mean(1), rtol=1e-6)


# Freed memory is kept for the next step, where the C library can

TOUCH = """
import resource, sys, torch
from noisewise.training.trainer import keep_freed_memory
asked = keep_freed_memory() if "ask" in sys.argv else None
def touch():  # 16 MiB in blocks that glibc's heap holds, freed again
    blocks = [torch.ones(2**16) for _ in range(64)]
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(asked, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str, **variables: str) -> tuple[str, int]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", TOUCH, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    asked, count = done.stdout.split()
    return asked, int(count)


def test_memory_that_is_kept_is_not_asked_for_again():
    asked, kept = faults("ask")
    if platform.libc_ver()[0] != "glibc":
        assert asked == "False"
        return
    assert asked == "True"
    # glibc moves its thresholds by what it has seen, so that what an unasked process does depends on its start: pin them
    _, unasked = faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept < unasked / 10
