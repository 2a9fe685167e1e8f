"""The random numbers behind every draw."""

import torch
from scipy import stats

from noisewise.streams import GOLDEN, MASK, bits, stream_key, uniforms


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
