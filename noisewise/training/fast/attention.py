"""Attention of one head over few tokens, by matrix products.

    weights = softmax(queries keys^T / sqrt(C)),    out = weights values

torch's kernels work through tiles, for sequences whose weights would not fit into memory, and those that add in a fixed order
are slow for heads as wide as a U-Net's. Here the weights of a batch are a few megabytes: they are kept, and all that is left is
products and two short kernels. Scores are float32, as in torch's. Queries, keys and values lie side by side in one tensor, and
so do their gradients: neither is copied.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 512  # tokens: with more, the weights take more time and memory than tiles do
VALUES = 4096  # scores that a program has
HALVES = (torch.bfloat16, torch.float16)
WIDE = hasattr(torch.ops.aten.bmm, "dtype")  # torch 2.8 and later: products of halves with a float32 result


def _sizes(weights: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid for (B, N, N), and what a program takes on."""
    tokens = weights.shape[2]
    columns = 1 << (tokens - 1).bit_length()
    rows = max(VALUES // columns, 1)
    return (-(-weights.shape[0] * tokens // rows),), {"N": tokens, "K": columns, "ROWS": rows, "num_warps": 8}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(B, N, M) in float32, as it is summed up in any case."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.dtype in HALVES else torch.bmm(a, b)


@torch.library.custom_op("noisewise::attend", mutates_args=())
def _attend(qkv: Tensor) -> tuple[Tensor, Tensor]:
    from noisewise.training.fast import token_kernels as kernels  # needs Triton

    query, key, value = qkv.chunk(3, dim=2)
    scores = _product(query, key.mT)
    weights = torch.empty_like(scores, dtype=qkv.dtype)
    grid, sizes = _sizes(weights)
    kernels.softmax_forward[grid](scores, weights, query.shape[2] ** -0.5, len(scores) * scores.shape[1], **sizes)
    return torch.bmm(weights, value), weights


@_attend.register_fake
def _(qkv: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    return qkv.new_empty(batch, tokens, width // 3), qkv.new_empty(batch, tokens, tokens)


@torch.library.custom_op("noisewise::attend_backward", mutates_args=())
def _attend_backward(gradient: Tensor, qkv: Tensor, weights: Tensor) -> Tensor:
    from noisewise.training.fast import token_kernels as kernels  # needs Triton

    gradient, out = gradient.contiguous(), torch.empty_like(qkv)
    query, key, value = qkv.chunk(3, dim=2)
    to_query, to_key, to_value = out.chunk(3, dim=2)
    upper, lower = _product(gradient, value.mT), torch.empty_like(weights)
    grid, sizes = _sizes(weights)
    kernels.softmax_backward[grid](upper, weights, lower, query.shape[2] ** -0.5, len(weights) * weights.shape[1], **sizes)
    torch.bmm(lower, key, out=to_query)
    torch.bmm(lower.mT, query, out=to_key)
    torch.bmm(weights.mT, gradient, out=to_value)
    return out


@_attend_backward.register_fake
def _(gradient: Tensor, qkv: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(qkv)


def _keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
    qkv, weights = ctx.saved_tensors
    found: Tensor = _attend_backward(gradient.to(qkv.dtype), qkv, weights)
    return found


_attend.register_autograd(_gradients, setup_context=_keep)


def attend(qkv: Tensor) -> Tensor:
    """(B, N, C) from queries, keys and values side by side (B, N, 3C), one head."""
    if qkv.device.type == "cuda" and (qkv.dtype == torch.float32 or (WIDE and qkv.dtype in HALVES)):
        out: Tensor = _attend(qkv.contiguous())[0]
        return out
    query, key, value = qkv.chunk(3, dim=2)
    return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
