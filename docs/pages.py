"""Pictures of the pages."""

from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent


def smaller(source: Path, name: str, width: int, colours: int) -> None:
    """Put the picture among those of the pages, with at most so many pixels across, and colours unless 0."""
    with Image.open(source) as image:
        picture = image.convert("RGB")
    if picture.width > width:
        picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    path = DOCS / "img" / f"{name}.png"
    picture = picture.quantize(colours, kmeans=4, dither=Image.Dither.NONE) if colours else picture
    picture.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
