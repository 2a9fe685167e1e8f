import numpy as np
import pytest
import torch
from PIL import Image

from noisewise.generation.images import to_uint8
from noisewise.metrics.features import PREPROCESSING, clean_fid, find_preprocessing, pytorch_fid
from noisewise.precision import full_float32


def random_images(*shape, seed=0):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(32, 32), (400, 350)])
def test_clean_fid_resizes_as_pillow_does_on_float_channels(size):
    images = random_images(2, 3, *size)
    expected = np.empty((2, 3, 299, 299), np.float32)
    for image, row in zip(images.numpy(), expected, strict=True):
        for channel, out in zip(image, row, strict=True):
            resized = Image.fromarray(channel.astype(np.float32)).resize((299, 299), Image.Resampling.BICUBIC)
            out[:] = np.asarray(resized).clip(0, 255)
    grey_levels = clean_fid(images) * 128 + 128
    np.testing.assert_allclose(grey_levels.numpy(), expected, atol=0.01)  # grey levels: Pillow weighs in float64


def test_pytorch_fid_interpolates_between_pixel_centres():
    image = torch.tensor([[0, 255]], dtype=torch.uint8).expand(1, 3, 2, 2)
    position = (torch.arange(299) + 0.5) * 2 / 299 - 0.5
    expected = 2 * position.clamp(0, 1) - 1
    torch.testing.assert_close(pytorch_fid(image), expected.expand(1, 3, 299, 299), rtol=0, atol=1e-6)


def test_pytorch_fid_has_no_antialiasing():
    stripes = torch.tensor([0, 255], dtype=torch.uint8).repeat(299)[:598].expand(1, 3, 598, 598)
    wide = torch.zeros(1, 3, 897, 897, dtype=torch.uint8)
    wide[..., 1::3] = 255  # the middle of every three columns is all that is looked at
    assert float(pytorch_fid(wide).min()) == 1.0
    assert float(pytorch_fid(stripes).abs().max()) < 1e-6
    assert float(clean_fid(wide)[..., 9:-9].max()) < 0.5


@pytest.mark.parametrize("name", ["pytorch-fid", "clean-fid"])
def test_grey_images_become_three_equal_channels(name):
    grey = random_images(2, 1, 28, 28)
    prepared = PREPROCESSING[name](grey)
    assert prepared.shape == (2, 3, 299, 299)
    torch.testing.assert_close(prepared, PREPROCESSING[name](grey.repeat(1, 3, 1, 1)))


def test_samples_are_rounded_as_files_hold_them():
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(levels.float() / 127.5 - 1), levels)
    assert to_uint8(torch.tensor([-3.0, -1.0, 0.999, 1.0, 7.0])).tolist() == [0, 0, 255, 255, 255]
    assert to_uint8(levels) is levels


def test_bad_images_say_what_is_wrong():
    with pytest.raises(ValueError, match="diverged"):
        to_uint8(torch.tensor([0.0, float("nan")]))
    with pytest.raises(TypeError, match="int64"):
        to_uint8(torch.zeros(1, 3, 8, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match="to_uint8 first"):
        pytorch_fid(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="channels come before"):
        pytorch_fid(random_images(1, 8, 8, 3))
    with pytest.raises(ValueError, match=r"got \(3, 8, 8\)"):
        clean_fid(random_images(3, 8, 8))
    with pytest.raises(ValueError, match="no pixels"):
        clean_fid(random_images(1, 3, 0, 8))
    with pytest.raises(ValueError, match="unknown preprocessing 'pil'; there are pytorch-fid"):
        find_preprocessing("pil")


def test_tf32_is_off_inside_and_as_before_outside():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    for setting in (True, False):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = setting
        with full_float32():
            if hasattr(torch.backends.cudnn, "conv"):
                assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"
            else:
                assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is setting
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
