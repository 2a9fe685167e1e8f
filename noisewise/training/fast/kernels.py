"""Triton kernels of norm.py. A program holds all pixels of a few groups of one image, channels last."""

import triton
import triton.language as tl


@triton.jit
def kept(seed, index, P: tl.constexpr):
    """Whether each index survives dropout: a 32-bit mix of (seed, index) against the share P."""
    h = (index.to(tl.uint32) * 0x9E3779B1) ^ seed
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    LIMIT: tl.constexpr = int(P * 4294967296)
    return h >= LIMIT


@triton.jit
def forward(
    x, shift, gamma, beta, seed, y, mean, rstd, image_stride, pixel_stride, eps,
    HW: tl.constexpr, C: tl.constexpr, CPG: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    chunk, n = tl.program_id(0), tl.program_id(1)
    cols, rows = tl.arange(0, K), tl.arange(0, BLOCK)
    c = chunk * (GROUPS * CPG) + cols
    live = cols < GROUPS * CPG
    mask = live[None, :] & (rows < HW)[:, None]
    FULL: tl.constexpr = (GROUPS * CPG == K) and (BLOCK == HW)
    at = rows[:, None] * C + c[None, :]
    source = x + n.to(tl.int64) * image_stride + rows[:, None] * pixel_stride + c[None, :]
    v = tl.load(source).to(tl.float32) if FULL else tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if SHIFT:
        v = v + tl.load(shift + n * C + c, mask=live, other=0.0).to(tl.float32)[None, :]
        if not FULL:
            v = tl.where(mask, v, 0.0)
    # sums over pixels for each channel, then over the channels of the same group
    group = cols // CPG
    same = (group[:, None] == group[None, :]) & live[:, None] & live[None, :]
    COUNT: tl.constexpr = HW * CPG
    m = tl.sum(tl.where(same, tl.sum(v, 0)[:, None], 0.0), 0) / COUNT
    v = v - m[None, :]
    if not FULL:
        v = tl.where(mask, v, 0.0)
    variance = tl.sum(tl.where(same, tl.sum(v * v, 0)[:, None], 0.0), 0) / COUNT
    r = 1.0 / tl.sqrt(variance + eps)
    g = tl.load(gamma + c, mask=live, other=0.0).to(tl.float32)
    b = tl.load(beta + c, mask=live, other=0.0).to(tl.float32)
    z = v * (r * g)[None, :] + b[None, :]
    z = z * tl.sigmoid(z)
    if P > 0:
        z = tl.where(kept(tl.load(seed).to(tl.uint32), n * (HW * C) + at, P), z * (1.0 / (1.0 - P)), 0.0)
    target = y + n.to(tl.int64) * (HW * C) + at
    if FULL:
        tl.store(target, z.to(y.dtype.element_ty))
    else:
        tl.store(target, z.to(y.dtype.element_ty), mask=mask)
    tl.store(mean + n * C + c, m, mask=live)
    tl.store(rstd + n * C + c, r, mask=live)


@triton.jit
def backward(
    dy, x, shift, gamma, beta, seed, mean, rstd, dx, sums, dshift,
    image_stride, pixel_stride, dy_image_stride, dy_pixel_stride, N,
    HW: tl.constexpr, C: tl.constexpr, CPG: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    chunk, n = tl.program_id(0), tl.program_id(1)
    cols, rows = tl.arange(0, K), tl.arange(0, BLOCK)
    c = chunk * (GROUPS * CPG) + cols
    live = cols < GROUPS * CPG
    mask = live[None, :] & (rows < HW)[:, None]
    FULL: tl.constexpr = (GROUPS * CPG == K) and (BLOCK == HW)
    at = rows[:, None] * C + c[None, :]
    source = x + n.to(tl.int64) * image_stride + rows[:, None] * pixel_stride + c[None, :]
    incoming = dy + n.to(tl.int64) * dy_image_stride + rows[:, None] * dy_pixel_stride + c[None, :]
    h = tl.load(source).to(tl.float32) if FULL else tl.load(source, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(incoming).to(tl.float32) if FULL else tl.load(incoming, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(mean + n * C + c, mask=live, other=0.0)
    r = tl.load(rstd + n * C + c, mask=live, other=0.0)
    g = tl.load(gamma + c, mask=live, other=0.0).to(tl.float32)
    b = tl.load(beta + c, mask=live, other=0.0).to(tl.float32)
    if SHIFT:
        m = m - tl.load(shift + n * C + c, mask=live, other=0.0).to(tl.float32)
    h = (h - m[None, :]) * r[None, :]
    if not FULL:
        h = tl.where(mask, h, 0.0)
    z = h * g[None, :] + b[None, :]
    s = tl.sigmoid(z)
    if P > 0:
        d = tl.where(kept(tl.load(seed).to(tl.uint32), n * (HW * C) + at, P), d * (1.0 / (1.0 - P)), 0.0)
    d = d * (s * (1.0 + z * (1.0 - s)))
    db, dg = tl.sum(d, 0), tl.sum(d * h, 0)
    tl.store(sums + n * C + c, dg, mask=live)
    tl.store(sums + (N + n) * C + c, db, mask=live)
    group = cols // CPG
    same = (group[:, None] == group[None, :]) & live[:, None] & live[None, :]
    COUNT: tl.constexpr = HW * CPG
    a1 = tl.sum(tl.where(same, (db * g)[:, None], 0.0), 0) / COUNT
    a2 = tl.sum(tl.where(same, (dg * g)[:, None], 0.0), 0) / COUNT
    out = (d * g[None, :] - a1[None, :] - h * a2[None, :]) * r[None, :]
    if not FULL:
        out = tl.where(mask, out, 0.0)
    target = dx + n.to(tl.int64) * (HW * C) + at
    if FULL:
        tl.store(target, out.to(dx.dtype.element_ty))
    else:
        tl.store(target, out.to(dx.dtype.element_ty), mask=mask)
    if SHIFT:
        tl.store(dshift + n * C + c, tl.sum(out, 0), mask=live)
