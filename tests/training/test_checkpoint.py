"""Checkpoints come back bit for bit, or not at all: torn, changed and hostile ones are refused and the one before is taken."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch

from noisewise.training import checkpoint
from noisewise.training.checkpoint import (
    TEMPORARY,
    UNUSABLE,
    CheckpointError,
    is_whole,
    load,
    name_of,
    newest,
    newest_for_all,
    newest_name,
    prune,
    save,
    set_aside,
    set_aside_after,
    steps_in,
    sweep,
)

FILES = ["ema.safetensors", "model.safetensors", "state.json", "manifest.json"]
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
WHOLE = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES = [getattr(torch, name) for name in FLOATS + WHOLE]


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(3, 4, generator=generator), "bias": torch.randn(3, generator=generator)},
        "ema": {"weight": torch.randn(3, 4, generator=generator)},
    }


STATE = {"step": 3, "seconds": 0.1 + 0.2, "text": "é", "nothing": None, "list": [1, [2.5]]}


def same(found, expected):
    assert set(found) == set(expected)
    for part in expected:
        assert set(found[part]) == set(expected[part])
        for name, value in expected[part].items():
            assert (found[part][name].dtype, found[part][name].shape) == (value.dtype, value.shape)
            bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (found[part][name], value)]
            assert torch.equal(*bits), f"{part}: {name}"


@pytest.fixture
def folder(tmp_path):
    """A run with a checkpoint at step 1, and one at step 3 for the test to break."""
    save(tmp_path / "checkpoints", 1, tensors(1), {"step": 1})
    save(tmp_path / "checkpoints", 3, tensors(3), STATE)
    return tmp_path / "checkpoints"


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def rewritten(path, change):
    """A manifest as an attacker would write it: changed, with checksums that fit the files beside it."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = change(manifest) or manifest
    (path / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))


def refused(folder, reason, broken=3):
    """It is refused with a reason, `newest` says so and takes the one before."""
    with pytest.raises(CheckpointError, match=reason) as error:
        load(folder / name_of(broken))
    assert name_of(broken) in str(error.value)
    assert not is_whole(folder / name_of(broken))
    told = []
    found = newest(folder, told.append)
    assert found.step == 1
    same(found.tensors, tensors(1))
    assert told == [f"{error.value}; trying the one before"]


# Saving and loading


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (), (0,), (2, 0, 3)], ids=str)
def test_tensors_of_every_kind_come_back_bit_for_bit(dtype, shape, tmp_path):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    value = raw.view(dtype).reshape(shape)
    path = save(tmp_path, 5, {"part": {"value": value}}, {})
    same(load(path).tensors, {"part": {"value": value}})


def test_special_values_shared_memory_and_views_come_back_bit_for_bit(tmp_path):
    base = torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-45]])
    values = {
        "part": {"base": base, "again": base, "transposed": base.T, "row": base[1], "gradient": base.clone().requires_grad_()}
    }
    same(load(save(tmp_path, 5, values, {})).tensors, values)


def test_everything_else_comes_back(tmp_path):
    found = load(save(tmp_path / "deep" / "er", 12, {**tensors(), "empty": {}}, STATE))
    same(found.tensors, {**tensors(), "empty": {}})
    assert (found.step, found.state, found.path) == (12, STATE, tmp_path / "deep" / "er" / "step-00000012")
    assert found.state["seconds"] == 0.1 + 0.2


def test_the_files_are_those_that_the_documentation_names(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000003"]
    assert sorted(path.name for path in (folder / name_of(3)).iterdir()) == sorted(FILES)
    manifest = json.loads((folder / name_of(3) / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], sorted(manifest["files"])) == (1, 3, sorted(FILES)[:1] + sorted(FILES)[2:])


def test_a_whole_checkpoint_is_not_written_again(folder):
    before = {path: path.stat() for path in (folder / name_of(3)).iterdir()}
    assert save(folder, 3, tensors(99), {}) == folder / name_of(3)
    assert {path: path.stat() for path in (folder / name_of(3)).iterdir()} == before


@pytest.mark.parametrize("name", FILES)
def test_a_broken_checkpoint_is_set_aside_and_written_again(name, folder):
    (folder / name_of(3) / name).unlink()
    rest = contents(folder / name_of(3))
    save(folder, 3, tensors(99), {"new": True})
    same(load(folder / name_of(3)).tensors, tensors(99))
    assert load(folder / name_of(3)).state == {"new": True}
    assert names_in(folder) == [name_of(1), name_of(3), "unusable-step-00000003"]
    assert contents(folder / "unusable-step-00000003") == rest


def test_steps_are_in_the_order_of_numbers_and_other_names_are_left_alone(tmp_path):
    assert steps_in(tmp_path / "nowhere") == []
    for name in [
        "step-00000010",
        "step-00000009",
        "step-123456789",
        "step-7",
        "step-000000008",
        "writing-step-00000011-5",
        "unusable-step-00000012",
        "unusable-step-00000012-1",
        "notes",
    ]:
        (tmp_path / name).mkdir()
    assert steps_in(tmp_path) == [9, 10, 123456789]


def test_without_any_checkpoint_there_is_none(tmp_path):
    assert newest(tmp_path / "nowhere", pytest.fail) is None
    assert newest(tmp_path, pytest.fail) is None


def test_the_newest_is_taken_without_a_word(folder):
    assert newest(folder, pytest.fail).step == 3


def test_when_all_are_broken_that_is_an_error(folder):
    for step in (1, 3):
        (folder / name_of(step) / "model.safetensors").unlink()
    told = []
    with pytest.raises(
        CheckpointError,
        match=r"none of the 2 checkpoints in .* can be used: the run has to be trained again, in another folder",
    ):
        newest(folder, told.append)
    assert ["step-00000003" in told[0], "step-00000001" in told[1]] == [True, True]


def test_one_that_the_run_removes_meanwhile_is_not_called_broken(folder, monkeypatch):
    def pruned_first(path, lazy=False):
        if path.name == name_of(3) and path.exists():
            save(folder, 5, tensors(), STATE)
            prune(folder, keep=1)
        return load(path)

    monkeypatch.setattr(checkpoint, "load", pruned_first)
    assert newest(folder, pytest.fail).step == 5


def test_the_second_rank_waits_for_another_choice_when_the_first_one_s_is_gone(folder, monkeypatch):
    said = iter([7, 0, 3])  # the first rank has found 7, which is no longer there, and then 3
    monkeypatch.setattr(checkpoint.distributed, "rank", lambda: 1)
    monkeypatch.setattr(checkpoint.distributed, "from_first_rank", lambda tensor: torch.tensor([next(said)]))
    assert newest_for_all(folder, pytest.fail).step == 3
    assert list(said) == []


def test_a_folder_that_only_the_first_rank_sees_is_an_error(folder, monkeypatch):
    said = iter([7, 1])
    monkeypatch.setattr(checkpoint.distributed, "rank", lambda: 1)
    monkeypatch.setattr(checkpoint.distributed, "from_first_rank", lambda tensor: torch.tensor([next(said)]))
    with pytest.raises(CheckpointError, match=r"step-00000007 is there for the first process, but not for all"):
        newest_for_all(folder, pytest.fail)


# Torn and changed


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(name, folder):
    (folder / name_of(3) / name).unlink()
    refused(folder, f"{name} is missing")


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_off_anywhere_is_noticed(name, folder):
    path = folder / name_of(3) / name
    whole = path.read_bytes()
    for length in sorted({*range(0, len(whole), 7), 0, 1, 8, len(whole) - 1}):
        path.write_bytes(whole[:length])
        assert not is_whole(path.parent), f"{length} of {len(whole)} bytes"
    refused(folder, "is not what was written|cannot be read")
    path.write_bytes(whole)
    assert is_whole(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_noticed(name, folder):
    path = folder / name_of(3) / name
    whole = path.read_bytes()
    for place in range(0, len(whole), 1 if name == "manifest.json" else 5):
        bit = 1 << place % 8
        for flip in (bit,) if name != "manifest.json" else (1, 2, 4, 16, 32):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            assert not is_whole(path.parent), f"bit {flip} of byte {place}: {whole[place : place + 1]!r}"
    refused(folder, "is not what was written|cannot be read")


@pytest.mark.parametrize(
    "damage", [lambda data: data + b"x", lambda data: bytes(len(data))], ids=["something after it", "zeros"]
)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_longer_or_empty_is_noticed(name, damage, folder):
    path = folder / name_of(3) / name
    path.write_bytes(damage(path.read_bytes()))
    refused(folder, "is not what was written|cannot be read")


def test_an_empty_folder_and_a_file_in_its_place_are_noticed(folder):
    shutil.rmtree(folder / name_of(3))
    (folder / name_of(3)).mkdir()
    refused(folder, r"manifest\.json is missing")
    (folder / name_of(3)).rmdir()
    (folder / name_of(3)).write_text("")
    refused(folder, r"manifest\.json is missing")


def test_a_later_format_is_told_what_to_do(folder):
    rewritten(folder / name_of(3), lambda manifest: manifest.update(format=2))
    refused(folder, "has format 2, this version of noisewise reads 1: resume it with the version that wrote it")


def test_a_checkpoint_of_another_step_is_noticed(folder):
    shutil.rmtree(folder / name_of(3))
    shutil.copytree(folder / name_of(1), folder / name_of(3))
    refused(folder, "its manifest is that of step 1")


# Hostile


def renamed(old, new):
    """Name another file in the manifest, with the description of one that is there."""

    def change(manifest):
        manifest["files"][new] = manifest["files"].pop(old)

    return change


HOSTILE = {
    "a path upwards": (renamed("model.safetensors", "../../../../etc/passwd"), "no file of a checkpoint"),
    "a path upwards with the right ending": (renamed("model.safetensors", "../outside.safetensors"), "no file of a checkpoint"),
    "an absolute path": (renamed("model.safetensors", "/etc/passwd"), "no file of a checkpoint"),
    "an absolute path with the right ending": (renamed("model.safetensors", "/tmp/x.json"), "no file of a checkpoint"),
    "a folder inside": (renamed("model.safetensors", "a/model.safetensors"), "no file of a checkpoint"),
    "another ending": (renamed("model.safetensors", "model.pt"), "no file of a checkpoint"),
    "an empty name": (renamed("model.safetensors", ""), "no file of a checkpoint"),
    "a zero byte": (renamed("model.safetensors", "a\0.json"), "is missing"),
    "no state": (lambda manifest: manifest["files"].pop("state.json") and None, r"does not name state\.json"),
    "no files": (lambda manifest: manifest.update(files={}), r"does not name state\.json"),
    "no format": (lambda manifest: manifest.pop("format") and None, "cannot be read"),
    "files as a number": (lambda manifest: manifest.update(files=5), "cannot be read"),
    "files as a list": (lambda manifest: manifest.update(files=["state.json"]), "cannot be read"),
    "files as null": (lambda manifest: manifest.update(files=None), "cannot be read"),
    "a description as a number": (lambda manifest: manifest["files"].update({"state.json": 5}), "is not what was written"),
    "the step as text": (lambda manifest: manifest.update(step="three"), "cannot be read"),
    "the step as a float": (lambda manifest: manifest.update(step=3.0), "cannot be read"),
    "the step as NaN": (lambda manifest: manifest.update(step=float("nan")), "cannot be read"),
    "the step as infinity": (lambda manifest: manifest.update(step=float("inf")), "cannot be read"),
    "the step as a list": (lambda manifest: manifest.update(step=[3]), "cannot be read"),
    "a negative step": (lambda manifest: manifest.update(step=-3), "is that of step -3"),
    "the format as text": (lambda manifest: manifest.update(format="1"), "has format 1"),
    "the format as NaN": (lambda manifest: manifest.update(format=float("nan")), "has format nan"),
    "a list": (lambda manifest: "[1, 2]", "cannot be read"),
    "a number": (lambda manifest: "5", "cannot be read"),
    "null": (lambda manifest: "null", "cannot be read"),
    "nothing": (lambda manifest: " ", "cannot be read"),
    "a number of very many digits": (lambda manifest: '{"format": 1, "step": ' + "9" * 10_000 + "}", "cannot be read"),
    "deep lists": (lambda manifest: "[" * 100_000 + "]" * 100_000, "cannot be read"),
    "deep objects": (lambda manifest: '{"format":' * 100_000 + "1" + "}" * 100_000, "cannot be read"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused(kind, folder):
    change, reason = HOSTILE[kind]
    (folder / "outside.safetensors").write_bytes((folder / name_of(3) / "model.safetensors").read_bytes())
    rewritten(folder / name_of(3), change)
    refused(folder, reason)


def test_a_manifest_that_is_no_text_is_refused(folder):
    (folder / name_of(3) / "manifest.json").write_bytes(b"\xff\xfe\x00{")
    refused(folder, "cannot be read")


@pytest.mark.parametrize("name", FILES)
def test_links_are_not_followed(name, folder, tmp_path):
    path = folder / name_of(3) / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    refused(folder, f"{name} is missing")


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_does_not_hang(name, folder):
    path = folder / name_of(3) / name
    path.unlink()
    os.mkfifo(path)
    refused(folder, f"{name} is missing")


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_disguise_does_not_run(folder, tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()  # it would
    for name in FILES[:-1]:
        for written in (
            lambda path, bomb: path.write_bytes(pickle.dumps(bomb)),
            lambda path, bomb: torch.save({"weight": bomb}, path),
        ):
            save(folder, 3, tensors(3), STATE)
            written(folder / name_of(3) / name, Bomb(tmp_path / "harm"))
            rewritten(folder / name_of(3), lambda manifest: None)
            refused(folder, "cannot be read")
    (folder / name_of(3) / "manifest.json").write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    refused(folder, "cannot be read")
    assert not (tmp_path / "harm").exists()


def header(text):
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**8) + b"{}",
        b"",
        header("[" * 100_000),
        header('{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}'),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}') + bytes(4),
        header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}') + bytes(8),
        header('{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}') + bytes(4),
        header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}') + bytes(4),
        header('{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}') + bytes(4),
    ],
    ids=["huge header", "long header", "empty", "deep header", "huge tensor", "short data", "hole", "dtype", "negative", "NaN"],
)
def test_hostile_tensors_are_refused(data, folder):
    (folder / name_of(3) / "model.safetensors").write_bytes(data)
    rewritten(folder / name_of(3), lambda manifest: None)
    refused(folder, "cannot be read")


@pytest.mark.parametrize("text", ["[]", "5", "null", '"step"', "", "[" * 100_000, "{'a': 1}", '{"a": ' * 100_000])
def test_a_hostile_state_is_refused(text, folder):
    (folder / name_of(3) / "state.json").write_text(text)
    rewritten(folder / name_of(3), lambda manifest: None)
    refused(folder, "cannot be read|is not an object")


# Removing


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (1, 0, [9]),
        (2, 0, [8, 9]),
        (20, 0, list(range(1, 10))),
        (1, 3, [3, 6, 9]),
        (2, 4, [4, 8, 9]),
        (1, 100, [9]),
        (3, 1, list(range(1, 10))),
    ],
)
def test_the_newest_and_the_multiples_stay(keep, keep_every, left, tmp_path):
    for step in range(1, 10):
        save(tmp_path, step, tensors(step), {})
    prune(tmp_path, keep, keep_every)
    assert steps_in(tmp_path) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(step) for step in left]
    assert all(is_whole(tmp_path / name_of(step)) for step in left)


def test_pruning_nothing_is_harmless(tmp_path):
    prune(tmp_path / "nowhere", 1)
    sweep(tmp_path / "nowhere")


def test_a_rotten_checkpoint_that_was_passed_over_does_not_cost_the_whole_ones(tmp_path):
    """Were the rotten 733 counted as the newest, keeping one would remove the run's only whole checkpoint."""
    for step in (500, 733):
        save(tmp_path, step, tensors(step), {"step": step})
    victim = tmp_path / name_of(733) / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    rotten = contents(tmp_path / name_of(733))
    found = newest(tmp_path, lambda message: None)
    assert found.step == 500
    set_aside_after(tmp_path, found.step)
    assert names_in(tmp_path) == [name_of(500), "unusable-step-00000733"]
    save(tmp_path, 600, tensors(600), {"step": 600})
    prune(tmp_path, keep=1)
    assert names_in(tmp_path) == [name_of(600), "unusable-step-00000733"]
    assert contents(tmp_path / "unusable-step-00000733") == rotten
    same(newest(tmp_path, pytest.fail).tensors, tensors(600))
    assert newest_name(tmp_path) == name_of(600)


def test_setting_aside_again_and_again_loses_nothing(tmp_path):
    for number in range(3):
        save(tmp_path, 7, tensors(number), {"number": number})
        set_aside(tmp_path / name_of(7))
    assert names_in(tmp_path) == [f"{UNUSABLE}{name_of(7)}{end}" for end in ("", "-1", "-2")]
    numbers = [json.loads((tmp_path / name / "state.json").read_text())["number"] for name in names_in(tmp_path)]
    assert numbers == [0, 1, 2]
    assert steps_in(tmp_path) == []


def test_setting_aside_touches_only_what_comes_later(folder):
    set_aside_after(folder, 3)
    set_aside(folder / name_of(9))  # there is none
    assert names_in(folder) == [name_of(1), name_of(3)]
    set_aside_after(folder, 0)
    assert names_in(folder) == [f"{UNUSABLE}{name_of(1)}", f"{UNUSABLE}{name_of(3)}"]
    set_aside_after(folder / "nowhere", 0)


def test_a_removal_that_was_cut_short_leaves_no_half_of_a_checkpoint(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killing)
        with pytest.raises(Killed):
            prune(folder, 1)
    assert steps_in(folder) == [3]
    sweep(folder)
    assert [path.name for path in folder.iterdir()] == [name_of(3)]


def test_sweeping_takes_what_is_half_written_and_nothing_else(folder):
    for name in [f"{TEMPORARY}step-00000005-99", f"{TEMPORARY}removed-2-99"]:
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"half")
    (folder / "unusable-step-00000004").mkdir()
    sweep(folder)
    assert names_in(folder) == [name_of(1), name_of(3), "unusable-step-00000004"]
    assert is_whole(folder / name_of(3))


# Disks that fail, and kills


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""


def killing(*arguments, **settings):
    raise Killed


def count_calls(monkeypatch, act):
    """Call `act(number)` before and after each call that touches the disk, and list their names."""
    calls = []

    def watched(holder, name):
        original = getattr(holder, name)

        def wrapper(*arguments, **settings):
            act(len(calls), calls.append(f"before {name}"))
            result = original(*arguments, **settings)
            act(len(calls), calls.append(f"after {name}"))
            return result

        monkeypatch.setattr(holder, name, wrapper)

    for holder, name in [(os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "open"), (shutil, "rmtree"), (os, "unlink")]:
        watched(holder, name)
    return calls


def broken_at_5(folder):
    save(folder, 5, tensors(50), {"old": True})
    (folder / name_of(5) / "ema.safetensors").unlink()


@pytest.mark.parametrize("over_a_broken_one", [False, True], ids=["new", "over a broken one"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(over_a_broken_one, folder, tmp_path, monkeypatch):
    if over_a_broken_one:
        broken_at_5(folder)

    def kill_at(moment, where):
        def act(number, _):
            if number == moment:
                raise Killed

        with monkeypatch.context() as patch:
            calls = count_calls(patch, act)
            try:
                save(where, 5, tensors(5), {"step": 5})
            except Killed:
                return True, calls
            return False, calls

    outcomes, moment, killed = [], 0, True
    while killed:
        where = tmp_path / f"copy-{moment}"
        shutil.copytree(folder, where)
        killed, calls = kill_at(moment, where)
        found = newest(where, lambda message: None)
        assert found.step in (3, 5), calls[-1]
        same(found.tensors, tensors(found.step))
        assert is_whole(where / name_of(1))
        outcomes.append(found.step)
        sweep(where)
        assert not list(where.glob(f"{TEMPORARY}*"))
        save(where, 5, tensors(5), {"step": 5})  # the run goes on
        same(newest(where, pytest.fail).tensors, tensors(5))
        shutil.rmtree(where)
        moment += 1
    assert outcomes == sorted(outcomes)
    assert len(outcomes) > 20
    assert {3, 5} == set(outcomes)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_at_any_moment_leaves_earlier_checkpoints_as_they_were(code, folder, tmp_path, monkeypatch):
    def fail_at(moment, where):
        def act(number, _):
            if number == moment:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            count_calls(patch, act)
            save(where, 5, tensors(5), {"step": 5})

    moment, failures = 0, 0
    while True:
        where = tmp_path / f"copy-{moment}"
        shutil.copytree(folder, where)
        before = {path: path.read_bytes() for path in sorted(where.rglob("*")) if path.is_file()}
        try:
            fail_at(moment, where)
        except CheckpointError as error:
            message = str(error)
        else:
            break
        failures += 1
        assert {path: path.read_bytes() for path in before} == before
        assert f"the checkpoint of step 5 could not be written: [Errno {code}] {os.strerror(code)}" in message
        good = newest(where, pytest.fail).step
        assert f"The last good checkpoint is {where / name_of(good)}" in message
        assert ("free some space" in message) == (code in (errno.ENOSPC, errno.EDQUOT))
        assert not list(where.glob(f"{TEMPORARY}*"))
        shutil.rmtree(where)
        moment += 1
    assert failures > 15


@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_names_the_last_good_checkpoint_if_there_is_one(earlier, folder, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    broken_at_5(folder)
    assert newest_name(folder) == name_of(3)
    place = folder if earlier else tmp_path / "empty"
    kept = f"The last good checkpoint is {folder / name_of(3)}" if earlier else "There is no earlier checkpoint"
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=f"No space left on device. {kept}; free some space"):
        save(place, 5, tensors(5), {})
    assert not list(place.glob(f"{TEMPORARY}*"))


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the checkpoint of step 5 could not be written"):
        save(tmp_path / "file", 5, tensors(5), {})
