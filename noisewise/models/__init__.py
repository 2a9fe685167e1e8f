"""The networks that are trained: `model(x, time, labels=None)` returns a tensor of the shape of x.

`time` is what the process feeds the model, (B,), integer or float. `labels` is (B,) int64; the value `classes`, one past the
last class, means "no class", and a conditional model without labels takes it for every sample.
"""

from noisewise.models.build import MODELS, build_model, with_labels
from noisewise.models.dit import DiT
from noisewise.models.unet import UNet
from noisewise.models.uvit import UViT

__all__ = ["MODELS", "DiT", "UNet", "UViT", "build_model", "with_labels"]
