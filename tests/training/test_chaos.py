"""A disk that fails at some of its calls; `make chaos` takes all of them."""

import os
import signal
from pathlib import Path

import pytest

from tests.training.chaos.__main__ import STEPS, chaos
from tests.training.chaos.power import Call, Disk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ready():
    with chaos() as found:
        if found is None:
            pytest.skip("needs Linux and a C compiler (cc, gcc or clang)")
        yield found


def checked(ready) -> None:
    wrong, ready.wrong = ready.wrong, []
    assert not wrong, "\n".join(wrong)


def test_a_power_cut_loses_no_checkpoint_and_no_row(ready):
    ready.power("new", lambda states: states == 60)
    ready.power("resumed", lambda states: False)
    assert ready.calls["new"] > 100
    checked(ready)


@pytest.mark.parametrize("scene", ["new", "resumed"])
def test_a_kill_loses_nothing(scene, ready):
    calls = ready.count(scene)
    ready.kill(scene, [calls // 2], "k")
    ready.kill(scene, ready.writes[scene][-4:-3], "t")
    checked(ready)


def test_a_full_disk_and_a_fault_lose_nothing(ready):
    calls = ready.count("new")
    ready.fail("new", [calls // 2], "f", 28)
    ready.fail("resumed", [calls // 4], "e", 5)
    checked(ready)


def test_the_shim_sees_what_is_lost_and_left_behind(ready, monkeypatch):
    """The checks can fail: files too many, and a checkpoint that is not there."""
    run = ready.fresh("strange", "new")
    assert ready.train(run)[0] == 0
    (run / "left behind").write_text("")
    ready.check(run, "strange")
    assert len(ready.wrong) == 1
    assert "left behind" in ready.wrong.pop()
    ready._check_claims(run, {f"run/checkpoints/step-{STEPS + 1:08d}"}, "strange")
    assert f"lost the checkpoints of steps [{STEPS + 1}]" in ready.wrong.pop()
    (run / "metrics.jsonl").write_text("")
    ready._check_claims(run, set(), "strange")
    assert "the rows of [1, 2" in ready.wrong.pop()


def test_a_killed_process_was_killed_by_the_shim(ready):
    run = ready.fresh("killed", "new")
    assert ready.train(run, "k", 1)[0] == -signal.SIGKILL
    assert not os.path.exists(run)
    assert ready.train(run, "e", 1, 28)[0] == 1
    assert not os.path.exists(run)


def made(*calls: tuple[str, ...]) -> Disk:
    disk = Disk(Path("/d"))
    for what, path, *more in calls:
        disk.apply(Call(what, f"/d/{path}".rstrip("/"), more[0] if more else "", more[1].encode() if len(more) > 1 else b""))
    return disk


def test_only_what_was_flushed_survives():
    wrote = [("create", "a"), ("write", "a", "0", "one")]
    assert made(*wrote).survivors("sure") == {}
    assert made(*wrote).survivors("all") == {"a": b""}
    assert made(*wrote, ("sync", "a")).survivors("sure") == {}
    assert made(*wrote, ("sync", "a"), ("sync", "")).survivors("sure") == {"a": b"one"}
    more = made(*wrote, ("sync", "a"), ("sync", ""), ("write", "a", "3", "two"))
    assert more.survivors("sure") == {"a": b"one"}


def test_a_rename_is_sure_with_its_folder():
    wrote = [("create", "a"), ("write", "a", "0", "one"), ("sync", "a"), ("sync", ""), ("rename", "a", "/d/b")]
    assert made(*wrote).survivors("sure") == {"a": b"one"}
    assert made(*wrote).survivors("all") == {"b": b"one"}
    assert made(*wrote, ("sync", "")).survivors("sure") == {"b": b"one"}
    inner = made(("mkdir", "f"), ("create", "f/a"), ("sync", "f/a"), ("sync", ""), ("rename", "f", "/d/g"))
    assert inner.survivors("sure") == {"f": None}
