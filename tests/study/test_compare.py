"""A whole comparison on a tiny model: the command, what it leaves, and that its runs are ordinary runs."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from noisewise.cli import main
from noisewise.study.compare import combinations, compare, take_turns, with_budget
from noisewise.training.config import DataConfig
from noisewise.training.run import Run, train
from tests.training.processes import ROOT, environment, finish, last_step
from tests.training.test_run import final
from tests.training.tiny import differing, tiny

SAMPLERS = "uniform,minsnr,adaptive:warmup=2,every=2"
TINY = [
    "--preset=digits",
    "--device=cpu",
    "--batch=16",
    "--model.name=dit",
    '--model.options={"patch": 4, "width": 16, "depth": 1, "heads": 2}',
    "--log.sample_steps=3",
    "--images=40",
]


def rows_in(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a comparison, and the command that made it."""
    folder = tmp_path_factory.mktemp("compare") / "out"
    command = ["compare", *TINY, f"--samplers={SAMPLERS}", "--seeds=2", "--budget=6it", f"--out={folder}"]
    assert main(command) == 0
    return folder, command


def test_every_sampler_and_seed_has_a_complete_row(compared):
    rows = rows_in(compared[0])
    specs = ["uniform", "minsnr", "adaptive:warmup=2,every=2"]
    assert [(row["sampler"], row["seed"]) for row in rows] == [(spec, seed) for seed in (0, 1) for spec in specs]
    for row in rows:
        assert row["steps"] == 6
        assert row["seconds"] > 0
        assert row["steps_per_second"] == pytest.approx(6 / row["seconds"])
        assert row["metric"] == "digits-frechet"
        assert row["distance"] > 0
        assert len(row["held_out"]) == 20
        assert all(np.isfinite(row["held_out"]))
        assert row["config"]["sampler"] == row["sampler"]
        assert row["config"]["seed"] == row["seed"]
        assert {"torch", "python", "noisewise", "machine", "git"} <= set(row)
    assert len({row["distance"] for row in rows}) == 6


def test_the_report_is_there_and_its_path_is_printed_last(compared, capsys):
    folder, command = compared
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    results = rows_in(folder)
    assert main(command) == 0  # once more: nothing is trained again
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"report: {folder / 'report.html'}"
    page = (folder / "report.html").read_text()
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    assert "<script" not in page
    assert "minsnr" in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before
    again = rows_in(folder)
    for row, old in zip(again, results, strict=True):
        assert row["held_out"] == pytest.approx(old["held_out"], rel=1e-6)
        assert {key: row[key] for key in ("steps", "seconds")} == {key: old[key] for key in ("steps", "seconds")}


def test_runs_beyond_the_budget_are_not_passed_off_as_within_it(compared, capsys):
    folder, command = compared
    before = (folder / "report.html").read_text()
    assert main([part.replace("6it", "3it") for part in command]) == 1
    assert "has made 6 steps, more than --budget: give another --out" in capsys.readouterr().err
    assert (folder / "report.html").read_text() == before


def test_taking_turns_changes_nothing_in_a_run(compared, tmp_path):
    folder, _ = compared
    for run in sorted((folder / "runs").iterdir()):
        alone = tmp_path / run.name
        options = ["--resume", f"--config={run / 'config.yaml'}", f"--out={alone}"]
        assert main(["train", *options]) == 0
        assert differing(final(run, 6), final(alone, 6)) == []


def test_a_comparison_goes_on_where_it_was_interrupted(compared, tmp_path):
    config = with_budget(tiny(), "6it")
    configs = combinations(config, ["uniform", "adaptive:warmup=2,every=2"], 1, tmp_path)
    first = Run(configs[1])
    walk = first.advance()
    for _ in range(3):
        next(walk)
    first.save()
    first.close()
    straight = train(replace(configs[1], out=str(tmp_path / "straight")))
    results = compare(configs, images=20)
    assert [result.steps for result in results] == [6, 6]
    assert differing(final(tmp_path / "runs" / (first.folder.path.name), 6), final(straight, 6)) == []


def test_runs_advance_together(tmp_path):
    configs = combinations(tiny(steps=40), ["uniform", "speed:k=5"], 1, tmp_path)
    runs, behind = [Run(config) for config in configs], []
    for run in runs:
        step = run.trainer.training_step

        def noting(step=step):
            step()
            behind.append(abs(runs[0].trainer.step - runs[1].trainer.step))

        run.trainer.training_step = noting
    take_turns(runs)
    for run in runs:
        run.close()
    assert [run.trainer.step for run in runs] == [40, 40]
    assert 0 < max(behind) <= 2  # a twentieth of forty steps


def test_a_budget_of_seconds_too_short_for_a_log_point_is_reported_all_the_same(tmp_path, capsys):
    command = ["compare", *TINY, "--samplers=uniform,mode:scale=0.5,mode:scale=-0.5", "--seeds=1", "--budget=0.001s"]
    assert main([*command, f"--out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert "one seed" in said
    assert all(1 <= row["steps"] < 50 for row in rows_in(tmp_path / "out"))


def test_several_processes_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["compare", *TINY, "--samplers=uniform", "--budget=2it", f"--out={tmp_path / 'out'}"]) == 1
    assert "noisewise: compare is one process: start it without torchrun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_comparison_stopped_by_a_signal_saves_all_runs_and_the_same_command_finishes(tmp_path):
    """A real process. Steps are the budget, so that the end can be compared with one that nobody stopped."""
    options = [*TINY, "--samplers=uniform,adaptive:warmup=20,every=10", "--seeds=1", "--budget=600it"]

    def start(out):
        command = [sys.executable, "-m", "noisewise", "compare", *options, f"--out={out}"]
        return subprocess.Popen(
            command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    out, runs = tmp_path / "out", tmp_path / "out" / "runs"
    process = start(out)
    while process.poll() is None and len(list(runs.glob("*/metrics.jsonl"))) < 2:  # both have begun
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = finish(process)
    assert process.returncode == 0, said
    assert "SIGTERM: the runs are saved; the same command goes on with them" in said
    stopped = {run.name: last_step(run) for run in runs.iterdir()}
    assert len(stopped) == 2
    assert all(0 < step < 600 for step in stopped.values()), stopped
    assert not (out / "results.jsonl").exists()
    assert not (out / "report.html").exists()

    process = start(out)
    said = finish(process)
    assert process.returncode == 0, said
    for name, step in stopped.items():
        assert f"resuming{runs / name}atstep{step}" in "".join(said.split()), said  # lines are wrapped anywhere
    assert [row["steps"] for row in rows_in(out)] == [600, 600]
    assert (out / "report.html").is_file()
    whole = start(tmp_path / "whole")
    said = finish(whole)
    assert whole.returncode == 0, said
    for name in stopped:
        assert differing(final(runs / name, 600), final(tmp_path / "whole" / "runs" / name, 600)) == []


@pytest.mark.parametrize("budget", ["30", "0s", "-3s", "it", "3 it", "1e3it", "0.5it"])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ValueError, match=r"--budget .*give seconds as in 30s, or steps as in 1000it"):
        with_budget(tiny(), budget)


def test_budgets_are_seconds_or_steps():
    assert (with_budget(tiny(), "2.5s").seconds, with_budget(tiny(), "20it").steps) == (2.5, 20)
    assert with_budget(tiny(seconds=3.0), "20it").seconds is None


def test_bad_samplers_and_seeds_are_found_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="uniorm"):
        combinations(tiny(), ["uniform", "uniorm"], 1, tmp_path)
    with pytest.raises(ValueError, match="twice"):
        combinations(tiny(), ["uniform", "uniform"], 1, tmp_path)
    with pytest.raises(ValueError, match="--seeds must be >= 1, got 0"):
        combinations(tiny(), ["uniform"], 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_data_without_a_test_split_are_found_before_anything_is_trained(tmp_path):
    np.save(tmp_path / "data.npy", np.zeros((32, 1, 8, 8), np.uint8))
    config = tiny(data=DataConfig(source="array", path=str(tmp_path / "data.npy")))
    with pytest.raises((FileNotFoundError, ValueError), match="test"):
        compare(combinations(config, ["uniform"], 1, tmp_path / "out"), images=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--sampler=speed", "--seed=3"])
def test_the_options_of_a_single_run_are_refused_rather_than_ignored(option, capsys):
    assert main(["compare", "--preset=digits", option]) == 1
    assert "takes --samplers and --seeds" in capsys.readouterr().err


def test_a_misspelt_option_of_the_comparison_is_recognised(capsys):
    assert main(["compare", "--preset=digits", "--budgt=3it"]) == 1
    assert "did you mean --budget?" in capsys.readouterr().err
