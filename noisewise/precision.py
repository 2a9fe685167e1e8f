"""Float32 that is float32: no TF32 inside, whatever the caller has switched on (torch has it on for convolutions)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _switches() -> list[tuple[Any, str, Any]]:
    """(where, attribute, value without TF32)."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(convolutions, "conv"):  # torch 2.9 and later
        return [(convolutions.conv, "fp32_precision", "ieee"), (products, "fp32_precision", "ieee")]
    return [(convolutions, "allow_tf32", False), (products, "allow_tf32", False)]


@contextmanager
def full_float32() -> Iterator[None]:
    """Convolutions and matrix products without TF32 inside the block; the caller's settings return after it."""
    before = [(where, name, getattr(where, name)) for where, name, _ in _switches()]
    try:
        for where, name, value in _switches():
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
