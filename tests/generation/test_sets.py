"""Sets of images on disk: whole after any interruption, the same however they were made."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noisewise.generation.images import generate, to_uint8
from noisewise.generation.sets import RECORD, fill, image_set
from noisewise.generation.solvers import Solver
from noisewise.generation.trained import load_trained
from tests.generation.runs import trained_once

SOLVER = Solver("ddim", 3)
FORMATS = pytest.mark.parametrize("format", ["png", "npy"])


@pytest.fixture(scope="module")
def trained():
    return load_trained(trained_once())


def make(trained, folder, count=11, *, batch=None, progress=None, **settings):
    images = image_set(trained, folder, count, **{"solver": SOLVER, "chunk": 4, **settings})
    fill(images, trained, batch=batch, progress=progress)
    return images


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pixels(images):
    return torch.cat(list(images.batches())).int()


@FORMATS
def test_a_set_holds_what_the_model_generates(trained, tmp_path, format):
    found = pixels(make(trained, tmp_path / "set", format=format))
    expected = to_uint8(generate(trained.call, trained.objective, trained.shape, 11, solver=SOLVER, batch=4)).int()
    assert found.shape == (11, 1, 8, 8)
    assert int((found - expected).abs().max()) <= 1
    assert float(found.float().std()) > 5


def test_files_are_what_other_programs_expect(trained, tmp_path):
    values = pixels(make(trained, tmp_path / "png", format="png")).numpy()
    assert sorted(files(tmp_path / "png")) == [*(f"{i:08d}.png" for i in range(11)), RECORD]
    with Image.open(tmp_path / "png" / "00000007.png") as picture:
        assert (picture.mode, picture.size) == ("L", (8, 8))
        assert np.array_equal(np.asarray(picture), values[7, 0])
    make(trained, tmp_path / "npy", format="npy")
    arrays = [np.load(tmp_path / "npy" / f"chunk-0000{i}.npy", allow_pickle=False) for i in range(3)]
    assert [(array.dtype, array.shape) for array in arrays] == [(np.uint8, (n, 1, 8, 8)) for n in (4, 4, 3)]
    assert np.array_equal(np.concatenate(arrays), values)


@FORMATS
def test_neither_the_batch_nor_the_chunk_matters_beyond_rounding(trained, tmp_path, format):
    one = pixels(make(trained, tmp_path / "a", format=format))
    for name, settings in {"b": {"chunk": 11}, "c": {"chunk": 1}, "d": {"chunk": 4, "batch": 3}}.items():
        other = pixels(make(trained, tmp_path / name, format=format, **settings))
        assert int((one - other).abs().max()) <= 1, settings


@FORMATS
def test_after_a_failure_it_goes_on_and_ends_with_the_same_bytes(trained, tmp_path, format):
    make(trained, tmp_path / "whole", format=format)

    def fail_after_two(_, done=[]):  # noqa: B006
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(trained, tmp_path / "set", format=format, progress=fail_after_two)
    before = files(tmp_path / "set")
    assert 2 <= len(before) < len(files(tmp_path / "whole"))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir() if path.name != RECORD}
    make(trained, tmp_path / "set", format=format)
    assert files(tmp_path / "set") == files(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == time for path, time in times.items()), "what was there was made again"


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from noisewise.generation import sets
from noisewise.generation.solvers import Solver
from noisewise.generation.trained import load_trained

torch.set_num_threads(1)
replace = Path.replace

def killed_in_the_second(self, target):
    if target.name == "chunk-00001.npy":
        os.truncate(self, 14)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(self, target)

Path.replace = killed_in_the_second
trained = load_trained(sys.argv[1])
sets.fill(sets.image_set(trained, Path(sys.argv[2]), 11, solver=Solver("ddim", 3), chunk=4), trained)
"""


def test_a_kill_in_the_middle_of_a_file_loses_only_that_file(trained, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", KILLED, str(trained.folder), str(tmp_path / "set")]
    assert subprocess.run(command, env=environment, timeout=120).returncode == -signal.SIGKILL
    left = files(tmp_path / "set")
    assert "chunk-00000.npy" in left
    assert "chunk-00001.npy" not in left
    assert len(left) == 3
    images = make(trained, tmp_path / "set")
    whole = make(trained, tmp_path / "whole")
    assert int((pixels(images) - pixels(whole)).abs().max()) <= 1
    images.remove()
    assert not (tmp_path / "set").exists()


@FORMATS
def test_growing_keeps_what_is_there_and_completes_the_last_chunk(trained, tmp_path, format):
    make(trained, tmp_path / "set", 6, format=format)
    before = files(tmp_path / "set")
    grown = make(trained, tmp_path / "set", 11, format=format)
    assert int((pixels(grown) - pixels(make(trained, tmp_path / "whole", 11, format=format))).abs().max()) <= 1
    kept = {name for name, data in files(tmp_path / "set").items() if before.get(name) == data}
    assert kept >= ({"chunk-00000.npy"} if format == "npy" else {f"{i:08d}.png" for i in range(4)})
    assert json.loads((tmp_path / "set" / RECORD).read_text())["count"] == 11


@FORMATS
def test_asking_for_fewer_gives_the_first_ones_and_forgets_none(trained, tmp_path, format):
    all_of_them = pixels(make(trained, tmp_path / "set", format=format))
    before = files(tmp_path / "set")
    assert torch.equal(pixels(make(trained, tmp_path / "set", 6, format=format)), all_of_them[:6])
    assert files(tmp_path / "set") == before


def test_another_batch_size_goes_on_with_the_files_as_they_are_cut(trained, tmp_path):
    whole = pixels(make(trained, tmp_path / "set", 6))
    images = make(trained, tmp_path / "set", 11, chunk=2)
    assert (images.chunk, sorted(files(tmp_path / "set"))[:3]) == (4, [f"chunk-0000{i}.npy" for i in range(3)])
    assert int((pixels(images)[:6] - whole).abs().max()) <= 1


def test_every_other_setting_is_refused_in_the_same_folder_by_name(tmp_path):
    trained = load_trained(trained_once(conditional=True))
    make(trained, tmp_path / "set", 2)
    before = files(tmp_path / "set")
    others = {
        "seed": {"seed": 1},
        "solver": {"solver": Solver("ddim", 4)},
        "label": {"label": 3},
        "guidance": {"guidance": 2.0},
        "interval": {"interval": (0.1, 0.9)},
        "format": {"format": "png"},
        "precision": {"precision": "bf16"},
        "autoencoder": {"autoencoder": "other"},
    }
    for name, settings in others.items():
        with pytest.raises(ValueError, match=f"made with another {name} .*give another --out"):
            make(trained, tmp_path / "set", 2, **settings)
    for other in (load_trained(trained.folder, weights="model"), load_trained(trained.folder, step=6)):
        with pytest.raises(ValueError, match=r"another .*sha256"):
            make(other, tmp_path / "set", 2)
    assert files(tmp_path / "set") == before
    keys = {image_set(trained, tmp_path, 2, **{"solver": SOLVER, **settings}).key for settings in others.values()}
    assert len(keys) == len(others)
    assert image_set(trained, tmp_path, 2).key == image_set(trained, tmp_path / "x", 9, chunk=3).key not in keys


@pytest.mark.parametrize("keep", [0, 0.5])
@FORMATS
def test_a_torn_file_does_not_count_as_done(trained, tmp_path, format, keep):
    make(trained, tmp_path / "set", format=format)
    whole = files(tmp_path / "set")
    torn = tmp_path / "set" / ("00000005.png" if format == "png" else "chunk-00001.npy")
    torn.write_bytes(torn.read_bytes()[: int(keep * torn.stat().st_size)])
    make(trained, tmp_path / "set", format=format)
    assert files(tmp_path / "set") == whole


def test_images_of_unknown_origin_are_not_taken_for_our_own(trained, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    Image.new("L", (8, 8)).save(folder / "00000000.png")
    with pytest.raises(FileExistsError, match="unknown origin"):
        make(trained, folder, format="png")
    assert sorted(files(folder)) == ["00000000.png", "notes.txt"]


@pytest.mark.parametrize(("file", "what"), [("config.yaml", "a run"), ("comparison.json", "a comparison")])
def test_images_do_not_mix_with_a_run(trained, tmp_path, file, what):
    (tmp_path / file).touch()
    with pytest.raises(FileExistsError, match=f"holds {what}: give another --out"):
        fill(image_set(trained, tmp_path, 3, format="png"), trained)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_progress_counts_what_was_there_too(trained, tmp_path):
    told = []
    make(trained, tmp_path / "set", 6)
    make(trained, tmp_path / "set", 11, progress=told.append)
    assert told == [4, 4, 3]


def test_a_precision_is_used_and_classes_take_turns(tmp_path):
    trained = load_trained(trained_once(conditional=True))
    exact, rough = (pixels(make(trained, tmp_path / p, precision=p)) for p in ("fp32", "bf16"))
    assert 0 < int((exact - rough).abs().max()) < 64
    sevens = pixels(make(trained, tmp_path / "sevens", label=7))
    assert torch.equal(sevens[7], exact[7]) or int((sevens[7] - exact[7]).abs().max()) <= 1
    assert not torch.equal(sevens[8], exact[8])


def test_bad_settings_are_named_before_anything_is_written(trained, tmp_path):
    bad = {
        "count and chunk must be >= 1, got 0 and 4": {"count": 0},
        "count and chunk must be >= 1, got 2 and 0": {"chunk": 0},
        "unknown format 'jpg': choose one of png, npy": {"format": "jpg"},
        "unknown precision 'fp8'": {"precision": "fp8"},
        "label 3 was asked for, but the model was trained without classes": {"label": 3},
        "guidance needs a model that was trained with classes": {"guidance": 2.0},
        "interval must be": {"interval": (0.5, 0.2)},
    }
    for message, settings in bad.items():
        with pytest.raises(ValueError, match=message):
            make(trained, tmp_path / "set", **{"count": 2, **settings})
    assert not (tmp_path / "set").exists()


@FORMATS
@pytest.mark.parametrize("shape", [(3, 1, 16), (3, 16, 1), (1, 1, 5), (1, 6, 4), (4, 3, 2)])
def test_pictures_of_any_size_come_back_as_they_were(trained, tmp_path, format, shape):
    images = image_set(trained, tmp_path, 2, solver=SOLVER, chunk=2, format=format)
    values = torch.arange(2 * np.prod(shape)).view(2, *shape).to(torch.uint8)
    images.write(range(2), values)
    assert torch.equal(images.read(range(2)), values)
    if format == "png":
        assert Image.open(images.image_file(0)).size == (shape[2], shape[1])


def test_guidance_needs_a_model_that_was_trained_without_classes_too(trained, tmp_path):
    always = replace(trained.config, model=replace(trained.config.model, label_dropout=0.0))
    with pytest.raises(ValueError, match=r"has seen them always \(model.label_dropout=0\)"):
        image_set(replace(trained, classes=10, config=always), tmp_path, 2, guidance=2.0)
    image_set(replace(trained, classes=10, config=always), tmp_path, 2, guidance=1.0)


@FORMATS
def test_a_disk_that_takes_no_more_is_an_error_with_its_reason(trained, tmp_path, format):
    images = image_set(trained, tmp_path, 400, chunk=400, format=format)
    images.begin()
    most, limits = 2048, resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = torch.randint(256, (400, 1, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as failure:
            images.write(range(400), noise)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failure.value.errno == errno.EFBIG
