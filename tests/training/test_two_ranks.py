"""Two real processes, DDP and FSDP2: they agree on everything, and any number of processes goes on with what they saved."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from noisewise.generation.run_samples import draw_samples
from noisewise.streams import stream_key
from noisewise.training import checkpoint
from noisewise.training.components import STEP
from noisewise.training.run import Run, train
from noisewise.training.tensor_files import shard_name
from tests.torchrun import fork_ranks
from tests.training.tiny import own, tiny, trainer_of
from tests.workers.contracts import digest
from tests.workers.train import PARALLEL, SAMPLERS, main, settings, trained

WAYS = [f"{parallel}/{name}" for parallel in PARALLEL for name in SAMPLERS]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What the two ranks have said, and where."""
    out = tmp_path_factory.mktemp("ranks")
    for parallel in PARALLEL:
        train(replace(settings("adaptive", out / "one" / parallel), steps=4), draw=draw_samples)
    return *fork_ranks(main, out), out


@pytest.mark.parametrize("way", WAYS)
def test_ranks_hold_the_same_weights_averages_and_sampler(both, way):
    first, second, _ = both
    mine, theirs = first["runs"][way], second["runs"][way]
    assert mine["step"] == theirs["step"] == 8
    assert mine["parts"] == theirs["parts"]
    assert mine["row"] == theirs["row"]
    assert mine["row"]["processes"] == 2


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_are_written_once_and_whole(both, way):
    folder = both[2] / way / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000008"]
    saved = checkpoint.load(folder / "step-00000008")
    assert saved.state["processes"] == 2
    model = trainer_of(settings(Path(way).name, folder)).model
    assert {name: value.shape for name, value in saved.tensors["model"].items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert all(torch.isfinite(value).all() for part in saved.tensors.values() for value in part.values())
    assert len((both[2] / way / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("way", WAYS)
def test_one_process_goes_on_with_the_run_of_two(both, way):
    name = Path(way).name
    config = replace(settings(name, both[2] / way), steps=12)
    run = Run(config, resume=True)
    assert run.trainer.step == 8
    for _ in run.advance():
        pass
    assert run.trainer.step == 12
    assert np.isfinite(float(run.trainer.guard.norm_sum))
    run.close()


def test_each_rank_saves_its_own_rows_and_none_the_whole(both):
    place = both[2] / "fsdp" / "adaptive" / "checkpoints" / "step-00000008"
    whole = checkpoint.load(place).tensors
    for part in ("model", "ema", "optimizer"):
        index = json.loads((place / f"{part}.index.json").read_text())
        assert set(index) == set(whole[part])
        halves = [load_file(place / shard_name(part, rank, 2)) for rank in range(2)]
        for name, value in whole[part].items():
            held = [len(half[name]) if value.ndim else 0 for half in halves if name in half]
            assert max(held) <= -(-len(value) // 2) if value.ndim else held == [0]
            if value.ndim:
                assert torch.equal(torch.cat([half[name] for half in halves]), value)
    assert not list(place.glob("sampler-*"))  # alike on both: written once


@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_go_on_with_the_run_of_one(both, parallel):
    first, second, out = both
    mine, theirs = first["resumed"][parallel], second["resumed"][parallel]
    saved = checkpoint.load(out / "one" / parallel / "checkpoints" / "step-00000004").tensors
    assert mine["loaded"] == {part: digest(values[name] for name in sorted(values)) for part, values in saved.items()}
    assert (mine["began"], mine["step"]) == (4, 8)
    assert mine["parts"] == theirs["parts"]
    again = trained(replace(settings("adaptive", out / "alone" / parallel), steps=8))
    assert again["parts"]["model"] != mine["parts"]["model"]  # two ranks draw other timesteps than one


def test_sharding_does_not_change_what_is_learned(both):
    """The same draws, data and noise: DDP and FSDP2 differ by rounding alone."""
    for name in ("adaptive", "learned"):
        one, other = (
            checkpoint.load(both[2] / parallel / name / "checkpoints" / "step-00000008").tensors["model"]
            for parallel in PARALLEL
        )
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-2, atol=1e-3)


def test_the_ranks_together_see_the_batch_of_one_process(both):
    together = torch.cat([torch.tensor(result["first"]["x0"]) for result in both[:2]])
    assert torch.equal(together, trainer_of(tiny()).batches.get(0)[0])


def test_the_gradient_of_two_ranks_is_that_of_one_process_on_the_same_draws(both):
    trainer = trainer_of(tiny(model=own("Own")))
    process, losses = trainer.objective.process, []
    for rank, result in enumerate(both[:2]):
        x0, time = torch.tensor(result["first"]["x0"]), torch.tensor(result["first"]["time"])
        torch.manual_seed(stream_key(0, STEP, 0, 0, rank) >> 1)
        losses.append(trainer.objective.losses(trainer.model, x0, (time + 0.5) / process.steps, torch.randn_like(x0)))
    torch.cat(losses).mean().backward()
    for result in both[:2]:
        for expected, found in zip(trainer.model.parameters(), result["first"]["gradient"], strict=True):
            torch.testing.assert_close(torch.tensor(found), expected.grad.flatten(), rtol=1e-4, atol=1e-6)


def test_errors_reach_both_ranks(both):
    for result in both[:2]:
        assert result["processes"] == 2
        assert "a micro-batch of 5 does not divide among 2 processes" in result["odd"]
    assert "--resume" in both[0]["refused"]
    assert "another process has failed" in both[1]["refused"]
