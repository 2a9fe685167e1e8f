"""Where a command computes: this machine's device, and the other processes if there are any."""

import torch

DEVICES = ("auto", "cpu", "cuda")


def place(device: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no GPU; use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def prepare_processes(device: torch.device) -> torch.device:
    """Join the other processes, if torchrun or accelerate launch has started any, and return this one's device."""
    from accelerate import PartialState

    return PartialState(cpu=device.type == "cpu").device
