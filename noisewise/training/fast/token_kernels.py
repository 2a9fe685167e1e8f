"""Triton kernels of tokens.py and attention.py. Ours, because torch.compile takes its sums over features and over tokens in
separate passes over memory, and, where the order of adding is fixed, without a choice of their sizes."""

import triton
import triton.language as tl

from noisewise.training.fast.kernels import logistic


@triton.jit
def join_forward(
    x, h, bias, gate, shift, scale, joined, y, mean, rstd, gate_stride, shift_stride, scale_stride, tokens, eps,
    D: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One token: joined = x + gate * (h + bias), and y, its normalised values, scaled and shifted."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    sample, live = row // tokens, d < D
    branch = tl.load(h + row * D + d, mask=live, other=0.0).to(tl.float32)
    if BIAS:
        branch += tl.load(bias + d, mask=live, other=0.0).to(tl.float32)
    if GATE:
        branch *= tl.load(gate + sample * gate_stride + d, mask=live, other=0.0).to(tl.float32)
    v = tl.load(x + row * D + d, mask=live, other=0.0).to(tl.float32) + branch
    kept = v.to(joined.dtype.element_ty)
    tl.store(joined + row * D + d, kept, mask=live)
    v = kept.to(tl.float32)
    middle = tl.sum(v, 0) / D
    v = tl.where(live, v - middle, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps)
    s = 1.0 + tl.load(scale + sample * scale_stride + d, mask=live, other=0.0).to(tl.float32)
    out = v * r * s + tl.load(shift + sample * shift_stride + d, mask=live, other=0.0).to(tl.float32)
    tl.store(y + row * D + d, out.to(y.dtype.element_ty), mask=live)
    tl.store(mean + row, middle)
    tl.store(rstd + row, r)


@triton.jit
def join_backward(
    dj, dy, joined, h, bias, gate, scale, mean, rstd, dx, dh, sums, gate_stride, scale_stride, samples, tokens, chunks,
    D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of a sample, one after another: gradients of x and h, and sums over these tokens for the gradients of shift,
    scale, gate and bias, of which each program has a place of its own."""
    chunk, sample, d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, K)
    live = d < D
    g = tl.zeros([K], tl.float32) + 1.0
    if GATE:
        g = tl.load(gate + sample * gate_stride + d, mask=live, other=0.0).to(tl.float32)
    s = 1.0 + tl.load(scale + sample * scale_stride + d, mask=live, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + d, mask=live, other=0.0).to(tl.float32)
    to_shift, to_scale = tl.zeros([K], tl.float32), tl.zeros([K], tl.float32)
    to_gate, to_bias = tl.zeros([K], tl.float32), tl.zeros([K], tl.float32)
    for row in tl.range(chunk * ROWS, tl.minimum(chunk * ROWS + ROWS, tokens), num_stages=STAGES):
        token = sample * tokens + row
        at = token * D + d
        # all of them first, as none is fetched while sums are waited for
        from_y = tl.load(dy + at, mask=live, other=0.0)
        normal = tl.load(joined + at, mask=live, other=0.0)
        past = tl.load(dj + at, mask=live, other=0.0)
        branch = tl.load(h + at, mask=live, other=0.0)
        middle, r = tl.load(mean + token), tl.load(rstd + token)
        from_y = from_y.to(tl.float32)
        normal = tl.where(live, (normal.to(tl.float32) - middle) * r, 0.0)
        inner = from_y * s
        plain, along = tl.sum(inner, 0) / D, tl.sum(inner * normal, 0) / D
        total = tl.where(live, (inner - plain - normal * along) * r + past.to(tl.float32), 0.0)
        branch = branch.to(tl.float32)
        if BIAS:
            branch += b
        tl.store(dx + at, total.to(dx.dtype.element_ty), mask=live)
        tl.store(dh + at, (total * g).to(dh.dtype.element_ty), mask=live)
        to_shift += from_y
        to_scale += from_y * normal
        if GATE:
            to_gate += total * branch
        to_bias += total
    own, each = (sample * chunks + chunk) * D + d, samples * chunks * D
    tl.store(sums + own, to_shift, mask=live)
    tl.store(sums + each + own, to_scale, mask=live)
    tl.store(sums + 2 * each + own, to_gate, mask=live)
    tl.store(sums + 3 * each + own, to_bias * g, mask=live)


@triton.jit
def gelu_share(z, EXACT: tl.constexpr, QUICK: tl.constexpr):
    """What is multiplied by z in GELU(z), and its slope there: the normal distribution, or tanh's form of it."""
    if EXACT:
        share = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    else:
        squared = z * z
        share = logistic(1.5957691216057308 * z * (1.0 + 0.044715 * squared), QUICK)
        slope = share * (1.0 - share) * (1.5957691216057308 * (1.0 + 0.134145 * squared))
    return share, slope


@triton.jit
def gelu_forward(
    x, bias, y, rows, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    """y = GELU(x + bias), a tile."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask, at = (row < rows)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
    b = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + b[None, :]
    share, _ = gelu_share(z, EXACT, QUICK)
    tl.store(y + at, (z * share).to(y.dtype.element_ty), mask=mask)


@triton.jit
def gelu_backward(
    dy, x, bias, dx, sums, rows,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, EXACT: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    """TILES tiles below each other: gradients of x, and their sums over these rows for that of the bias."""
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(1).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask, at = (row < rows)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + b[None, :]
        share, slope = gelu_share(z, EXACT, QUICK)
        out = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32) * (share + z * slope)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
        total += out
    tl.store(sums + tl.program_id(1) * D + d, tl.sum(total, 0), mask=d < D)


@triton.jit
def softmax_forward(scores, weights, scale, rows, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """From the products of queries and keys, some rows of them, to weights."""
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, K)
    at, mask = row[:, None] * N + d[None, :], (row < rows)[:, None] & (d < N)[None, :]
    s = tl.load(scores + at, mask=mask, other=-float("inf")) * scale
    s = tl.where((row < rows)[:, None], s, 0.0)  # a row of nothing but infinities would be NaN
    e = tl.exp(s - tl.max(s, 1)[:, None])
    tl.store(weights + at, (e / tl.sum(e, 1)[:, None]).to(weights.dtype.element_ty), mask=mask)


@triton.jit
def softmax_backward(upper, weights, lower, scale, rows, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """From the gradient of the weights to that of the products of queries and keys."""
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, K)
    at, mask = row[:, None] * N + d[None, :], (row < rows)[:, None] & (d < N)[None, :]
    p = tl.load(weights + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(upper + at, mask=mask, other=0.0)
    out = p * (g - tl.sum(p * g, 1)[:, None]) * scale
    tl.store(lower + at, out.to(lower.dtype.element_ty), mask=mask)
