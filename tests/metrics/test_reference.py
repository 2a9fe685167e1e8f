import resource
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from noisewise.metrics.digits_features import digits_features, load_digits_classifier
from noisewise.metrics.features import features
from noisewise.metrics.frechet import Moments
from noisewise.metrics.reference import Key, cache_folder, load_reference, reference
from tests.metrics.sets import digits

NETWORK, NAME = load_digits_classifier()
KEY = Key("digits", NAME, "digits")


def must_not_be_asked():
    raise AssertionError("the images were read although the reference is in the cache")
    yield


@pytest.fixture
def made(tmp_path):
    return reference(digits()[:200], KEY, NETWORK, folder=tmp_path, keep_features=True, batch=64)


def test_a_reference_holds_the_moments_and_features_of_its_images(made):
    expected = digits_features(digits()[:200])
    assert made.moments.count == 200
    torch.testing.assert_close(made.features, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(made.moments.mean, Moments.of(expected).mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(made.moments.cov, Moments.of(expected).cov, rtol=0, atol=1e-5)


def test_the_second_time_it_comes_from_the_cache_to_the_bit(made, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = reference(must_not_be_asked(), KEY, NETWORK, folder=tmp_path, keep_features=True)
    assert again.moments.count == 200
    assert torch.equal(again.moments.cov, made.moments.cov)
    assert torch.equal(again.features, made.features)
    assert [file.name for file in tmp_path.iterdir()] == [KEY.file]


def test_on_a_full_disk_it_is_made_and_not_kept(made, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.warns(UserWarning, match="could not be kept for the next time"):
            again = reference(digits()[:200], KEY, NETWORK, folder=tmp_path / "full", batch=64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(again.moments.cov, made.moments.cov)
    assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize(
    "other", [Key("more", NAME, "digits"), Key("digits", "net", "digits"), Key("digits", NAME, "clean-fid")]
)
def test_another_key_is_another_reference(made, tmp_path, other):
    assert load_reference(KEY, tmp_path) is not None
    assert load_reference(other, tmp_path) is None


def test_features_are_computed_when_the_cache_has_none(tmp_path):
    assert reference(digits()[:50], KEY, NETWORK, folder=tmp_path).features is None
    assert reference(digits()[:50], KEY, NETWORK, folder=tmp_path, keep_features=True).features.shape == (50, 32)


def rewrite(path, change):
    """Write the file again with other tensors or metadata."""
    with safe_open(path, "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, about)
    save_file(tensors, path, about)


def other_numbers(tensors, about):
    tensors["mean"] = tensors["mean"] + 1e-9


def other_network(tensors, about):
    about["network"] = "another"


def other_format(tensors, about):
    about["format"] = "noisewise-reference-0"


@pytest.mark.parametrize(
    ("change", "message"), [(other_numbers, "damaged"), (other_network, "of another network"), (other_format, "another format")]
)
def test_a_file_that_is_not_what_its_key_says_is_computed_again(made, tmp_path, change, message):
    rewrite(tmp_path / KEY.file, change)
    with pytest.raises(ValueError, match=message):
        load_reference(KEY, tmp_path)
    with pytest.warns(UserWarning, match=f"{message}.*computing the reference again"):
        again = reference(digits()[:200], KEY, NETWORK, folder=tmp_path, batch=64)
    assert torch.equal(again.moments.cov, made.moments.cov)
    assert load_reference(KEY, tmp_path) is not None


def test_a_cut_off_file_is_computed_again(made, tmp_path):
    file = tmp_path / KEY.file
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="cannot be read"):
        reference(digits()[:200], KEY, NETWORK, folder=tmp_path)


def test_the_cache_is_where_the_user_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "noisewise"
    reference(digits()[:20], KEY, NETWORK)
    assert (tmp_path / "noisewise" / KEY.file).is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "noisewise"


def test_progress_counts_images():
    told = []
    features(digits()[:50].split(20), NETWORK, "digits", batch=15, progress=told.append)
    assert told == [15, 20, 35, 40, 50]


def test_bad_input_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="no images to make a reference of"):
        reference([], KEY, NETWORK, folder=tmp_path)
    with pytest.raises(ValueError, match="unknown preprocessing"):
        reference(digits()[:5], Key("digits", NAME, "resize"), NETWORK, folder=tmp_path)
    with pytest.raises(ValueError, match="batch must be >= 1"):
        features(digits()[:5], NETWORK, "digits", batch=0)
