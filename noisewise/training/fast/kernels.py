"""Triton kernels of norm.py and of update.py. Ours, because torch.compile leaves GroupNorm, SiLU and dropout in several passes
over memory, and torch's fused Adam neither clips nor averages weights: three passes, not one.

In norm.py a program has a few groups of channels of one image, and goes through its pixels twice, ROWS at a time, channels
last: for sums, then for values. Where ROWS covers the image, the compiler sees that both passes read the same and keeps it;
hence nothing is to be stored between them.
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
    x, shift, gamma, beta, seed, y, centre, rstd, image_stride, pixel_stride, shift_stride, eps,
    HW: tl.constexpr, C: tl.constexpr, CPG: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    SHIFT: tl.constexpr, SILU: tl.constexpr, P: tl.constexpr, QUICK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols, n = tl.arange(0, K), tl.program_id(1)
    c, live = tl.program_id(0) * (GROUPS * CPG) + cols, cols < GROUPS * CPG
    FULL: tl.constexpr = (GROUPS * CPG == K) and (HW % ROWS == 0)
    source = x + n.to(tl.int64) * image_stride
    pivot = tl.load(source + c, mask=live, other=0.0).to(tl.float32)  # sums of squares about it lose no digits
    first, second = tl.zeros([ROWS, K], tl.float32), tl.zeros([ROWS, K], tl.float32)
    for start in tl.range(0, HW, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        mask = live[None, :] & (rows < HW)[:, None]
        v = fetch(source + rows[:, None] * pixel_stride + c[None, :], mask, FULL)
        v = only(mask, v - pivot[None, :], FULL)
        first += v
        second += v * v
    total = tl.sum(first, 0)
    moved = tl.zeros([K], tl.float32)
    if SHIFT:
        moved = tl.load(shift + n.to(tl.int64) * shift_stride + c, mask=live, other=0.0).to(tl.float32)
    own = tl.where(live, pivot + moved + total / HW, 0.0)
    mean = within_groups(own, CPG, GROUPS, K) / CPG
    apart = tl.where(live, own - mean, 0.0)
    squares = tl.sum(second, 0) - total * total / HW + HW * apart * apart
    r = 1.0 / tl.sqrt(within_groups(squares, CPG, GROUPS, K) / (HW * CPG) + eps)
    middle = mean - moved
    scale = tl.load(gamma + c, mask=live, other=0.0).to(tl.float32) * r
    b = tl.load(beta + c, mask=live, other=0.0).to(tl.float32)
    for start in tl.range(0, HW, ROWS, num_stages=STAGES):
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
    SILU: tl.constexpr, P: tl.constexpr, QUICK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols, n = tl.arange(0, K), tl.program_id(1)
    c, live = tl.program_id(0) * (GROUPS * CPG) + cols, cols < GROUPS * CPG
    FULL: tl.constexpr = (GROUPS * CPG == K) and (HW % ROWS == 0)
    middle, r = tl.load(centre + n * C + c, mask=live, other=0.0), tl.load(rstd + n * C + c, mask=live, other=0.0)
    g = tl.load(gamma + c, mask=live, other=0.0).to(tl.float32)
    b = tl.load(beta + c, mask=live, other=0.0).to(tl.float32)
    weighted, plain = tl.zeros([ROWS, K], tl.float32), tl.zeros([ROWS, K], tl.float32)
    for start in tl.range(0, HW, ROWS, num_stages=STAGES):
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
    for start in tl.range(0, HW, ROWS, num_stages=STAGES):
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


# Of update.py: tensors are known by their addresses in a table, so that one launch reaches all of them; 0 stands for none.


@triton.jit
def prepare(
    steps, numbers, norm, finite, lr, limit, log_beta1, log_beta2, count,
    LANES: tl.constexpr,
):  # fmt: skip
    """Count the step of each tensor, unless it is left out, and work out the numbers that all its elements share."""
    t = tl.program_id(0) * LANES + tl.arange(0, LANES)
    address = tl.load(steps + t, mask=t < count, other=0)
    trained = address != 0
    step = address.to(tl.pointer_type(tl.float32))
    made = tl.load(step, mask=trained, other=1.0) + tl.where(tl.load(finite) != 0, 1.0, 0.0)
    tl.store(step, made, mask=trained)
    # in float32, 1 - beta^step would lose most of its digits in the first steps
    exact = made.to(tl.float64)
    rate = tl.load(lr).to(tl.float64) / (1.0 - tl.exp(exact * log_beta1))
    root = 1.0 / tl.sqrt(1.0 - tl.exp(exact * log_beta2))
    tl.store(numbers + t * 3, tl.minimum(limit / (tl.load(norm) + 1e-6), 1.0), mask=trained)
    tl.store(numbers + t * 3 + 1, rate.to(tl.float32), mask=trained)
    tl.store(numbers + t * 3 + 2, root.to(tl.float32), mask=trained)


@triton.jit
def move(
    table, numbers, parts, finite, blend, lr, rest1, rest2, eps, decay,
    DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one tensor: its weights, their moments and their average."""
    t = tl.load(parts + tl.program_id(0) * 2)
    start = tl.load(parts + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    row, shared = table + t * 6, numbers + t * 3
    left = tl.load(row + 5) - start
    p, g, m = start_at(row, start), start_at(row + 1, start), start_at(row + 2, start)
    v, a = start_at(row + 3, start), start_at(row + 4, start)
    stepping, averaged = (tl.load(finite) != 0) & (tl.load(row + 1) != 0), tl.load(row + 4) != 0
    scale, rate, root = tl.load(shared), tl.load(shared + 1), tl.load(shared + 2)
    share, shrink = tl.load(blend), tl.load(lr) * decay
    if left >= BLOCK:  # a length known to be a multiple of four lets loads and stores be four numbers wide
        move_part(p, g, m, v, a, BLOCK, stepping, averaged, scale, rate, root, share, shrink, rest1, rest2, eps, decay,
                  DECOUPLED, BLOCK)  # fmt: skip
    else:
        move_part(p, g, m, v, a, left, stepping, averaged, scale, rate, root, share, shrink, rest1, rest2, eps, decay,
                  DECOUPLED, BLOCK)  # fmt: skip


@triton.jit
def start_at(address, start):
    """Where a part begins; tensors begin at multiples of 16 bytes (a hint on the number would not reach the pointer)."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.float32)), 16) + start


@triton.jit
def move_part(
    p, g, m, v, a, left, stepping, averaged, scale, rate, root, share, shrink, rest1, rest2, eps, decay,
    DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < left
    stepped, kept = at < tl.where(stepping, left, 0), at < tl.where(averaged, left, 0)
    weight = tl.load(p + at, mask=inside, other=0.0)
    gradient = tl.load(g + at, mask=stepped, other=0.0) * scale
    first = tl.load(m + at, mask=stepped, other=0.0)
    second = tl.load(v + at, mask=stepped, other=0.0)
    average = tl.load(a + at, mask=kept, other=0.0)
    if DECOUPLED:
        moved = weight - shrink * weight
    else:
        moved = weight
        gradient += decay * weight
    # by differences, as 0.001 is exact to 6e-8 in float32, and 1 - 0.999 to 1.3e-5
    first += rest1 * (gradient - first)
    second += rest2 * (gradient * gradient - second)
    moved -= rate * first / (tl.sqrt(second) * root + eps)
    weight = tl.where(stepping, moved, weight)
    tl.store(p + at, weight, mask=stepped)
    tl.store(m + at, first, mask=stepped)
    tl.store(v + at, second, mask=stepped)
    tl.store(a + at, average + share * (weight - average), mask=kept)
