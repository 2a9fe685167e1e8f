"""The trainer on a GPU: precisions, skipped steps, compilation, resuming."""

import math

import pytest
import torch
from torch import nn

from noisewise.training import checkpoint
from noisewise.training.components import build_parts
from noisewise.training.options import load_preset
from noisewise.training.parallel import make_accelerator
from noisewise.training.run import dry_run
from noisewise.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DIT = ["--model.name=dit", '--model.options={"patch": 2, "width": 32, "depth": 2, "heads": 2}']
TINY = ["--batch=32", *DIT, "--log.trackers=[]", "--device=cuda", "--fast=never"]  # the fast path: test_fast_cuda.py


def trainer(*options: str, model: nn.Module | None = None) -> Trainer:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # another precision may follow in the same process
    config = load_preset("digits", *TINY, *options)
    parts = build_parts(config)
    if model is not None:
        parts = type(parts)(parts.objective, parts.source, model, parts.classes)
    return Trainer(config, parts, make_accelerator(config))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_learns_in_every_precision(precision):
    made = trainer(f"--precision={precision}", "--steps=200", "--log.every=50")
    rows = [row for row in made.run() if row]
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert all(parameter.dtype == torch.float32 for parameter in made.model.parameters())


class SometimesNaN(nn.Module):
    """Predicts well enough, but NaN where the flag is up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("broken", torch.zeros(()))

    def forward(self, x, time):
        return x * self.scale + torch.where(self.broken > 0, math.nan, 0.0)


def test_a_bad_step_changes_nothing_and_is_counted_without_waiting_for_the_device():
    model = SometimesNaN()
    made = trainer("--steps=100", "--sampler=uniform", "--precision=fp32", model=model)
    made.training_step()
    made.training_step()
    before = {name: value.clone() for name, value in made.tensors()["optimizer"].items()}
    weight = model.scale.detach().clone()
    model.broken.fill_(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.training_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(made.guard.skipped) == 1
    assert torch.equal(model.scale, weight)
    after = made.tensors()["optimizer"]
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    model.broken.fill_(0)
    made.training_step()
    assert not torch.equal(model.scale, weight)
    assert int(made.guard.run) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resuming_continues_where_it_stopped(tmp_path, precision):
    """Up to the order in which a GPU adds: the same losses to a few digits, the same counts exactly."""
    options = [f"--precision={precision}", "--steps=40", "--log.every=10", "--sampler=adaptive:warmup=5,every=5"]
    whole = trainer(*options)
    rows = [row for row in whole.run() if row]
    first = trainer(*options)
    for row in first.run():
        if row and row["step"] == 20:
            break
    path = checkpoint.save(tmp_path, first.step, first.tensors(), first.state())
    second = trainer(*options)
    second.load(checkpoint.load(path))
    again = [row for row in second.run() if row]
    assert [row["step"] for row in again] == [30, 40]
    for mine, theirs in zip(again, rows[2:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
        assert mine["samples"] == theirs["samples"]
    assert second.sampler.step == whole.sampler.step == 40


def test_a_compiled_model_trains_and_its_checkpoint_has_plain_names():
    made = trainer("--steps=20", "--log.every=10", "--compile=true", "--sampler=uniform")
    made.warm_up()
    assert made.seconds == 0  # compilation is off the clock
    rows = [row for row in made.run() if row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert not any("_orig_mod" in name for part in made.tensors().values() for name in part)


def test_a_dry_run_reports_the_memory_of_the_gpu():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    report = dry_run(load_preset("digits", *TINY))
    assert report["device"].startswith("cuda")
    assert 0 < report["memory_gib"] < 10
