"""The fast path on one CUDA device: fused kernels, a compiled model, and the whole step in CUDA graphs."""

from noisewise.training.fast.choose import chosen_step, why_not
from noisewise.training.fast.graphs import GraphedStep

__all__ = ["GraphedStep", "chosen_step", "why_not"]
