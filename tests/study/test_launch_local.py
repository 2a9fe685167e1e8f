"""Runs as processes of this machine: they take turns, keep to their limits, and die without taking others along."""

import os
import signal
import threading
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from noisewise.study.job import Status
from noisewise.study.launch.local import Local, Share, Worker, cause_of_death, gpu_of, groups, size_in_bytes, take_turns
from noisewise.study.outcome import read_outcome
from noisewise.study.worker import work
from noisewise.training.components import build_parts
from noisewise.training.config import DataConfig, LogConfig
from noisewise.training.signals import StopRequest
from tests.study.fateful import FATES, SEEDS, fateful, jobs_in
from tests.training.processes import last_step, metrics, until
from tests.training.test_run import final
from tests.training.tiny import differing

ONE = Share(threads=1)
LONG = {"budget": "100000it", "log": LogConfig(every=10, trackers=[], sample_steps=4)}  # for runs that are to be interrupted


def pictures(job):
    """When each evaluation was made, by its place."""
    return [path.stat().st_mtime_ns for path in sorted((job.folder / "samples").iterdir())]


def test_runs_advance_together_and_are_what_they_are_alone(tmp_path):
    jobs = jobs_in(tmp_path / "turns", ["uniform", "adaptive:warmup=2,every=2"])
    Local(turns=2).launch(jobs, StopRequest())
    assert [read_outcome(job.folder).status for job in jobs] == ["finished", "finished"]
    first, second = map(pictures, jobs)
    assert first[0] < second[0] < first[1] < second[1] < first[2] < second[2] < first[3] < second[3]
    alone = jobs_in(tmp_path / "alone", ["uniform", "adaptive:warmup=2,every=2"])
    Local(turns=1).launch(alone, StopRequest())
    assert pictures(alone[0])[-1] < pictures(alone[1])[0]
    for one, other in zip(jobs, alone, strict=True):
        assert differing(final(one.folder), final(other.folder)) == []
        assert metrics(one.folder) == metrics(other.folder)


def test_a_worker_moves_only_when_it_has_its_turn(tmp_path):
    stop, jobs = StopRequest(), jobs_in(tmp_path, ["uniform", "minsnr"], budget="40it", shares=(1.0,))
    workers = [Worker(job, ONE) for job in jobs]
    for worker in workers:
        worker.listen(stop)
    workers[0].advance(0.5, stop)
    workers[1].advance(0.25, stop)
    assert [Status.read(job.folder).step for job in jobs] == [20, 10]
    assert {Status.read(job.folder).state for job in jobs} == {"waiting"}
    for worker in workers:
        worker.end(stop)
    assert [last_step(job.folder) for job in jobs] == [20, 10]  # saved although nobody asked for a checkpoint
    assert [Status.read(job.folder) for job in jobs] == [None, None]


def test_failures_stay_alone_and_are_tried_again(tmp_path):
    """One seed is well, one wants more memory than it may have, one has losses that are not finite; then there is a cure."""
    cure = tmp_path / "cure"
    jobs = jobs_in(tmp_path, seeds=3, seed=SEEDS["healthy"], model=fateful(cure), max_bad_steps=2, shares=(0.5, 1.0))
    launcher = Local(turns=1, jobs=2, memory=3 << 30)
    launcher.launch(jobs, StopRequest())
    healthy, hungry, poisoned = (read_outcome(job.folder) for job in jobs)
    assert healthy.status == "finished"
    assert hungry.status == poisoned.status == "failed"
    assert "out of memory" in hungry.failure.message
    assert "not finite" in poisoned.failure.message
    assert (poisoned.failure.step, "Diverged" in poisoned.failure.log) == (2, True)
    cure.touch()
    launcher.launch([job for job in jobs if job.folder != healthy.folder], StopRequest())
    assert {read_outcome(job.folder).status for job in jobs} == {"finished"}


def test_each_fate_has_its_seed():
    for fate in FATES:
        (job,) = jobs_in(Path("nowhere"), model=fateful(Path("nowhere")), seed=SEEDS[fate])
        assert build_parts(job.config).model.fate == fate


def test_a_limit_below_what_a_process_begins_with_is_explained(tmp_path):
    (job,) = jobs_in(tmp_path)
    Local(memory=size_in_bytes("50MB")).launch([job], StopRequest())
    assert "--memory is 48 MiB, but a process needs" in read_outcome(job.folder).failure.message


def test_a_killed_worker_is_a_failure_the_others_finish_and_it_goes_on_later(tmp_path):
    jobs = jobs_in(tmp_path, ["uniform", "minsnr"], budget="200it", shares=(0.5, 1.0), log=LONG["log"])
    stop, killed = StopRequest(), []

    def kill():
        until(
            lambda: len(read_outcome(jobs[0].folder).evaluations) == 1 if (jobs[0].folder / "metrics.jsonl").exists() else False
        )
        killed.append(worker_of(jobs[0]))
        os.kill(killed[0], signal.SIGKILL)

    watching = threading.Thread(target=kill)
    watching.start()
    take_turns(jobs, ONE, stop)
    watching.join()
    first, second = (read_outcome(job.folder) for job in jobs)
    assert (first.status, second.status) == ("failed", "finished")
    assert "killed by SIGKILL" in first.failure.message
    Local().launch(jobs[:1], stop)
    straight = jobs_in(tmp_path / "straight", budget="200it", shares=(0.5, 1.0), log=LONG["log"])
    work(straight[0])
    assert differing(final(jobs[0].folder, 200), final(straight[0].folder, 200)) == []
    assert metrics(jobs[0].folder) == metrics(straight[0].folder)


def worker_of(job):
    """The process that holds the lock of a run's folder."""
    inode = (job.folder / ".lock").stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return next(int(words[4]) for words in locks if words[1] == "FLOCK" and words[5].endswith(f":{inode}"))


def test_a_worker_told_to_stop_by_someone_else_saves_and_says_so(tmp_path):
    (job,) = jobs_in(tmp_path, **LONG)
    worker, stop = Worker(job, ONE), StopRequest()
    worker.listen(stop)
    turn = threading.Thread(target=worker.advance, args=(0.9, stop))
    turn.start()
    until((job.folder / "metrics.jsonl").exists)
    os.kill(worker.process.pid, signal.SIGTERM)
    turn.join()
    assert worker.ended
    assert last_step(job.folder) > 0
    assert read_outcome(job.folder).failure.message == "it was told to stop by a signal, and is saved"


def test_ctrl_c_reaches_neither_a_worker_nor_the_server_that_forks_it(tmp_path):
    """Both begin with seconds of imports, and an interrupt there would be two tracebacks."""
    forkserver._forkserver._stop()  # other tests may have started it
    (job,) = jobs_in(tmp_path, **LONG)
    worker = Worker(job, ONE)
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    server = int(status.partition("PPid:")[2].split()[0])
    for words in (status, Path(f"/proc/{server}/status").read_text()):
        assert int(words.partition("SigBlk:")[2].split()[0], 16) & 1 << signal.SIGINT - 1
    worker.end(StopRequest())


def test_no_process_is_started_after_a_request_to_stop(tmp_path, monkeypatch):
    stop, started = StopRequest(), []

    class Starting:
        ended = True

        def __init__(self, job, share):
            started.append(job)

        def listen(self, stop):
            stop.name = "SIGINT"

        def end(self, stop):
            pass

    monkeypatch.setattr("noisewise.study.launch.local.Worker", Starting)
    jobs = jobs_in(tmp_path, ["uniform", "minsnr"])
    take_turns(jobs, ONE, stop)
    assert started == jobs[:1]


def test_a_training_worker_hears_of_the_end_of_its_launcher(tmp_path):
    """A closed pipe is all that is left of a launcher that was killed."""
    (job,) = jobs_in(tmp_path, **LONG)
    worker = Worker(job, ONE)
    worker.listen(StopRequest())
    worker.pipe.send(0.9)
    until((job.folder / "metrics.jsonl").exists)
    worker.pipe.close()
    worker.process.join(30)
    assert worker.process.exitcode == 0
    assert 0 < last_step(job.folder) < 90000


def test_a_worker_gets_its_threads(tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        jobs = jobs_in(tmp_path, seeds=2, data=DataConfig(source="array", path=str(tmp_path)))  # ends before it computes
        Local(jobs=2).launch(jobs, StopRequest())
    finally:
        torch.set_num_threads(before)
    assert [read_outcome(job.folder).status for job in jobs] == ["failed", "failed"]
    assert [read_outcome(job.folder).environment()["threads"] for job in jobs] == [3, 3]


def test_groups_hold_all_samplers_of_a_schedule_and_seed(tmp_path):
    jobs = jobs_in(tmp_path, ["uniform", "minsnr", "p2"], schedules=["linear", "cosine"], seeds=2)
    names = [[job.folder.name for job in group] for group in groups(jobs, 3)]
    assert names[0] == ["linear-uniform-0", "linear-minsnr-0", "linear-p2-0"]
    assert names[3] == ["cosine-uniform-1", "cosine-minsnr-1", "cosine-p2-1"]
    assert [len(group) for group in groups(jobs, 2)] == [2, 1] * 4
    assert [len(group) for group in groups(jobs, 1)] == [1] * 12


def test_slots_share_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [gpu_of(slot) for slot in range(3)] == ["2", "5", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert gpu_of(1) is None


def test_sizes_are_read():
    assert size_in_bytes("8GiB") == 8 << 30
    assert size_in_bytes("1.5 GB") == 1_500_000_000
    for text in ("8", "8G", "0GiB", "-1GiB", "GiB"):
        with pytest.raises(ValueError, match="give a size as in 8GiB"):
            size_in_bytes(text)


def test_an_end_is_described():
    assert cause_of_death(3) == "its process ended with status 3 before the run did"
    assert cause_of_death(-signal.SIGSEGV) == "its process was killed by SIGSEGV"
    assert "memory" in cause_of_death(-signal.SIGKILL)


@pytest.mark.parametrize("name", ["turns", "jobs"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"--{name} must be >= 1, got 0"):
        Local(**{name: 0})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_runs_take_turns_on_a_gpu_and_one_that_wants_too_much_memory_fails(tmp_path):
    """Workers come from a process that has never touched it."""
    jobs = jobs_in(tmp_path, ["uniform", "adaptive:warmup=2,every=2"], device="cuda")
    Local(turns=2, memory=8 << 30).launch(jobs, StopRequest())
    assert [read_outcome(job.folder).status for job in jobs] == ["finished", "finished"]
    (starved,) = jobs_in(tmp_path / "starved", device="cuda", batch=4096)
    Local(memory=1 << 20).launch([starved], StopRequest())
    assert "out of memory" in read_outcome(starved.folder).failure.message
