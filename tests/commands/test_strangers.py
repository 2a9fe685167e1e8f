"""The folder of a stranger: nothing that it names is run, written through, or waited for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from noisewise.plain_files import inside, replace_file
from noisewise.study.job import Status
from noisewise.training.run_folder import git_state
from tests.generation.runs import copy_of_run

COMMANDS = {
    "generate": ["generate", "RUN", "--count", "2", "--steps", "2"],
    "evaluate": ["evaluate", "RUN", "--metrics", "none", "--heldout", "4", "--levels", "2"],
    "resume": ["train", "--resume", "--out", "RUN"],
    "resume --dry-run": ["train", "--resume", "--out", "RUN", "--dry-run"],
    "analyze": ["analyze", "gradients", "--run", "RUN", "--out", "OUT"],
    "report": ["report", "RUN"],
}


def hostile(tmp_path, options: str, name: str = "subprocess.Popen") -> Path:
    run = copy_of_run(tmp_path)
    text = (run / "config.yaml").read_text()
    start, end = text.index("model:\n"), text.index("optimizer:\n")
    model = f"model:\n  name: {name}\n  options: {options}\n  conditional: false\n  label_dropout: 0.1\n"
    (run / "config.yaml").write_text(text[:start] + model + text[end:])
    return run


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_in_a_stranger_s_folder_is_not_run(words, tmp_path, call):
    hostile(tmp_path, f"{{args: [touch, {tmp_path / 'planted'}]}}")
    status, said = call(words)
    assert not (tmp_path / "planted").exists()
    if words[0] != "report":  # which needs no model
        assert (status, "subprocess.Popen" in said, "--trust" in said) == (1, True, True), said


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_nor_is_one_among_the_options_of_an_honest_model(words, tmp_path, call):
    inner = f"{{class_path: logging.FileHandler, init_args: {{filename: {tmp_path / 'planted'}}}}}"
    hostile(tmp_path, f"{{patch: {inner}}}", "dit")
    call(words)
    assert not (tmp_path / "planted").exists()


def test_the_user_s_word_lets_a_folder_s_model_in(tmp_path, call, monkeypatch):
    own = ["--model.name", "tests.training.tiny:Own", "--model.options", "{}", "--device", "cpu", "--batch", "16"]
    new = ["train", "--preset", "digits", "--steps", "2", "--log.trackers", "[]", "--log.samples_every", "0", "--out", "RUN"]
    assert call(new, *own)[0] == 0
    assert call(COMMANDS["generate"])[0] == 0, "it is remembered that the user gave it"
    shutil.rmtree(tmp_path / "state")
    for words in (COMMANDS["generate"], COMMANDS["evaluate"], COMMANDS["resume"]):
        status, said = call(words)
        assert status == 1, words
        assert "tests.training.tiny:Own" in said
        assert call(words, "--trust", "tests.training.tiny:Other")[0] == 1
    assert call(COMMANDS["generate"], "--trust", "tests.training.tiny:Own")[0] == 0
    assert call(COMMANDS["generate"])[0] == 1, "to look at one folder is no word for the next"
    assert call([*new, "--resume"], *own)[0] == 0, "on the command line it is the user's word"
    assert call(COMMANDS["generate"])[0] == 0


@pytest.mark.parametrize("kind", ["fsmonitor", "filter"])
def test_a_command_of_a_stranger_s_repository_is_not_run(kind, tmp_path, monkeypatch):
    """`environment()` notes the commit of the current folder, and git runs what a repository's own settings name."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    folder, planted = tmp_path / "repository", tmp_path / "planted"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True, capture_output=True)

    git("init")
    (folder / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    (folder / "file").write_text("2")
    if kind == "fsmonitor":
        git("config", "core.fsmonitor", f"touch {planted}; false")
    else:
        git("config", "filter.x.clean", f"touch {planted}; cat")
        (folder / ".gitattributes").write_text("file filter=x\n")
    state = git_state()
    assert not planted.exists()
    assert state is not None
    assert state.endswith("+" if kind == "fsmonitor" else "?")


LINKS = {
    ".lock": "resume",
    "environment.jsonl": "resume",
    "metrics.jsonl": "evaluate",
    "samples": "resume",
    "checkpoints": "resume",
    "generated": "generate",
}


@pytest.mark.parametrize(("name", "command"), LINKS.items())
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_written_never_leaves_the_folder_through_a_link(kind, name, command, tmp_path, call):
    run, precious = copy_of_run(tmp_path), tmp_path / "precious"
    is_folder = name in ("samples", "checkpoints", "generated")
    if kind == "pipe" and is_folder:
        pytest.skip("a folder is no pipe")
    if is_folder:
        precious.mkdir()
        if (run / name).exists():
            (run / name).rename(precious / "inner")
            precious = precious / "inner"
    else:
        precious.write_text("precious\n")
        (run / name).unlink(missing_ok=True)
    if kind == "link":
        (run / name).symlink_to(precious)
    else:
        os.mkfifo(run / name)
    before = everything(precious)
    more = ["--steps", "14", "--log.samples_every", "1"] if command == "resume" else []
    status, said = call(COMMANDS[command], *more)
    assert everything(precious) == before
    assert status == 1
    assert f"{name} is a link, or no plain file" in said


def everything(path):
    """All names and contents below a path."""
    if path.is_dir():
        return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}
    return path.read_bytes()


def test_a_temporary_file_is_not_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious\n")
    (tmp_path / f".config.yaml-{os.getpid()}").symlink_to(precious)
    replace_file(tmp_path / "config.yaml", "steps: 3\n")
    Status("training", 3, 1.0).write(tmp_path)
    (tmp_path / f".status.json-{os.getpid()}").symlink_to(precious)
    Status("training", 4, 1.0).write(tmp_path)
    assert precious.read_text() == "precious\n"
    assert (tmp_path / "config.yaml").read_text() == "steps: 3\n"
    assert Status.read(tmp_path).step == 4


@pytest.mark.parametrize("path", ["a/../../b", "../b"])
def test_a_path_inside_a_folder_does_not_climb_out(path, tmp_path):
    with pytest.raises(ValueError, match="is not in"):
        inside(tmp_path, tmp_path / path)


@pytest.mark.parametrize("bad", [b"5\n", b"\xff\n", b'{"step": {}}\n'])
def test_a_damaged_line_of_metrics_does_not_keep_a_run_from_going_on(bad, tmp_path, call):
    run = copy_of_run(tmp_path)
    rows = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(rows + bad)
    status, said = call(COMMANDS["resume"], "--steps", "14")
    assert status == 0, said
    assert f"metrics.jsonl: damaged in line {rows.count(bytes([10])) + 1}" in said
    assert (run / "metrics.jsonl").read_bytes().startswith(rows)
