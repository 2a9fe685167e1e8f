"""What cannot be written is named as the user knows it, with the reason."""

import errno
import os
from pathlib import Path

import pytest

from noisewise.plain_files import writing
from noisewise.training.run_folder import replace_file


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
