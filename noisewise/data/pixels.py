"""From a picture of any mode and size to uint8 (C, H, W)."""

import os
import struct
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

MODES = {1: "L", 3: "RGB"}
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
"""What Pillow raises for damaged files, besides OSError."""
SCALE = "scale all to one size: --data.options '{size: 32}' (--data-options of evaluate, --options of encode)"
ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}  # what whole files end with
TAIL = 64  # bytes in which that should be: some programs write a little more
TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ORIENTATION = 0x0112


def check_options(size: int | None, channels: int) -> None:
    """`size` and `channels` as every source of pictures takes them."""
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f"size must be a whole number of pixels, at least 1, got {size!r}")
    if type(channels) is not int or channels not in MODES:
        raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {channels!r}")


def check_mode(picture: Image.Image) -> None:
    """Refuse pictures of more than 8 bits: converting them would clip, not scale."""
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 8 bits a channel (mode {picture.mode}); convert it to 8 bits first")


def upright_size(picture: Image.Image) -> tuple[int, int]:
    """Height and width once the camera's orientation is applied; reads the header alone."""
    width, height = picture.size
    told = any(name in picture.info for name in ("exif", "xmp", "XML:com.adobe.xmp"))  # getexif alone may decode a PNG
    turned = told and picture.getexif().get(ORIENTATION) in TURNED
    return (width, height) if turned else (height, width)


def to_array(picture: Image.Image, size: int | None, channels: int) -> NDArray[np.uint8]:
    """uint8 (C, H, W): upright, transparency laid over white, the central square scaled to size x size if a size is given."""
    check_mode(picture)
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert(MODES[channels])
    if size is not None:
        picture = square(picture, size)
    array = np.asarray(picture)
    return array[None] if channels == 1 else np.moveaxis(array, -1, 0)


def square(picture: Image.Image, size: int) -> Image.Image:
    """The central square, scaled to size x size with an antialiasing filter; unchanged if it is that already."""
    width, height = picture.size
    if width == height == size:
        return picture
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return picture.resize((size, size), Image.Resampling.LANCZOS, box=(left, top, left + side, top + side))


def verify(file: IO[bytes], thoroughly: bool) -> tuple[int, int]:
    """Height and width of a picture whose header is sound, and whose every pixel is when asked to look thoroughly.

    A file without its usual end is looked at thoroughly in any case: most damaged files were cut short while being copied.
    """
    with Image.open(file) as picture:
        check_mode(picture)
        if thoroughly or not has_end(file, picture.format):
            picture.load()
        return upright_size(picture)


def has_end(file: IO[bytes], kind: str | None) -> bool:
    """Whether a file ends as whole files of its kind do, where that is known; leaves it where it was."""
    place, size = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL))
    tail = file.read()
    file.seek(place)
    return ENDS.get(kind or "", b"") in tail
