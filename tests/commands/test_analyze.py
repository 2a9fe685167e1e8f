"""noisewise analyze itself: help, bad input, the files it writes."""

import csv
import shlex
import subprocess
import sys

import pytest

from noisewise.analysis import ANALYSES
from noisewise.commands.cli import main


def test_help_names_every_analysis(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ANALYSES)


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_shows_its_own_options(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--formats" in shown
    assert shown.count("--") > 4, "nothing but --out and --formats"


def test_help_imports_no_analysis():
    """Each is imported when asked for: one that needs more than the others must not be in their way."""
    code = """
import sys
from noisewise.commands.cli import main
try:
    main(["analyze", "--help"])
except SystemExit:
    pass
print([name for name in sys.modules if name.startswith("noisewise.analysis.")])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_an_analysis_writes_its_picture_in_every_format_and_its_data(tmp_path, capsys):
    command = ["analyze", "increments", "--schedules", "linear:steps=50,cosine:steps=40", "--formats", "png,svg,pdf"]
    assert main([*command, "--out", str(tmp_path / "deep" / "er")]) == 0
    files = {path.name: path for path in (tmp_path / "deep" / "er").iterdir()}
    assert sorted(files) == ["increments.csv", "increments.pdf", "increments.png", "increments.svg"]
    assert files["increments.png"].read_bytes().startswith(b"\x89PNG")
    assert files["increments.pdf"].read_bytes().startswith(b"%PDF")
    assert "<svg" in files["increments.svg"].read_text()
    with files["increments.csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 90
    assert {row["schedule"] for row in rows} == {"linear:steps=50", "cosine:steps=40"}
    said = capsys.readouterr().out
    assert "linear:steps=50: acceleration" in said
    assert all(str(path) in said for path in files.values())


SMALL = (
    "--preset digits --budget 4it --points 1 --device cpu --batch 16 --model.name tests.training.tiny:Own --model.options {}"
)
PREDICTOR = f"predictor {SMALL} --levels 6 --images 4 --steps 12 --queue 5 --sizes 3,1 --credit 5"
BAD = [
    ("increments --formats gif", "--formats 'gif': choose from png, svg, pdf"),
    ("increments --formats ''", "choose from png, svg, pdf"),
    ("increments --schedules lineer", "did you mean 'linear'"),
    ("increments --schedules ' '", "--schedules is empty"),
    ("increments --schedules linear,,cosine", "empty place between its commas"),
    ("increments --schedule linear", "unknown option '--schedule'"),
    ("density --run nowhere", "nowhere is no run"),
    ("density --comparison nowhere", "nowhere holds no comparison"),
    ("density --run nowhere --samplers uniform", "one of --run, --comparison and --samplers"),
    ("density --samplers unifrm", "did you mean 'uniform'"),
    ("density --samplers ''", "empty place"),
    ("density --samplers uniform --process lineer", "did you mean 'linear'"),
    ("density --sampler uniform", "unknown option '--sampler'"),
    ("gradients", "give the folder of a run, or --preset NAME"),
    ("gradients --run x --preset digits", "give the folder of a run, or --preset NAME"),
    ("gradients --run nowhere", "is no run"),
    ("gradients --preset digitz", "no preset 'digitz'"),
    ("gradients --preset digits --points 0", "--points must be >= 1"),
    ("gradients --run somewhere --points 2", "--points is for a --preset"),
    ("gradients --run somewhere --budget 2it", "--budget is for a --preset"),
    ("gradients --preset digits --budget soon", "--budget 'soon'"),
    (f"gradients {SMALL} --levels 0", "--levels must be >= 1"),
    (f"gradients {SMALL} --rows 1", "--rows 1"),
    (f"gradients {SMALL} --objective learned", "learned in training"),
    (f"gradients {SMALL} --objective uniform", "names the sampler"),
    (f"gradients {SMALL} --objective vbl", "vlb"),
    (f"interdependence {SMALL} --levels 0", "--levels must be >= 1"),
    (f"interdependence {SMALL} --strata 0", "--strata must be >= 1"),
    (f"interdependence {SMALL} --steps 0", "--steps must be >= 1"),
    (f"interdependence {SMALL} --share 0", "share of the batch"),
    (f"interdependence {SMALL} --images 1", "--images must be >= 2"),
    (f"{PREDICTOR} --levels 0", "--sizes must lie in"),
    (f"{PREDICTOR} --sizes 0,1", "--sizes must lie in 1 ... 6"),
    (f"{PREDICTOR} --sizes 7", "--sizes must lie in 1 ... 6"),
    (f"{PREDICTOR} --sizes a", "--sizes 'a'"),
    (f"{PREDICTOR} --queue 2", "--queue must be >= 3"),
    (f"{PREDICTOR} --steps 6", "--queue + 5"),
    (f"{PREDICTOR} --queue-images 5", "--queue-images must lie in 1 ... 4"),
    (f"{PREDICTOR} --credit 2", "--credit must be 0 or at least 5"),
    (f"{PREDICTOR} --target learned", "learned in training"),
    ("overhead --samplers adaptiv", "did you mean 'adaptive'"),
    ("overhead --samplers ''", "empty place"),
    ("overhead --seconds 0", "--seconds must be positive"),
    ("overhead --batches none", "--batches 'none': give whole numbers of at least 1"),
    ("overhead --batches 8,-1", "--batches '8,-1': give whole numbers of at least 1"),
    ("overhead --widths 1.5", "--widths '1.5': give whole numbers of at least 1"),
    ("overhead --with 8", "did you mean --widths"),
    ("overhead --batch=16", "analyze overhead takes --batches, which may be a single one, not --batch\n"),
    ("overhead --sampler uniform", "analyze overhead takes --samplers, which may be a single one, not --sampler\n"),
    ("ablate --values 1,2", "--values needs the one --setting"),
    ("ablate --setting strata", "--setting strata needs --values"),
    ("ablate --setting floor --values ''", "--values is empty"),
    ("ablate --setting floor --values 0,0", "names 0 twice"),
    ("ablate --setting floor --values 2", "floor must lie in [0, 1]"),
    ("ablate --setting flor --values 2", "did you mean 'floor'"),
    ("ablate --setting floor --sampler adaptiv", "no sampler"),
    ("ablate --setting chosen --sampler adaptive", "chosen is a setting of the reinforce estimator"),
    ("ablate --setting floor --seeds 0", "--seeds must be >= 1"),
    ("ablate --setting floor --budget soon", "--budget 'soon'"),
    ("ablate --setting floor --seed 3", "ablate takes --seeds"),
    ("ablate --setting floor --stepz 3", "did you mean --steps"),
    ("optimal", "give the folder of a run, or --preset NAME"),
    ("optimal --preset digits --levels 0", "--levels must be >= 1, got 0"),
    ("optimal --preset digits --images 1", "--images must be >= 2, got 1"),
    ("optimal --preset digits --references -1", "--references must be >= 0, got -1"),
    ("optimal --run nowhere", "nowhere is no run"),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[line.replace(SMALL, "...") for line, _ in BAD])
def test_bad_input_is_said_without_a_traceback_and_leaves_nothing(line, words, tmp_path, capsys):
    assert main(["analyze", *shlex.split(line), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0.5,0.1", "-0.1,0.5", "0.5,1.1", "0.5", "a,b", "0.5,0.5", "nan,1"])
def test_ranges_that_are_none_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["analyze", "interdependence", f"--range={text}"])
    assert "LOW,HIGH" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["incremants"]])
def test_no_analysis_or_an_unknown_one_is_a_wrong_use(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *arguments])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ANALYSES)


def test_a_run_is_the_first_word_or_an_option(tmp_path, capsys):
    for words in (["nowhere"], ["--run", "nowhere"]):
        assert main(["analyze", "gradients", *words, "--batch", "8", "--out", str(tmp_path)]) == 1
        assert "nowhere is no run" in capsys.readouterr().err
    assert main(["analyze", "gradients", "one", "--run", "other"]) == 1
    assert "name the run once" in capsys.readouterr().err
    assert main(["analyze", "gradients", "one", "other"]) == 1
    assert "one run at a time" in capsys.readouterr().err
