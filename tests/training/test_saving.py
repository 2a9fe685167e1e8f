"""Saves in the background: what is written is the state of its own step, whatever training does meanwhile."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from noisewise.training import checkpoint
from noisewise.training.checkpoint import CheckpointError
from noisewise.training.config import CheckpointConfig
from noisewise.training.guard import Diverged
from noisewise.training.run import Run, train
from noisewise.training.saving import Saver
from noisewise.training.tensor_files import StoredPart, write_tensors
from tests.training.processes import ROOT
from tests.training.tiny import own, tiny

PATIENCE = 60  # seconds; only ends a test that would hang


def settings(out, **changes):
    return tiny(out=str(out), sampler="adaptive:warmup=2,every=2", checkpoint=CheckpointConfig(every=4, keep=9), **changes)


def content(folder, step):
    """What a checkpoint holds, by file, without what depends on the clock."""
    place = folder / "checkpoints" / checkpoint.name_of(step)
    return {path.name: path.read_bytes() for path in place.glob("*.safetensors")}


def through(run, look):
    """Train to the end; `look` is called after each step."""
    for step in run.advance():
        look(step)


@pytest.fixture
def held(monkeypatch):
    """Saves that wait until they are let go."""
    gate, real = threading.Event(), checkpoint.save

    def save(*arguments, **more):
        assert gate.wait(PATIENCE)
        return real(*arguments, **more)

    monkeypatch.setattr(checkpoint, "save", save)
    yield gate
    gate.set()


def test_training_goes_on_meanwhile_and_what_is_saved_is_the_state_of_its_step(tmp_path, held):
    run, made = Run(settings(tmp_path / "run")), []
    for step in run.advance():
        made.append(step)
        if step == 7:
            assert checkpoint.steps_in(run.folder.checkpoints) == []  # that of step 4 is still being written
            held.set()  # or the next save, which waits for it, would wait for ever
    run.close()
    assert made == list(range(1, 13))
    straight = train(settings(tmp_path / "straight"))
    for step in (4, 8, 12):
        assert content(tmp_path / "run", step) == content(straight, step)


def test_a_save_that_fails_is_told_at_the_next_step(tmp_path, monkeypatch):
    real, failing = checkpoint.save, threading.Event()

    def save(folder, step, *arguments):
        if step == 8:
            failing.set()
            raise CheckpointError("no room for step 8")
        return real(folder, step, *arguments)

    monkeypatch.setattr(checkpoint, "save", save)
    run, made = Run(settings(tmp_path / "run")), []

    def look(step):
        made.append(step)
        if step == 8:
            assert failing.wait(PATIENCE)
            run._saver._thread.join()

    with pytest.raises(CheckpointError, match="no room for step 8"):
        through(run, look)
    run.close()
    assert made[-1] == 8
    assert checkpoint.steps_in(run.folder.checkpoints) == [4]


@pytest.mark.parametrize("how", ["stop", "end", "exception", "divergence"])
def test_every_end_waits_for_the_save_under_way(how, tmp_path, held):
    """Let go by a timer, so that whoever does not wait finds nothing."""
    config = settings(tmp_path / "run")
    if how == "divergence":
        config = replace(config, model=own("Poisoned"), max_bad_steps=3)
    run = Run(config)
    threading.Timer(0.3, held.set).start()
    if how == "divergence":
        with pytest.raises(Diverged):
            through(run, lambda step: setattr(run.trainer.model, "high", 10_000 * (step >= 4)))
    else:
        for step in run.advance():
            if step == (12 if how == "end" else 5):
                break
    run.close()
    assert 4 in checkpoint.steps_in(run.folder.checkpoints) or how == "divergence"
    assert checkpoint.load(run.folder.checkpoints / checkpoint.name_of(4)).step == 4
    assert not list(run.folder.checkpoints.glob("writing-*"))


def test_nothing_is_removed_while_a_save_is_under_way(tmp_path, held):
    config = replace(settings(tmp_path / "run"), checkpoint=CheckpointConfig(every=4, keep=1))
    run = Run(config)
    for step in run.advance():
        if step == 4:
            held.set()
            run.settle(wait=True)
            held.clear()
        if step in (9, 11):  # that of step 8 is being written
            assert checkpoint.steps_in(run.folder.checkpoints) == [4]
        if step == 11:
            held.set()
    run.close()
    assert checkpoint.steps_in(run.folder.checkpoints) == [12]


def test_memory_is_used_again(tmp_path):
    saver, value, seen = Saver(), torch.arange(6.0).view(2, 3).t(), []
    for number in range(2):
        saver.begin({"part": {"x": value + number}}, lambda copies: seen.append(copies["part"]["x"]))
        saver.result()
    assert seen[0].data_ptr() == seen[1].data_ptr()
    assert torch.equal(seen[1], value + 1)


KILLED = """
import os, signal, sys
from pathlib import Path
from dataclasses import replace
from noisewise.training import checkpoint, tensor_files
from noisewise.training.run import train
from tests.training.test_saving import settings
real, writes = checkpoint.write_tensors, []
def killing(path, values):
    found = real(path, values)
    writes.append(path)
    if "step-00000008" in path.parent.name and len([one for one in writes if one.parent == path.parent]) == 3:
        os.kill(os.getpid(), signal.SIGKILL)  # half of the files are there
    return found
checkpoint.write_tensors = killing
train(settings(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_background_save_costs_that_save_alone(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], env=environment, check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    place = tmp_path / "run" / "checkpoints"
    assert checkpoint.steps_in(place) == [4]
    assert [path.name.startswith("writing-step-00000008") for path in place.glob("writing-*")] == [True]
    folder = train(settings(tmp_path / "run"), resume=True)
    straight = train(settings(tmp_path / "straight"))
    for step in (8, 12):
        assert content(folder, step) == content(straight, step)
    assert not list(place.glob("writing-*"))


# Rows of tensors


def test_any_rows_come_back_from_any_shards(tmp_path):
    whole = torch.arange(22.0).view(11, 2)
    cuts = [(0, 4), (4, 8), (8, 11)]
    files = [f"part-{rank:05d}-of-00003.safetensors" for rank in range(3)]
    for file, (start, stop) in zip(files, cuts, strict=True):
        write_tensors(tmp_path / file, {"x": whole[start:stop]})
    write_tensors(tmp_path / "plain.safetensors", {"x": whole})
    index = {"x": [(file, *cut) for file, cut in zip(files, cuts, strict=True)]}
    for part in (StoredPart(tmp_path, files, index), StoredPart(tmp_path, ["plain.safetensors"])):
        assert torch.equal(part["x"], whole)
        assert part.shape("x") == (11, 2)
        for first, last in [(0, 11), (3, 9), (4, 8), (8, 11), (5, 5), (11, 11), (10, 11), (0, 1)]:
            assert torch.equal(part.rows("x", first, last), whole[first:last])


def test_a_shard_with_fewer_rows_than_its_index_says_is_refused(tmp_path):
    write_tensors(tmp_path / "0", {"x": torch.ones(4, 2)})
    write_tensors(tmp_path / "1", {"x": torch.ones(1, 2)})
    part = StoredPart(tmp_path, ["0", "1"], {"x": [("0", 0, 4), ("1", 4, 8)]})
    assert len(part.rows("x", 0, 5)) == 5
    for read in (lambda: part["x"], lambda: part.rows("x", 4, 8), lambda: part.rows("x", 5, 7)):
        with pytest.raises(ValueError, match="does not fit"):
            read()


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{}",
        '{"x": []}',
        '{"x": [["../x", 0, 2]]}',
        '{"x": [["part-0.safetensors", 1, 2]]}',
        '{"y": [["part-0.safetensors", 0, 2]]}',
    ],
)
def test_a_hostile_index_is_refused(index, tmp_path):
    path = checkpoint.save(tmp_path, 3, {"part-0": {"x": torch.ones(2)}}, {"step": 3})
    (path / "part.index.json").write_text(index)
    manifest = json.loads((path / "manifest.json").read_text())
    digest = hashlib.sha256(index.encode()).hexdigest()
    manifest["files"]["part.index.json"] = {"bytes": len(index), "sha256": digest}
    (path / "manifest.json").write_text(json.dumps(manifest))
    if index == "{}":  # of no tensors at all
        assert checkpoint.load(path).tensors["part"] == {}
        return
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
