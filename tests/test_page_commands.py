"""The pages on the command line agree with it: their commands and programs run, their tables are those of the code.

Commands are shown as one would type them, and run here with far fewer steps and images (`SHORTER`). Blocks that need a GPU, the
network or data say so in a first line `# needs: ...`; of those only the options are checked.
"""

import argparse
import inspect
import io
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState, PartialState

from noisewise.analysis import ANALYSES
from noisewise.commands.cli import COMMANDS, main
from noisewise.commands.parser import Parser
from noisewise.data import SOURCES
from noisewise.generation.solvers import SOLVERS
from noisewise.generation.spacing import SPACINGS
from noisewise.metrics.distances import METRICS
from noisewise.models import MODELS
from noisewise.training.options import PRESETS, preset_names

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(str(path.relative_to(DOCS))[:-3] for path in DOCS.rglob("*.md") if "```sh\n" in path.read_text())
"""Those with commands. Pages with Python alone are run by test_pages.py."""
NOISEWISE = re.compile(r"(?:python -m )?noisewise ")
TINY = ["--batch=8", "--device=cpu", "--precision=fp32", "--log.samples=4", "--log.sample_steps=3"]
SMALL = [*TINY, "--budget=2it", "--model.options.channels=8"]
FEW = ["--points=1", "--levels=4", "--images=4"]
SHORTER = {
    "train": [*TINY, "--log.trackers=[]"],
    "compare": [*SMALL, "--seeds=1", "--evaluate-at=1", "--images=8"],
    "reproduce": [*SMALL, "--seeds=1", "--evaluate-at=1", "--images=8"],
    "generate": ["--count=8", "--steps=3", "--device=cpu"],
    "evaluate": ["--count=64", "--steps=3", "--heldout=16", "--levels=4", "--device=cpu"],
    "analyze gradients": [*SMALL, "--points=1", "--levels=2", "--rows=4"],
    "analyze interdependence": [*SMALL, *FEW, "--strata=2", "--steps=1"],
    "analyze predictor": [*SMALL, *FEW, "--steps=8", "--queue=3", "--sizes=1,2", "--credit=5"],
    "analyze overhead": ["--seconds=0.01", "--widths=8", "--batches=8", "--steps-of-process=100", "--device=cpu"],
    "analyze optimal": ["--levels=4", "--images=8", "--device=cpu"],
    "analyze ablate": [*SMALL, "--values=0.2", "--seeds=1", "--images=8"],
}


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # python -m looks in the current folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    AcceleratorState._reset_state()
    PartialState._reset_state()


def read(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def blocks(page: str, languages: str) -> list[tuple[str, str]]:
    return re.findall(rf"^```({languages})\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def tables(page: str) -> list[list[list[str]]]:
    """Every table as rows of cells without backticks, the headings first and the line below them left out."""
    found = [group.splitlines() for group in re.findall(r"(?:^\|.*\n)+", read(page), re.MULTILINE)]
    return [[[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in [t[0], *t[2:]]] for t in found]


def table(page: str, *headings: str) -> dict[str, list[str]]:
    """First cell -> the others, of all tables that begin with these headings."""
    rows = [row for one in tables(page) if tuple(one[0][: len(headings)]) == headings for row in one[1:]]
    assert rows, f"{page}.md has no table {headings}"
    assert len({row[0] for row in rows}) == len(rows), "a name stands twice"
    return {row[0]: row[1:] for row in rows}


def section(page: str, title: str) -> str:
    """What stands between this heading of the second level and the next."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", read(page), re.DOTALL | re.MULTILINE)
    assert found, f"{page}.md has no section {title}"
    return found[1]


# Commands and programs


def shortened(words: list[str]) -> list[str]:
    """The command with less to do."""
    more = list(SHORTER.get(" ".join(words[:2]) if words[0] == "analyze" else words[0], []))
    if "--run" in words or (words[0] == "analyze" and len(words) > 2 and not words[2].startswith("-")):
        more = [word for word in more if not word.startswith(("--budget", "--points"))]
    if words[0] == "train":
        more.append("--steps=6" if "--resume" in words else "--steps=4")
        if "digits" in words and "--model.name" not in words:
            more.append("--model.options.channels=8")
    return words + more


def run(command: str) -> str:
    """What a command prints; it must succeed."""
    words, target = shlex.split(NOISEWISE.sub("", command, count=1)), None
    if words[-2] == ">":
        words, target = words[:-2], Path(words[-1])
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(shortened(words)) == 0, command
    if target is not None:
        target.write_text(printed.getvalue())
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_programs_run_in_their_order(page: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, text in blocks(page, "sh|python"):
        if language == "python":
            exec(compile(text, page, "exec"), names)
        elif not text.startswith("# needs: "):
            assert text.strip(), "an empty block"
            for line in text.replace("\\\n", " ").splitlines():
                assert NOISEWISE.match(line), f"not a command of ours, and it does not say what it needs: {line}"
                printed = run(line)
                assert "--print-config" in line or printed, line


def test_enough_of_the_commands_run() -> None:
    """That a page marks all its commands as in need of something would go unnoticed above."""
    run_here = [
        text.replace("\\\n", " ").splitlines()
        for page in PAGES
        for _, text in blocks(page, "sh")
        if not text.startswith("# needs: ")
    ]
    assert {NOISEWISE.sub("", line).split()[0] for lines in run_here for line in lines} == set(COMMANDS) - {"encode"}
    assert sum(map(len, run_here)) >= 20


@cache
def help_of(command: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return printed.getvalue()


def flags_of(command: str) -> set[str]:
    return set(re.findall(r"--[a-z][\w.-]*[a-z0-9]", help_of(command)))


def check_flags(text: str) -> int:
    """How many commands of ours there are in a text; each flag of each must exist."""
    commands = re.findall(r"(?:^|-m |: )noisewise (analyze \w+|\w+) ?(.*)", text.replace("\\\n", " "), re.MULTILINE)
    for command, rest in commands:
        known = flags_of(command) | (flags_of("train") if command.startswith(("compare", "analyze", "reproduce")) else set())
        for flag in re.findall(r"(?<=\s)--[\w.-]+", " " + rest):
            assert re.sub(r"(options)\..*", r"\1", flag) in known, f"{command} has no {flag}"  # as in --model.options.depth
    return len(commands)


WITH_COMMANDS = [page for page in PAGES if any("noisewise " in text for _, text in blocks(page, "sh"))]


@pytest.mark.parametrize("page", [*WITH_COMMANDS, "../README"])
def test_every_flag_in_a_command_exists(page: str) -> None:
    assert sum(check_flags(text) for _, text in blocks(page, "sh|text"))


def test_every_flag_in_the_comments_of_presets_exists() -> None:
    assert sum(check_flags((PRESETS / f"{name}.yaml").read_text()) for name in preset_names()) >= 2


# Tables of names: those with defaults or numbers are written by docs/generate.py


FLAGS = {"generating": "generate", "evaluating": "evaluate", "comparing": "compare", "reports": "report", "preview": "preview"}
"""Pages that show the flags most people need, with their commands."""


@pytest.mark.parametrize(("page", "command"), FLAGS.items())
def test_flags_in_tables_exist(page: str, command: str) -> None:
    assert set(table(page, "flag")) <= flags_of(command)


def parser_of(command: str) -> Parser:
    words = command.split()
    package = "noisewise.analysis" if words[0] == "analyze" else "noisewise.commands"
    parser = Parser(prog=f"noisewise {command}")
    import_module(f"{package}.{words[-1]}").add_options(parser)
    return parser


@pytest.mark.parametrize("command", [*sorted(set(COMMANDS) - {"analyze"}), *(f"analyze {name}" for name in ANALYSES)])
def test_help_explains_every_flag_and_says_its_default(command: str) -> None:
    """Pages show the most important ones and send to the help for the others."""
    said = "".join(help_of(command).split())  # long ones are broken
    for action in parser_of(command)._actions:
        assert action.help, action.option_strings
        if action.option_strings and action.default not in (None, False, [], "", argparse.SUPPRESS):
            assert "default" in action.help or "".join(str(action.default).split()) in said, action.option_strings


@pytest.mark.parametrize("analysis", ANALYSES)
def test_every_analysis_has_a_section_with_a_command_and_a_picture(analysis: str) -> None:
    text = section("analyzing", analysis)
    assert f"noisewise analyze {analysis}" in text
    assert f"(img/analysis_{analysis}.png)" in text


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_has_a_section_with_a_command_and_its_options(name: str) -> None:
    text = section("data", name)
    assert "```sh" in text
    if set(inspect.signature(SOURCES[name]).parameters) - {"path", "split"}:
        assert f"<!-- generated: options-of {name} -->" in text


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_has_every_option_of_a_network(name: str) -> None:
    """It is made from the docstrings."""
    explained = inspect.getdoc(MODELS[name]) or ""
    assert all(f"{option}: " in explained for option in inspect.signature(MODELS[name]).parameters)


def test_names_are_those_of_the_code() -> None:
    assert [re.match(r"\[`(\w+)`\]", name)[1] for name in table("analyzing", "analysis")] == list(ANALYSES)  # type: ignore[index]
    assert tuple(table("generating", "spacing")) == SPACINGS
    assert tuple(table("evaluating", "metric")) == METRICS
    assert list(table("models", "model.name")) == list(MODELS)
    solvers = table("generating", "solver", "order")
    assert list(solvers) == list(SOLVERS)
    for name, cells in solvers.items():
        assert all(option.name in cells[-1] for option in fields(SOLVERS[name])), name


# Fields of what is written


def test_every_field_of_a_row_of_metrics_is_explained() -> None:
    run("noisewise train --preset digits --out runs/first")
    run("noisewise evaluate runs/first --vlb 2 --metrics " + ",".join(METRICS))
    training, evaluation = (json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines())
    explained = table("training", "field")
    assert set(training) == set(explained) - {"processes", "outliers"}  # which are there if there are several, or any
    names = {name for row in table("evaluating", "field") for name in row.split("`, `")}
    metrics = {field for _, field, *_ in [[name, *cells] for name, cells in table("evaluating", "metric").items()]}
    assert {name.replace("digits-frechet", "fid") for name in evaluation} <= names | metrics
    for group in ("heldout", "vlb"):
        assert all(f"`{name}`" in read("evaluating") for name in evaluation[group]), group


def test_the_folder_of_a_comparison_holds_what_the_page_lists() -> None:
    run("noisewise compare --preset digits --samplers uniform --out out/compared")
    assert {name.strip("/") for name in table("comparing", "file")} == {
        path.name for path in Path("out/compared").iterdir() if path.name[0] != "."
    }


def test_the_run_folder_and_checkpoint_hold_what_the_pages_list() -> None:
    run("noisewise train --preset digits --out runs/first")
    listed = {name.strip("/") for name in table("training", "file")}
    assert {path.name for path in Path("runs/first").iterdir() if path.name[0] != "."} <= listed
    (layout,) = (text for _, text in blocks("checkpoints", "text") if "manifest.json" in text)
    (checkpoint,) = Path("runs/first/checkpoints").iterdir()
    assert set(re.findall(r"^ +(\S+)", layout, re.MULTILINE)) == {path.name for path in checkpoint.iterdir()}


def test_what_print_config_prints_reads_back_as_the_same() -> None:
    command = "noisewise train --preset digits --sampler 'mix:of=(speed:k=5),floor=0.1' --print-config"
    first = run(f"{command} > mine.yaml")
    assert run("noisewise train --config mine.yaml --print-config") == first
    assert yaml.safe_load(first)["sampler"] == "mix:of=(speed:k=5),floor=0.1"
