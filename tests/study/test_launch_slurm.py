"""The Slurm launcher, with submitit's processes on this machine in place of a cluster: real jobs, the same code."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from noisewise.commands.cli import main
from noisewise.study.launch.slurm import Slurm, in_processes, parsed_setting, read_jobs, timeout_for
from noisewise.study.outcome import read_outcome
from noisewise.study.worker import work
from noisewise.training.config import LogConfig
from noisewise.training.signals import StopRequest
from tests.study.fateful import SEEDS, fateful, jobs_in
from tests.training.processes import metrics, until
from tests.training.test_run import final
from tests.training.tiny import differing

OFTEN = LogConfig(every=10, trackers=[], sample_steps=4)


def on_this_machine(folder):
    return Slurm(folder, {"timeout_min": 5}, cluster="local", pause=0.2)


def children(number):
    """The processes that a process has started."""
    return [int(pid) for pid in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


@pytest.fixture
def tidied(tmp_path):
    """Nothing is left running, whatever happens."""
    yield
    for number in in_processes(read_jobs(tmp_path).values()):
        os.kill(int(number), signal.SIGTERM)


@pytest.mark.slow
def test_jobs_outlive_the_command_and_are_watched_again_not_submitted_twice(tmp_path, tidied):
    """One fails by itself, one is warned by the signal before a time limit and goes on to its end, one is killed."""
    (ill,) = jobs_in(tmp_path, seed=SEEDS["nan"], model=fateful(tmp_path / "cure"), max_bad_steps=2)
    (warned,) = jobs_in(tmp_path, ["minsnr"], budget="600it", shares=(0.1, 1.0), log=OFTEN)
    (killed,) = jobs_in(tmp_path, ["p2"], budget="100000it", shares=(0.1, 1.0), log=OFTEN)
    jobs, launcher, stop = [ill, warned, killed], on_this_machine(tmp_path), StopRequest()

    def interrupt():
        until(lambda: all((job.folder / "metrics.jsonl").exists() for job in (warned, killed)))
        stop.name = "SIGINT"

    watching = threading.Thread(target=interrupt)
    watching.start()
    launcher.launch(jobs, stop)
    watching.join()
    numbers = read_jobs(tmp_path)
    assert set(numbers) == {job.folder.name for job in jobs}
    assert all(number in launcher.farewell() for number in numbers.values())
    assert numbers[killed.folder.name] in in_processes(numbers.values())  # it goes on without us
    (task,) = children(numbers[warned.folder.name])
    os.kill(task, signal.SIGUSR2)

    def kill():
        until(lambda: "resuming" in (warned.folder / "log.txt").read_text())
        os.kill(children(numbers[killed.folder.name])[0], signal.SIGKILL)

    watching = threading.Thread(target=kill)
    watching.start()
    launcher.launch([job for job in jobs if job.status == "unfinished"], StopRequest())
    watching.join()
    assert read_jobs(tmp_path) == numbers
    outcomes = [read_outcome(job.folder) for job in jobs]
    assert [found.status for found in outcomes] == ["failed", "finished", "failed"], [found.failure for found in outcomes]
    assert "not finite" in read_outcome(ill.folder).failure.message
    assert "ended before its run did: its process is gone" in read_outcome(killed.folder).failure.message
    log = (warned.folder / "log.txt").read_text()
    assert "SIGUSR2: saved at step" in log
    assert "resuming" in log  # submitit has put it back into the queue
    (straight,) = jobs_in(tmp_path / "straight", ["minsnr"], budget="600it", shares=(0.1, 1.0), log=OFTEN)
    work(straight)
    assert metrics(warned.folder) == metrics(straight.folder)
    assert differing(final(warned.folder, 600), final(straight.folder, 600)) == []


def test_settings_are_numbers_where_they_look_like_numbers():
    settings = ["partition=gpu", "timeout_min=60", "mem_gb=7.5", "setup=a=b"]
    assert dict(map(parsed_setting, settings)) == {"partition": "gpu", "timeout_min": 60, "mem_gb": 7.5, "setup": "a=b"}
    for text in ("partition", "=gpu", "partition="):
        with pytest.raises(ValueError, match="give a name and a value, as in --slurm partition=gpu"):
            parsed_setting(text)


def test_a_time_limit_leaves_room_for_what_is_off_the_clock(tmp_path):
    (short,), (steps,) = jobs_in(tmp_path, budget="150s"), jobs_in(tmp_path, budget="10it")
    assert (timeout_for(short), timeout_for(steps)) == (65, 720)


def test_a_machine_without_slurm_is_told_so_before_anything_is_submitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(["compare", "--preset=digits", "--launcher=slurm", f"--out={tmp_path / 'out'}"]) == 1
    assert "are you indeed on a slurm cluster?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_jobs_are_remembered_by_the_name_of_their_run(tmp_path):
    assert read_jobs(tmp_path) == {}
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "jobs.json").write_text(json.dumps({"linear-uniform-0": "12"}))
    assert read_jobs(tmp_path) == {"linear-uniform-0": "12"}
    assert "scancel 12" in Slurm(tmp_path).farewell()


def test_processes_that_are_gone_are_not_in_the_queue():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert in_processes([str(os.getpid()), str(pid)]) == {str(os.getpid())}
    os.waitpid(pid, 0)
    assert in_processes([str(pid)]) == set()
