"""noisewise analyze itself: help, bad input, the files it writes."""

import csv
import importlib
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


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_is_a_module_with_options_and_an_answer(name):
    module = importlib.import_module(f"noisewise.analysis.{name}")
    assert callable(module.add_options)
    assert callable(module.analyse)


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


def test_written_again_it_is_the_same(tmp_path):
    tables = []
    for _ in range(2):
        assert main(["analyze", "increments", "--schedules", "flow", "--formats", "png", "--out", str(tmp_path)]) == 0
        tables.append((tmp_path / "increments.csv").read_bytes())
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["increments", "--formats", "gif"], "--formats 'gif': choose from png, svg, pdf"),
        (["increments", "--formats", ""], "choose from png, svg, pdf"),
        (["increments", "--schedules", "lineer"], "did you mean 'linear'"),
        (["increments", "--schedules", " "], "--schedules is empty"),
        (["increments", "--schedules", "linear,,cosine"], "empty place between its commas"),
        (["increments", "--schedule", "linear"], "unknown option '--schedule'"),
        (["density", "--run", "nowhere"], "nowhere is no run"),
        (["density", "--comparison", "nowhere"], "nowhere holds no comparison"),
    ],
)
def test_bad_input_is_said_without_a_traceback(arguments, words, tmp_path, capsys):
    assert main(["analyze", *arguments, "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


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
