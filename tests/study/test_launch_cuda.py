"""Workers on a GPU: they come from a process that has never touched it, and keep to their part of its memory."""

import pytest
import torch

from noisewise.study.launch.local import Local
from noisewise.study.outcome import read_outcome
from noisewise.training.signals import StopRequest
from tests.study.fateful import jobs_in

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_runs_take_turns_on_a_gpu_and_one_that_wants_too_much_memory_fails(tmp_path):
    jobs = jobs_in(tmp_path, ["uniform", "adaptive:warmup=2,every=2"], device="cuda")
    Local(turns=2, memory=8 << 30).launch(jobs, StopRequest())
    assert [read_outcome(job.folder).status for job in jobs] == ["finished", "finished"]
    (starved,) = jobs_in(tmp_path / "starved", device="cuda", batch=4096)
    Local(memory=1 << 20).launch([starved], StopRequest())
    assert "out of memory" in read_outcome(starved.folder).failure.message
