"""The Ray launcher, on a real Ray of this machine."""

import threading
import time

import pytest
import ray

from noisewise.study.launch.ray import Ray
from noisewise.study.outcome import read_outcome
from noisewise.study.worker import work
from noisewise.training.config import LogConfig
from noisewise.training.signals import StopRequest
from tests.study.fateful import SEEDS, fateful, jobs_in
from tests.training.processes import last_step
from tests.training.test_run import final
from tests.training.tiny import differing


@pytest.fixture(scope="module")
def cluster():
    """Room for two runs at a time."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.slow
def test_runs_are_tasks_that_fail_alone_and_save_when_told_to_stop(tmp_path, cluster):
    log = LogConfig(every=10, trackers=[], sample_steps=4)
    (well,) = jobs_in(tmp_path, shares=(1.0,))
    (ill,) = jobs_in(tmp_path, seed=SEEDS["nan"], model=fateful(tmp_path / "cure"), max_bad_steps=2)
    Ray().launch([well, ill], StopRequest())
    assert [read_outcome(job.folder).status for job in (well, ill)] == ["finished", "failed"]
    assert "not finite" in read_outcome(ill.folder).failure.message
    assert "evaluated at 100% of the budget" in (well.folder / "log.txt").read_text()
    (straight,) = jobs_in(tmp_path / "straight", shares=(1.0,))
    work(straight)
    assert differing(final(well.folder), final(straight.folder)) == []

    (long,) = jobs_in(tmp_path, ["minsnr"], budget="100000it", log=log)
    stop = StopRequest()

    def interrupt():
        end = time.monotonic() + 60
        while not (long.folder / "metrics.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.01)
        stop.name = "SIGINT"

    watching = threading.Thread(target=interrupt)
    watching.start()
    Ray().launch([long], stop)
    watching.join()
    assert read_outcome(long.folder).status == "unfinished"
    assert 0 < last_step(long.folder) < 100000
