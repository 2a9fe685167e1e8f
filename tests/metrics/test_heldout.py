"""Held-out losses against a computation by hand; the same whatever the batch, the run before it and the caller's seed."""

import json

import numpy as np
import pytest
import torch

from noisewise import DDPM, EDM, Flow, Objective
from noisewise.data import Synthetic, open_data
from noisewise.looking.validation import validate
from noisewise.metrics.heldout import NOISE_SEED, held_out_losses
from noisewise.streams import normals
from noisewise.weighting import MinSNR
from tests.models.small_models import small, stirred

OBJECTIVES = [Objective(DDPM.linear()), Objective(EDM(), "edm"), Objective(Flow(), "flow", "huber")]


def scale(x, time):
    return 0.3 * x + time.float().view(-1, 1, 1, 1) * 1e-4


def latents(folder):
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal((2, 11, 2, 4, 4)).astype(np.float16)
    np.save(folder / "mean.npy", values[0])
    np.save(folder / "std.npy", np.abs(values[1]))
    index = {"version": 1, "autoencoder": "none", "shape": [2, 4, 4], "count": 11, "classes": 0}
    (folder / "index.json").write_text(json.dumps(index | {"scale": 0.5, "shift": 0.0, "source": "made up"}))
    return open_data("latents", folder)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.prediction)
def test_equals_a_loop_over_images_and_levels(objective):
    source, levels = Synthetic((1, 4, 4), count=7), 5
    result = held_out_losses(scale, objective, source, levels=levels, batch=3)
    each = torch.zeros(7, levels, dtype=torch.float64)
    for i in range(7):
        x0 = source.decode(source.read(np.array([i]))[0])
        for level in range(levels):
            noise = normals(NOISE_SEED, torch.tensor([i]), level, (1, 4, 4))
            each[i, level] = objective.losses(scale, x0, torch.tensor([(level + 0.5) / levels]), noise).double()
    torch.testing.assert_close(result.loss, each.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(result.error, each.std(0) / 7**0.5, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(result.u, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64))
    assert result.samples == 7
    assert result.mean == pytest.approx(float(each.mean()), rel=1e-6)


def test_equals_validate_bit_for_bit():
    source = Synthetic((1, 4, 4), count=11)
    x0 = source.decode(source.read(np.arange(11))[0])
    found = held_out_losses(scale, OBJECTIVES[0], source, levels=5, batch=4, seed=3)
    same = validate(lambda x, u, noise: OBJECTIVES[0].losses(scale, x, u, noise), x0.split(4), OBJECTIVES[0], levels=5, seed=3)
    assert torch.equal(found.loss, same.loss)
    assert torch.equal(found.error, same.error)
    assert found.quartiles == same.quartiles


@pytest.mark.parametrize("kind", ["pictures", "latents"])
def test_neither_the_batch_nor_the_random_state_matters(kind, tmp_path):
    source = Synthetic((1, 4, 4), count=11) if kind == "pictures" else latents(tmp_path / "latents")
    results = []
    for batch, seed in ((11, 0), (4, 1), (1, 2)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append(held_out_losses(scale, OBJECTIVES[0], source, levels=4, batch=batch).loss)
        assert torch.equal(torch.get_rng_state(), state)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-6, atol=0)


def test_the_noise_of_an_image_does_not_depend_on_how_many_there_are():
    first = held_out_losses(scale, OBJECTIVES[0], Synthetic((1, 4, 4), count=3), levels=2)
    among = held_out_losses(scale, OBJECTIVES[0], Synthetic((1, 4, 4), count=9), levels=2, images=3)
    assert first.samples == among.samples == 3
    assert held_out_losses(scale, OBJECTIVES[0], Synthetic((1, 4, 4), count=9), levels=2, images=50).samples == 9
    assert not torch.equal(
        first.loss, held_out_losses(scale, OBJECTIVES[0], Synthetic((1, 4, 4), count=3), seed=1, levels=2).loss
    )


def test_a_conditional_model_is_told_the_labels():
    model = stirred(small("dit", classes=10))
    source = open_data("digits", split="test")
    told = held_out_losses(model, OBJECTIVES[0], source, levels=2, images=20, classes=10)
    untold = held_out_losses(model, OBJECTIVES[0], source, levels=2, images=20)
    assert not torch.allclose(told.loss, untold.loss)
    labels = source.read(np.arange(20))[1]
    by_hand = held_out_losses(lambda x, time: model(x, time, labels), OBJECTIVES[0], source, levels=2, images=20)
    assert torch.equal(told.loss, by_hand.loss)


def test_a_perfect_model_has_no_loss_and_the_weighted_mean_weights():
    source, objective = Synthetic((1, 4, 4), count=6), Objective(DDPM.linear(), "x0")
    x0 = source.decode(source.read(np.arange(6))[0])
    assert held_out_losses(lambda x, time: x0, objective, source, levels=3).mean == 0
    result = held_out_losses(scale, OBJECTIVES[0], source, levels=8)
    weights = MinSNR(gamma=5.0).weights(OBJECTIVES[0], result.u.float()).double()
    assert result.weighted(MinSNR(gamma=5.0), OBJECTIVES[0]) == pytest.approx(float((weights * result.loss).mean()), rel=1e-6)
    assert result.weighted(MinSNR(gamma=5.0), OBJECTIVES[0]) != pytest.approx(result.mean, rel=1e-2)


def test_progress_hears_of_every_loss():
    heard = []
    held_out_losses(scale, OBJECTIVES[0], Synthetic((1, 4, 4), count=7), levels=3, batch=4, progress=heard.append)
    assert heard == [4, 4, 4, 3, 3, 3]


@pytest.mark.parametrize("settings", [{"levels": 0}, {"images": 0}, {"batch": 0}])
def test_nothing_to_measure_is_an_error(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be >= 1, got 0"):
        held_out_losses(scale, OBJECTIVES[0], Synthetic((1, 4, 4)), **settings)


def test_few_images_of_sorted_data_are_of_all_kinds(tmp_path):
    values = np.repeat(np.float32([[[[-1.0]]], [[[1.0]]]]), 10, axis=0).repeat(4, axis=2).repeat(4, axis=3)
    np.save(tmp_path / "test.npy", values)
    source = open_data("array", tmp_path / "test.npy")
    seen = []

    def watched(x, time):
        seen.append(x.mean(dim=(1, 2, 3)).sign().tolist())
        return 0 * x

    held_out_losses(watched, Objective(DDPM.linear()), source, levels=1000, images=6, batch=6)
    assert sorted(seen[0]) == [-1] * 3 + [1] * 3  # at the least noise
