"""An autoencoder of diffusers, as `encode` needs it: from pictures to the mean and deviation of their latents."""

from typing import Any

import torch
from diffusers import AutoencoderKL, VQModel
from torch import Tensor

from noisewise.data.source import Source

KINDS = {"AutoencoderKL": AutoencoderKL, "VQModel": VQModel}


class Encoder:
    """AutoencoderKL gives the mean and standard deviation of its posterior, VQModel its latents before quantisation."""

    def __init__(self, model: Any, kind: str) -> None:
        self.model, self.kind = model, kind
        config = model.config
        if getattr(config, "latents_mean", None) or getattr(config, "latents_std", None):
            raise ValueError(
                "this autoencoder scales each channel by its own latents_mean and latents_std, which is not supported"
            )
        self.scale = float(getattr(config, "scaling_factor", None) or 1.0)
        self.shift = float(getattr(config, "shift_factor", None) or 0.0)
        self.has_std = kind == "AutoencoderKL"
        self.device, self.dtype = next((p.device, p.dtype) for p in model.parameters())

    def latent_shape(self, source: Source) -> list[int]:
        """The shape of one latent of this source's pictures, which must suit the autoencoder."""
        config = self.model.config
        factor = 2 ** (len(config.block_out_channels) - 1)
        if not source.image:
            raise ValueError(f"only pictures can be encoded, and {source.name} holds none")
        channels, height, width = source.shape
        if channels != config.in_channels:
            raise ValueError(
                f"the autoencoder takes {config.in_channels} channels, {source.name} has {channels}: "
                f"open the data with channels={config.in_channels}, or choose another autoencoder"
            )
        if height % factor or width % factor:
            raise ValueError(
                f"the autoencoder shrinks pictures {factor} times, which {height}x{width} does not allow: "
                f"open the data with a size that is a multiple of {factor}"
            )
        depth = config.latent_channels if self.has_std else config.vq_embed_dim or config.latent_channels
        return [depth, height // factor, width // factor]

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> dict[str, Tensor | None]:
        """`mean` and `std` in float32, without the scaling factor."""
        output = self.model.encode(pictures.to(self.dtype))
        if not self.has_std:
            return {"mean": output.latents.float(), "std": None}
        return {"mean": output.latent_dist.mean.float(), "std": output.latent_dist.std.float()}


def load_autoencoder(name: str, subfolder: str | None, device: torch.device | str, dtype: torch.dtype) -> Encoder:
    """The autoencoder of a local folder or of the hub, of the class that its config names; only safetensors are read."""
    where = name if subfolder is None else f"{name} (subfolder {subfolder})"
    try:
        kind = AutoencoderKL.load_config(name, subfolder=subfolder).get("_class_name")
    except OSError as error:
        raise ValueError(f"no autoencoder at {where}: {error}; if it is a pipeline, give subfolder='vae'") from error
    if kind not in KINDS:
        raise ValueError(f"{where} is a {kind}, not one of {', '.join(KINDS)}; if it is a pipeline, give subfolder='vae'")
    try:
        model = KINDS[kind].from_pretrained(name, subfolder=subfolder, torch_dtype=dtype, use_safetensors=True)
    except OSError as error:
        raise ValueError(f"cannot load {where}: {error}") from error
    return Encoder(model.to(device).eval().requires_grad_(False), kind)
