"""Image i is image i, whatever else is generated with it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, VQModel
from PIL import Image

from noisewise import DDPM, EDM, Flow, Objective
from noisewise.commands.cli import main
from noisewise.generation.guidance import denoiser
from noisewise.generation.images import generate, generate_batches, grid, make_decoder, save_grid, to_uint8
from noisewise.generation.sets import image_set
from noisewise.generation.solvers import Solver, default_solver
from noisewise.generation.trained import load_trained
from noisewise.streams import normals
from tests.data.small_autoencoder import SMALL
from tests.models.small_models import CLASSES, SHAPE, small, stirred

OBJECTIVES = [Objective(DDPM.linear()), Objective(EDM(), "edm"), Objective(Flow(time_scale=1000), "flow")]


def solver(objective, steps=4):
    return replace(default_solver(objective.process), steps=steps)


@pytest.fixture(scope="module")
def model():
    return stirred(small("dit", classes=CLASSES))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.prediction)
def test_images_do_not_depend_on_the_batch_or_the_random_state(objective, model):
    settings = {"solver": solver(objective), "classes": CLASSES, "guidance": 1.5}
    together = generate(model, objective, SHAPE, 7, batch=7, **settings)
    torch.manual_seed(99)
    parts = generate(model, objective, SHAPE, 7, batch=2, **settings)
    torch.testing.assert_close(parts, together, rtol=1e-4, atol=1e-5)
    numbers, some = next(generate_batches(model, objective, SHAPE, [5, 2], **settings))
    assert numbers.tolist() == [5, 2]
    torch.testing.assert_close(some, together[[5, 2]], rtol=1e-4, atol=1e-5)
    assert len({tuple(image.flatten().tolist()) for image in together}) == 7


def test_equals_the_solver_by_hand(model):
    objective, labels = OBJECTIVES[0], torch.tensor([0, 1, 2])
    found = generate(model, objective, SHAPE, 3, solver=solver(objective), seed=4, classes=CLASSES, guidance=2.0)
    estimate = denoiser(model, objective, labels, guidance=2.0, null_label=CLASSES, interval=(0.0, 1.0))

    def noise(draw):
        return normals(4, torch.arange(3), draw, SHAPE)

    assert torch.equal(found, solver(objective).generate(estimate, objective.process, noise, clip=1.0))


def test_classes_go_round_and_a_label_is_for_all():
    told = []

    def model(x, time, labels):
        told.append(labels.tolist())
        return x

    settings = {"solver": solver(OBJECTIVES[0], 2), "classes": 3}
    generate(model, OBJECTIVES[0], SHAPE, 5, **settings)
    assert set(map(tuple, told)) == {(0, 1, 2, 0, 1)}
    told.clear()
    generate(model, OBJECTIVES[0], SHAPE, 2, label=2, **settings)
    assert set(map(tuple, told)) == {(2, 2)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch must be >= 1, got 0"),
        ({"label": 3, "classes": 3}, "label 3 is not one of the model's 3 classes"),
        ({"label": 0}, "label 0 was asked for, but the model was trained without classes"),
        ({"count": 0}, "count must be >= 1, got 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    count = settings.pop("count", 2)
    with pytest.raises(ValueError, match=message):
        generate(lambda x, time: x, OBJECTIVES[0], SHAPE, count, **settings)


# As pictures ----------------------------------------------------------------------------------------------------------


def test_every_sample_is_where_it_should_be_and_enlarged_by_whole_pixels():
    samples = torch.linspace(-1, 1, 5).view(5, 1, 1, 1).expand(-1, 1, 8, 8)
    picture = grid(samples, columns=3)
    assert picture.shape == (2 * 36 + 4, 3 * 36 + 4, 3)
    expected = [0, 64, 128, 191, 255]
    for i, value in enumerate(expected):
        top, left = 4 + (i // 3) * 36, 4 + (i % 3) * 36
        block = picture[top : top + 32, left : left + 32]
        assert np.ptp(block) == 0
        assert abs(int(block[0, 0, 0]) - value) <= 1
    assert (picture[40:, 76:] == 255).all()  # the place of a sixth
    assert (picture[:4] == 255).all()
    assert (picture[:, 36:40] == 255).all()


def test_colours_and_pixels_keep_their_place():
    sample = torch.full((1, 3, 4, 6), -1.0)
    sample[0, 1, 2, 3] = 1.0  # green at row 2, column 3
    picture = grid(sample, gap=0, enlarge=2)
    assert picture.shape == (8, 12, 3)
    assert [tuple(place) for place in np.argwhere(picture == 255)] == [(4, 6, 1), (4, 7, 1), (5, 6, 1), (5, 7, 1)]


def test_large_samples_are_not_enlarged_and_values_outside_are_clipped():
    picture = grid(torch.full((1, 3, 40, 40), 7.0), gap=0)
    assert picture.shape == (40, 40, 3)
    assert (picture == 255).all()


def test_the_file_holds_the_grid(tmp_path):
    samples = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    path = save_grid(samples, tmp_path / "deep" / "picture.png")
    assert np.array_equal(np.asarray(Image.open(path)), grid(samples))


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 8, 8), (0, 1, 8, 8)])
def test_what_is_no_picture_is_refused(shape):
    with pytest.raises(ValueError, match=r"a grid needs samples of shape \(N, 1 or 3, H, W\), got"):
        grid(torch.zeros(shape))


# Latents --------------------------------------------------------------------------------------------------------------


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
