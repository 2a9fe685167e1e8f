"""Real processes, really killed: whatever happens, a resumed run ends bit for bit where an uninterrupted one does."""

import os
import random
import resource
import shutil
import signal
import time
from functools import cache

import numpy as np
import pytest
from PIL import Image

from tests.training.processes import Forked, finish, last_step, metrics, start, tensors

KILLS = int(os.environ.get("NOISEWISE_KILLS", "20"))
PART = 140  # steps; runs are compared at multiples of it
FOREVER = "--steps=1000000"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run to a given step, in a process of its own."""

    @cache
    def trained(steps):
        out = tmp_path_factory.mktemp("whole") / "run"
        said = finish(start(out, f"--steps={steps}", "--checkpoint.every=7"))
        assert last_step(out) == steps, said
        return out

    return trained


def wait_for(condition, process) -> bool:
    """Whether it came true before the process ended."""
    while process.poll() is None:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


def test_a_run_killed_at_random_moments_ends_where_an_uninterrupted_one_does(uninterrupted, tmp_path):
    rng, out = random.Random(0), tmp_path / "run"
    kills = []
    while len(kills) < KILLS:
        process = Forked(out, FOREVER, "--checkpoint.every=7", "--resume")
        # a third die while starting; the others somewhere in the next steps, where a third of the time is spent on checkpoints
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.4))
        else:
            before = last_step(out)
            target = before + rng.choice([1, 7, 14, 28])
            wait_for(lambda target=target: last_step(out) >= target, process)
            time.sleep(rng.uniform(0, 0.05))
        assert process.poll() is None, f"it ended before it was killed: {process.communicate()[0]}"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills.append(last_step(out))
    end = beyond(kills[-1])
    assert end > PART
    said = finish(Forked(out, f"--steps={end}", "--checkpoint.every=7", "--resume"))
    assert tensors(out, end) == tensors(uninterrupted(end), end), said
    assert metrics(out) == metrics(uninterrupted(end))
    assert not list((out / "checkpoints").glob("writing-*"))


def beyond(step):
    """Where to compare a run that stopped at a step."""
    return (step // PART + 1) * PART


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_ends_cleanly(number, uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = start(out, FOREVER, "--checkpoint.every=100000")
    assert wait_for((out / "metrics.jsonl").exists, process)
    process.send_signal(number)
    said = finish(process)
    assert process.returncode == 0, said
    assert signal.Signals(number).name in said
    assert "--resume" in said
    stopped = last_step(out)
    assert stopped > 0
    assert metrics(out)[-1]["step"] <= stopped
    end = beyond(stopped)
    finish(Forked(out, f"--steps={end}", "--checkpoint.every=100000", "--resume"))
    assert tensors(out, end) == tensors(uninterrupted(end), end)


def test_a_signal_to_all_processes_of_a_run_leaves_its_readers_alone(tmp_path):
    """As timeout, systemd and Slurm send it; a reader that dies would take the run with it, before it has saved."""
    for number in range(24):
        values = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(values).save(tmp_path / f"{number}.png")
    out, data = tmp_path / "run", ["--data.source=folder", f"--data.path={tmp_path}", "--data.workers=2"]
    shape = ["--data.options={channels: 1}", "--data.shape=null", "--data.classes=null", "--data.resident=false"]
    process = start(out, *data, *shape, "--steps=1000000", "--checkpoint.every=1000000", start_new_session=True)
    assert wait_for((out / "metrics.jsonl").exists, process)
    os.killpg(process.pid, signal.SIGTERM)
    said = finish(process)
    assert process.returncode == 0, said
    assert "SIGTERM: saved at step" in said
    assert last_step(out) > 0


def test_a_full_disk_ends_in_a_clear_error_with_the_last_good_checkpoint_intact(uninterrupted, tmp_path):
    out = tmp_path / "run"
    finish(Forked(out, "--steps=70", "--checkpoint.every=7"))
    sizes = {path.name: path.stat().st_size for path in (out / "checkpoints" / "step-00000070").iterdir()}

    def small_files_only():
        # the kernel refuses to write beyond this size, as it would on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes["model.safetensors"] // 2,) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    process = start(out, FOREVER, "--checkpoint.every=7", "--resume", preexec_fn=small_files_only)
    said = finish(process)
    assert process.returncode != 0
    assert "could not be written" in said
    assert "step-00000070" in said
    assert "--resume" in said
    assert last_step(out) == 70
    finish(Forked(out, f"--steps={PART}", "--checkpoint.every=7", "--resume"))
    assert tensors(out, PART) == tensors(uninterrupted(PART), PART)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(uninterrupted, tmp_path):
    out = tmp_path / "run"
    finish(Forked(out, "--steps=70", "--checkpoint.every=35"))
    victim = out / "checkpoints" / "step-00000070" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    said = finish(Forked(out, f"--steps={PART}", "--checkpoint.every=7", "--resume"))
    assert "model.safetensors is not what was written" in said
    assert "at step 35" in said
    assert tensors(out, PART) == tensors(uninterrupted(PART), PART)
    assert metrics(out) == metrics(uninterrupted(PART))


TWO = ["--steps=120", "--checkpoint.every=10"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "run"
    said = finish(start(out, *TWO, ranks=2))
    assert last_step(out) == 120, said
    return out


def test_two_ranks_one_killed_then_resumed(two_ranks, tmp_path):
    out = tmp_path / "run"
    process = start(out, *TWO, "--resume", ranks=2)
    assert wait_for(lambda: last_step(out) >= 40, process)
    children = workers_of(process.pid)
    assert len(children) == 2
    os.kill(children[1], signal.SIGKILL)
    finish(process)
    assert process.returncode != 0
    stopped = last_step(out)
    assert 40 <= stopped < 120
    finish(start(out, *TWO, "--resume", ranks=2))
    assert tensors(out, 120) == tensors(two_ranks, 120)
    assert metrics(out) == metrics(two_ranks)


def test_the_number_of_processes_may_change(two_ranks, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(two_ranks, out)
    said = finish(Forked(out, "--steps=180", "--checkpoint.every=30", "--resume"))
    assert "1 processes instead of 2" in said
    assert last_step(out) == 180
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(10, 190, 10))
    assert rows[-1]["samples"] == 180 * 16
    assert rows[-1]["loss"] < rows[0]["loss"]


def workers_of(pid: int) -> list[int]:
    """The children that torchrun has started, in order of rank."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{entry}/environ") as file:
                    variables = dict(part.partition("=")[::2] for part in file.read().split("\0"))
            except OSError:
                continue
            if parent == pid:
                found.append((int(variables.get("RANK", "-1")), int(entry)))
    return [process for _, process in sorted(found)]
