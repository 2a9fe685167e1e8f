"""Image i is image i, whatever else is generated with it."""

from dataclasses import replace

import pytest
import torch

from noisewise import DDPM, EDM, Flow, Objective
from noisewise.generation.guidance import denoiser
from noisewise.generation.images import generate, generate_batches
from noisewise.generation.solvers import default_solver
from noisewise.noise import normals
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


def test_another_seed_gives_other_images(model):
    one, other = (generate(model, OBJECTIVES[0], SHAPE, 2, solver=solver(OBJECTIVES[0]), seed=seed) for seed in (0, 1))
    assert not torch.allclose(one, other, atol=0.1)


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


def test_no_gradients_are_recorded(model):
    assert not generate(model, OBJECTIVES[0], SHAPE, 1, solver=solver(OBJECTIVES[0], 2)).requires_grad


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
