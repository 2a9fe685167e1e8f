"""Files appear whole or not at all; what cannot be written is named as the user knows it, with the reason."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from noisewise.plain_files import FolderInUse, locked, replace_file, replacing, sweep, writing


def said(path, act):
    with pytest.raises(OSError, match="cannot be written") as failure, writing(f"--out {path}", Path(path)):
        act(Path(path))
    return str(failure.value)


def make(path):
    path.mkdir(parents=True, exist_ok=True)


def test_a_file_in_the_way_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert said("file", make) == "--out file cannot be written: file is a file, not a folder"
    assert said("file/a/b", make) == f"--out file/a/b cannot be written: {tmp_path / 'file'} is a file, not a folder"


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    assert said(link, make).endswith(f"{link} is a link that leads nowhere, not a folder")


def test_a_folder_in_the_way_is_named(tmp_path):
    assert said(tmp_path, lambda path: path.write_text("")).endswith(f"written: {tmp_path} is a folder, not a file")


def test_a_folder_that_takes_no_files_is_named_and_no_temporary_file(tmp_path):
    path = tmp_path / "here" / "x.html"
    path.parent.mkdir()

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.with_name(".temporary")))

    for _ in range(2):  # the file may be there from before
        assert said(path, full) == f"--out {path} cannot be written: {path.parent} does not take it (No space left on device)"
        path.touch()
    assert said("/proc/x.html", lambda path: replace_file(path, "x")).startswith(
        "--out /proc/x.html cannot be written: /proc does not take it ("
    )


def test_other_errors_stay_what_they_are(tmp_path):
    own = FileExistsError("holds a run already")
    for error in (own, ValueError("wrong"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as failure, writing("--out x", tmp_path):
            raise error
        assert failure.value is error


def test_what_can_be_written_is(tmp_path):
    with writing("--out x", tmp_path / "x"):
        make(tmp_path / "x")
    assert (tmp_path / "x").is_dir()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, number):
    """NFS without its lock daemon, Lustre without -o flock."""

    def flock(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="lies on a file system without locks") as failure, writing("--out x", tmp_path):
        locked(tmp_path)
    assert str(failure.value).startswith(f"{tmp_path} lies on a file system without locks ({os.strerror(number)}), where")


def test_a_folder_in_use_is_named(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(FolderInUse, match="is in use by another process: wait for it, or"),
        writing("--out x", tmp_path),
    ):
        locked(tmp_path)
    locked(tmp_path).close()


# Whole or not at all


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_or_left_alone(tmp_path, durable):
    path = tmp_path / "file"
    replace_file(path, "old", durable)
    replace_file(path, "new", durable)
    for error in (OSError("No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(error)), replacing(path, durable) as file:  # noqa: PT012
            file.write(b"half")
            raise error
    assert (path.read_text(), [entry.name for entry in tmp_path.iterdir()]) == ("new", ["file"])


def test_a_disk_that_is_full_when_flushed_leaves_the_old_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    replace_file(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "new")
    assert (path.read_text(), [entry.name for entry in tmp_path.iterdir()]) == ("old", ["file"])


def test_a_written_file_has_the_permissions_of_any_other_and_takes_the_place_of_a_link(tmp_path):
    usual, link = tmp_path / "usual", tmp_path / "link"
    usual.write_text("usual")
    link.symlink_to(usual)
    replace_file(link, b"new")
    assert not link.is_symlink()
    assert (link.read_text(), usual.read_text()) == ("new", "usual")
    assert link.stat().st_mode == usual.stat().st_mode


def test_two_writers_with_one_process_number_do_not_meet(tmp_path):
    with replacing(tmp_path / "file") as first, replacing(tmp_path / "file") as second:
        first.write(b"first")
        second.write(b"second")
        assert len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / "file").read_text() == "first"


def test_temporary_files_of_the_dead_are_swept_and_others_stay(tmp_path):
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True)
    dead = ended.stdout.strip()
    left = [f".config.yaml-{dead}", f".metrics.jsonl-{dead}", f".status.json-{dead}-00ff00ff", f".chunk-00000.npy-{dead}"]
    left += [f".config.yaml-{os.getpid()}-00ff00ff"]  # in a container the next process may have the number of the last
    kept = [f".config.yaml-{os.getppid()}-00ff00ff", ".config.yaml-mine", "config.yaml", f"config.yaml-{dead}", ".lock"]
    kept += [f".profile-{dead}"]
    for name in left + kept:
        (tmp_path / name).write_text("")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
