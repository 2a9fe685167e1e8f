"""Triton kernels of norm.py. Ours, because torch.compile leaves GroupNorm, SiLU and dropout in several passes over memory.

A program has a few groups of channels of one image, and goes through its pixels twice, ROWS at a time, channels last: for sums,
then for values. Where ROWS covers the image, the compiler sees that both passes read the same and keeps it; hence nothing is to
be stored between them.
"""

import triton
import triton.language as tl


@triton.jit
def fetch(at, mask, FULL: tl.constexpr):
    """Values in float32; 0 outside of the mask, which FULL says has no outside."""
    return tl.load(at).to(tl.float32) if FULL else tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def only(mask, values, FULL: tl.constexpr):
    """The values in the mask, 0 elsewhere."""
    return values if FULL else tl.where(mask, values, 0.0)


@triton.jit
def put(at, values, mask, FULL: tl.constexpr):
    """Store values in the mask."""
    values = values.to(at.dtype.element_ty)
    if FULL:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=mask)


@triton.jit
def logistic(z, QUICK: tl.constexpr):
    """1 / (1 + exp(-z)); QUICK takes the GPU's own reciprocal, right to one unit in the last place."""
    denominator = 1.0 + tl.exp(-z)
    if QUICK:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / denominator


@triton.jit
def mixed(h):
    """A 32-bit number of which every bit depends on every bit of h."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def kept(seed, n, index, P: tl.constexpr):
    """Whether each index within image n survives dropout: a short mix, as it is done for every value, against the share P."""
    salt = mixed(tl.load(seed).to(tl.uint32) + mixed(n.to(tl.uint32)))
    h = (index.to(tl.uint32) ^ salt) * 0x9E3779B1
    h = (h ^ (h >> 15)) * 0x846CA68B
    LIMIT: tl.constexpr = int(P * 4294967296)
    return h >= LIMIT


@triton.jit
def within_groups(values, CPG: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr):
    """For each of K channels, the sum over all channels of its group; those of no group are 0."""
    if GROUPS == 1:
        sums = tl.zeros([K], tl.float32) + tl.sum(values, 0)
    elif (CPG & (CPG - 1)) == 0:
        sums = tl.sum(tl.reshape(values, [K // CPG, CPG]), 1)
        sums = tl.reshape(tl.broadcast_to(sums[:, None], [K // CPG, CPG]), [K])
    else:
        group = tl.arange(0, K) // CPG
        sums = tl.sum(tl.where(group[:, None] == group[None, :], values[:, None], 0.0), 0)
    return sums


@triton.jit
def forward(
    x, shift, gamma, beta, seed, y, centre, rstd, image_stride, pixel_stride, eps,
    HW: tl.constexpr, C: tl.constexpr, CPG: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    SHIFT: tl.constexpr, SILU: tl.constexpr, P: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    cols, n = tl.arange(0, K), tl.program_id(1)
    c, live = tl.program_id(0) * (GROUPS * CPG) + cols, cols < GROUPS * CPG
    FULL: tl.constexpr = (GROUPS * CPG == K) and (HW % ROWS == 0)
    source = x + n.to(tl.int64) * image_stride
    pivot = tl.load(source + c, mask=live, other=0.0).to(tl.float32)  # sums of squares about it lose no digits
    first, second = tl.zeros([ROWS, K], tl.float32), tl.zeros([ROWS, K], tl.float32)
    for start in range(0, HW, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = live[None, :] & (rows < HW)[:, None]
        v = fetch(source + rows[:, None] * pixel_stride + c[None, :], mask, FULL)
        v = only(mask, v - pivot[None, :], FULL)
        first += v
        second += v * v
    total = tl.sum(first, 0)
    moved = tl.load(shift + n * C + c, mask=live, other=0.0).to(tl.float32) if SHIFT else tl.zeros([K], tl.float32)
    own = tl.where(live, pivot + moved + total / HW, 0.0)
    mean = within_groups(own, CPG, GROUPS, K) / CPG
    apart = tl.where(live, own - mean, 0.0)
    squares = tl.sum(second, 0) - total * total / HW + HW * apart * apart
    r = 1.0 / tl.sqrt(within_groups(squares, CPG, GROUPS, K) / (HW * CPG) + eps)
    middle = mean - moved
    scale = tl.load(gamma + c, mask=live, other=0.0).to(tl.float32) * r
    b = tl.load(beta + c, mask=live, other=0.0).to(tl.float32)
    for start in range(0, HW, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = live[None, :] & (rows < HW)[:, None]
        v = fetch(source + rows[:, None] * pixel_stride + c[None, :], mask, FULL)
        z = (v - middle[None, :]) * scale[None, :] + b[None, :]
        if SILU:
            z = z * logistic(z, QUICK)
        at = rows[:, None] * C + c[None, :]
        if P > 0:
            z = tl.where(kept(seed, n, at, P), z * (1.0 / (1.0 - P)), 0.0)
        put(y + n.to(tl.int64) * (HW * C) + at, z, mask, FULL)
    tl.store(centre + n * C + c, middle, mask=live)
    tl.store(rstd + n * C + c, r, mask=live)


@triton.jit
def inward(
    dy, x, seed, n, rows, c, middle, r, g, b, mask, image_stride, pixel_stride, dy_image_stride, dy_pixel_stride,
    HW: tl.constexpr, C: tl.constexpr, SILU: tl.constexpr, P: tl.constexpr, QUICK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Some rows of normalised values, and of the gradient with respect to gamma * values + beta."""
    h = fetch(x + n.to(tl.int64) * image_stride + rows[:, None] * pixel_stride + c[None, :], mask, FULL)
    d = fetch(dy + n.to(tl.int64) * dy_image_stride + rows[:, None] * dy_pixel_stride + c[None, :], mask, FULL)
    h = only(mask, (h - middle[None, :]) * r[None, :], FULL)
    if P > 0:
        d = tl.where(kept(seed, n, rows[:, None] * C + c[None, :], P), d * (1.0 / (1.0 - P)), 0.0)
    if SILU:
        z = h * g[None, :] + b[None, :]
        s = logistic(z, QUICK)
        d = d * (s * (1.0 + z * (1.0 - s)))
    return h, d


@triton.jit
def backward(
    dy, x, gamma, beta, seed, centre, rstd, dx, sums, dshift,
    image_stride, pixel_stride, dy_image_stride, dy_pixel_stride, N,
    HW: tl.constexpr, C: tl.constexpr, CPG: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    SILU: tl.constexpr, P: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    cols, n = tl.arange(0, K), tl.program_id(1)
    c, live = tl.program_id(0) * (GROUPS * CPG) + cols, cols < GROUPS * CPG
    FULL: tl.constexpr = (GROUPS * CPG == K) and (HW % ROWS == 0)
    middle, r = tl.load(centre + n * C + c, mask=live, other=0.0), tl.load(rstd + n * C + c, mask=live, other=0.0)
    g = tl.load(gamma + c, mask=live, other=0.0).to(tl.float32)
    b = tl.load(beta + c, mask=live, other=0.0).to(tl.float32)
    weighted, plain = tl.zeros([ROWS, K], tl.float32), tl.zeros([ROWS, K], tl.float32)
    for start in range(0, HW, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = live[None, :] & (rows < HW)[:, None]
        h, d = inward(
            dy, x, seed, n, rows, c, middle, r, g, b, mask, image_stride, pixel_stride, dy_image_stride, dy_pixel_stride,
            HW, C, SILU, P, QUICK, FULL,
        )  # fmt: skip
        weighted += d * h
        plain += d
    dg, db = tl.sum(weighted, 0), tl.sum(plain, 0)
    COUNT: tl.constexpr = HW * CPG
    a1, a2 = within_groups(db * g, CPG, GROUPS, K) / COUNT, within_groups(dg * g, CPG, GROUPS, K) / COUNT
    moved = tl.zeros([ROWS, K], tl.float32)
    for start in range(0, HW, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = live[None, :] & (rows < HW)[:, None]
        h, d = inward(
            dy, x, seed, n, rows, c, middle, r, g, b, mask, image_stride, pixel_stride, dy_image_stride, dy_pixel_stride,
            HW, C, SILU, P, QUICK, FULL,
        )  # fmt: skip
        out = only(mask, (d * g[None, :] - a1[None, :] - h * a2[None, :]) * r[None, :], FULL)
        put(dx + n.to(tl.int64) * (HW * C) + rows[:, None] * C + c[None, :], out, mask, FULL)
        moved += out
    tl.store(sums + n * C + c, dg, mask=live)
    tl.store(sums + (N + n) * C + c, db, mask=live)
    tl.store(dshift + n * C + c, tl.sum(moved, 0), mask=live)
