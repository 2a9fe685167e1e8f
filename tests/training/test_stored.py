"""A config.yaml of anybody's is read without importing anything, and never takes long."""

import subprocess
import sys

import pytest

from noisewise.training.config import Config
from noisewise.training.options import as_yaml, config_parser, load_config, parse_config
from noisewise.training.stored import Refused, read_stored
from tests.training.processes import ROOT, environment

HIDDEN = {
    "a group": "model: {class_path: planted.X}",
    "a group by its dotted name": "model.class_path: planted.X",
    "a group as one word": "model: planted.X",
    "another group": "ema: {class_path: planted.X}",
    "an option": "model: {options: {a: {class_path: planted.X, init_args: {}}}}",
    "an option of an option": "model: {options: {a: {b: [{class_path: planted.X}]}}}",
    "an option as text": "data: {options: {a: '{class_path: planted.X}'}}",
    "an option as text in other letters": """data: {options: {a: '{"\\x63lass_path": planted.X}'}}""",
    "all options as text": "model: {options: '{a: {class_path: planted.X}}'}",
    "options by their dotted name": "model.options: {a: {class_path: planted.X}}",
    "a value": "seed: {class_path: planted.X}",
    "a list": "log: {trackers: [{class_path: planted.X}]}",
    "a file of its own": "model: inner.yaml",
}


READ_ALL = """
import json, os, sys
from pathlib import Path
from noisewise.training.options import config_parser, load_config, parse_config
for folder in map(Path, sys.argv[1:]):
    os.chdir(folder)
    sys.modules.pop("planted", None)
    for read in (load_config, lambda path: parse_config(config_parser(), ["--steps=3"], stored=path)):
        try:
            read(Path("config.yaml"))
        except ValueError as error:
            print(folder.name, error)
"""


def test_reading_settings_imports_nothing(tmp_path):
    """One process reads all of them, each in a folder of its own."""
    (tmp_path / "planted.py").write_text("open('imported', 'w').close()\nclass X:\n    pass\n")
    folders = {name: tmp_path / str(number) for number, name in enumerate(HIDDEN)}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "inner.yaml").write_text("class_path: planted.X\n")
        (folder / "config.yaml").write_text(HIDDEN[name])
    paths = {**environment(), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", READ_ALL, *map(str, folders.values())]
    found = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert [name for name, folder in folders.items() if (folder / "imported").exists()] == [], found.stdout


def test_free_options_stay_as_they_are_written_also_where_the_command_line_adds_to_them(tmp_path):
    config = Config()
    config.model.options = {"a": {"class_path": "planted.X"}, "b": "12", "c": [1, {"d": None}]}
    config.evaluation.data_options = {"f": {"class_path": "planted.X"}, "g": "012"}
    (tmp_path / "config.yaml").write_text(as_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    found = parse_config(config_parser(), ["--model.options.e=5", "--steps=3"], stored=tmp_path / "config.yaml")
    assert (found.steps, found.model.options) == (3, {**config.model.options, "e": 5})
    assert found.evaluation == config.evaluation


@pytest.mark.parametrize(
    ("arguments", "steps", "epochs"), [([], 7, 3), (["--steps=9"], 9, None), (["--epochs=4"], 7, 4), (["--seed=1"], 7, 3)]
)
def test_steps_or_epochs_come_after_those_that_are_stored(arguments, steps, epochs, tmp_path):
    (tmp_path / "config.yaml").write_text(as_yaml(Config(steps=7, epochs=3.0)))
    found = parse_config(config_parser(), arguments, stored=tmp_path / "config.yaml")
    assert (found.steps, found.epochs) == (steps, epochs)


def bomb(open, close):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    references = [f"*a{i - 1}" for i in range(1, 30)]
    inner = [", ".join(f"{f'k{n}: ' if open == '{' else ''}{one}" for n in range(10)) for one in references]
    lines += [f"a{i}: &a{i} {open}{inner[i - 1]}{close}" for i in range(1, 30)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        bomb("[", "]"),
        bomb("{", "}"),
        "&a [*a]",
        "model: {options: &a {b: *a}}",
        "[" * 5000 + "]" * 5000,
        "model: {options: {a: " + "[" * 200 + "]" * 200 + "}}",
        "# " + "x" * 2**20,
    ],
)
def test_a_file_that_means_more_than_it_says_is_refused(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises((ValueError, OSError), match=r"config\.yaml"):
        load_config(path)


def test_a_reference_that_means_little_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {options: {a: &list [1, 2], b: *list}}")
    assert load_config(path).model.options == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize("text", ["log: {trackers: [[a]]}", "seed: {a: 1}", "data: {shape: [[1], 2]}"])
def test_a_setting_is_a_value_or_a_list_of_values(text, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(Refused, match="must be a value"):
        read_stored(path)
