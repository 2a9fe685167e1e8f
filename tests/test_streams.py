"""The random numbers behind every draw, and the noise images are made from: normal, independent, and the same in any batch."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from noisewise.streams import GOLDEN, MASK, _box_muller, bits, normals, stream_key, uniforms


def split_mix_64(state: int, n: int) -> list[int]:
    """SplitMix64 as published, in Python integers."""
    out = []
    for _ in range(n):
        state = (state + GOLDEN) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


def test_the_generator_is_split_mix_64():
    assert split_mix_64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # the test vector in common use
    for seed in (0, 1234567, MASK):
        assert [value & MASK for value in bits(seed, 50).tolist()] == split_mix_64(seed, 50)


def test_several_keys_give_a_row_each():
    keys = [0, 5, MASK, stream_key(1, 2)]
    assert torch.equal(bits(keys, 9), torch.stack([bits(key, 9) for key in keys]))
    assert torch.equal(uniforms(keys, 9), torch.stack([uniforms(key, 9) for key in keys]))


def test_uniforms_are_uniform_and_inside():
    u = uniforms(stream_key(1, 2, 3), 200_000)
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert stats.kstest(u.double().numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(1 - (1 - u), u)  # mirror images are exact


def test_streams_are_independent():
    keys = {
        stream_key(seed, step, micro, rank, 0)
        for seed in range(4)
        for step in range(10)
        for micro in range(3)
        for rank in range(8)
    }
    assert len(keys) == 4 * 10 * 3 * 8
    a, b = uniforms(stream_key(0, 0, 0, 0), 50_000), uniforms(stream_key(0, 0, 0, 1), 50_000)
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02


# Noise of images

SHAPE = (3, 16, 16)


def some(images=200, seed=0, draw=0, shape=SHAPE):
    return normals(seed, torch.arange(images), draw, shape)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("draw", [0, 7])
def test_values_are_standard_normal(seed, draw):
    z = some(300, seed, draw).double().flatten()
    n = len(z)
    assert abs(float(z.mean())) < 4 / math.sqrt(n)
    assert abs(float(z.var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((z**3).mean())) < 4 * math.sqrt(15 / n)
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / n)
    assert stats.kstest(z.numpy(), stats.norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize("along", ["images", "draws", "seeds"])
def test_images_draws_and_seeds_are_independent(along):
    """All pairwise correlations, and those of the squares, are as small as those of independent normals."""
    rows = {
        "images": lambda: some(60).flatten(1),
        "draws": lambda: torch.cat([some(1, draw=draw).flatten(1) for draw in range(60)]),
        "seeds": lambda: torch.cat([some(1, seed=seed).flatten(1) for seed in range(60)]),
    }[along]()
    above = np.triu_indices(60, 1)
    for values in (rows.double().numpy(), rows.double().numpy() ** 2):
        correlations = np.corrcoef(values)[above] * math.sqrt(rows.shape[1])
        assert np.abs(correlations).max() < 5
        assert abs((correlations**2).mean() - 1) < 4 * math.sqrt(2 / len(correlations))


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 256])
def test_elements_are_independent(lag):
    z = some(300).flatten(1).double()
    for values in (z, z**2 - 1, z.abs() - math.sqrt(2 / math.pi)):
        product = (values[:, :-lag] * values[:, lag:]).flatten()
        assert abs(float(product.mean())) < 4 * float(product.std()) / math.sqrt(len(product))


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7, 7), (4, 4)])
def test_any_split_of_the_images_gives_identical_values(shape):
    whole = normals(5, torch.arange(64), 2, shape)
    assert whole.dtype == torch.float32
    assert whole.shape == (64, *shape)
    for size in (1, 3, 7, 64):
        assert torch.equal(torch.cat([normals(5, part, 2, shape) for part in torch.arange(64).split(size)]), whole)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normals(5, order, 2, shape), whole[order])
    assert torch.equal(normals(5, torch.tensor([3, 3]), 2, shape), whole[[3, 3]])


def reference(seed, image, draw, count):
    """The definition in plain integers and the standard library's functions."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    key = 0
    for part in (0x6E6F697365, seed, draw):
        key = mix((key + golden + part) & mask)
    key, values = mix((image * golden + key) & mask), []
    for pair in range(1, (count + 1) // 2 + 1):
        word = mix((mix(pair * golden & mask) + key) & mask)
        radius = math.sqrt(-2 * math.log(((word >> 32) + 0.5) / 2**32))
        angle = 2 * math.pi * ((word & 0xFFFFFFFF) + 0.5) / 2**32
        values += [radius * math.cos(angle), radius * math.sin(angle)]
    return values[:count]


def test_values_equal_a_plain_reference():
    """So that no later version silently generates other images."""
    images = [0, 1, 12345, 2**50]
    expected = torch.tensor([reference(7, image, 4, 25) for image in images])
    torch.testing.assert_close(normals(7, torch.tensor(images), 4, (5, 5)).flatten(1), expected, rtol=1e-6, atol=1e-7)


def test_huge_seeds_and_indices_are_fine():
    assert torch.isfinite(normals(-(2**70), torch.tensor([2**62, -1]), 10**6, (4,))).all()


def test_the_extremes_are_finite():
    ends = torch.tensor([0, 2**32 - 1])
    both = torch.stack(_box_muller(ends[:, None], ends[None, :].expand(2, 2)))
    assert torch.isfinite(both).all()
    assert float(both.abs().max()) == pytest.approx(math.sqrt(2 * math.log(2**33)), rel=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_gives_the_same_bits():
    images = torch.arange(512)
    for draw in (0, 9):
        assert torch.equal(normals(3, images, draw, (3, 32, 32), "cuda").cpu(), normals(3, images, draw, (3, 32, 32)))


@pytest.mark.parametrize(
    ("images", "draw", "shape", "message"),
    [
        (torch.arange(3).float(), 0, (2,), "int64"),
        (torch.zeros(2, 2, dtype=torch.int64), 0, (2,), "vector"),
        (torch.arange(3), -1, (2,), "draw must be"),
        (torch.arange(3), 0, (2, 0), "at least 1"),
    ],
)
def test_wrong_arguments_are_explained(images, draw, shape, message):
    with pytest.raises(ValueError, match=message):
        normals(0, images, draw, shape)


def test_numbers_of_several_keys_are_made_where_they_are_asked_for():
    expected = uniforms([1, 2, 3], 8, "cpu")
    with torch.device("meta"):  # somebody's default device
        found = uniforms([1, 2, 3], 8, "cpu")
    assert torch.equal(found, expected)
