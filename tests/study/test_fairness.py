"""What makes a comparison fair: with one seed, all samplers begin with the same weights and see the same data and noise."""

import pytest
import torch

from tests.training.tiny import differing, own, tensors, tiny, trainer_of

STEPS = 3
OTHERS = ["minsnr", "speed", "logit_normal", "loss_moment", "adaptive", "adaptive:estimator=reinforce,every=1"]


def noises(trainer):
    """The noise in each sample of each step, worked out from what the model was given."""
    process, found = trainer.objective.process, []
    for k in range(STEPS):
        x0, _ = trainer.batches.get(trainer.samples)
        trainer.training_step()
        x, time = trainer.model.seen[k]
        alpha, sigma = (scale.view(-1, 1, 1, 1) for scale in process.scales((time + 0.5) / process.steps))
        found.append((x0, (x - alpha * x0) / sigma))
    return found


@pytest.mark.parametrize("sampler", OTHERS)
def test_weights_data_and_noise_are_those_of_the_baseline(sampler):
    base, other = (trainer_of(tiny(sampler=spec, model=own("Recording"))) for spec in ("uniform", sampler))
    assert differing(tensors(base, "model"), tensors(other, "model")) == []
    for (x0, noise), (other_x0, other_noise) in zip(noises(base), noises(other), strict=True):
        assert torch.equal(x0, other_x0)
        assert torch.allclose(noise, other_noise, atol=2e-3)  # x0 is divided by a small sigma where there is little noise
        assert 0.9 < float(noise.std()) < 1.1


def test_another_seed_has_other_weights_data_and_noise():
    one, other = (trainer_of(tiny(seed=seed, model=own("Recording"))) for seed in (0, 1))
    assert differing(tensors(one, "model"), tensors(other, "model")) != []
    for (x0, noise), (other_x0, other_noise) in zip(noises(one), noises(other), strict=True):
        assert not torch.equal(x0, other_x0)
        assert not torch.allclose(noise, other_noise, atol=0.1)
