"""Files of a run or a comparison that are damaged or made up: one line says what is wrong, soon, and without escape codes."""

import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from noisewise.plain_files import replace_file
from noisewise.recipes import recipe
from noisewise.spec import SpecError
from noisewise.study.outcome import Plan
from noisewise.training import checkpoint
from noisewise.training.run import Run, check_name, default_folder
from noisewise.words import printable
from tests.generation.runs import copy_of_run
from tests.study.made import curve, planted
from tests.training.processes import ROOT, environment, finish, last_step, start, until
from tests.training.test_faults import workers_of
from tests.training.tiny import tiny

GENERATE = ["generate", "RUN", "--count", "2", "--steps", "2"]
RESUME = ["train", "--resume", "--out", "RUN", "--steps", "13"]
REPORT = ["report", "RUN"]
ESCAPE = "\x1b[31mred"


@pytest.fixture(autouse=True)
def soon():
    """What hangs ends the test."""

    def late(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def with_state(run, change):
    """The newest checkpoint with a state that says something else, and a manifest that vouches for it."""
    folder = checkpoint_folder(run)
    state, manifest = (json.loads((folder / name).read_text()) for name in ("state.json", "manifest.json"))
    change(state)
    text = json.dumps(state).encode()
    (folder / "state.json").write_bytes(text)
    manifest["files"]["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def checkpoint_folder(run):
    return run / "checkpoints" / "step-00000012"


STATES = {
    "nothing": (lambda state: state.clear(), [GENERATE, RESUME]),
    "no data": (lambda state: state.pop("data"), [GENERATE, RESUME]),
    "no shape": (lambda state: state["data"].pop("shape"), [GENERATE]),
    "a shape of words": (lambda state: state["data"].update(shape=["a"]), [GENERATE]),
    "no number of classes": (lambda state: state["data"].update(classes=float("inf")), [GENERATE]),
    "latents of nothing": (lambda state: state["data"].update(latents={"a": 1}), [GENERATE]),
    "no processes": (lambda state: state.pop("processes"), [RESUME]),
    "processes of escape codes": (lambda state: state.update(processes=ESCAPE), [RESUME]),
    "a step without end": (lambda state: state.update(step=float("inf")), [RESUME]),
    "a step of 1e23": (lambda state: state.update(step=10**23), [RESUME]),
    "another step": (lambda state: state.update(step=5), [RESUME]),
    "samples below 0": (lambda state: state.update(samples=-16), [RESUME]),
    "time below 0": (lambda state: state.update(seconds=-1.0), [RESUME]),
    "escape codes": (lambda state: state["data"].update(samples=ESCAPE), [RESUME]),
}


@pytest.mark.parametrize(("change", "commands"), STATES.values(), ids=STATES)
def test_a_state_that_is_none_is_refused(change, commands, tmp_path, call):
    with_state(copy_of_run(tmp_path), change)
    for words in commands:
        status, said = call(words)
        assert status == 1, words
        assert "step-00000012" in said


@pytest.mark.parametrize("part", ["ema.safetensors", "model.safetensors"])
def test_a_manifest_without_weights_is_refused(part, tmp_path, call):
    path = checkpoint_folder(copy_of_run(tmp_path)) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"][part]
    path.write_text(json.dumps(manifest))
    status, said = call(GENERATE)
    assert (status, part in said) == (1, True)


@pytest.mark.parametrize(("name", "value"), [("format", ESCAPE), ("step", ESCAPE), ("step", True), ("files", {ESCAPE: {}})])
def test_a_manifest_of_nonsense_costs_one_checkpoint(name, value, tmp_path, call):
    path = checkpoint_folder(copy_of_run(tmp_path)) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    status, said = call(GENERATE)
    assert (status, "step-00000012" in said) == (0, True)


def test_a_step_of_1e23_is_no_checkpoint(tmp_path, call):
    run = copy_of_run(tmp_path)
    checkpoint_folder(run).rename(run / "checkpoints" / f"step-{10**23}")
    assert checkpoint.steps_in(run / "checkpoints") == [6]
    assert call(GENERATE)[0] == 0
    assert call(RESUME)[0] == 0


ROWS = [
    {"loss": 1e308},
    {"loss": 1e300},
    {"loss_by_level": [1e308] * 10},
    {"step": 0},
    {"loss": -1e308},
    {"gradient_norm": 1e308},
    {"kind": "evaluation", "share": 1.0, "images": 5, "metric": None, "distance": None, "held_out": [1e308, 1.0]},
]


@pytest.mark.parametrize("change", ROWS)
def test_a_report_draws_any_number(change, tmp_path, call):
    path = copy_of_run(tmp_path) / "metrics.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:-1], json.dumps({**json.loads(rows[-1]), **change})]) + "\n")
    assert call(REPORT)[0] == 0


NO_ROWS = [
    {"loss": [1]},
    {"loss": "\u202e"},
    {"loss_by_level": True},
    {"density_by_level": [[1]]},
    {"density_by_level": {"class_path": "os.system"}},
    {"objective_by_level": "9" * 5000},
    {"step": 10**30},
    {"seconds": float("nan")},
]


@pytest.mark.parametrize("change", NO_ROWS, ids=str)
def test_a_row_that_no_run_writes_is_refused_by_the_report(change, tmp_path, call):
    path = copy_of_run(tmp_path) / "metrics.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:-1], json.dumps({**json.loads(rows[-1]), **change})]) + "\n")
    status, said = call(REPORT)
    assert (status, len(said.splitlines())) == (1, 1)
    assert "metrics.jsonl cannot be read" in said


PIPES = ["generated/step-00000012-seed-0/generation.json", "generated/step-00000012-seed-0/00000000.png"]


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_among_the_images_is_not_waited_for(name, tmp_path, call):
    run = copy_of_run(tmp_path)
    assert call(GENERATE)[0] == 0
    (run / name).unlink()
    os.mkfifo(run / name)
    call(GENERATE)


@pytest.mark.parametrize("name", ["samples/step-00000012.png", "failure.json", "environment.jsonl", "metrics.jsonl"])
def test_a_pipe_in_a_run_is_not_waited_for(name, tmp_path, call):
    run = copy_of_run(tmp_path)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    call(REPORT)
    (run / name).unlink()
    (run / name).symlink_to("/dev/zero")
    call(REPORT)


@pytest.mark.parametrize("text", ["{}", "[]", '{"chunk": 0, "count": 2}', '{"chunk": "x", "count": 2}', "x", "[" * 9999])
def test_a_record_of_images_that_is_none_is_named(text, tmp_path, call):
    run = copy_of_run(tmp_path)
    assert call(GENERATE)[0] == 0
    record = run / "generated" / "step-00000012-seed-0" / "generation.json"
    record.write_text(text)
    status, said = call(GENERATE)
    assert (status, str(record) in said) == (1, True)


@pytest.mark.parametrize("value", ["10000000000", "1.0e+30", "[2, 10000000000]"])
def test_a_network_of_impossible_size_is_refused(value, tmp_path, call):
    run = copy_of_run(tmp_path)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("depth: 1", f"depth: {value}"))
    status, said = call(GENERATE)
    assert (status, "depth" in said) == (1, True)


@pytest.mark.parametrize(
    ("was", "value"),
    [("depth: 1", "depth: null"), ("sigma_data: 0.5", "sigma_data: null"), ("name: dit", f"name: '{'9' * 10**5}'")],
)
def test_a_setting_of_another_kind_or_of_any_length_is_refused_in_a_line(was, value, tmp_path, call):
    run = copy_of_run(tmp_path)
    text = (run / "config.yaml").read_text()
    assert was in text
    (run / "config.yaml").write_text(text.replace(was, value))
    status, said = call(GENERATE)
    assert (status, len(said.splitlines()), len(said) < 5000) == (1, 1, True)


@pytest.mark.parametrize("name", ["name", "process", "sampler", "model.name", "data.source"])
def test_a_name_that_is_no_word_is_refused(name, tmp_path, call):
    run = copy_of_run(tmp_path)
    group, _, inner = name.rpartition(".")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text + (f"{group}.{inner}: null\n" if group else f"{inner}: null\n"))
    status, said = call(REPORT)
    assert (status, f"{name} must be a word" in said) == (1, True)


# Comparisons


@pytest.mark.parametrize("name", ["../../secret", "/secret", "a/b", "..", ".", "", "a\0b"])
def test_the_runs_of_a_comparison_lie_in_it(name, tmp_path, call):
    folder = planted(tmp_path / "run", {("linear", "uniform", 0): curve(3.0, 2.0)}).folder
    path = folder / "comparison.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "runs": [name]}))
    with pytest.raises(ValueError, match="no name of a run"):
        Plan.read(folder)
    assert call(REPORT)[0] == 1


@pytest.mark.parametrize("text", ["[]", "{}", "5", "[" * 99999, '{"format": 1, "runs": 3}', "\xff"])
@pytest.mark.parametrize("name", ["comparison.json", "runs/00-uniform-0/failure.json", "runs/00-uniform-0/environment.jsonl"])
def test_a_damaged_file_of_a_comparison_is_named(name, text, tmp_path, call):
    folder = planted(tmp_path / "run", {("linear", "uniform", 0): curve(3.0, 2.0)}).folder
    (folder / name).write_bytes(text.encode("latin-1"))
    status, said = call(REPORT)
    assert status == 0 or name in said


# The command line


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/../../x", "a\x1b[31m"])
def test_a_name_leads_nowhere_else(name, call):
    with pytest.raises(ValueError, match="--name"):
        default_folder(tiny(name=name))
    status, said = call(["compare", "--preset", "digits", "--name", name])
    assert (status, "--name" in said) == (1, True)
    check_name("group/first")


def test_a_tracker_does_not_write_outside_the_run(tmp_path):
    config = tiny(name="../elsewhere", out=str(tmp_path / "run"))
    config.log.trackers = ["tensorboard"]
    with pytest.raises(ValueError, match="--name"):
        Run(config)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("words", [["train", "--preset", "digits", "--out", "bad\udcff"], ["report", "bad\udcff"]])
def test_a_name_that_is_no_utf8_is_refused(words, call):
    status, said = call(words)
    assert (status, "UTF-8" in said) == (1, True)


@pytest.mark.parametrize("depth", [30, 1500])
def test_specs_too_deep_in_one_another_are_refused(depth):
    spec = "uniform"
    for _ in range(depth):
        spec = f"mix:of=({spec}),floor=0.1"
    with pytest.raises(SpecError, match=r"deep|at most"):  # the deepest are too long as well
        recipe(spec, tiny().objective())
    recipe("mix:of=(mix:of=(mix:of=(speed:k=5),floor=0.1),floor=0.1),floor=0.1", tiny().objective())


def test_control_characters_are_written_out():
    assert printable("a\x1b[31mb\x07\u202ec\tä▁\n") == "a\\x1b[31mb\\x07\\u202ec\tä▁\n"


# What a kill leaves


KILLED = """
import os, signal, sys
from pathlib import Path
from noisewise.plain_files import replace_file
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_file(Path(sys.argv[1]), "half")
"""


def test_a_run_sweeps_what_a_killed_process_has_left(tmp_path, call):
    run = copy_of_run(tmp_path)
    found = subprocess.run([sys.executable, "-c", KILLED, str(run / "config.yaml")], env=environment(), cwd=ROOT, timeout=100)
    assert found.returncode == -signal.SIGKILL
    assert list(run.glob(".config.yaml-*"))
    assert call(RESUME)[0] == 0
    assert not list(run.glob(".config.yaml-*"))
    replace_file(run / "notes.json", "{}")
    assert (run / "notes.json").read_text() == "{}"


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_is_spoken_of(tmp_path):
    signal.alarm(240)
    out = tmp_path / "run"
    process = start(out, "--steps=1000000", "--checkpoint.every=1000000", ranks=2)
    until((out / "metrics.jsonl").exists)
    os.kill(workers_of(process.pid)[1], signal.SIGTERM)
    said = finish(process)  # gloo may abort at exit, after all is said
    assert f"another process was asked to stop: saved at step {last_step(out)}; go on with --resume" in said
