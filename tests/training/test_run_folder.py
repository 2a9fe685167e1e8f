"""A run's folder: begun once, resumed with the same settings, used by one process at a time, never torn."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import noisewise
from noisewise.plain_files import FolderInUse, read_rows
from noisewise.training.options import load_config, load_preset
from noisewise.training.run_folder import RunFolder, environment, git_state

HOLD = """
import sys
from pathlib import Path
from noisewise.training.run_folder import RunFolder
from noisewise.training.options import load_preset
folder = RunFolder(Path(sys.argv[1]))
folder.begin(load_preset("digits"), resume=True)
print("held", flush=True)
sys.stdin.readline()
"""

FORK = """
import os, signal
if os.fork() == 0:
    print(os.getpid(), flush=True)
    signal.pause()
sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "one")
    yield folder
    folder.end()


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# What survives a power cut


@pytest.fixture
def flushed(monkeypatch):
    """What was flushed and renamed, in order."""
    events, fsync, rename = [], os.fsync, os.rename

    def recorded(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(self, target):
        events.append(f"-> {target}")
        rename(self, target)
        return Path(target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", renamed)
    return events


def test_a_new_folder_is_named_on_the_disk_all_the_way_up(tmp_path, flushed):
    folder = RunFolder(tmp_path / "a" / "b" / "run")
    folder.begin(load_preset("digits"), resume=False)
    folder.end()
    parents = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert [path for path in flushed if path in parents] == parents
    config = str(tmp_path / "a" / "b" / "run" / "config.yaml")
    assert str(folder.path) in flushed[flushed.index(f"-> {config}") :], "nor is it lost that it was renamed"


def test_rows_are_on_the_disk_before_the_checkpoint_that_claims_them(folder, flushed):
    folder.begin(load_preset("digits"), resume=False)
    folder.log({"step": 1})
    flushed.clear()
    path = folder.commit(1, {"model": {"weight": torch.ones(2)}}, {"step": 1})
    done = flushed.index(f"-> {path}")
    before, after = flushed[:done], flushed[done:]
    assert {str(folder.metrics_file), str(folder.path / "environment.jsonl"), str(folder.path)} <= set(before)
    assert {"model.safetensors", "state.json", "manifest.json"} <= {Path(path).name for path in before}
    assert before.index(str(folder.metrics_file)) < before.index(next(name for name in before if "model" in name))
    assert str(folder.checkpoints) in after


def test_a_row_alone_is_flushed_when_it_must_last(folder, flushed):
    folder.begin(load_preset("digits"), resume=False)
    flushed.clear()
    folder.log({"step": 1})
    assert flushed == [], "not at every log point"
    folder.log({"step": 2}, durable=True)
    assert {str(folder.metrics_file), str(folder.path)} == set(flushed) - {str(folder.path / "environment.jsonl")}


# Begin and resume


def test_a_new_run_writes_down_its_settings_and_where_it_runs(folder):
    config = load_preset("digits", "--seed=3", "--name=1e5")
    folder.begin(config, resume=False)
    assert load_config(folder.path / "config.yaml") == config
    assert len(rows_of(folder.path / "environment.jsonl")) == 1
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "config.yaml", "environment.jsonl"]
    assert (folder.checkpoints, folder.samples) == (folder.path / "checkpoints", folder.path / "samples")


def test_a_folder_that_holds_a_comparison_takes_no_run(folder):
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "comparison.json").write_text("{}")
    for resume in (False, True):
        with pytest.raises(FileExistsError, match=r"one holds a comparison, whose runs are in .*runs: give another --out"):
            folder.begin(load_preset("digits"), resume=resume)
    assert [path.name for path in folder.path.iterdir()] == ["comparison.json"]


def test_a_folder_that_holds_a_run_is_not_overwritten(folder):
    folder.begin(load_preset("digits"), resume=False)
    folder.end()
    before = folder.config_file.read_text()
    with pytest.raises(FileExistsError, match="one holds a run already: continue it with --resume, or give another --out"):
        folder.begin(load_preset("digits", "--seed=9"), resume=False)
    assert folder.config_file.read_text() == before
    assert len(rows_of(folder.path / "environment.jsonl")) == 1


def test_a_run_is_resumed_with_other_settings_where_they_may_change_and_writes_them_down(folder):
    folder.begin(load_preset("digits"), resume=False)
    folder.end()
    more = load_preset("digits", "--steps=9999", "--data.path=elsewhere", "--optimizer.lr=0.0005", "--optimizer.clip=null")
    folder.begin(more, resume=True)
    assert load_config(folder.config_file) == load_preset("digits"), "resuming may still fail"
    folder.write_config(more)
    assert load_config(folder.config_file) == more
    assert len(rows_of(folder.path / "environment.jsonl")) == 2


def test_other_pinned_settings_are_refused_with_their_names(folder):
    folder.begin(load_preset("digits"), resume=False)
    folder.end()
    before = folder.config_file.read_text()
    other = load_preset("digits", "--optimizer.eps=0.5", "--model.options.channels=8", "--sampler=uniform", "--steps=7")
    with pytest.raises(ValueError, match="cannot be resumed with other settings") as error:
        folder.begin(other, resume=True)
    assert str(error.value).endswith(
        "one cannot be resumed with other settings: sampler: adaptive -> uniform; model.options.channels: 16 -> 8; "
        "optimizer.eps: 1e-08 -> 0.5. Start a new run with --out"
    )
    assert folder.config_file.read_text() == before
    folder.begin(load_preset("digits"), resume=True)  # the failure has not locked it


# The lock


def test_a_second_process_is_refused_until_the_first_ends(folder):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse, match="one is in use by another process: wait for it, or give another --out"):
            folder.begin(load_preset("digits"), resume=True)
        assert len(rows_of(folder.path / "environment.jsonl")) == 1
        other.kill()  # even so the lock is gone
        other.wait(timeout=60)
    folder.begin(load_preset("digits"), resume=True)


def test_a_reading_process_that_outlives_a_killed_run_does_not_hold_its_folder(folder):
    script = HOLD.removesuffix("sys.stdin.readline()\n") + FORK
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        worker = int(other.stdout.readline())
        try:
            with pytest.raises(FolderInUse, match="in use"):  # the fork has not unlocked it either
                folder.begin(load_preset("digits"), resume=True)
            other.kill()
            other.wait(timeout=60)
            folder.begin(load_preset("digits"), resume=True)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_two_runs_of_one_process_do_not_share_a_folder(folder):
    folder.begin(load_preset("digits"), resume=True)
    second = RunFolder(folder.path)
    with pytest.raises(FolderInUse, match="in use"):
        second.begin(load_preset("digits"), resume=True)
    folder.end()
    folder.end()  # twice is harmless
    second.begin(load_preset("digits"), resume=True)
    second.end()


# Rows


def test_rows_are_read_as_they_were_written(folder):
    folder.path.mkdir(parents=True)
    rows = [{"step": 1, "loss": 0.1 + 0.2, "levels": [None, 1.5]}, {"step": 2, "text": "é\u2028"}]
    assert folder.metrics() == []
    for row in rows:
        folder.log(row)
    assert folder.metrics() == rows


def test_later_rows_are_forgotten(folder):
    folder.path.mkdir(parents=True)
    folder.forget_after(0)  # nothing there yet
    for step in (1, 2, 3, 4):
        folder.log({"step": step})
    folder.forget_after(2)
    assert folder.metrics() == [{"step": 1}, {"step": 2}]
    folder.log({"step": 3, "again": True})
    assert folder.metrics() == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    folder.forget_after(0)
    assert folder.metrics_file.read_text() == ""


def test_a_row_torn_anywhere_is_forgotten(folder):
    folder.path.mkdir(parents=True)
    whole, torn = json.dumps({"step": 1, "loss": [1.5, None]}) + "\n", json.dumps({"step": 2, "loss": [2.5, None]})
    for length in range(len(torn)):
        folder.metrics_file.write_text(whole + torn[:length])
        assert folder.metrics() == [json.loads(whole)]
        folder.forget_after(5)
        assert folder.metrics_file.read_text() == whole
        folder.log({"step": 2})
        assert folder.metrics() == [json.loads(whole), {"step": 2}]


def test_a_row_after_a_torn_one_is_kept(folder):
    folder.path.mkdir(parents=True)
    for torn, steps in {'{"step": 2, "lo': [1, 3], '{"step": 2}': [1, 2, 3]}.items():
        folder.metrics_file.write_text('{"step": 1}\n' + torn)
        folder.log({"step": 3})
        assert [row["step"] for row in folder.metrics()] == steps


# The environment


def test_the_environment_says_what_a_result_depends_on(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["noisewise", "train", "--seed", "3"])
    row = environment()
    assert list(row) == ["noisewise", "torch", "python", "machine", "processes", "threads", "arguments", "git"]
    assert (row["noisewise"], row["torch"], row["python"]) == (
        noisewise.__version__,
        torch.__version__,
        platform.python_version(),
    )
    assert (row["processes"], row["threads"], row["arguments"]) == (4, torch.get_num_threads(), ["train", "--seed", "3"])
    assert row["machine"]
    assert json.loads(json.dumps(row)) == row


def git(*arguments, folder):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments], cwd=folder, check=True, capture_output=True
    )


def test_the_commit_is_known_and_changes_show(tmp_path, monkeypatch):
    git("init", folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert git_state() is None  # no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file", folder=tmp_path)
    git("commit", "-m", "first", folder=tmp_path)
    commit = git_state()
    assert len(commit) == 40
    (tmp_path / "untracked").write_text("1")
    assert git_state() == commit
    (tmp_path / "file").write_text("2")
    assert git_state() == f"{commit}+"


def test_outside_a_repository_or_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert git_state() is None
    monkeypatch.setenv("PATH", "")
    assert git_state() is None


BAD_LINES = {
    "a number": b"5\n",
    "a list": b"[1]\n",
    "no text": b"\xff\xfe\n",
    "half of a row": b'{"step": 3, "lo\n',
    "a step that is a word": b'{"step": "x"}\n',
    "a step that is a list": b'{"step": [1]}\n',
    "a step that is NaN": b'{"step": NaN}\n',
    "a share that is no number": b'{"kind": "evaluation", "step": 1, "share": [1]}\n',
    "a number that is too long": b'{"step": ' + b"9" * 9999 + b"}\n",
    "brackets without end": b"[" * 99999 + b"\n",
    "nothing at all": b"null\n",
}


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_a_damaged_line_is_named_and_set_aside_and_the_others_stay(bad, where, folder):
    folder.begin(load_preset("digits"), resume=False)
    lines = [b'{"step": 1}\n', b'{"step": 2}\n']
    folder.metrics_file.write_bytes(b"".join([*lines[:where], bad, *lines[where:]]))
    told = []
    folder.forget_after(9, told.append)
    assert folder.metrics() == [{"step": 1}, {"step": 2}]
    assert folder.metrics_file.read_bytes() == b"".join(lines)
    assert (folder.path / "metrics.damaged.jsonl").read_bytes() == bad
    assert len(told) == 1
    assert f"{folder.metrics_file}: damaged in line {where + 1}" in told[0]
    folder.forget_after(9, pytest.fail)


def test_a_run_that_begins_again_says_that_it_drops_its_log(folder):
    """Its checkpoints may have been deleted to save space."""
    folder.begin(load_preset("digits"), resume=False)
    folder.metrics_file.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    folder.forget_after(1, pytest.fail)
    told = []
    folder.forget_after(0, told.append)
    assert told == [f"{folder.path} has no checkpoint: it begins again, and its log up to step 1 is dropped"]
    folder.forget_after(0, pytest.fail)


def test_a_cut_off_end_is_no_damage(folder):
    """It is what a kill leaves, and the step is made again."""
    folder.begin(load_preset("digits"), resume=False)
    folder.metrics_file.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    folder.forget_after(9, pytest.fail)
    assert folder.metrics() == [{"step": 1}]
    assert not (folder.path / "metrics.damaged.jsonl").exists()


def test_a_file_of_rows_without_end_is_refused(tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="line 1 has more than"):
        read_rows(tmp_path / "rows.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(OSError, match="no plain file"):
            read_rows(path)
