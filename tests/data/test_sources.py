"""Each source against files in its own format, and what it says about files that are not."""

import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from safetensors.numpy import save_file

from noisewise.data import PATHS, SOURCES, Synthetic, open_data
from noisewise.data.cifar10 import RECORD
from noisewise.data.digits import FILE


def everything(source):
    return source.read(np.arange(len(source)))


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def save_png(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


# open_data


def test_unknown_sources_are_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean 'cifar10'.*digits, cifar10, folder, array, latents, huggingface"):
        open_data("cifar-10")


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "digits"])
def test_a_missing_path_is_asked_for(source):
    with pytest.raises(ValueError, match="needs a path") as error:
        open_data(source)
    assert PATHS[source] in str(error.value)


@pytest.mark.parametrize("source", ["cifar10", "folder", "array", "latents"])
def test_a_path_that_is_not_there_is_named(source, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_data(source, tmp_path / "nowhere")


@pytest.mark.parametrize("source", ["cifar10", "folder", "array", "latents"])
def test_an_empty_folder_is_said_to_hold_nothing(source, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no|has no"):
        open_data(source, tmp_path)


def test_unknown_options_are_listed_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match="no option 'sise': it has size, channels, labels, skip_corrupt"):
        open_data("folder", tmp_path, options={"sise": 3})
    with pytest.raises(ValueError, match="no option 'size': it has none"):
        open_data("digits", options={"size": 3})


# digits


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    reference = load_digits()
    source = open_data("digits", split="all")
    values, labels = everything(source)
    ours = sorted(zip(values.flatten(1).tolist(), labels.tolist(), strict=True))
    assert ours == sorted(zip(reference.data.astype(int).tolist(), reference.target.tolist(), strict=True))


def test_digits_split_once_and_for_all():
    parts = {split: open_data("digits", split=split) for split in ("train", "test", "all")}
    assert [len(part) for part in parts.values()] == [1500, 297, 1797]
    train, test, whole = (everything(part)[0] for part in parts.values())
    assert torch.equal(torch.cat([train, test]), whole)
    assert len({part.fingerprint() for part in parts.values()}) == 3
    assert np.bincount(everything(parts["test"])[1].numpy(), minlength=10).min() >= 15  # all digits are in the test set
    with pytest.raises(ValueError, match="train, test, all"):
        open_data("digits", split="val")
    with pytest.raises(ValueError, match="take no path"):
        open_data("digits", "here")


def test_digits_are_pictures_from_minus_one_to_one():
    source = open_data("digits")
    values, labels = source.read(np.array([5, 1]))
    assert values.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert source.shape == (1, 8, 8) == tuple(values.shape[1:])
    assert (source.classes, source.image, source.nbytes) == (10, True, 1500 * 64)
    decoded = source.decode(everything(source)[0])
    assert decoded.dtype == torch.float32
    assert (float(decoded.min()), float(decoded.max())) == (-1, 1)


def test_digits_carry_their_attribution():
    with np.load(FILE, allow_pickle=False) as file:
        text = str(file["attribution"])
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text


# CIFAR-10

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar_records(number, count=20):
    return noise(count, 3, 32, 32, seed=number), np.arange(number, number + count) % 10


def write_binary(folder):
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        images, labels = cifar_records(number)
        rows = [bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))


class Python2Pickler(pickle._Pickler):
    """Writes byte strings as Python 2 wrote its strings, and numpy under the name it had then."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_string(self, value):
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)
        self.memoize(value)

    dispatch[bytes] = save_string


def python2(path, content):
    with path.open("wb") as file:
        Python2Pickler(file, 2).dump(content)
    path.write_bytes(path.read_bytes().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))


def write_pickled(folder):
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        images, labels = cifar_records(number)
        names = [b"a.png"] * len(images)
        content = {b"batch_label": b"batch", b"labels": labels.tolist(), b"data": images.reshape(-1, 3072), b"filenames": names}
        python2(folder / name, content)


LAYOUTS = {"cifar-10-batches-bin": write_binary, "cifar-10-batches-py": write_pickled}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inside", [False, True])
def test_cifar10_is_read_from_both_layouts_and_from_the_folder_above(layout, inside, tmp_path):
    LAYOUTS[layout](tmp_path / layout)
    path = tmp_path / layout if inside else tmp_path
    for split, numbers in (("train", range(5)), ("test", [5])):
        source = open_data("cifar10", path, split=split)
        values, labels = everything(source)
        expected = [cifar_records(number) for number in numbers]
        assert np.array_equal(values.numpy(), np.concatenate([images for images, _ in expected]))
        assert np.array_equal(labels.numpy(), np.concatenate([labels for _, labels in expected]))
        assert (source.shape, source.classes, source.image, source.nbytes) == ((3, 32, 32), 10, True, len(values) * 3072)
    torch.testing.assert_close(source.decode(values), values.float() / 127.5 - 1, rtol=0, atol=0)


def test_the_python_files_of_the_tests_hold_what_the_official_ones_do(tmp_path):
    """Strings of Python 2 and the three globals of an array, nothing newer."""
    import pickletools

    write_pickled(tmp_path / "py")
    found = {op.name: arg for op, arg, _ in pickletools.genops((tmp_path / "py" / "test_batch").read_bytes())}
    assert "BINSTRING" in found
    assert not {"SHORT_BINBYTES", "BINBYTES"} & set(found)
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in (tmp_path / "py" / "test_batch").read_bytes()


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, protocol):
    folder = tmp_path / "cifar-10-batches-py"
    write_pickled(folder)
    harm = tmp_path / "harm"
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": Hostile(harm)}, protocol))
    with pytest.raises(ValueError, match=r"data_batch_3.*wants to run .*open.*do not trust it"):
        open_data("cifar10", tmp_path)
    assert not harm.exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x02]q\x00.", pickle.dumps({b"data": 1}, 2)])
def test_a_damaged_pickle_is_named(tmp_path, content):
    folder = tmp_path / "cifar-10-batches-py"
    write_pickled(folder)
    (folder / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=r"test_batch is not a CIFAR-10"):
        open_data("cifar10", tmp_path, split="test")


def test_damaged_or_missing_binary_files_are_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    write_binary(folder)
    file = folder / "data_batch_2.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin has 61459 bytes, not a whole number of records of 3073"):
        open_data("cifar10", tmp_path)
    file.write_bytes(whole[: 3 * RECORD] + b"\x4d" + whole[3 * RECORD + 1 :])
    with pytest.raises(ValueError, match="label 77 in record 3"):
        open_data("cifar10", tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_2\.bin"):
        open_data("cifar10", tmp_path)
    with pytest.raises(ValueError, match="choose one of train, test"):
        open_data("cifar10", tmp_path, split="val")


# Folders of pictures


def test_a_folder_gives_its_pictures_in_the_order_of_their_names(tmp_path):
    pictures = {f"{i}.png": noise(6, 4, 3, seed=i) for i in range(3)}
    for name, array in pictures.items():
        save_png(tmp_path / ("deep/er" if name == "1.png" else "") / name, array)
    (tmp_path / "notes.txt").write_text("not a picture")
    source = open_data("folder", tmp_path)
    values, labels = everything(source)
    assert labels is None
    assert (source.shape, source.classes, source.image, source.in_memory) == ((3, 6, 4), 0, True, False)
    assert source.nbytes == values.numel()
    expected = [pictures[name].transpose(2, 0, 1) for name in ("0.png", "2.png", "1.png")]
    assert np.array_equal(values.numpy(), np.stack(expected))


@pytest.mark.parametrize("ending", ["png", "jpg", "JPEG", "webp", "bmp"])
def test_every_kind_of_picture_is_read(tmp_path, ending):
    Image.new("RGB", (8, 8), (250, 120, 10)).save(tmp_path / f"a.{ending}")
    values, _ = everything(open_data("folder", tmp_path))
    assert values[0, :, 4, 4].tolist() == pytest.approx([250, 120, 10], abs=4)


def test_sub_folders_are_classes_when_labels_are_asked_for(tmp_path):
    for number, name in enumerate(["cat", "ant", "bee"]):
        for i in range(number + 1):
            save_png(tmp_path / name / "x" / f"{i}.png", noise(4, 4, 3))
    (tmp_path / "empty").mkdir()
    source = open_data("folder", tmp_path, options={"labels": True})
    assert source.classes == 3
    assert everything(source)[1].tolist() == [0, 0, 1, 1, 1, 2]
    save_png(tmp_path / "stray.png", noise(4, 4, 3))
    with pytest.raises(ValueError, match=r"stray\.png lies in none of the class folders \(ant, bee, cat\)"):
        open_data("folder", tmp_path, options={"labels": True})


def test_linked_folders_are_followed_but_not_in_circles(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "elsewhere" / name / "0.png")
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (root / "b").symlink_to(tmp_path / "elsewhere" / "b")
    (tmp_path / "elsewhere" / "b" / "up").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "self").symlink_to(root / "a")
    source = open_data("folder", root, options={"labels": True})
    assert (source.classes, everything(source)[1].tolist()) == (2, [0, 1])


def test_splits_are_sub_folders_and_share_their_classes(tmp_path):
    for name in ("train/a", "train/b", "train/c", "test/c"):
        save_png(tmp_path / name / "0.png", noise(4, 4, 3))
    options = {"labels": True}
    assert len(open_data("folder", tmp_path, options=options)) == 3
    test = open_data("folder", tmp_path, split="test", options=options)
    assert everything(test)[1].tolist() == [2]  # not 0, though c is its only class
    assert test.classes == 3
    with pytest.raises(FileNotFoundError, match="no sub-folder 'val'"):
        open_data("folder", tmp_path, split="val")


def test_test_pictures_beside_the_others_are_no_training_data(tmp_path):
    for name in ("bus", "train", "tram", "test/bus"):
        save_png(tmp_path / name / "0.png", noise(4, 4, 3))
    source = open_data("folder", tmp_path, options={"labels": True})
    assert (len(source), source.classes) == (3, 3)  # here "train" is a class
    assert len(open_data("folder", tmp_path, split="test")) == 1


def test_what_other_programs_leave_in_a_folder_is_no_data(tmp_path):
    for name in ("train/a", "train/b", "val/a", "train/a/.ipynb_checkpoints", "train/.thumbnails", "__MACOSX/train/a"):
        save_png(tmp_path / name / "0.png", noise(4, 4, 3))
    (tmp_path / ".cache").mkdir()
    source = open_data("folder", tmp_path, options={"labels": True})
    assert (len(source), source.classes) == (2, 2)


def test_names_of_files_need_not_be_utf8(tmp_path):
    save_png(tmp_path / "a.png", noise(4, 4, 3))
    os.rename(os.fsencode(tmp_path / "a.png"), os.fsencode(tmp_path) + b"/caf\xe9.png")
    source = open_data("folder", tmp_path)
    assert len(source.fingerprint()) == 16


def test_pictures_are_cropped_at_the_centre_and_scaled(tmp_path):
    array = np.zeros((8, 16, 3), np.uint8)
    array[:, 4:12] = 200
    array[:, 4:8, 0] = 100
    save_png(tmp_path / "a.png", array)
    values, _ = everything(open_data("folder", tmp_path, options={"size": 8}))
    assert np.array_equal(values[0].numpy(), array[:, 4:12].transpose(2, 0, 1))  # nothing of the black sides
    save_png(tmp_path / "a.png", (np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8))
    values, _ = everything(open_data("folder", tmp_path, options={"size": 8, "channels": 1}))
    assert values.shape == (1, 1, 8, 8)
    assert (values.float() - 127.5).abs().max() < 3  # a checkerboard becomes grey, not black or white, if antialiased


def test_a_picture_of_another_size_is_named(tmp_path):
    for i in range(3):
        save_png(tmp_path / f"{i}.png", noise(4, 5, 3) if i != 1 else noise(4, 6, 3))
    with pytest.raises(ValueError, match=r"1\.png is 6x4 pixels, others 5x4: scale all to one size"):
        open_data("folder", tmp_path)
    assert open_data("folder", tmp_path, options={"size": 4}).shape == (3, 4, 4)


def test_modes_become_the_channels_asked_for(tmp_path):
    grey = noise(4, 4)
    save_png(tmp_path / "a.png", grey)
    values, _ = everything(open_data("folder", tmp_path))
    assert np.array_equal(values[0].numpy(), np.stack([grey] * 3))
    save_png(tmp_path / "a.png", np.full((4, 4, 3), (90, 90, 90), np.uint8))
    values, _ = everything(open_data("folder", tmp_path, options={"channels": 1}))
    assert values.unique().tolist() == [90]
    clear = np.zeros((4, 4, 4), np.uint8)
    clear[:2, :, 3] = 255
    save_png(tmp_path / "a.png", clear)
    values, _ = everything(open_data("folder", tmp_path))
    assert values[0, :, :2].unique().tolist() == [0]
    assert values[0, :, 2:].unique().tolist() == [255]  # what is clear is white
    with pytest.raises(ValueError, match=r"channels must be 1 .* or 3"):
        open_data("folder", tmp_path, options={"channels": 4})
    with pytest.raises(ValueError, match="size must be a whole number"):
        open_data("folder", tmp_path, options={"size": "32"})


def test_sixteen_bits_are_refused_rather_than_clipped(tmp_path):
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png: it has more than 8 bits"):
        open_data("folder", tmp_path)


def test_photographs_stand_upright(tmp_path):
    picture = Image.fromarray(noise(4, 6, 3))
    exif = picture.getexif()
    exif[0x0112] = 6  # taken with the camera turned
    picture.save(tmp_path / "a.jpg", exif=exif)
    source = open_data("folder", tmp_path)
    assert source.shape == (3, 6, 4) == tuple(everything(source)[0].shape[1:])


def test_photographs_whose_orientation_is_in_xmp_alone_stand_upright(tmp_path):
    xmp = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
    <rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>"""
    Image.fromarray(noise(4, 6, 3)).save(tmp_path / "a.jpg", xmp=xmp)
    source = open_data("folder", tmp_path)
    assert source.shape == (3, 6, 4) == tuple(everything(source)[0].shape[1:])


@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
def test_files_that_were_cut_short_are_named_before_training(tmp_path, ending):
    for i in range(3):
        save_png(tmp_path / f"{i}.{ending}", noise(32, 32, 3))
    whole = (tmp_path / f"1.{ending}").read_bytes()
    (tmp_path / f"1.{ending}").write_bytes(whole[: len(whole) * 2 // 3])  # the header is sound
    with pytest.raises(ValueError, match=rf"cannot read .*1\.{ending}.*mend or remove it, or .*skip_corrupt: true"):
        open_data("folder", tmp_path)


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_whole_files_with_something_after_their_end_are_read(tmp_path, ending):
    save_png(tmp_path / f"0.{ending}", noise(32, 32, 3))
    expected = everything(open_data("folder", tmp_path))[0]
    with (tmp_path / f"0.{ending}").open("ab") as file:
        file.write(bytes(1000))
    assert torch.equal(everything(open_data("folder", tmp_path))[0], expected)


def test_whole_files_are_not_decoded_to_open_a_folder(tmp_path, monkeypatch):
    for ending in ("png", "jpg", "bmp"):
        save_png(tmp_path / f"0.{ending}", noise(32, 32, 3))

    def decoded(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    assert len(open_data("folder", tmp_path)) == 3


def test_corrupt_files_are_named_or_counted_and_left_out(tmp_path):
    for i in range(4):
        save_png(tmp_path / f"{i}.png", noise(32, 32, 3))
    whole = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(whole[:1000] + bytes(200) + whole[1200:])  # both ends are sound
    source = open_data("folder", tmp_path)
    with pytest.raises(ValueError, match=r"cannot read .*2\.png.*skip_corrupt"):
        everything(source)
    (tmp_path / "1.png").write_bytes(b"this is no picture")
    with pytest.raises(ValueError, match=r"cannot read .*1\.png.*skip_corrupt"):
        open_data("folder", tmp_path)
    with pytest.warns(UserWarning, match=r"left out 2 of 4 pictures that cannot be read, such as .*1\.png"):
        source = open_data("folder", tmp_path, options={"skip_corrupt": True})
    assert [file.name for file in source.files] == ["0.png", "3.png"]
    assert everything(source)[0].shape == (2, 3, 32, 32)


def test_labels_stay_with_their_pictures_when_files_are_left_out(tmp_path):
    for name in "abc":
        save_png(tmp_path / name / "0.png", noise(4, 4, 3))
    (tmp_path / "a" / "0.png").write_bytes(b"this is no picture")
    with pytest.warns(UserWarning, match="left out 1 of 3"):
        source = open_data("folder", tmp_path, options={"skip_corrupt": True, "labels": True})
    assert everything(source)[1].tolist() == [1, 2]


def test_sound_folders_are_opened_without_a_warning(tmp_path):
    save_png(tmp_path / "0.png", noise(4, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_data("folder", tmp_path, options={"skip_corrupt": True})


# Arrays

FORMATS = {
    ".npy": lambda path, values, labels: (np.save(path, values), np.save(path.with_name(f"{path.stem}_labels.npy"), labels)),
    ".npz": lambda path, values, labels: np.savez(path, images=values, labels=labels),
    ".safetensors": lambda path, values, labels: save_file({"images": values, "labels": labels}, path),
}


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("values", [noise(6, 7, 5, 3), noise(6, 3, 7, 5), noise(6, 7, 5)], ids=["NHWC", "NCHW", "NHW"])
def test_arrays_of_pictures_are_read_in_every_layout(tmp_path, ending, values):
    FORMATS[ending](tmp_path / f"x{ending}", values, np.array([0, 1, 2, 2, 1, 4]))
    source = open_data("array", tmp_path / f"x{ending}")
    expected = values[:, None] if values.ndim == 3 else values if values.shape[1] == 3 else values.transpose(0, 3, 1, 2)
    rows = np.array([4, 0, 0])
    found, labels = source.read(rows)
    assert np.array_equal(found.numpy(), expected[rows])
    assert found.is_contiguous()
    assert labels.tolist() == [1, 0, 0]
    assert (source.shape, source.classes, source.image) == (expected.shape[1:], 5, True)
    assert source.in_memory == (ending != ".npy")
    assert source.nbytes == values.nbytes


@pytest.mark.parametrize("shape", [(5, 7), (5, 2, 7), (5, 4, 4, 4), (5, 2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_floats_of_any_shape_are_taken_as_they_are(tmp_path, shape, dtype):
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    np.save(tmp_path / "x.npy", values)
    source = open_data("array", tmp_path / "x.npy")
    found, labels = everything(source)
    assert labels is None
    assert (source.shape, source.classes, source.image) == (shape[1:], 0, False)
    decoded = source.decode(found)
    assert decoded.dtype == torch.float32
    assert np.array_equal(decoded.numpy(), values.astype(np.float32))


def test_float_pictures_can_be_declared(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 8, 8, 3), np.float32))
    source = open_data("array", tmp_path / "x.npy", options={"pictures": True, "channels_last": True})
    assert (source.image, source.shape) == (True, (3, 8, 8))
    with pytest.raises(ValueError, match="unset pictures"):
        open_data("array", tmp_path / "x.npy", options={"pictures": True})
    np.save(tmp_path / "x.npy", np.array([0, 255], np.float32)[:, None, None, None] * np.ones((2, 3, 8, 8), np.float32))
    everything(open_data("array", tmp_path / "x.npy"))  # no pictures: any number will do
    with pytest.raises(ValueError, match=r"x holds 255 in row 1, but pictures of floats lie in \[-1, 1\]"):
        everything(open_data("array", tmp_path / "x.npy", options={"pictures": True}))


def test_floats_that_look_like_pictures_with_channels_last_are_said_to_be_read_otherwise(tmp_path, recwarn):
    np.save(tmp_path / "x.npy", np.zeros((4, 8, 8, 3), np.float32))
    with pytest.warns(UserWarning, match="read as 8 channels of 8 x 3; .* set channels_last"):
        assert open_data("array", tmp_path / "x.npy").shape == (8, 8, 3)
    np.save(tmp_path / "latents.npy", np.zeros((4, 4, 8, 8), np.float32))
    recwarn.clear()
    open_data("array", tmp_path / "latents.npy")
    open_data("array", tmp_path / "x.npy", options={"channels_last": False})
    assert not recwarn.list


def test_an_ambiguous_layout_is_asked_about(tmp_path):
    np.save(tmp_path / "x.npy", noise(6, 3, 5, 4))
    with pytest.raises(ValueError, match="either axis 1 or axis 3 may be the channels; set channels_last"):
        open_data("array", tmp_path / "x.npy")
    assert open_data("array", tmp_path / "x.npy", options={"channels_last": False}).shape == (3, 5, 4)
    assert open_data("array", tmp_path / "x.npy", options={"channels_last": True}).shape == (4, 3, 5)
    np.save(tmp_path / "y.npy", noise(6, 7, 5, 7))
    with pytest.raises(ValueError, match="neither axis"):
        open_data("array", tmp_path / "y.npy")


def test_the_only_array_of_a_file_needs_no_name_and_several_do(tmp_path):
    np.savez(tmp_path / "one.npz", whatever=noise(3, 4))
    assert open_data("array", tmp_path / "one.npz").shape == (4,)
    np.savez(tmp_path / "two.npz", a=noise(3, 4), b=noise(3, 5))
    with pytest.raises(ValueError, match="set key to one of a, b"):
        open_data("array", tmp_path / "two.npz")
    assert open_data("array", tmp_path / "two.npz", options={"key": "b"}).shape == (5,)
    np.savez(tmp_path / "numbered.npz", noise(3, 4), **{"0": noise(3, 5)})
    assert open_data("array", tmp_path / "numbered.npz", options={"key": 0}).shape == (5,)  # as YAML has it
    with pytest.raises(ValueError, match="no array 'c'"):
        open_data("array", tmp_path / "two.npz", options={"key": "c"})


def test_splits_of_arrays_are_files(tmp_path):
    np.save(tmp_path / "train.npy", noise(3, 4))
    np.save(tmp_path / "test.npy", noise(2, 4))
    assert len(open_data("array", tmp_path)) == 3
    assert len(open_data("array", tmp_path, split="test")) == 2
    assert len(open_data("array", tmp_path / "train.npy", split="test")) == 2
    with pytest.raises(FileNotFoundError, match=r"no file val\.npy"):
        open_data("array", tmp_path, split="val")


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[Hostile(tmp_path / "harm")]], object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=np.array([[Hostile(tmp_path / "harm")]], object))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(ValueError, match="plain numbers"):
            open_data("array", tmp_path / name)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("values", "labels", "options", "message"),
    [
        (np.zeros((3, 4), np.int32), None, {}, "int32: save it as uint8"),
        (np.zeros(3, np.float32), None, {}, "at least one more"),
        (np.zeros((0, 4), np.float32), None, {}, "none of them empty"),
        (noise(3, 4), np.arange(2), {}, "must be 3 whole numbers"),
        (noise(3, 4), np.zeros(3), {}, "must be 3 whole numbers, got float64"),
        (noise(3, 4), np.array([0, -1, 2]), {}, "negative, got -1"),
        (noise(3, 4), np.arange(3), {"classes": 2}, "needs at least 3 classes"),
    ],
)
def test_arrays_that_cannot_be_data_are_refused(tmp_path, values, labels, options, message):
    np.save(tmp_path / "x.npy", values)
    if labels is not None:
        np.save(tmp_path / "x_labels.npy", labels)
    with pytest.raises(ValueError, match=message):
        open_data("array", tmp_path / "x.npy", options=options)


def test_files_of_another_kind_are_refused(tmp_path):
    for name, message in (
        ("x.pt", "no array file"),
        ("x.npy", "not a .npy"),
        ("x.npz", "not an .npz"),
        ("x.safetensors", "not a .s"),
    ):
        (tmp_path / name).write_bytes(b"something else altogether")
        with pytest.raises(ValueError, match=message):
            open_data("array", tmp_path / name)


def test_a_row_that_is_not_finite_is_named_when_it_is_read(tmp_path):
    values = np.zeros((9, 2), np.float32)
    values[7, 1] = np.nan
    np.save(tmp_path / "x.npy", values)
    source = open_data("array", tmp_path / "x.npy")
    source.read(np.array([1, 8]))
    with pytest.raises(ValueError, match="NaN or infinity in row 7"):
        source.read(np.array([8, 7]))


def test_more_classes_than_labels_show_can_be_declared(tmp_path):
    np.savez(tmp_path / "x.npz", data=noise(3, 4), labels=np.array([0, 1, 1]))
    assert open_data("array", tmp_path / "x.npz", options={"classes": 10}).classes == 10


# Hugging Face


@pytest.fixture(scope="module")
def dataset():
    datasets = pytest.importorskip("datasets")
    pictures = [Image.fromarray(noise(5, 5, 3, seed=i)) for i in range(6)]
    features = datasets.Features(
        {"id": datasets.Value("int64"), "picture": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    content = {"id": range(6), "picture": pictures, "kind": [0, 1, 2, 0, 1, 1]}
    return datasets.Dataset.from_dict(content, features=features)


def test_a_saved_dataset_gives_pictures_and_labels_found_by_their_type(dataset, tmp_path):
    dataset.save_to_disk(tmp_path / "saved")
    source = open_data("huggingface", tmp_path / "saved")
    values, labels = source.read(np.array([4, 2]))
    assert np.array_equal(values.numpy(), np.stack([noise(5, 5, 3, seed=i).transpose(2, 0, 1) for i in (4, 2)]))
    assert labels.tolist() == [1, 2]
    assert (len(source), source.shape, source.classes, source.image, source.nbytes) == (6, (3, 5, 5), 3, True, 6 * 75)
    small = open_data("huggingface", tmp_path / "saved", options={"size": 2, "channels": 1, "labels": False})
    assert small.read(np.array([0]))[0].shape == (1, 1, 2, 2)
    assert small.classes == 0
    assert small.fingerprint() != source.fingerprint()
    assert open_data("huggingface", str(tmp_path / "saved")).fingerprint() == source.fingerprint()
    with pytest.raises(ValueError, match="without splits"):
        open_data("huggingface", tmp_path / "saved", split="test")


def test_splits_of_a_saved_dataset_are_its_own(dataset, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([3])}).save_to_disk(tmp_path / "saved")
    assert len(open_data("huggingface", tmp_path / "saved", split="test")) == 1
    with pytest.raises(ValueError, match="choose one of train, test"):
        open_data("huggingface", tmp_path / "saved", split="val")


def test_columns_that_do_not_suit_are_named(dataset, tmp_path):
    dataset.remove_columns("picture").save_to_disk(tmp_path / "blind")
    with pytest.raises(ValueError, match="no column of pictures among id, kind"):
        open_data("huggingface", tmp_path / "blind")
    dataset.map(lambda row: {"other": row["picture"]}, features=None).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match="picture, other; set image"):
        open_data("huggingface", tmp_path / "two")
    assert len(open_data("huggingface", tmp_path / "two", options={"image": "other"})) == 6
    with pytest.raises(ValueError, match="'id' is no column of type ClassLabel; there are: kind"):
        open_data("huggingface", tmp_path / "two", options={"image": "other", "label": "id"})


@pytest.mark.parametrize("bad", [0, 2])
def test_a_damaged_picture_of_a_dataset_is_named_by_its_row(tmp_path, bad):
    datasets = pytest.importorskip("datasets")
    for i in range(4):
        save_png(tmp_path / f"{i}.png", noise(32, 32, 3))
    contents = [(tmp_path / f"{i}.png").read_bytes() for i in range(4)]
    contents[bad] = contents[bad][:1000]
    pictures = [{"bytes": content, "path": None} for content in contents]
    made = datasets.Dataset.from_dict({"picture": pictures}, features=datasets.Features({"picture": datasets.Image()}))
    made.save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=rf"cannot read the picture in row {bad} of saved: .*truncated.*put a sound one"):
        open_data("huggingface", tmp_path / "saved").read(np.array([1, 1, bad, 3]))


def test_without_the_datasets_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'noisewise\[datasets\]'"):
        open_data("huggingface", tmp_path)


# Synthetic data and fingerprints


def test_synthetic_data_have_the_shape_asked_for_and_never_change():
    source = Synthetic((3, 32, 32), 10)
    values, labels = everything(source)
    assert values.dtype == torch.uint8
    assert values.shape[1:] == source.shape == (3, 32, 32)
    assert set(labels.tolist()) == set(range(10))
    assert source.image
    assert Synthetic((3, 32, 32), 10).fingerprint() == source.fingerprint()
    floats = Synthetic((4, 8, 8), floats=True)
    assert (floats.image, floats.classes, floats.decode(everything(floats)[0]).dtype) == (False, 0, torch.float32)


def array_source(folder, change):
    np.save(folder / "x.npy", noise(5, 4) if change != "data" else noise(5, 4, seed=1))
    np.save(folder / "x_labels.npy", np.arange(5) if change != "labels" else np.arange(5)[::-1])
    return folder / "x.npy"


def npz_source(folder, change):
    values = noise(5, 40)
    if change == "data":
        values[2, 20] += 1
    np.savez(folder / "x.npz", data=values, labels=np.arange(5) if change != "labels" else np.arange(5)[::-1])
    return folder / "x.npz"


def folder_source(folder, change):
    for i in range(3):
        save_png(folder / "pictures" / f"{i}.png", noise(4, 4, 3, seed=i + (change == "data")))
    if change == "labels":  # a file more
        save_png(folder / "pictures" / "9.png", noise(4, 4, 3))
    return folder / "pictures"


@pytest.mark.parametrize(("kind", "write"), [("array", array_source), ("array", npz_source), ("folder", folder_source)])
def test_a_fingerprint_changes_with_the_data_and_not_with_their_place(tmp_path, kind, write):
    prints = []
    for number, change in enumerate([None, None, "data", "labels"]):
        (tmp_path / str(number)).mkdir()
        prints.append(open_data(kind, write(tmp_path / str(number), change)).fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert all(len(text) == 16 for text in prints)


def test_options_that_change_the_samples_change_the_fingerprint(tmp_path):
    path = folder_source(tmp_path, None)
    prints = {open_data("folder", path, options=options).fingerprint() for options in ({}, {"size": 2}, {"channels": 1})}
    assert len(prints) == 3


def test_some_rows_stand_for_all(tmp_path):
    labels = np.repeat(np.arange(5), 20)
    np.savez(tmp_path / "sorted.npz", x=np.zeros((100, 8, 8, 3), np.uint8), labels=labels)
    source = open_data("array", tmp_path / "sorted.npz")
    assert np.bincount(labels[source.some(10)]).tolist() == [2] * 5
    assert source.some(None).tolist() == source.some(1000).tolist() == list(range(100))
    assert open_data("digits", split="test").some(3).tolist() == [0, 1, 2]  # their order tells nothing
