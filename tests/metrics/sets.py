"""Sets of samples the tests measure."""

import numpy as np
import torch

from noisewise.data.digits import Digits


def gaussian(n, dim, shift=0.0, scale=1.0, seed=0):
    """Float32 rows, N(shift, scale^2)."""
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * scale + shift


def digits(split="train"):
    """The embedded digits, uint8 from 0 to 255, (n, 1, 8, 8)."""
    source = Digits(split)
    values, _ = source.read(np.arange(len(source)))
    return (values.float() * 255 / 16).round().to(torch.uint8)
