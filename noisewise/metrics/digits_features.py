"""Features for the embedded 8 x 8 digits, where Inception makes no sense: a small classifier's last hidden layer.

The Fréchet distance of these features is reported as ``digits-frechet``, never as FID. The 32 features have mean 0 and
variance 1 over the training digits. `benchmarks/train_digits_classifier.py` makes the weights, which come with the package.
"""

from importlib.resources import as_file, files

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from noisewise.generation.images import to_uint8
from noisewise.metrics.features import features
from noisewise.training.tensor_files import digest

FILE = "digits_classifier.safetensors"
NAME = "digits-classifier"
METRIC = "digits-frechet"
DIM = 32


class DigitsClassifier(nn.Module):
    """Digits (n, 1, 8, 8) in [-1, 1] to features (n, 32); `logits` goes on to the ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.conv_1 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv_2 = nn.Conv2d(32, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, DIM)
        self.classes = nn.Linear(DIM, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv_1(F.relu(self.conv(images))))
        x = F.relu(self.conv_2(F.max_pool2d(x, 2)))
        return self.hidden(x.flatten(1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Classes (n, 10) from features (n, 32)."""
        return self.classes(F.relu(hidden))


def read_classifier() -> tuple[dict[str, Tensor], dict[str, str]]:
    """The shipped weights and what is written about them (how they were trained, accuracy on held-out digits)."""
    with as_file(files("noisewise.metrics") / FILE) as path:
        if not path.is_file():
            raise FileNotFoundError(f"{FILE} is missing from the installed noisewise: install it again")
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def load_digits_classifier(device: torch.device | str = "cpu") -> tuple[nn.Module, str]:
    """The classifier, ready for `features` with preprocessing "digits", and its id."""
    state, _ = read_classifier()
    network = DigitsClassifier()
    network.load_state_dict(state)
    return network.requires_grad_(False).eval().to(device), f"{NAME}-{digest(state)[:12]}"


def digits_features(images: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Features (n, 32) of digits (n, 1, 8, 8): uint8 from 0 to 255, or float in [-1, 1]."""
    network, _ = load_digits_classifier(device)
    return features(to_uint8(images), network, "digits", device, batch=4096)
