"""From latents back to images, with the autoencoder that made them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Decoder = Callable[[Tensor], Tensor]


def make_decoder(
    latents: dict[str, Any],
    device: torch.device | str,
    autoencoder: str | None = None,
    subfolder: str | None = None,
    batch: int = 16,
) -> Decoder:
    """Samples of a model of latents -> images in [-1, 1].

    Args:
        latents: what the checkpoint says about them: autoencoder, subfolder, scale, shift.
        device: where to decode.
        autoencoder: another place to find it.
        subfolder: of that place.
        batch: latents at a time: images are much larger.
    """
    from noisewise.data.autoencoder import load_autoencoder

    place, inner = (autoencoder, subfolder) if autoencoder else (latents["autoencoder"], latents["subfolder"])
    model = load_autoencoder(place, inner, device, torch.float32).model
    scale, shift = float(latents["scale"]), float(latents["shift"])

    @torch.no_grad()
    def decode(samples: Tensor) -> Tensor:
        parts = [model.decode(part.to(device) / scale + shift).sample for part in samples.float().split(batch)]
        return torch.cat(parts).clamp(-1, 1)

    return decode
