"""One run of a comparison: what it leaves at each share of its budget, and that no interruption changes or repeats any."""

import json
import math
import threading
from dataclasses import replace

import pytest
import torch

from noisewise.generation.run_samples import run_samples
from noisewise.generation.trained import load_trained
from noisewise.metrics.heldout import held_out_losses
from noisewise.processes import DDPM
from noisewise.study import measure, worker
from noisewise.study.job import explained, forget_failure, is_false_start
from noisewise.study.measure import distance_to_data
from noisewise.study.outcome import read_outcome
from noisewise.study.worker import logged, work
from noisewise.training.components import open_source
from noisewise.training.config import DataConfig
from noisewise.training.run import Run, train
from noisewise.training.run_folder import RunFolder
from noisewise.training.signals import StopRequest
from noisewise.weighting import vlb_coefficients
from tests.study.fateful import SEEDS, fateful, jobs_in
from tests.training.test_run import final
from tests.training.tiny import differing, own

ADAPTIVE = "adaptive:warmup=2,every=2"


def without_clock(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "steps_per_second", "took")} for row in rows]


class StopAt(StopRequest):
    """Asks to stop when it has been looked at so often: once after each step, and many times in an evaluation."""

    def __init__(self, looks):
        super().__init__()
        self.left = looks

    @property
    def requested(self):
        self.left -= 1
        if self.left < 0:
            self.name = "StopAt"
        return self.name is not None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job that nobody interrupted."""
    (job,) = jobs_in(tmp_path_factory.mktemp("whole"), [ADAPTIVE])
    assert work(job) == "finished"
    return job


@pytest.fixture
def counted(monkeypatch):
    """The shares that are measured, in order."""
    seen, real = [], worker.evaluate

    def evaluate(run, share, images, **more):
        found = real(run, share, images, **more)
        seen.append(share)
        return found

    monkeypatch.setattr(worker, "evaluate", evaluate)
    return seen


def test_a_run_is_measured_at_each_share_of_its_budget(whole):
    outcome = read_outcome(whole.folder)
    assert outcome.status == "finished"
    assert [(found.share, found.step) for found in outcome.evaluations] == [(0.25, 3), (0.5, 6), (0.75, 9), (1.0, 12)]
    seconds = [found.seconds for found in outcome.evaluations]
    assert seconds == sorted(seconds)
    for found in outcome.evaluations:
        assert (found.images, found.metric, len(found.held_out)) == (20, "digits-frechet", 50)
        assert found.distance > 0
        assert (whole.folder / found.picture).name == f"step-{found.step:08d}.png"
        assert (whole.folder / found.picture).is_file()
    assert len({found.loss for found in outcome.evaluations}) == 4


def test_what_is_measured_is_the_averaged_model_on_the_test_images(whole):
    model = load_trained(whole.folder, step=12)
    found = held_out_losses(model.call, model.objective, open_source(whole.config, "test"), levels=50, images=400)
    last = read_outcome(whole.folder).final
    assert last.held_out == pytest.approx(found.loss.tolist(), rel=1e-6)
    c = vlb_coefficients(DDPM.linear())[torch.arange(10, 1000, 20)]  # at the middle of each interval
    expected = (c / vlb_coefficients(DDPM.linear()).mean() * torch.tensor(last.held_out)).mean()
    assert last.vlb == pytest.approx(float(expected), rel=1e-4)


def test_a_process_without_a_discrete_bound_has_none(tmp_path):
    (job,) = jobs_in(tmp_path, schedules=["flow"], budget="2it", shares=(1.0,), prediction="flow")
    assert work(job) == "finished"
    assert read_outcome(job.folder).final.vlb is None


def test_a_headline_is_the_distance_of_more_images_at_the_end_and_changes_nothing_else(whole, tmp_path, capsys):
    (job,) = jobs_in(tmp_path, [ADAPTIVE])
    job = replace(job, headline=50)  # two parts like the first, and a shorter one
    assert work(job) == "finished"
    *before, last = read_outcome(job.folder).evaluations
    assert {(found.headline, found.headline_images) for found in before} == {(None, None)}
    assert last.headline_images == 50
    run = Run(job.config, resume=True)
    images = run_samples(run, 50)
    metric, expected, _ = distance_to_data(run, [images], print)
    run.close()
    assert (last.metric, last.headline) == (metric, pytest.approx(expected, rel=1e-9))
    assert f"step 12  digits-frechet of 50 images: {last.headline}" in capsys.readouterr().out
    usual = read_outcome(whole.folder).evaluations
    assert [found.distance for found in (*before, last)] == [found.distance for found in usual]
    assert differing(final(job.folder), final(whole.folder)) == []


def test_a_headline_that_was_cut_off_is_made_again_and_the_weights_are_those_of_training(whole, tmp_path, monkeypatch):
    (job,) = jobs_in(tmp_path, [ADAPTIVE])
    job, stop = replace(job, headline=50), StopRequest()

    def asked_to_stop(run, count, check=None, *, first=0, solver=None):
        if first:
            stop.name = "in the middle of the headline"
        return run_samples(run, count, check, first=first, solver=solver)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "run_samples", asked_to_stop)
        assert work(job, stop=stop) == "stopped"
    assert [found.share for found in read_outcome(job.folder).evaluations] == [0.25, 0.5, 0.75]
    assert differing(final(job.folder), final(whole.folder)) == []  # saved as trained, not as averaged
    assert work(job) == "finished"
    assert read_outcome(job.folder).final.headline_images == 50


def test_turns_and_evaluations_change_nothing_in_a_run(whole, tmp_path):
    (job,) = jobs_in(tmp_path, [ADAPTIVE])
    assert work(job, [turn / 20 for turn in range(1, 21)]) == "finished"
    assert without_clock(job.folder) == without_clock(whole.folder)
    assert differing(final(job.folder), final(whole.folder)) == []
    alone = train(replace(job.config, out=str(tmp_path / "alone")))
    assert differing(final(alone), final(whole.folder)) == []


@pytest.mark.parametrize(("looks", "turns"), [(0, 1), (2, 20), (7, 1), (7, 20), (13, 1), (60, 1), (200, 1)])
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_nothing_had_happened(whole, tmp_path, counted, looks, turns):
    (job,) = jobs_in(tmp_path, [ADAPTIVE])
    shares = [turn / turns for turn in range(1, turns + 1)]
    assert work(job, shares, StopAt(looks)) == "stopped"
    assert read_outcome(job.folder).status == "unfinished" if looks else not (job.folder / "config.yaml").exists()
    assert work(job, shares) == "finished"
    assert counted == [0.25, 0.5, 0.75, 1.0]
    assert without_clock(job.folder) == without_clock(whole.folder)
    assert differing(final(job.folder), final(whole.folder)) == []


def test_an_evaluation_that_was_cut_off_is_made_again_and_no_other(whole, tmp_path, counted, monkeypatch):
    (job,) = jobs_in(tmp_path, [ADAPTIVE])

    measuring = worker.evaluate

    def killed(run, share, images, **more):
        if share == 0.75:
            raise KeyboardInterrupt  # ends the process at the worst moment: saved, and not yet measured
        return measuring(run, share, images, **more)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            work(job)
    assert counted == [0.25, 0.5]
    assert work(job) == "finished"
    assert counted == [0.25, 0.5, 0.75, 1.0]
    assert without_clock(job.folder) == without_clock(whole.folder)


def test_a_finished_run_is_left_alone(whole, counted):
    before = (whole.folder / "metrics.jsonl").read_bytes()
    assert work(whole) == "finished"
    assert counted == []
    assert (whole.folder / "metrics.jsonl").read_bytes() == before


def test_shares_that_one_slow_step_reaches_have_one_measurement_in_common(tmp_path, counted):
    (job,) = jobs_in(tmp_path, budget="0.0001s")
    assert work(job) == "finished"
    assert counted == [1.0]
    outcome = read_outcome(job.folder)
    assert [found.share for found in outcome.evaluations] == [0.25, 0.5, 0.75, 1.0]
    assert {found.step for found in outcome.evaluations} == {1}


def test_seconds_are_those_of_training_alone(tmp_path, monkeypatch):
    (job,) = jobs_in(tmp_path, budget="0.2s", shares=(0.5, 1.0))
    real = worker.evaluate

    def slow(*given, **more):
        threading.Event().wait(0.5)
        return real(*given, **more)

    monkeypatch.setattr(worker, "evaluate", slow)
    assert work(job) == "finished"
    half, end = read_outcome(job.folder).evaluations
    assert 0.1 <= half.seconds < 0.2 <= end.seconds < 0.5


def test_a_run_that_diverges_is_a_failure_with_its_log(tmp_path):
    (job,) = jobs_in(tmp_path, model=own("Poisoned", low=0, high=1000), max_bad_steps=5, shares=(1.0,))
    with logged(job.folder):
        assert work(job) == "failed"
    outcome = read_outcome(job.folder)
    assert outcome.status == "failed"
    assert outcome.failure.step == 5
    assert "5 steps in a row had a loss or gradient that is not finite" in outcome.failure.message
    assert "Diverged" in outcome.failure.log
    assert "Diverged" in (job.folder / "log.txt").read_text()


def test_a_start_that_failed_may_be_repeated_with_other_settings(tmp_path):
    (job,) = jobs_in(tmp_path, budget="2it", shares=(1.0,), data=DataConfig(source="array", path=str(tmp_path / "none.npy")))
    assert work(job) == "failed"
    assert "none.npy" in read_outcome(job.folder).failure.message
    assert is_false_start(job.folder)
    forget_failure(job.folder)
    (mended,) = jobs_in(tmp_path, budget="2it", shares=(1.0,))
    assert mended.folder == job.folder
    assert work(mended) == "finished"
    assert not is_false_start(job.folder)


def test_a_failed_run_that_finishes_is_no_failure_any_more(tmp_path):
    cure = tmp_path / "cure"
    (job,) = jobs_in(tmp_path, model=fateful(cure), seed=SEEDS["nan"], max_bad_steps=3)
    assert work(job) == "failed"
    cure.touch()
    assert work(job) == "finished"
    assert read_outcome(job.folder).status == "finished"
    assert not (job.folder / "failure.json").exists()


def test_a_folder_that_another_process_is_about_to_leave_is_waited_for(tmp_path):
    (job,) = jobs_in(tmp_path, budget="2it", shares=(1.0,))
    other = RunFolder(job.folder)
    other.begin(job.config, resume=False)
    threading.Timer(0.5, other.end).start()
    assert work(job) == "finished"


def test_a_folder_that_stays_in_use_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 0.3)
    (job,) = jobs_in(tmp_path, budget="2it", shares=(1.0,))
    other = RunFolder(job.folder)
    other.begin(job.config, resume=False)
    assert work(job) == "failed"
    other.end()
    assert "in use by another process" in read_outcome(job.folder).failure.message


def test_averaged_weights_without_finite_losses_are_a_failure_not_a_number(tmp_path, monkeypatch):
    (job,) = jobs_in(tmp_path, budget="2it", shares=(1.0,))
    real = worker.evaluate

    def broken(run, *given, **more):
        with torch.no_grad():
            next(iter(run.trainer.ema.average.values())).fill_(math.nan)
        return real(run, *given, **more)

    monkeypatch.setattr(worker, "evaluate", broken)
    assert work(job) == "failed"
    assert "of the averaged weights is nan" in read_outcome(job.folder).failure.message


def test_memory_that_ran_out_is_named_as_such():
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 60, dtype=torch.uint8)
    assert explained(caught.value).startswith("out of memory: ")
    assert explained(MemoryError()) == "out of memory: MemoryError"
    assert explained(ValueError("every must be\n>= 1")) == "every must be >= 1"
