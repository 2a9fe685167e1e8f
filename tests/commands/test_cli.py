"""The command line as users meet it: help, errors without tracebacks, and whole commands from end to end."""

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from noisewise import __version__
from noisewise.commands import cli
from noisewise.commands.cli import COMMANDS, main
from noisewise.distributed import FailedElsewhere
from noisewise.plain_files import FolderInUse
from noisewise.study.outcome import NoneFinished
from noisewise.training.checkpoint import CheckpointError
from noisewise.training.guard import Diverged
from noisewise.training.signals import StopRequest
from tests.data.small_autoencoder import SMALL
from tests.training.tiny import DIT

ROOT = Path(__file__).parents[2]
TINY = ["--preset=digits", "--device=cpu", "--batch=16", "--steps=6", "--log.every=3", "--log.trackers=[]"]
TINY += ["--log.samples_every=0", "--model.name=dit", f"--model.options={json.dumps(DIT)}"]


def run(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("NOISEWISE_TRACEBACK", None)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def no_traceback_wanted(monkeypatch):
    monkeypatch.delenv("NOISEWISE_TRACEBACK", raising=False)


@pytest.fixture
def own_interrupt():
    """Python's handler of Ctrl-C, and pytest's again afterwards: a command that was interrupted leaves none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def steps_of(out):
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(arguments, capsys):
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert all(name in said and what in said for name, what in COMMANDS.items())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"noisewise {command}" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main(["--help"]) == 0
    assert "--version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "noisewise: error: there is no command 'trian'; choose one of train, "),
        (["trian"], "; did you mean train?"),
        (["--hepl"], "unrecognized arguments: --hepl; did you mean --help?"),
        (["generate", "run", "--cout=3"], "noisewise generate: error: unrecognized arguments: --cout=3; did you mean --count?"),
        (["generate", "run", "other"], "unrecognized arguments: other\n"),
        (["generate", "run", "--format=pgn"], "argument --format: invalid choice: 'pgn'"),
        (["generate", "run", "--coun", "3"], "; did you mean --count?"),  # and not taken for it
        (["analyze", "increment"], "noisewise analyze: error: there is no analysis 'increment'; choose one of gradients, "),
        (["encode"], "the following arguments are required: --data"),
    ],
)
def test_a_wrong_use_is_a_line_with_what_was_probably_meant(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 2
    assert said.splitlines()[1].endswith(" --help")


def test_help_keeps_examples_in_lines_and_wraps_the_rest(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main(["preview", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  noisewise preview --scheduler ") for line in lines) == 2
    assert all(len(line) < 60 for line in lines if not line.startswith("  noisewise "))


def test_help_of_train_shows_its_options_and_the_settings(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {flag} " in said for flag in ("--preset", "--dry-run", "--optimizer.lr", "--data.path"))
    assert said.count("usage:") == 1


def test_help_imports_neither_torch_nor_the_commands():
    code = "import sys; from noisewise.commands.cli import main; main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    loaded = run("-c", code).stderr
    assert "'noisewise.commands.parser'" in loaded
    assert "torch" not in loaded
    assert "'noisewise.commands.train'" not in loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--preset=digit"], "there is no preset 'digit'; choose one of "),
        (["train", *TINY, "--sampler=unifrm"], "did you mean 'uniform'"),
        (["train", *TINY, "--process=linaer", "--dry-run"], "did you mean 'linear'"),
        (["train", *TINY, "--ema.decay=1.5"], "ema.decay must lie in [0, 1), got 1.5"),
        (["train", *TINY, "--steps=many"], "many"),
        (["train", *TINY, "--data=pictures"], "--data.source, --data.path"),
        (["train", *TINY, "--accumulation=5"], "batch=16 does not divide into accumulation=5"),
        (["train", *TINY, "--data.source=folder", "--data.path=no/where"], "no/where"),
        (["train", *TINY, "--out=/proc/run"], "--out /proc/run cannot be written: /proc does not take it ("),
        (["train", *TINY, f"--out={__file__}"], f"--out {__file__} cannot be written: {__file__} is a file, not a folder"),
        (["analyze", "increments", f"--out={__file__}"], f"{__file__} is a file, not a folder"),
        (["compare", "--budget=soon"], "--budget 'soon'"),
        (["encode", "--data=no/where", "--autoencoder=x", "--out=y"], "no/where"),
    ],
)
def test_errors_are_one_clear_line_without_a_traceback(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert "NOISEWISE_TRACEBACK" not in said  # a typo needs no traceback
    monkeypatch.setenv("NOISEWISE_TRACEBACK", "1")
    with pytest.raises((ValueError, OSError)):
        main(arguments)
    assert [path for path in tmp_path.rglob("*") if path.name in ("config.yaml", "metrics.jsonl")] == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("every must be >= 1, got 0"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (ImportError("drawing needs matplotlib"), True),
        (FolderInUse("runs/first is in use"), True),
        (CheckpointError("step-00000007 is damaged"), True),
        (Diverged("5 steps in a row"), True),
        (FailedElsewhere("another process has failed"), True),
        (NoneFinished("no run of out finished"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (TypeError("forward() takes 2 positional arguments"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_is_expected_to_go_wrong_is_one_line_and_else_a_second_says_how_to_see_where(error, expected, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(cli, "run_command", fail)
    assert main(["train"]) == 1
    first, *more = capsys.readouterr().err.splitlines()
    assert first == f"noisewise: {error}"
    assert more == ([] if expected else ["(set NOISEWISE_TRACEBACK=1 to see where this happened)"])


@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_unknown_option_is_one_clear_line_with_the_one_that_was_probably_meant(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [word for word in TINY if not word.startswith("--steps")]
    assert main([command, *options, "--accumulaton=3"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("noisewise: ")
    assert "--accumulaton=3" in said
    assert said.endswith("; did you mean --accumulation?")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named():
    block = "import sys; sys.modules['jsonargparse'] = None; from noisewise.commands.cli import main; sys.exit(main(['train']))"
    done = run("-c", block)
    assert done.returncode == 1
    assert "jsonargparse" in done.stderr
    assert "pip install 'noisewise[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m noisewise preview --scheduler linear | true"  # which is gone long before the first line
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


def test_a_dry_run_of_the_digits(tmp_path, capsys):
    assert main(["train", "--preset=digits", "--dry-run", "--device=cpu", f"--out={tmp_path / 'run'}"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["parameters"] == "163,985"
    assert said["batch"] == "192"
    assert float(said["seconds_per_step"]) > 0
    assert not (tmp_path / "run").exists()


def test_print_config_is_a_config_that_train_reads(tmp_path, capsys):
    assert main(["train", *TINY, "--model.options.width", "32", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["model"]["options"]["width"] == 32
    (tmp_path / "mine.yaml").write_text(printed)
    assert main(["train", f"--config={tmp_path / 'mine.yaml'}", f"--out={tmp_path / 'run'}"]) == 0
    assert steps_of(tmp_path / "run") == [3, 6]


def test_print_config_is_what_would_be_trained(tmp_path, capsys):
    assert main(["train", "--data.source=folder", "--data.shape=[1, 64, 64]", "--device=cpu", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["batch"], printed["steps"]) == (16, 5000)
    assert main(["train", *TINY, f"--out={tmp_path}"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", f"--out={tmp_path}", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load((tmp_path / "config.yaml").read_text())


def test_train_resume_and_the_path_at_the_end(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *TINY, f"--out={out}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"run: {out}"
    assert main(["train", *TINY, f"--out={out}"]) == 1
    assert "continue it with --resume" in capsys.readouterr().err
    assert main(["train", *TINY, f"--out={out}", "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    # a resumed run knows its own settings
    assert main(["train", f"--out={out}", "--resume", "--steps=9"]) == 0
    assert steps_of(out) == [3, 6, 9]
    assert main(["train", f"--out={out}", "--resume", "--optimizer.eps=0.5"]) == 1
    assert "optimizer.eps: 1e-08 -> 0.5" in capsys.readouterr().err


def test_a_run_goes_on_with_a_lower_learning_rate_and_keeps_it(tmp_path):
    out = tmp_path / "run"
    assert main(["train", *TINY, "--optimizer.warmup=0", f"--out={out}"]) == 0
    assert main(["train", f"--out={out}", "--resume", "--steps=9", "--optimizer.lr=0.0001"]) == 0
    assert yaml.safe_load((out / "config.yaml").read_text())["optimizer"]["lr"] == 0.0001
    assert main(["train", f"--out={out}", "--resume", "--steps=12"]) == 0  # nothing said: as before
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["lr"]) for row in rows] == [(3, 0.003), (6, 0.003), (9, 0.0001), (12, 0.0001)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_encode_where_the_same_command_goes_on(number, tmp_path, capsys, monkeypatch, own_interrupt):
    from diffusers import AutoencoderKL

    from noisewise.training.display import Count

    AutoencoderKL(**SMALL, latent_channels=2).eval().save_pretrained(tmp_path / "vae")
    np.save(tmp_path / "images.npy", np.zeros((12, 3, 8, 8), np.uint8))
    words = ["encode", "--source=array", f"--data={tmp_path / 'images.npy'}", f"--autoencoder={tmp_path / 'vae'}"]
    words += ["--device=cpu", "--batch=4", f"--out={tmp_path / 'latents'}"]
    with monkeypatch.context() as patched:
        patched.setattr(Count, "reach", lambda self, done: done == 8 and signal.raise_signal(number))
        assert main(words) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert json.loads((tmp_path / "latents.partial" / "progress.json").read_text())["done"] == 8
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert main(words) == 0
    assert not (tmp_path / "latents.partial").exists()


@pytest.mark.parametrize("patient", [False, True])
def test_an_error_that_ctrl_c_was_turned_into_is_not_told(patient, capsys, monkeypatch, own_interrupt):
    """As importers of large libraries do; but what goes wrong while a run is still being saved is."""
    from noisewise.commands import preview

    def work(args):
        with StopRequest() if patient else nullcontext():
            try:
                signal.raise_signal(signal.SIGINT)
                raise RuntimeError("the disk is full")
            except KeyboardInterrupt:
                raise RuntimeError("failed to import") from None

    monkeypatch.setattr(preview, "run", work)
    assert main(["preview", "--scheduler=linear"]) == (1 if patient else 130)
    said = capsys.readouterr().err
    assert "failed to import" not in said
    assert ("the disk is full" in said) == patient


def test_encode_and_then_train_on_the_latents(tmp_path, capsys):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(**SMALL, latent_channels=2).eval().save_pretrained(tmp_path / "vae")
    for i in range(12):
        folder = tmp_path / "pictures" / f"class{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(i).integers(0, 256, (20, 16, 3), np.uint8)
        Image.fromarray(values).save(folder / f"{i}.png")
    encode = [f"--data={tmp_path / 'pictures'}", f"--autoencoder={tmp_path / 'vae'}", "--device=cpu"]
    encode += ['--options={"size": 16, "labels": true}']
    (tmp_path / "file").touch()
    assert main(["encode", *encode, f"--out={tmp_path / 'file' / 'x'}"]) == 1
    assert f"--out {tmp_path / 'file' / 'x'} cannot be written: {tmp_path / 'file'} is a file" in capsys.readouterr().err
    assert main(["encode", *encode, f"--out={tmp_path / 'latents'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"latents: {tmp_path / 'latents'}"
    data = ["--data.source=latents", f"--data.path={tmp_path / 'latents'}", "--data.shape=[2, 8, 8]", "--data.classes=3"]
    options = ["--model.conditional=true", "--log.samples_every=3", f"--out={tmp_path / 'run'}"]
    assert main(["train", *TINY, *data, *options]) == 0
    assert steps_of(tmp_path / "run") == [3, 6]


@pytest.mark.parametrize("text", ["{size: [16}", "[16]", "16", ""])
@pytest.mark.parametrize(
    ("command", "option"),
    [(["encode", "--data=x", "--autoencoder=y", "--out=z"], "--options"), (["evaluate", "x"], "--data-options")],
)
def test_options_of_a_source_must_be_a_mapping(command, option, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, f"{option}={text}"])
    assert ended.value.code == 2
    assert f"argument {option}: {text!r} is no mapping: write names and values in braces" in capsys.readouterr().err


def test_a_warning_is_said_once_however_often_the_data_are_opened(tmp_path):
    for name in "abc":
        Image.new("L", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "d.png").touch()
    options = ["--data.source=folder", f"--data.path={tmp_path}", "--data.options={channels: 1, skip_corrupt: true}"]
    done = run(
        "-m",
        "noisewise",
        "train",
        *options,
        "--steps=1",
        "--batch=2",
        "--log.trackers=[]",
        "--log.samples_every=0",
        f"--out={tmp_path / 'run'}",
    )
    assert done.returncode == 0
    assert done.stderr.count("noisewise: warning: left out 1 of 4 pictures") == 1


@pytest.mark.parametrize("text", ["{640}", "640", "width=640", "{a: b: c}"])
@pytest.mark.parametrize("option", ["data.options", "model.options", "evaluation.data_options"])
def test_free_options_of_train_must_be_a_mapping(option, text, capsys):
    assert main(["train", f"--{option}", text, "--print-config"]) == 1
    assert f"noisewise: {option} must be names and values in braces" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["{size: 16, labels: true}", '{"size":\t16, "labels": true}'])
def test_options_of_a_source_are_yaml_or_json(options, tmp_path, capsys):
    (tmp_path / "pictures").mkdir()
    command = ["encode", f"--data={tmp_path / 'pictures'}", "--autoencoder=x", f"--out={tmp_path / 'out'}"]
    assert main([*command, f"--options={options}"]) == 1
    assert "holds no pictures" in capsys.readouterr().err  # so the options were taken


def test_numbers_among_options_are_those_of_train():
    from noisewise.training.options import read_mapping

    assert read_mapping("{a: 1e-3, b: 1e5, c: '1e5', d: null}") == {"a": 1e-3, "b": 1e5, "c": "1e5", "d": None}
