"""What convolutions and matrix products compute in, and in which order, whatever the caller has switched on.

Float32 is float32, or TF32 throughout; torch has TF32 on for convolutions."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def _switches(tf32: bool = False) -> list[tuple[Any, str, Any]]:
    """(where, attribute, value without TF32 or with it)."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    if hasattr(convolutions, "conv"):  # torch 2.9 and later
        value = "tf32" if tf32 else "ieee"
        return [(convolutions.conv, "fp32_precision", value), (products, "fp32_precision", value)]
    return [(convolutions, "allow_tf32", tf32), (products, "allow_tf32", tf32)]


def full_float32() -> AbstractContextManager[None]:
    """Convolutions and matrix products without TF32 inside the block; the caller's settings return after it."""
    return _switched(tf32=False)


def with_tf32() -> AbstractContextManager[None]:
    """The same with TF32."""
    return _switched(tf32=True)


@contextmanager
def convolutions(deterministic: bool) -> Iterator[None]:
    """cuDNN chooses the same kernels in every process, only such as always add in the same order; or any, by trial."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, not deterministic
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


@contextmanager
def _switched(tf32: bool) -> Iterator[None]:
    before = [(where, name, getattr(where, name)) for where, name, _ in _switches()]
    try:
        for where, name, value in _switches(tf32):
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
