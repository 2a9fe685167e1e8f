"""Small models and batches for the tests."""

import torch

from noisewise.models import build_model

SHAPE = (1, 8, 8)
CLASSES = 10
SMALL = {
    "unet": {"channels": 16, "multipliers": [1, 2], "attention": [4], "blocks": 1, "dropout": 0.0},
    "dit": {"width": 32, "depth": 2, "heads": 2},
    "uvit": {"width": 32, "depth": 3, "heads": 2},
}


def small(name, classes=0, seed=0, **options):
    torch.manual_seed(seed)
    return build_model(name, SMALL[name] | options, shape=SHAPE, classes=classes)


def stirred(model, seed=1, std=0.1):
    """The model with noise on all its weights, so that nothing is zero and everything matters."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return model.eval()


def batch(n=4, shape=SHAPE, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator), torch.linspace(3, 970, n).long()
