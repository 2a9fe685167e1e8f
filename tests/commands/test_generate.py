"""noisewise generate, as a user calls it."""

import errno
import json

import numpy as np
import pytest
from PIL import Image

from noisewise.commands.cli import main
from tests.generation.runs import checkpoint_of, copy_of_run, damage

FAST = ("--solver", "ddim:steps=3", "--device", "cpu")


def generate(run, *options):
    return main(["generate", str(run), *FAST, *map(str, options)])


def pictures(folder):
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


def test_by_default_pictures_lie_in_the_run(run, capsys):
    assert generate(run, "--count", 5) == 0
    folder = run / "generated" / "step-00000012-seed-0"
    assert pictures(folder).shape == (5, 8, 8)
    assert f"5 images of step 12 (ddim:steps=3,spacing=uniform): {folder}" in capsys.readouterr().out
    record = json.loads((folder / "generation.json").read_text())
    assert (record["count"], record["step"], record["weights"], record["seed"]) == (5, 12, "ema", 0)


def test_an_npz_file_that_does_not_fit_is_not_there(run, tmp_path, capsys, monkeypatch):
    def full(file, **arrays):
        file.write(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("noisewise.commands.generate.np.savez_compressed", full)
        assert generate(run, "--count", 2, "--out", tmp_path / "i.npz") == 1
    said = capsys.readouterr().err
    assert "i.npz cannot be written: " in said
    assert "No space left on device" in said
    assert not [file for file in tmp_path.iterdir() if file.is_file()]
    assert sorted(file.name for file in (tmp_path / "i.npz.parts").iterdir())  # its images, for the next time
    assert generate(run, "--count", 2, "--out", tmp_path / "i.npz") == 0
    assert np.load(tmp_path / "i.npz")["images"].shape == (2, 8, 8, 1)


def test_a_folder_an_npz_file_and_a_grid_hold_the_same_images(run, tmp_path):
    outs = {"folder": tmp_path / "folder", "npz": tmp_path / "new" / "x.NPZ", "grid": tmp_path / "x.PNG"}
    for out in outs.values():
        assert generate(run, "--count", 5, "--batch", 2, "--out", out) == 0
    expected = pictures(outs["folder"])
    with np.load(outs["npz"], allow_pickle=False) as content:
        assert content.files == ["images"]
        assert (content["images"].dtype, content["images"].shape) == (np.uint8, (5, 8, 8, 1))
        assert np.array_equal(content["images"][..., 0], expected)
    grid = np.asarray(Image.open(outs["grid"]))
    assert np.array_equal(grid[4 : 4 + 32 : 4, 4 : 4 + 32 : 4, 0], expected[0])
    assert np.array_equal(grid[40 : 40 + 32 : 4, 40 : 40 + 32 : 4, 0], expected[4])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new", "run", "x.PNG"], "parts were left behind"
    assert [path.name for path in outs["npz"].parent.iterdir()] == ["x.NPZ"]


@pytest.mark.parametrize(("format", "ending"), [("npz", ".npz"), ("grid", ".png")])
def test_a_format_without_a_place_goes_into_the_run_under_a_name_that_fits(run, capsys, format, ending):
    assert generate(run, "--count", 2, "--format", format) == 0
    out = run / "generated" / f"step-00000012-seed-0{ending}"
    assert out.is_file()
    assert capsys.readouterr().out.rstrip().endswith(f": {out}")
    assert generate(run, "--count", 2, "--format", format, "--out", run / "x.jpg") == 1
    assert f"writes a {ending} file" in capsys.readouterr().err


def test_fewer_images_than_an_interrupted_command_had_made_leave_nothing_behind(run, tmp_path, monkeypatch):
    from noisewise.commands import generate as generate_command

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generate_command.ImageSet, "batches", interrupted)
        assert generate(run, "--count", 5, "--batch", 2, "--out", tmp_path / "x.npz") == 130
    assert (tmp_path / "x.npz.parts").is_dir()
    assert generate(run, "--count", 3, "--batch", 2, "--out", tmp_path / "x.npz") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.npz"]


def test_seed_step_weights_and_steps_make_other_images(run, tmp_path):
    seen = set()
    variants = [(), ("--seed", 1), ("--step", 6), ("--model-weights", "model"), ("--steps", 2), ("--solver", "ddpm:steps=3")]
    for number, options in enumerate(variants):
        assert generate(run, "--count", 2, "--out", tmp_path / str(number), *options) == 0
        seen.add(pictures(tmp_path / str(number)).tobytes())
    assert len(seen) == len(variants)
    assert generate(checkpoint_of(run, 6), "--count", 2, "--out", tmp_path / "named") == 0
    assert pictures(tmp_path / "named").tobytes() == pictures(tmp_path / "2").tobytes()


def test_classes_and_guidance(tmp_path):
    run = copy_of_run(tmp_path, conditional=True)
    ways = {
        "all": (),
        "seven": ("--label", 7),
        "strong": ("--guidance", 100),
        "nowhere": ("--guidance", 100, "--interval", 0.2, 0.3),  # no step of the solver's three is there
    }
    for name, options in ways.items():
        assert generate(run, "--count", 8, "--out", tmp_path / name, *options) == 0
    plain, sevens, strong, nowhere = (pictures(tmp_path / name).astype(int) for name in ways)
    assert abs(plain[7] - sevens[7]).max() <= 1 < abs(plain[:7] - sevens[:7]).max()
    assert abs(plain - strong).max() > 1
    assert np.array_equal(plain, nowhere)


def test_errors_say_what_to_do(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "x.png").mkdir()
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "comparison.json").touch()
    cases = {
        "is no run: it has no config.yaml": (tmp_path / "none",),
        "holds a comparison, so give one of its runs": (tmp_path / "comparison",),
        "no checkpoint of step 7; it has 6, 12": (run, "--step", 7),
        "--count must be >= 1": (run, "--count", 0),
        "count and chunk must be >= 1, got 4 and 0": (run, "--count", 4, "--batch", 0),
        "unknown solver 'dim'": (run, "--solver", "dim:steps=3"),
        "2000 steps were asked for, but the process has only 1000": (run, "--steps", 2000),
        "label 3 was asked for, but the model was trained without classes": (run, "--label", 3),
        "guidance needs a model that was trained with classes": (run, "--guidance", 2),
        "--out g.jpg: a grid is written as .png": (run, "--out", tmp_path / "g.jpg"),
        "--out x.png is a folder: name a .png file, as in": (run, "--out", "x.png"),
        "--out file cannot be written: file is a file, not a folder": (run, "--out", "file"),
        "--out file/g.png cannot be written: ": (run, "--out", "file/g.png"),
        "--out /proc/g.png cannot be written: /proc does not take it (": (run, "--out", "/proc/g.png"),
        "--out /proc/g.npz cannot be written: ": (run, "--out", "/proc/g.npz"),
        "writes a .npz file": (run, "--format", "npz", "--out", tmp_path / "folder"),
    }
    for message, arguments in cases.items():
        assert generate(*arguments) == 1, message
        said = capsys.readouterr().err
        assert message in said
        assert ".parts" not in said
    assert not (run / "generated").exists(), "a refused command left something behind"
    assert generate(run, "--count", 2) == 0
    assert generate(run, "--count", 2, "--steps", 2) == 1
    assert "made with another solver" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_told_and_the_one_before_used(run, capsys):
    damage(run, 12)
    assert generate(run, "--count", 2) == 0
    assert (run / "generated" / "step-00000006-seed-0").is_dir()
    assert "step-00000012" in capsys.readouterr().out
