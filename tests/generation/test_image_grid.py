"""Samples in a grid, pixel by pixel."""

import numpy as np
import pytest
import torch
from PIL import Image

from noisewise.generation.images import grid, save_grid


def test_every_sample_is_where_it_should_be_and_enlarged_by_whole_pixels():
    samples = torch.linspace(-1, 1, 5).view(5, 1, 1, 1).expand(-1, 1, 8, 8)
    picture = grid(samples, columns=3)
    assert picture.shape == (2 * 36 + 4, 3 * 36 + 4, 3)
    expected = [0, 64, 128, 191, 255]
    for i, value in enumerate(expected):
        top, left = 4 + (i // 3) * 36, 4 + (i % 3) * 36
        block = picture[top : top + 32, left : left + 32]
        assert np.ptp(block) == 0
        assert abs(int(block[0, 0, 0]) - value) <= 1
    assert (picture[40:, 76:] == 255).all()  # the place of a sixth
    assert (picture[:4] == 255).all()
    assert (picture[:, 36:40] == 255).all()


def test_colours_and_pixels_keep_their_place():
    sample = torch.full((1, 3, 4, 6), -1.0)
    sample[0, 1, 2, 3] = 1.0  # green at row 2, column 3
    picture = grid(sample, gap=0, enlarge=2)
    assert picture.shape == (8, 12, 3)
    assert [tuple(place) for place in np.argwhere(picture == 255)] == [(4, 6, 1), (4, 7, 1), (5, 6, 1), (5, 7, 1)]


def test_large_samples_are_not_enlarged_and_values_outside_are_clipped():
    picture = grid(torch.full((1, 3, 40, 40), 7.0), gap=0)
    assert picture.shape == (40, 40, 3)
    assert (picture == 255).all()


def test_the_file_holds_the_grid(tmp_path):
    samples = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    path = save_grid(samples, tmp_path / "deep" / "picture.png")
    assert np.array_equal(np.asarray(Image.open(path)), grid(samples))


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 8, 8), (0, 1, 8, 8)])
def test_what_is_no_picture_is_refused(shape):
    with pytest.raises(ValueError, match=r"a grid needs samples of shape \(N, 1 or 3, H, W\), got"):
        grid(torch.zeros(shape))
