"""Triton kernels of update.py. Tensors are known by their addresses in a table, so that one launch reaches all of them; an
address of 0 stands for none. Ours, because torch's fused Adam neither clips nor averages weights: three passes, not one."""

import triton
import triton.language as tl


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
