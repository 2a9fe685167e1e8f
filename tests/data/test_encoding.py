"""Latents against the autoencoder's own, and encoding that survives interruptions."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DModel, VQModel

from noisewise.data import Batches, Synthetic, open_data
from noisewise.data.encoding import encode
from noisewise.plain_files import FolderInUse
from tests.data.small_autoencoder import SMALL

COUNT = 14


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny autoencoders, by the names of their folders."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made = {
        "kl": AutoencoderKL(**SMALL, latent_channels=2, scaling_factor=0.7, shift_factor=0.3),
        "vq": VQModel(**SMALL, latent_channels=3, vq_embed_dim=2, num_vq_embeddings=5, scaling_factor=1.4),
    }
    for name, model in made.items():
        model.eval().save_pretrained(root / name)
    return root, made


@pytest.fixture
def kl(models):
    """The folder of the usual one."""
    return str(models[0] / "kl")


@pytest.fixture
def source():
    return Synthetic((3, 8, 8), 5, count=COUNT)


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_latents_are_the_posterior_of_the_autoencoder(models, source, tmp_path):
    root, made = models
    folder = encode(source, str(root / "kl"), tmp_path / "latents", batch=4, store="float32")
    with torch.no_grad():
        posterior = made["kl"].encode(source.decode(source.read(np.arange(COUNT))[0])).latent_dist
    latents = open_data("latents", folder)
    values, labels = latents.read(np.arange(COUNT))
    torch.testing.assert_close(values[:, 0], posterior.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values[:, 1], posterior.std, rtol=1e-5, atol=1e-6)
    assert torch.equal(labels, source.read(np.arange(COUNT))[1])
    assert (latents.shape, latents.classes, latents.image, len(latents)) == ((2, 4, 4), 5, False, COUNT)
    assert (latents.scale, latents.shift, latents.autoencoder) == (0.7, 0.3, str(root / "kl"))
    assert latents.nbytes == 2 * COUNT * 32 * 4


def test_vq_latents_are_those_before_quantisation_and_have_no_deviation(models, source, tmp_path):
    root, made = models
    folder = encode(source, str(root / "vq"), tmp_path / "latents", batch=5, store="float32")
    with torch.no_grad():
        expected = made["vq"].encode(source.decode(source.read(np.arange(COUNT))[0])).latents
    latents = open_data("latents", folder)
    values, _ = latents.read(np.arange(COUNT))
    torch.testing.assert_close(values[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert values.shape == (COUNT, 1, 2, 4, 4)
    assert not (folder / "std.npy").exists()
    decoded = latents.decode(values)
    torch.testing.assert_close(decoded, expected * 1.4, rtol=1e-5, atol=1e-6)
    assert torch.equal(decoded, latents.decode(values))


def test_vq_latents_are_not_rescaled_by_stable_diffusions_factor(source, tmp_path):
    """diffusers gives its 0.18215 to a VQModel whose config names no factor, such as that of LDM on CelebA-HQ."""
    VQModel(**SMALL, latent_channels=3).eval().save_pretrained(tmp_path / "vq")
    latents = open_data("latents", encode(source, str(tmp_path / "vq"), tmp_path / "latents", store="float32"))
    values, _ = latents.read(np.arange(COUNT))
    assert torch.equal(latents.decode(values), values[:, 0])


def test_decoded_latents_have_the_scaled_mean_and_deviation(kl, source, tmp_path):
    latents = open_data("latents", encode(source, kl, tmp_path / "latents", store="float32"))
    values, _ = latents.read(np.arange(3))
    torch.manual_seed(0)
    draws = torch.stack([latents.decode(values) for _ in range(4000)])
    mean, std = (values[:, 0] - 0.3) * 0.7, values[:, 1] * 0.7
    assert draws.dtype == torch.float32
    assert ((draws.mean(0) - mean).abs() < 5 * std / 4000**0.5).all()
    torch.testing.assert_close(draws.std(0), std, rtol=5 / 8000**0.5, atol=0)


def test_decoding_draws_from_the_global_generator(kl, source, tmp_path):
    latents = open_data("latents", encode(source, kl, tmp_path / "latents"))
    with Batches(latents, batch=4, seed=0, workers=0) as batches:
        torch.manual_seed(1)
        first, labels = batches.get(0)
        second, _ = batches.get(0)
        torch.manual_seed(1)
        assert torch.equal(batches.get(0)[0], first)
    assert not torch.equal(first, second)
    assert first.shape == (4, 2, 4, 4)
    assert labels.shape == (4,)


def test_half_precision_is_stored_unless_told_otherwise(kl, source, tmp_path):
    half = encode(source, kl, tmp_path / "half")
    full = encode(source, kl, tmp_path / "full", store="float32")
    mean = np.load(half / "mean.npy")
    assert mean.dtype == np.float16
    assert np.array_equal(mean, np.load(full / "mean.npy").astype(np.float16))


def test_the_index_says_what_was_encoded_and_with_what(kl, source, tmp_path):
    folder = encode(source, kl, tmp_path / "latents", batch=3)
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 1
    assert index["kind"] == "AutoencoderKL"
    assert index["source"] == {"name": "synthetic", "fingerprint": source.fingerprint()}
    assert (index["shape"], index["count"], index["classes"]) == ([2, 4, 4], COUNT, 5)
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "labels.npy", "mean.npy", "std.npy"]


def test_data_without_labels_give_latents_without_labels(kl, tmp_path):
    folder = encode(Synthetic((3, 8, 8), count=3), kl, tmp_path / "latents")
    latents = open_data("latents", folder)
    assert latents.read(np.arange(3))[1] is None
    assert not (folder / "labels.npy").exists()


def test_progress_counts_rows(kl, source, tmp_path):
    seen = []
    encode(source, kl, tmp_path / "latents", batch=4, progress=seen.append)
    assert seen == [4, 8, 12, 14]


@pytest.mark.parametrize("save_every", [1, 2])
@pytest.mark.parametrize("stop", [4, 8, 12])
def test_an_interrupted_run_goes_on_to_identical_files(kl, source, tmp_path, stop, save_every):
    whole = encode(source, kl, tmp_path / "whole", batch=4)

    def interrupt(done):
        if done == stop:
            raise KeyboardInterrupt

    settings = {"batch": 4, "save_every": save_every}
    with pytest.raises(KeyboardInterrupt):
        encode(source, kl, tmp_path / "again", progress=interrupt, **settings)
    assert not (tmp_path / "again").exists()
    seen = []
    again = encode(source, kl, tmp_path / "again", progress=seen.append, **settings)
    assert seen[0] == min(stop + 4, COUNT)  # what was done is not encoded again
    assert files_of(again) == files_of(whole)
    assert not (tmp_path / "again.partial").exists()


KILLED = """
import os, signal, sys
from noisewise.data import Synthetic
from noisewise.data.encoding import encode
from noisewise.plain_files import FolderInUse
from tests.data.small_autoencoder import SMALL

def die(done):
    if done == 8:
        os.kill(os.getpid(), signal.SIGKILL)

encode(Synthetic((3, 8, 8), 5, count=14), sys.argv[1], sys.argv[2], batch=4, save_every=1, progress=die)
"""


def test_a_killed_process_leaves_what_another_can_finish(kl, source, tmp_path):
    command = [sys.executable, "-c", KILLED, kl, str(tmp_path / "killed")]
    killed = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (tmp_path / "killed.partial" / ".progress.json-999999999").touch()  # killed while it was written
    seen = []
    folder = encode(source, kl, tmp_path / "killed", batch=4, progress=seen.append)
    assert seen == [12, 14]
    assert files_of(folder) == files_of(encode(source, kl, tmp_path / "whole", batch=4))


def test_a_second_call_into_the_same_folder_is_refused(kl, source, tmp_path):
    def meanwhile(done):
        with pytest.raises(FolderInUse, match=r"latents\.partial is in use by another process"):
            encode(source, kl, tmp_path / "latents", batch=4)

    folder = encode(source, kl, tmp_path / "latents", batch=4, progress=meanwhile)
    assert files_of(folder) == files_of(encode(source, kl, tmp_path / "alone", batch=4))


def _settings_gone(partial):
    (partial / "progress.json").write_text('{"done": 4, "settings": 3}')


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("progress.json", lambda partial: (partial / "progress.json").write_text("{")),
        ("progress.json", lambda partial: (partial / "progress.json").write_text("[]")),
        ("progress.json", _settings_gone),
        ("mean.npy", lambda partial: (partial / "mean.npy").unlink()),
        ("std.npy", lambda partial: (partial / "std.npy").write_bytes(b"")),
        ("std.npy", lambda partial: np.save(partial / "std.npy", np.zeros(3))),
    ],
)
def test_damage_to_what_an_interrupted_run_has_left_is_named(kl, source, tmp_path, name, damage):
    def interrupt(done):
        raise KeyboardInterrupt

    out, partial = tmp_path / "latents", tmp_path / "latents.partial"
    with pytest.raises(KeyboardInterrupt):
        encode(source, kl, out, batch=4, progress=interrupt)
    damage(partial)
    with pytest.raises(ValueError, match=rf"/{re.escape(name)} is damaged: remove .*latents\.partial to encode"):
        encode(source, kl, out, batch=4)


def test_other_settings_do_not_go_on_with_a_run(kl, source, tmp_path):
    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(source, kl, tmp_path / "x", batch=4, save_every=1, progress=interrupt)
    with pytest.raises(ValueError, match=r"other settings \(batch, store\)"):
        encode(source, kl, tmp_path / "x", batch=2, store="float32")
    with pytest.raises(ValueError, match=r"other settings \(count, source\)"):
        encode(Synthetic((3, 8, 8), 5, count=9), kl, tmp_path / "x", batch=4)


def test_nothing_is_overwritten(kl, source, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        encode(source, kl, tmp_path / "here")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Synthetic((1, 8, 8)), "takes 3 channels, synthetic has 1"),
        (Synthetic((3, 9, 8)), "shrinks pictures 2 times, which 9x8 does not allow"),
        (Synthetic((3, 8, 8), floats=True), "only pictures"),
    ],
)
def test_data_that_do_not_suit_the_autoencoder_are_refused_at_once(kl, tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        encode(data, kl, tmp_path / "latents")
    assert not list(tmp_path.iterdir())


def test_what_is_no_autoencoder_is_refused(models, source, tmp_path):
    UNet2DModel(
        sample_size=8,
        block_out_channels=(8,),
        norm_num_groups=2,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    ).save_pretrained(tmp_path / "unet")
    with pytest.raises(ValueError, match="is a UNet2DModel, not one of AutoencoderKL, VQModel"):
        encode(source, str(tmp_path / "unet"), tmp_path / "latents")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no autoencoder at"):
        encode(source, str(tmp_path / "empty"), tmp_path / "latents")


def test_an_autoencoder_in_a_subfolder_is_found(models, source, tmp_path):
    root, _ = models
    folder = encode(source, str(root), tmp_path / "latents", subfolder="kl")
    assert open_data("latents", folder).subfolder == "kl"


def test_latents_too_large_for_half_precision_are_refused(models, source, tmp_path):
    _, made = models
    huge = AutoencoderKL.from_config(made["kl"].config)
    huge.load_state_dict(made["kl"].state_dict())
    with torch.no_grad():
        huge.quant_conv.bias.fill_(1e6)
    huge.save_pretrained(tmp_path / "huge")
    with pytest.raises(ValueError, match="not finite in float16: use store='float32'"):
        encode(source, str(tmp_path / "huge"), tmp_path / "latents")


class Endless(Synthetic):
    def __len__(self):
        return 10**14

    def fingerprint(self):
        return "endless"


def test_a_disk_too_small_is_noticed_before_it_is_full(kl, tmp_path):
    with pytest.raises(ValueError, match=r"need 12800000\.0 GB, but only"):
        encode(Endless((3, 8, 8)), kl, tmp_path / "x")


def test_wrong_settings_are_named(kl, source, tmp_path):
    with pytest.raises(ValueError, match="store must be one of float16, float32"):
        encode(source, kl, tmp_path / "x", store="int8")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        encode(source, kl, tmp_path / "x", batch=0)


def test_damaged_folders_of_latents_are_named(kl, source, tmp_path):
    folder = encode(source, kl, tmp_path / "latents")
    before = open_data("latents", folder).fingerprint()
    with pytest.raises(FileNotFoundError, match="no sub-folder 'test'"):
        open_data("latents", folder, split="test")
    np.save(folder / "std.npy", np.load(folder / "std.npy") * 2)
    assert open_data("latents", folder).fingerprint() != before
    np.save(folder / "std.npy", np.zeros((3, 2, 4, 4), np.float16))
    with pytest.raises(ValueError, match=r"std\.npy has shape \(3, 2, 4, 4\)"):
        open_data("latents", folder)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "version": 99}))
    with pytest.raises(ValueError, match="of format 99, this noisewise reads 1"):
        open_data("latents", folder)
    (folder / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks version"):
        open_data("latents", folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        open_data("latents", folder)


def test_splits_of_latents_are_sub_folders(kl, source, tmp_path):
    encode(source, kl, tmp_path / "all" / "train")
    encode(Synthetic((3, 8, 8), 5, count=6), kl, tmp_path / "all" / "test")
    assert len(open_data("latents", tmp_path / "all")) == COUNT
    assert len(open_data("latents", tmp_path / "all", split="test")) == 6
