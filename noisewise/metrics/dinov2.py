"""DINOv2's vision transformers (Oquab et al. 2023, arXiv 2304.07193) as feature networks: FD-DINOv2, beside FID.

Stein et al. 2023 (arXiv 2306.04675) found that distances of these features agree better with people than Inception's do. The
user brings the weights: Meta's own `dinov2_vitl14_pretrain.pth`, or the `model.safetensors` of transformers' DINOv2. Both are
read as data, none is executed. Images are resized and normalised as torch-fidelity does.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from noisewise.training.tensor_files import digest

METRIC = "fd_dinov2"
SIZE = 224
HEAD = 64  # features of an attention head, in all sizes of the model
OFFSET = 0.1  # that Meta's code adds to the number of patches when it resizes the table of positions
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
FILES = "give Meta's dinov2_vits14_pretrain.pth, dinov2_vitb14_pretrain.pth or dinov2_vitl14_pretrain.pth, or the "
FILES += "model.safetensors of transformers' DINOv2"


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before and a scale after."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})
        self.ls1, self.ls2 = (nn.ParameterDict({"gamma": torch.ones(dim)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2)
        x = x + self.ls1["gamma"] * self.attn["proj"](seen)
        return x + self.ls2["gamma"] * self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class DINOv2(nn.Module):
    """Images (n, 3, height, width), normalised, to features (n, dim): the class token after the last norm.

    Modules carry the names of Meta's weights.

    Args:
        dim: features; 1,024 for ViT-L/14.
        depth: blocks; 24 for ViT-L/14.
        patch: pixels of a patch's side.
        grid: patches of a side that the table of positions was learned for; 37 in Meta's weights.
        offset: see `OFFSET`; 0 resizes as transformers does.
    """

    def __init__(self, dim: int = 1024, depth: int = 24, patch: int = 14, grid: int = 37, offset: float = OFFSET) -> None:
        super().__init__()
        self.patch, self.grid, self.offset = patch, grid, offset
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + grid * grid, dim))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch, patch)})
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed["proj"](images)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches.flatten(2).transpose(1, 2)], 1)
        x = x + self._positions(*patches.shape[2:])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]

    def _positions(self, height: int, width: int) -> Tensor:
        """The table of positions, resized to so many patches."""
        if height == width == self.grid:
            return self.pos_embed
        table = self.pos_embed[:, 1:].transpose(1, 2).unflatten(2, (self.grid, self.grid))
        if self.offset:
            scale = ((height + self.offset) / self.grid, (width + self.offset) / self.grid)
            table = F.interpolate(table, scale_factor=scale, mode="bicubic")
        else:
            table = F.interpolate(table, (height, width), mode="bicubic")
        return torch.cat([self.pos_embed[:, :1], table.flatten(2).transpose(1, 2)], 1)


def prepare(images: Tensor) -> Tensor:
    """8-bit images to (n, 3, 224, 224), as torch-fidelity does: TensorFlow 1's bilinear resizing, ImageNet's statistics."""
    x = images.float().expand(-1, 3, -1, -1)
    for axis in (2, 3):
        size = x.shape[axis]
        at = torch.arange(SIZE, dtype=torch.float32, device=x.device) * (size / SIZE)  # no half pixel: corners are not centres
        low = at.long()
        share = (at - low).view(-1, *[1] * (3 - axis))
        first, second = x.index_select(axis, low), x.index_select(axis, (low + 1).clamp(max=size - 1))
        x = first + (second - first) * share
    mean, std = (torch.tensor(values, device=x.device).view(3, 1, 1) * 255 for values in (MEAN, STD))
    return (x - mean) / std


def load_dinov2(path: Path | str | None, device: torch.device | str = "cpu") -> tuple[DINOv2, str]:
    """The network, ready for `features`, and its id: its name and the first 12 digits of its weights' SHA-256."""
    if path is None:
        raise ValueError(f"FD-DINOv2 needs --weights FILE: {FILES}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no weights at {path}: {FILES}")
    state = read_dinov2(Path(path))
    network = _network(state, Path(path))
    network.load_state_dict(state, assign=True)
    name = f"dinov2-{len(network.norm.weight)}x{len(network.blocks)}-{digest(state)[:12]}"
    return network.requires_grad_(False).eval().to(device), name


def read_dinov2(path: Path) -> dict[str, Tensor]:
    """The state dict of `DINOv2` from Meta's or transformers' file."""
    try:
        tensors = path.suffix == ".safetensors"
        theirs = load_file(path) if tensors else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {FILES}") from error
    except Exception as error:  # a file that is something else can raise almost anything
        raise ValueError(f"{path} is no state dict: {FILES}") from error
    if not isinstance(theirs, Mapping) or not all(isinstance(value, Tensor) for value in theirs.values()):
        raise ValueError(f"{path} holds no plain state dict: {FILES}")
    named = {str(name): value.float() for name, value in theirs.items()}
    ours = _from_transformers(named) if any("encoder.layer." in name for name in named) else named
    ours.pop("mask_token", None)
    return dict(ours)


TRANSFORMERS = {
    r"embeddings\.cls_token": "cls_token",
    r"embeddings\.position_embeddings": "pos_embed",
    r"embeddings\.patch_embeddings\.projection\.(weight|bias)": r"patch_embed.proj.\1",
    r"layernorm\.(weight|bias)": r"norm.\1",
    r"encoder\.layer\.(\d+)\.(norm[12]|mlp\.fc[12])\.(weight|bias)": r"blocks.\1.\2.\3",
    r"encoder\.layer\.(\d+)\.layer_scale([12])\.lambda1": r"blocks.\1.ls\2.gamma",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(weight|bias)": r"blocks.\1.attn.proj.\2",
    r"encoder\.layer\.(\d+)\.attention\.attention\.(query|key|value)\.(weight|bias)": r"blocks.\1.attn.\2.\3",
}


def _from_transformers(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Meta's names; the three parts of an attention become one."""
    found: dict[str, Tensor] = {}
    for name, value in theirs.items():
        for pattern, ours in TRANSFORMERS.items():
            if match := re.fullmatch(rf"(?:dinov2\.)?{pattern}", name):
                found[match.expand(ours)] = value
    for name in [name for name in found if ".attn.query." in name]:
        parts = [found.pop(name.replace("query", part), None) for part in ("query", "key", "value")]
        if all(part is not None for part in parts):
            found[name.replace("query", "qkv")] = torch.cat([part for part in parts if part is not None])
    return found


def _network(state: Mapping[str, Tensor], path: Path) -> DINOv2:
    """The network that these are the weights of; an error if it is not one of the sizes with a plain perceptron."""
    try:
        dim, patch = len(state["norm.weight"]), state["patch_embed.proj.weight"].shape[-1]
        grid = math.isqrt(state["pos_embed"].shape[1] - 1)
        depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
        with torch.device("meta"):
            network = DINOv2(dim, depth, patch, grid)
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError, ZeroDivisionError):
        raise ValueError(f"{path} does not hold a DINOv2 network: {FILES}") from None
    expected = network.state_dict()
    wrong = [name for name in expected if name not in state or state[name].shape != expected[name].shape]
    wrong += [name for name in state if name not in expected]
    if wrong or dim % HEAD:
        raise ValueError(
            f"{path} does not hold DINOv2 of size S, B or L without registers: {wrong[0] if wrong else 'its width'} is "
            f"missing, of another shape or unknown; {FILES}"
        )
    return network
