"""A whole comparison on a tiny model: the command, what it leaves, that it survives everything, and what it refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from noisewise.commands.cli import main
from noisewise.commands.compare import doubts
from noisewise.plain_files import FolderInUse
from noisewise.study.conduct import alone, combinations, conduct, run_name
from noisewise.study.job import with_budget
from noisewise.study.launch import Local
from noisewise.study.outcome import Evaluation, Outcome, Plan, read_comparison
from noisewise.training.config import Config, DataConfig, EMAConfig
from noisewise.training.run import train
from tests.study.fateful import SEEDS, fateful
from tests.training.processes import ROOT, environment, finish, metrics, until
from tests.training.test_run import final
from tests.training.tiny import DIT, differing, tiny

SAMPLERS = "uniform,adaptive:warmup=2,every=2"
TINY = ["--preset=digits", "--device=cpu", "--batch=16", "--model.name=dit", f"--model.options={json.dumps(DIT)}"]
TINY += ["--log.sample_steps=3", "--images=40"]


def plan(**changes):
    return replace(Plan("tiny", "uniform", "12it", (0.5, 1.0), 20), **changes)


def configs_in(folder, samplers=("uniform",), *, seeds=1, budget="12it", **changes):
    return combinations(replace(with_budget(tiny(), budget), **changes), samplers, ["linear"], seeds, folder)


def files_of(folder):
    """Everything that the runs have left, with the time of its last change."""
    files = [path for path in (folder / "runs").rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a comparison, and the command that made it."""
    folder = tmp_path_factory.mktemp("compare") / "out"
    options = [f"--samplers={SAMPLERS}", "--schedules=linear,cosine", "--seeds=1", "--budget=6it", "--evaluate-at=0.5,1"]
    command = ["compare", *TINY, *options, f"--out={folder}"]
    assert main(command) == 0
    return folder, command


def test_every_combination_is_an_ordinary_run_measured_at_every_share(compared):
    folder, command = compared
    comparison = read_comparison(folder)
    assert comparison.plan.command == tuple(command)
    assert (comparison.plan.baseline, comparison.plan.budget, comparison.plan.evaluate_at) == ("uniform", "6it", (0.5, 1.0))
    made = [(outcome.process, outcome.seed, outcome.sampler) for outcome in comparison.outcomes]
    assert made == [
        (process, 0, sampler) for process in ("linear", "cosine") for sampler in ("uniform", "adaptive:warmup=2,every=2")
    ]
    for outcome in comparison.outcomes:
        assert outcome.status == "finished"
        assert [(found.share, found.step) for found in outcome.evaluations] == [(0.5, 3), (1.0, 6)]
        assert {"torch", "python", "noisewise", "machine", "git"} <= set(outcome.environment())
        assert "evaluated at 100% of the budget" in (outcome.folder / "log.txt").read_text()
    assert len({outcome.final.loss for outcome in comparison.outcomes}) == 4
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert (folder / "results.csv").is_file()


def test_a_run_of_a_comparison_is_what_the_trainer_makes_of_its_configuration(compared, tmp_path):
    for run in sorted((compared[0] / "runs").iterdir()):
        options = ["--resume", f"--config={run / 'config.yaml'}", f"--out={tmp_path / run.name}"]
        assert main(["train", *options]) == 0
        assert differing(final(run, 6), final(tmp_path / run.name, 6)) == []


def test_the_same_command_again_touches_no_run_and_prints_the_report_last(compared, capsys):
    folder, command = compared
    before = files_of(folder)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert "adaptive" in said
    page = (folder / "report.html").read_text()
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    assert files_of(folder) == before


def test_a_comparison_does_not_begin_in_the_folder_of_a_run(compared, tmp_path, capsys):
    _, command = compared
    (tmp_path / "config.yaml").write_text("name: mine\n")
    assert main([*(one for one in command if not one.startswith("--out")), f"--out={tmp_path}"]) == 1
    assert f"{tmp_path} holds a run of noisewise train: give another --out" in capsys.readouterr().err
    assert not (tmp_path / "comparison.json").exists()


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--budget=3it", "holds a comparison with --budget 6it, not 3it: give another --out"),
        ("--evaluate-at=0.25,1", "holds a comparison with --evaluate-at 0.5,1, not 0.25,1: give another --out"),
        ("--images=41", "holds a comparison with --images 40, not 41: give another --out"),
        ("--headline=90", "holds a comparison with --headline none, not 90: give another --out"),
        ("--headline=40", "--headline is for more than the 40 images of every evaluation, got 40"),
        ("--batch=32", "was made with other settings: batch: 16 -> 32. Give another --out"),
        ("--log.sample_steps=2", "was made with other settings: log.sample_steps: 3 -> 2. Give another --out"),
        ("--optimizer.lr=0.5", "was made with other settings: optimizer.lr: 0.003 -> 0.5. Give another --out"),
    ],
)
def test_a_comparison_does_not_go_on_as_another_one(compared, capsys, option, complaint):
    folder, command = compared
    before = files_of(folder), (folder / "comparison.json").read_text()
    assert main([*command, option, "--samplers=uniform,minsnr"]) == 1
    assert complaint in capsys.readouterr().err
    assert (files_of(folder), (folder / "comparison.json").read_text()) == before


def test_runs_of_another_version_are_refused_before_anything_is_trained(compared, tmp_path, capsys):
    folder, command = compared
    copy = tmp_path / "out"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    again = [*command, f"--out={copy}", "--seeds=2"]
    for name, change, complaint in [
        ("checkpoints/step-00000006/manifest.json", ('"format": 1', '"format": 99'), "has format 99, this version"),
        ("config.yaml", ("batch:", "batches:"), "or of another version of noisewise?"),
    ]:
        file = copy / "runs" / "linear-uniform-0" / name
        text = file.read_text()
        file.write_text(text.replace(*change))
        assert main(again) == 1
        assert complaint in capsys.readouterr().err
        file.write_text(text)
    plan_file = copy / "comparison.json"
    plan_file.write_text(plan_file.read_text().replace('"format": 1', '"format": 7'))
    assert main(again) == 1
    assert "its format is 7" in capsys.readouterr().err
    assert len(list((copy / "runs").iterdir())) == 4


def test_more_samplers_and_seeds_join_what_is_there(tmp_path):
    first = conduct(plan(), configs_in(tmp_path, ["uniform"]), Local())
    before = files_of(tmp_path)
    more = conduct(plan(baseline="minsnr"), configs_in(tmp_path, ["minsnr"], seeds=2), Local())
    assert [outcome.folder.name for outcome in more.outcomes] == ["linear-uniform-0", "linear-minsnr-0", "linear-minsnr-1"]
    assert more.plan.baseline == "uniform"  # since this command does not name it
    assert {outcome.status for outcome in more.outcomes} == {"finished"}
    assert before.items() <= files_of(tmp_path).items()
    turned = conduct(plan(baseline="minsnr"), configs_in(tmp_path, ["minsnr", "uniform"]), Local())
    assert turned.plan.baseline == "minsnr"
    assert first.plan.runs == ("linear-uniform-0",)
    assert first.plan.launches == (("linear-uniform-0",),)
    assert more.plan.launches == turned.plan.launches == (*first.plan.launches, ("linear-minsnr-0", "linear-minsnr-1"))
    assert not more.side_by_side(more.outcomes[0], more.outcomes[1])
    assert more.side_by_side(more.outcomes[1], more.outcomes[2])


def test_runs_beyond_the_budget_are_not_passed_off_as_within_it(tmp_path):
    (config,) = configs_in(tmp_path)
    train(config)  # and no comparison.json
    (shorter,) = configs_in(tmp_path, budget="6it")
    with pytest.raises(ValueError, match="has made 12 steps, more than --budget: give another --out"):
        conduct(plan(budget="6it"), [shorter], Local())


def test_a_failed_run_is_reported_the_rest_goes_on_and_the_same_command_tries_it_again(tmp_path, capsys):
    cure, out, file = tmp_path / "cure", tmp_path / "out", tmp_path / "base.yaml"
    model = fateful(cure)
    file.write_text(f"seed: {SEEDS['hungry']}\nmax_bad_steps: 2\n")
    options = [f"--config={file}", f"--model.name={model.name}", f"--model.options={json.dumps(model.options)}"]
    options += ["--samplers=uniform", "--seeds=2", "--budget=4it", "--evaluate-at=1", "--memory=3GiB"]
    assert main(["compare", *TINY, *options, f"--out={out}"]) == 1  # both fail
    said = capsys.readouterr().out
    assert re.search(r"failed: linear, uniform, seed 14: out of memory", said)
    assert re.search(r"failed: linear, uniform, seed 15: 2 steps in a row .* not finite", said)
    assert f"its log: {out / 'runs' / 'linear-uniform-15' / 'log.txt'}" in said
    assert not (out / "report.html").exists()

    file.write_text(file.read_text().replace("14", "13"))
    assert main(["compare", *TINY, *options, f"--out={out}"]) == 0  # the one more is well
    assert "failed: linear, uniform, seed 14: out of memory" in capsys.readouterr().out
    assert (out / "report.html").is_file()

    cure.touch()
    file.write_text(file.read_text().replace("13", "14"))
    assert main(["compare", *TINY, *options, f"--out={out}"]) == 0
    assert "failed" not in capsys.readouterr().out.partition("\n\n")[0]
    assert {outcome.status for outcome in read_comparison(out).outcomes} == {"finished"}


def test_only_failures_are_a_failure(tmp_path, capsys):
    options = ["--samplers=uniform", "--seeds=1", "--budget=4it", "--device=cuda"]
    command = ["compare", *TINY, *options, f"--out={tmp_path / 'out'}"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "failed: linear, uniform, seed 0: device=cuda, but torch finds no GPU" in said
    assert main([part.replace("cuda", "cpu") for part in command]) == 0  # a false start may begin again otherwise


def test_a_budget_of_seconds_too_short_for_a_log_point_is_reported_all_the_same(tmp_path, capsys):
    command = ["compare", *TINY, "--samplers=mode:scale=0.5,mode:scale=-0.5", "--seeds=1", "--budget=0.001s"]
    assert main([*command, f"--out={tmp_path / 'out'}"]) == 0
    assert "one seed" in capsys.readouterr().out
    assert all(1 <= outcome.final.step < 50 for outcome in read_comparison(tmp_path / "out").outcomes)


INTERRUPTED = [*TINY, "--samplers=uniform,adaptive:warmup=20,every=10", "--seeds=1", "--budget=240it", "--log.every=20"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A comparison that nobody interrupts, and the command but for its --out; in one thread, as the interrupted ones."""
    out = tmp_path_factory.mktemp("straight") / "out"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["compare", *INTERRUPTED, f"--out={out}"]) == 0
    yield out
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGKILL, False)]
)
def test_a_comparison_that_is_stopped_or_killed_is_finished_by_the_same_command(tmp_path, number, group, straight):
    """Real processes. Steps are the budget, so that the end can be compared with one that nobody stopped."""
    out, runs = tmp_path / "out", tmp_path / "out" / "runs"
    command = ["compare", *INTERRUPTED, f"--out={out}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "noisewise", *command],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until(lambda: len(list(runs.glob("*/samples/*.png"))) >= 3 or process.poll() is not None)
    if group:
        os.killpg(process.pid, number)  # as Ctrl-C and many a batch system do
    else:
        process.send_signal(number)
    said = finish(process)
    if number != signal.SIGKILL:
        assert process.returncode == 0, said
        assert f"{number.name}: the runs are saved; the same command goes on with them" in said
    before = {outcome.folder.name: outcome for outcome in read_comparison(out).outcomes}
    assert {outcome.status for outcome in before.values()} == {"unfinished"}
    assert not (out / "report.html").exists()

    assert main(command) == 0  # at once: after SIGKILL the workers may still be saving
    for name, outcome in before.items():
        after = next(found for found in read_comparison(out).outcomes if found.folder.name == name)
        assert after.status == "finished"
        made = len(outcome.evaluations)
        assert 1 <= made < 4
        assert after.evaluations[:made] == outcome.evaluations  # seconds and all: not made again
        assert differing(final(runs / name, 240), final(straight / "runs" / name, 240)) == []
        assert metrics(runs / name) == metrics(straight / "runs" / name)
        assert "resuming" in (runs / name / "log.txt").read_text()


def test_two_comparisons_in_one_folder_are_refused(tmp_path):
    with (
        alone(tmp_path),
        pytest.raises(FolderInUse, match=r"is in use by another process: wait for it, or give another --out"),
    ):
        conduct(plan(), configs_in(tmp_path), Local())


def test_several_processes_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["compare", *TINY, "--samplers=uniform", "--budget=2it", f"--out={tmp_path / 'out'}"]) == 1
    assert "noisewise: compare is one process: start it without torchrun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_budgets_are_seconds_or_steps():
    assert (with_budget(tiny(), "2.5s").seconds, with_budget(tiny(), "20it").steps) == (2.5, 20)
    assert with_budget(tiny(seconds=3.0), "20it").seconds is None


@pytest.mark.parametrize("budget", ["30", "0s", "-3s", "it", "3 it", "1e3it", "0.5it"])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ValueError, match=r"--budget .*give seconds as in 30s, or steps as in 1000it"):
        with_budget(tiny(), budget)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--samplers=uniform,uniorm", "uniorm"),
        ("--samplers=uniform,uniform", "--samplers names the same one twice"),
        ("--schedules=linear,lineer", "lineer"),
        ("--schedules=linear,linear", "--schedules names the same one twice"),
        ("--schedules=", "empty place between its commas"),
        ("--seeds=0", "--seeds must be >= 1, got 0"),
        ("--images=1", "--images must be >= 2, got 1"),
        ("--evaluate-at=0.5", "--evaluate-at must be increasing shares of the budget, the last one 1, got [0.5]"),
        ("--evaluate-at=0.5,0.5,1", "--evaluate-at must be increasing"),
        ("--evaluate-at=0,1", "--evaluate-at must be increasing"),
        ("--evaluate-at=nan,1", "--evaluate-at must be increasing"),
        ("--evaluate-at=half", "--evaluate-at 'half': give shares of the budget, as in 0.25,0.5,0.75,1"),
        ("--sampler=speed", "takes --samplers and --seeds, not --sampler and --seed"),
        ("--seed=3", "takes --samplers and --seeds, not --sampler and --seed"),
        ("--steps=10", "compare takes --budget, as in 1000it or 30s, not --steps"),
        ("--seconds=10", "compare takes --budget, as in 1000it or 30s, not --seconds"),
        ("--process=cosine", "give --process or --schedules, not both"),
        ("--parallel=fsdp", "use parallel=ddp"),
        ('--model.options={"patch":3}', "patch"),
        ("--turns=0", "--turns must be >= 1, got 0"),
        ("--memory=lots", "--memory 'lots': give a size as in 8GiB"),
        ("--slurm=partition=gpu", "--slurm is for --launcher slurm, not local"),
        ("--budgt=3it", "did you mean --budget?"),
    ],
)
def test_bad_input_is_found_before_anything_is_trained(tmp_path, capsys, option, complaint):
    assert main(["compare", *TINY, "--schedules=linear", "--seeds=1", "--budget=2it", f"--out={tmp_path / 'out'}", option]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["compare", *TINY, "--budget=2it", f"--out={tmp_path / 'out'}"]) == 1
    assert "is a file: name a folder" in capsys.readouterr().err


def test_data_without_a_test_split_are_found_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("data.npy", np.zeros((32, 1, 8, 8), np.uint8))
    configs = configs_in(tmp_path / "out", data=DataConfig(source="array", path="data.npy"))
    needs = r"compare needs held-out data, .*: data\.npy has no file test\.npy, .* beside it, .*"
    with pytest.raises(ValueError, match=needs + r"or give a folder with train\.npy and test\.npy"):
        conduct(plan(), configs, Local())
    Path("data.npy").rename("train.npy")
    configs = configs_in(tmp_path / "out", data=DataConfig(source="array", path="."))
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(tmp_path))} has no file test.npy, .* no split 'test': put one there"
    ):
        conduct(plan(), configs, Local())
    assert not (tmp_path / "out").exists()


def arrays_in(folder, *, labels=None, test_labels=None, seed=0):
    """A folder of 32 and 8 samples of the digits' shape; floats, and so no images to measure by Inception."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, numbers in (("train", 32, labels), ("test", 8, test_labels)):
        np.save(folder / f"{split}.npy", np.random.default_rng(seed).standard_normal((count, 1, 8, 8), np.float32))
        if numbers:
            np.save(folder / f"{split}_labels.npy", np.arange(count) % numbers)
    return DataConfig(source="array", path=str(folder))


@pytest.mark.parametrize(
    ("test_labels", "complaint"),
    [(None, r"but the held-out data .* have no labels"), (5, r"have 5 classes, but the model knows 3")],
)
def test_held_out_classes_that_do_not_fit_are_found_before_anything_is_trained(tmp_path, test_labels, complaint):
    data = arrays_in(tmp_path / "data", labels=3, test_labels=test_labels)
    configs = configs_in(tmp_path / "out", data=data, model=replace(tiny().model, conditional=True))
    with pytest.raises(ValueError, match=complaint):
        conduct(plan(), configs, Local())
    assert not (tmp_path / "out").exists()


def test_runs_with_other_data_are_not_compared(tmp_path):
    first, other = (arrays_in(tmp_path / f"data-{seed}", seed=seed) for seed in (0, 1))
    conduct(plan(), configs_in(tmp_path / "out", data=first), Local())
    more = configs_in(tmp_path / "out", ["uniform", "minsnr"], data=other)
    with pytest.raises(ValueError, match=r"uniform-0 was made with other data: fingerprint \w+ -> \w+\. Give another --out"):
        conduct(plan(), more, Local())
    shutil.move(tmp_path / "data-0", tmp_path / "elsewhere")  # where they lie does not matter
    moved = configs_in(tmp_path / "out", ["uniform", "minsnr"], data=replace(first, path=str(tmp_path / "elsewhere")))
    assert len(conduct(plan(), moved, Local()).outcomes) == 2


def test_names_of_runs_are_fit_for_files_and_no_two_are_the_same():
    specs = ["uniform", "mode:scale=0.5", "mode:scale=-0.5", "adaptive:every=2,floor=0.1+minsnr"]
    specs += ["adaptive:target=(minsnr)", "adaptive:target=(p2)", "adaptive:target=(p2:k=1)", "mix:(uniform)=1,(beta:a=2)=1"]
    names = [run_name(tiny(sampler=spec)) for spec in specs]
    assert names[:4] == [
        "linear-uniform-0",
        "linear-mode-scale=0.5-0",
        "linear-mode-scale=-0.5-0",
        "linear-adaptive-every=2-floor=0.1+minsnr-0",
    ]
    assert len(set(names)) == len(specs)
    assert all(re.fullmatch(r"[A-Za-z0-9._=+-]+", name) for name in names)
    long = [run_name(tiny(sampler="adaptive:" + ",".join(f"a{i}={i}" for i in range(n)))) for n in (60, 61)]
    assert len(set(long)) == 2
    assert all(len(os.fsencode(name)) < 255 for name in long)


def test_the_folder_of_a_comparison_is_named_after_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *TINY, "--samplers=uniform", "--seeds=1", "--budget=1it", "--evaluate-at=1"]) == 0
    assert Path("out/digits/runs/linear-uniform-0/config.yaml").is_file()


def measured(steps, **ema):
    evaluations = [Evaluation((n + 1) / len(steps), step, 1.0, 8, None, None, [1.0]) for n, step in enumerate(steps)]
    return Outcome(Path("run"), Config(ema=EMAConfig(**ema)), evaluations)


def test_a_budget_too_short_to_be_measured_is_said():
    assert doubts([measured([10, 20, 30])]) == []
    (said,) = doubts([measured([1, 1, 2])])
    assert "too short" in said
    assert "2 steps" in said
    assert "give a larger --budget" in said


def test_averages_of_mostly_untrained_weights_are_said_once():
    runs = [measured([21, 42, 63, 84], decay=0.9999, ramp=False) for _ in range(3)]
    first, rest = doubts(runs)
    assert "untrained" in first
    assert rest == "and 2 more runs like that"
    assert doubts([measured([21, 42, 63, 84])]) == []  # the ramp is on by default
