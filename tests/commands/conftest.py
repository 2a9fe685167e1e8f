"""Commands on a run of this test alone."""

import pytest

from noisewise.commands.cli import main


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in this process, where an exception that is not one of ours would end the test.

    RUN and OUT stand for folders in `tmp_path`. Returns the status and all that was said, which has no escape codes.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("NOISEWISE_TRACEBACK", raising=False)

    def run(words, *more):
        places = {"RUN": str(tmp_path / "run"), "OUT": str(tmp_path / "out")}
        status = main([places.get(word, word) for word in [*words, *more]])
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
        return status, said.out + said.err

    return run
