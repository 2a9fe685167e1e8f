"""What lies between a transformer's matrix products, fused: residual, gate, LayerNorm and modulation; bias and GELU.

    joined = x + gate * (h + bias)
    y      = layer_norm(joined) * (1 + scale) + shift

gate, shift and scale (B, D) belong to a sample; without a gate it is 1. Backwards a program goes through some tokens of one
sample and adds up, in a fixed order, what belongs to gate, shift, scale and bias on the way, so that all is read once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64  # tokens that a program goes through backwards
TILE, TILES, COLUMNS = 16, 16, 256  # rows and columns of a tile of GELU, and how many a program has backwards
STAGES = 3  # tokens that are fetched ahead, less one
QUICK = True  # off where there is no GPU: Triton's interpreter knows no instructions of one
SAMPLES = 65535  # the second dimension of a grid has no more


def _block(width: int) -> tuple[int, int]:
    """A power of two of columns, and warps for them."""
    block = 1 << (width - 1).bit_length()
    return block, min(max(block // 256, 1), 16)


def _pieces(count: int, size: int) -> int:
    return -(-count // size)


def _rows(values: Tensor) -> Tensor:
    """(B, D), of which each row is in one piece."""
    return values if values.stride(1) == 1 else values.contiguous()


@torch.library.custom_op("noisewise::join", mutates_args=())
def _join(
    x: Tensor, h: Tensor, bias: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float, low: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from noisewise.training.fast import token_kernels as kernels  # needs Triton

    x, h, shift, scale = x.contiguous(), h.contiguous(), _rows(shift), _rows(scale)
    gates = x if gate is None else _rows(gate)
    samples, tokens, d = x.shape
    joined, y = torch.empty_like(x), torch.empty_like(x, dtype=low)
    mean, rstd = (torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for _ in range(2))
    (block, warps), strides = _block(d), (gates.stride(0), shift.stride(0), scale.stride(0))
    kernels.join_forward[(samples * tokens,)](
        x, h, h if bias is None else bias, gates, shift, scale, joined, y, mean, rstd, *strides, tokens, eps,
        D=d, K=block, BIAS=bias is not None, GATE=gate is not None, num_warps=warps,
    )  # fmt: skip
    return joined, y, mean, rstd


@_join.register_fake
def _(
    x: Tensor, h: Tensor, bias: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float, low: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[:2], dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=low), statistics, torch.empty_like(statistics)


@torch.library.custom_op("noisewise::join_backward", mutates_args=())
def _join_backward(
    dj: Tensor,
    dy: Tensor,
    joined: Tensor,
    h: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from noisewise.training.fast import token_kernels as kernels  # needs Triton

    dj, dy, joined, h, scale = (*(v.contiguous() for v in (dj, dy, joined, h)), _rows(scale))
    gates = joined if gate is None else _rows(gate)
    samples, tokens, d = joined.shape
    chunks, (block, warps) = _pieces(tokens, CHUNK), _block(d)
    dx, dh = torch.empty_like(joined), torch.empty_like(h)
    sums = torch.empty(4, samples, chunks, d, dtype=torch.float32, device=joined.device)
    kernels.join_backward[(chunks, samples)](
        dj, dy, joined, h, h if bias is None else bias, gates, scale, mean, rstd, dx, dh, sums,
        gates.stride(0), scale.stride(0), samples, tokens, chunks,
        D=d, K=block, ROWS=CHUNK, BIAS=bias is not None, GATE=gate is not None, STAGES=STAGES, num_warps=warps,
    )  # fmt: skip
    return dx, dh, sums


@_join_backward.register_fake
def _(
    dj: Tensor,
    dy: Tensor,
    joined: Tensor,
    h: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    samples, tokens, d = joined.shape
    sums = joined.new_empty(4, samples, _pieces(tokens, CHUNK), d, dtype=torch.float32)
    return joined.new_empty(joined.shape), h.new_empty(h.shape), sums


def _keep_join(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, h, bias, gate, shift, scale, _, _ = inputs
    joined, _, mean, rstd = output
    ctx.save_for_backward(joined, h, bias, gate, scale, mean, rstd)
    ctx.kinds = (None if gate is None else gate.dtype, shift.dtype, scale.dtype)


def _join_gradients(ctx: Any, dj: Tensor, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    joined, h, bias, gate, scale, mean, rstd = ctx.saved_tensors
    dx, dh, sums = _join_backward(dj, dy, joined, h, bias, gate, scale, mean, rstd)
    dshift, dscale, dgate, dbias = sums.sum(2).unbind(0)
    for_gate, for_shift, for_scale = ctx.kinds
    own = None if bias is None else dbias.sum(0).to(bias.dtype)
    opened = None if for_gate is None else dgate.to(for_gate)
    return dx, dh, own, opened, dshift.to(for_shift), dscale.to(for_scale), None, None


_join.register_autograd(_join_gradients, setup_context=_keep_join)


@torch.library.custom_op("noisewise::gelu", mutates_args=())
def _gelu(x: Tensor, bias: Tensor, exact: bool) -> Tensor:
    from noisewise.training.fast import token_kernels as kernels  # needs Triton

    x = x.contiguous()
    rows, d, y = x.numel() // x.shape[-1], x.shape[-1], torch.empty_like(x)
    grid = (_pieces(d, COLUMNS), _pieces(rows, TILE))
    kernels.gelu_forward[grid](x, bias, y, rows, D=d, ROWS=TILE, COLUMNS=COLUMNS, EXACT=exact, QUICK=QUICK, num_warps=8)
    return y


@_gelu.register_fake
def _(x: Tensor, bias: Tensor, exact: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("noisewise::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    from noisewise.training.fast import token_kernels as kernels  # needs Triton

    dy, x = dy.contiguous(), x.contiguous()
    rows, d, dx = x.numel() // x.shape[-1], x.shape[-1], torch.empty_like(x)
    grid = (_pieces(d, COLUMNS), _pieces(rows, TILE * TILES))
    sums = torch.empty(grid[1], d, dtype=torch.float32, device=x.device)
    kernels.gelu_backward[grid](
        dy, x, bias, dx, sums, rows, D=d, ROWS=TILE, COLUMNS=COLUMNS, TILES=TILES, EXACT=exact, QUICK=QUICK, num_warps=8
    )
    return dx, sums


@_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    rows = _pieces(x.numel() // x.shape[-1], TILE * TILES)
    return x.new_empty(x.shape), x.new_empty(rows, x.shape[-1], dtype=torch.float32)


def _keep_gelu(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.exact = inputs[2]


def _gelu_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, bias = ctx.saved_tensors
    dx, sums = _gelu_backward(dy, x, bias, ctx.exact)
    return dx, sums.sum(0).to(bias.dtype), None


_gelu.register_autograd(_gelu_gradients, setup_context=_keep_gelu)


def join(
    x: Tensor, h: Tensor, bias: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual stream with a gated branch joined to it, and its modulated LayerNorm, in autocast's type if that is on."""
    kind = x.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if kind == "cuda" and x.dtype != torch.float64 and len(x) <= SAMPLES:  # the kernels compute in float32
        joined, y, _, _ = _join(x, h, bias, gate, shift, scale, eps, low)
        return joined, y
    branch = h if bias is None else h + bias
    joined = (x + (branch if gate is None else gate[:, None] * branch)).to(x.dtype)
    return joined, (F.layer_norm(joined, x.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]).to(low)


def biased_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """GELU(x + bias); `approximate` is GELU's own."""
    if x.device.type == "cuda" and x.dtype != torch.float64 and x.numel() // x.shape[-1] <= TILE * SAMPLES:
        return _gelu(x, bias, approximate == "none")
    return F.gelu(x + bias, approximate=approximate).to(x.dtype)
