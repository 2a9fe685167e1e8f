"""A folder alone never makes us import anything; the user's word does."""

import pytest

from noisewise.models.build import Untrusted, check_trusted, is_import_path, memory, remember, remembered


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("name", ["unet", "dit", "uvit", "nothing-of-ours"])
def test_names_without_a_path_are_ours_and_need_no_word(name, tmp_path):
    assert not is_import_path(name)
    check_trusted(name, tmp_path)
    remember(name)
    assert not memory().exists()


@pytest.mark.parametrize("name", ["subprocess.Popen", "os:system", "a.b:c.d", ".x", "x:"])
def test_a_path_needs_the_users_word_now_or_earlier(name, tmp_path):
    with pytest.raises(Untrusted, match="--trust") as refused:
        check_trusted(name, tmp_path)
    assert name in str(refused.value)
    with pytest.raises(Untrusted):
        check_trusted(name, tmp_path, ["another.Name", name.upper()])
    check_trusted(name, tmp_path, [name])
    with pytest.raises(Untrusted):
        check_trusted(name, tmp_path)
    remember(name)
    check_trusted(name, tmp_path)
    assert remembered() == {name}


def test_a_name_cannot_smuggle_another_one_into_the_memory(tmp_path):
    remember("mine.Net\nsubprocess.Popen")
    with pytest.raises(Untrusted):
        check_trusted("subprocess.Popen", tmp_path)


def test_names_are_kept_once_and_together(tmp_path):
    for name in ("a.B", "c.D", "a.B"):
        remember(name)
    assert memory().read_text().splitlines() == ["a.B", "c.D"]


def test_a_memory_that_cannot_be_written_or_read_is_no_reason_to_fail(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember("a.B")
    assert remembered() == set()
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    remember("a.B")
    assert memory() == tmp_path / ".local" / "state" / "noisewise" / "trusted-models"
    assert remembered() == {"a.B"}
