"""Models of latents, from encoding to images, with real autoencoders of diffusers that are small."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, VQModel
from PIL import Image

from noisewise.commands.cli import main
from noisewise.generation.images import generate, make_decoder, to_uint8
from noisewise.generation.sets import image_set
from noisewise.generation.solvers import Solver
from noisewise.generation.trained import load_trained

SMALL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
MODELS = {
    "kl": lambda: AutoencoderKL(**SMALL, latent_channels=4, scaling_factor=0.7, shift_factor=0.3),
    "vq": lambda: VQModel(**SMALL, latent_channels=3, vq_embed_dim=3, num_vq_embeddings=16, scaling_factor=1.4),
}


@pytest.fixture(scope="module", params=list(MODELS))
def latent_run(request, tmp_path_factory):
    """Pictures, encoded and trained on through the command line: (run, autoencoder, its folder)."""
    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    autoencoder = MODELS[request.param]().eval()
    autoencoder.save_pretrained(root / "autoencoder" / "vae")
    (root / "pictures").mkdir()
    values = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8)
    for number, picture in enumerate(values):
        Image.fromarray(picture).save(root / "pictures" / f"{number}.png")
    place = ["--autoencoder", str(root / "autoencoder"), "--subfolder", "vae"]
    encode = ["encode", "--data", str(root / "pictures"), *place, "--out", str(root / "latents"), "--device", "cpu"]
    assert main(encode) == 0
    settings = [
        *("--data.source", "latents", "--data.path", str(root / "latents"), "--out", str(root / "run")),
        *("--steps", "4", "--batch", "4", "--device", "cpu", "--precision", "fp32", "--log.trackers", "[]"),
        *("--model.name", "dit", "--model.options", '{"patch": 4, "width": 16, "depth": 1, "heads": 2}'),
    ]
    assert main(["train", *settings]) == 0
    return root / "run", autoencoder, root / "autoencoder"


def test_images_come_out_at_the_end(latent_run, tmp_path):
    run, autoencoder, _ = latent_run
    assert main(["generate", str(run), "--count", "5", "--batch", "2", "--steps", "3", "--out", str(tmp_path / "out")]) == 0
    found = np.stack([np.asarray(Image.open(path)) for path in sorted((tmp_path / "out").glob("*.png"))])
    assert found.shape == (5, 16, 16, 3)
    trained = load_trained(run)
    config = autoencoder.config
    solver = Solver.parse(json.loads((tmp_path / "out" / "generation.json").read_text())["solver"], trained.objective.process)
    latents = generate(trained.call, trained.objective, trained.shape, 5, solver=solver, batch=2, clip=None)
    with torch.no_grad():
        unscaled = latents / config.scaling_factor + (getattr(config, "shift_factor", None) or 0)
        expected = to_uint8(autoencoder.decode(unscaled).sample.clamp(-1, 1)).permute(0, 2, 3, 1).int().numpy()
    assert abs(found.astype(int) - expected).max() <= 1
    assert found.std() > 1


def test_latents_are_unscaled_before_they_are_decoded(latent_run):
    run, autoencoder, _ = latent_run
    trained = load_trained(run)
    latents = 0.3 * torch.randn(3, *trained.shape, generator=torch.Generator().manual_seed(0))
    scale, shift = autoencoder.config.scaling_factor, getattr(autoencoder.config, "shift_factor", None) or 0.0
    with torch.no_grad():
        right, wrong = (autoencoder.decode(latents / scale + sign * shift).sample.clamp(-1, 1) for sign in (1, -1))
    torch.testing.assert_close(make_decoder(trained.latents, "cpu")(latents), right, rtol=0, atol=1e-5)
    assert not shift or float((right - wrong).abs().max()) > 1e-3


def test_it_decodes_in_parts_and_stays_within_the_range_of_pixels(latent_run):
    run, _, _ = latent_run
    trained = load_trained(run)
    assert (trained.image, trained.clip, trained.latents["subfolder"]) == (False, None, "vae")
    latents = 30 * torch.randn(5, *trained.shape, generator=torch.Generator().manual_seed(0))
    whole, parts = (make_decoder(trained.latents, "cpu", batch=batch)(latents) for batch in (5, 2))
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-5)
    assert whole.shape == (5, 3, 16, 16)
    assert float(whole.abs().max()) <= 1
    assert not whole.requires_grad


def test_another_autoencoder_can_be_named_where_the_first_is_gone(latent_run, tmp_path, capsys):
    run, _autoencoder, place = latent_run
    moved = place.rename(place.with_name("moved"))
    command = ["generate", str(run), "--count", "2", "--steps", "2", "--out", str(tmp_path / "out")]
    try:
        assert main(command) == 1
        assert str(place) in capsys.readouterr().err
        assert main([*command, "--autoencoder", str(moved), "--subfolder", "vae"]) == 0
    finally:
        moved.rename(place)
    assert len(list((tmp_path / "out").glob("*.png"))) == 2


def test_a_model_of_neither_images_nor_latents_is_refused(latent_run, tmp_path):
    trained = replace(load_trained(latent_run[0]), latents=None)
    with pytest.raises(ValueError, match="does not make images"):
        image_set(trained, tmp_path, 2)
