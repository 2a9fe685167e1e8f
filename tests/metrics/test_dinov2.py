"""DINOv2 against transformers' on random weights, and its preparation of images."""

import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Dinov2Config, Dinov2Model

from noisewise.metrics.dinov2 import DINOv2, load_dinov2, prepare, read_dinov2
from noisewise.metrics.features import features

DIM, DEPTH, GRID = 128, 3, 5


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=DIM, num_hidden_layers=DEPTH, num_attention_heads=DIM // 64, image_size=14 * GRID, patch_size=14
    )
    model = Dinov2Model(config).eval()
    with torch.no_grad():  # none of them 0 or 1, as some are at first
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def files(theirs, tmp_path_factory):
    """The same weights as transformers and as Meta name them."""
    folder = tmp_path_factory.mktemp("weights")
    theirs.save_pretrained(folder)  # in the names of the published file, which are not the module's own
    torch.save({**read_dinov2(folder / "model.safetensors"), "mask_token": torch.zeros(1, DIM)}, folder / "meta.pth")
    return folder / "model.safetensors", folder / "meta.pth"


@pytest.mark.parametrize("size", [14 * GRID, 14 * 3, 14 * 8])
def test_equals_transformers_on_random_weights(theirs, files, size):
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    for file in files:
        ours, _ = load_dinov2(file)
        ours.offset = 0  # transformers resizes positions by their number alone
        with torch.no_grad():
            expected = theirs(images).last_hidden_state[:, 0]
            torch.testing.assert_close(ours(images), expected, atol=2e-5, rtol=1e-4)


def test_both_files_hold_one_network(files):
    (first, name), (second, same) = (load_dinov2(file) for file in files)
    assert name == same
    assert name.startswith(f"dinov2-{DIM}x{DEPTH}-")
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())


def test_a_classifiers_file_holds_the_network_too(files, tmp_path):
    theirs = {f"dinov2.{name}": value for name, value in load_file(files[0]).items()}
    save_file({**theirs, "classifier.weight": torch.zeros(5, 2 * DIM)}, tmp_path / "model.safetensors")
    assert load_dinov2(tmp_path / "model.safetensors")[1] == load_dinov2(files[0])[1]


def test_positions_are_resized_with_metas_offset():
    network = DINOv2(64, 1, grid=37)
    torch.nn.init.normal_(network.pos_embed)
    table = network.pos_embed[0, 1:].T.reshape(1, 64, 37, 37)
    scale = (16 + 0.1) / 37
    expected = torch.nn.functional.interpolate(table, scale_factor=(scale, scale), mode="bicubic")
    found = network._positions(16, 16)
    assert found.shape == (1, 257, 64)
    torch.testing.assert_close(found[0, 1:].T.reshape(64, 16, 16), expected[0])
    assert not torch.allclose(expected, torch.nn.functional.interpolate(table, (16, 16), mode="bicubic"), atol=1e-3)


@pytest.mark.parametrize("size", [(32, 32), (224, 224), (17, 40), (300, 512)])
def test_images_are_resized_as_tensorflow_1_did(size):
    images = torch.randint(0, 256, (2, 3, *size), generator=torch.Generator().manual_seed(0)).byte()
    found = prepare(images)
    assert found.shape == (2, 3, 224, 224)
    mean, std = torch.tensor([0.485, 0.456, 0.406]) * 255, torch.tensor([0.229, 0.224, 0.225]) * 255
    for y, x in [(0, 0), (3, 200), (223, 223), (100, 57)]:  # from the definition, one point at a time
        down, right = y * size[0] / 224, x * size[1] / 224
        i, j = int(down), int(right)
        below, beside = min(i + 1, size[0] - 1), min(j + 1, size[1] - 1)
        pixels = images.double()
        upper = pixels[:, :, i, j] * (1 - right + j) + pixels[:, :, i, beside] * (right - j)
        lower = pixels[:, :, below, j] * (1 - right + j) + pixels[:, :, below, beside] * (right - j)
        expected = (upper * (1 - down + i) + lower * (down - i) - mean) / std
        torch.testing.assert_close(found[:, :, y, x].double(), expected, atol=1e-4, rtol=1e-4)
    if size == (224, 224):
        torch.testing.assert_close(found, (images - mean.view(3, 1, 1)) / std.view(3, 1, 1))


def test_features_of_images_grey_and_coloured(files):
    network, _ = load_dinov2(files[0])
    images = torch.randint(0, 256, (3, 1, 28, 28), generator=torch.Generator().manual_seed(0)).byte()
    grey = features(images, network, "dinov2")
    assert grey.shape == (3, DIM)
    torch.testing.assert_close(grey, features(images.expand(-1, 3, -1, -1), network, "dinov2", batch=2), atol=1e-5, rtol=1e-4)


def test_vit_l_has_the_size_of_the_published_one():
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in DINOv2().parameters()) == 304_368_640 - 1024  # without the mask token


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_other_files_are_refused_in_one_line(files, tmp_path, capsys):
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "broken.safetensors").write_bytes(b"12345678nonsense")
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    torch.save({"model": Evil()}, tmp_path / "evil2.pth")
    missing = read_dinov2(files[0])
    missing.pop("blocks.1.ls2.gamma")
    torch.save(missing, tmp_path / "part.pth")
    registers = {**read_dinov2(files[0]), "register_tokens": torch.zeros(1, 4, DIM)}
    torch.save(registers, tmp_path / "registers.pth")
    save_file({**load_file(files[0]), "embeddings.register_tokens": torch.zeros(1, 4, DIM)}, tmp_path / "theirs.safetensors")
    torch.save({**read_dinov2(files[0]), "norm.bias": torch.full((DIM,), torch.nan)}, tmp_path / "nan.pth")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(ValueError, match="dinov2_vitl14_pretrain") as raised:
            load_dinov2(path)
        assert "\n" not in str(raised.value), path
    assert "executed" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs --weights"):
        load_dinov2(None)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        load_dinov2(tmp_path / "nowhere.pth")
