"""Train the small classifier whose features measure generated 8 x 8 digits, and write it into the package.

Usage: python benchmarks/train_digits_classifier.py [--out FILE] [--epochs 60] [--seed 0]

Trained on the 1,500 training digits, shifted and dimmed at random; accuracy on the other 297 goes into the
file. Half a minute on one core.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import noisewise.metrics
from noisewise.data.digits import Digits
from noisewise.metrics.digits_features import DIM, FILE, DigitsClassifier


def load(split: str) -> tuple[Tensor, Tensor]:
    """Digits in [-1, 1] and their labels."""
    digits = Digits(split)
    values, labels = digits.read(torch.arange(len(digits)).numpy())
    assert labels is not None
    return digits.decode(values), labels


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts by up to one pixel, contrasts down to 0.7, a little noise."""
    n = len(images)
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    rows, columns = torch.randint(3, (2, n), generator=generator)
    offsets = torch.arange(8)
    shifted = padded[
        torch.arange(n)[:, None, None], 0, (rows[:, None] + offsets)[:, :, None], (columns[:, None] + offsets)[:, None, :]
    ][:, None]
    contrast = 0.7 + 0.3 * torch.rand(n, 1, 1, 1, generator=generator)
    return (shifted + 1) * contrast - 1 + 0.1 * torch.randn(images.shape, generator=generator)


def train(epochs: int, seed: int) -> DigitsClassifier:
    """The classifier, its features scaled to mean 0 and variance 1 over the training digits."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    images, labels = load("train")
    network, norm = DigitsClassifier(), nn.BatchNorm1d(DIM, affine=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * -(-len(images) // 100))
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(100):
            logits = network.logits(norm(network(augment(images[rows], generator))))
            F.cross_entropy(logits, labels[rows], label_smoothing=0.05).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():  # the normalisation becomes a part of the linear layer, with the statistics of clean digits
        hidden = network(images)
        scale = hidden.std(0).clamp_min(1e-6)
        network.hidden.bias.copy_((network.hidden.bias - hidden.mean(0)) / scale)
        network.hidden.weight.copy_(network.hidden.weight / scale[:, None])
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(noisewise.metrics.__path__[0]) / FILE)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    network = train(args.epochs, args.seed)
    images, labels = load("test")
    with torch.no_grad():
        accuracy = float((network.logits(network(images)).argmax(1) == labels).double().mean())
    about = {
        "made_by": "benchmarks/train_digits_classifier.py",
        "data": "digits, train split (1500); E. Alpaydin and C. Kaynak, UCI 1998, CC BY 4.0",
        "held_out_accuracy": f"{accuracy:.4f}",
        "held_out_digits": str(len(labels)),
        "epochs": str(args.epochs),
        "seed": str(args.seed),
    }
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, args.out, about)
    args.out.chmod(0o644)  # safetensors writes files that only their owner may read
    print(f"accuracy on {len(labels)} held-out digits {accuracy:.4f}; wrote {args.out.name}, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
