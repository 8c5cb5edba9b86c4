"""Safe reading of image files in common formats, with a pixel limit.

An unreadable file raises an exception that names it (`open_image`) or is added to a list (`iter_images`).
"""

import base64
import io
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps, features

AVIF = features.check("avif")  # missing in some builds of Pillow
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", *(("AVIF",) if AVIF else ()))
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", *((".avif",) if AVIF else ()))
UNREAD = {".avif", ".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".tga"}
UNREAD -= set(SUFFIXES)  # image files of unsupported formats
MAX_PIXELS = 64_000_000
HEADERS = threading.Lock()
DATA_URL = re.compile(r"data:image/(png|jpeg|webp|bmp|gif|tiff|avif)(;[^,]*)?;base64,", re.IGNORECASE)


def open_image(path: str | Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the first frame of a file in one of `FORMATS` as a loaded RGB image, rotated by its EXIF orientation and
    composited over white. Raises FileNotFoundError if the file does not exist, and ValueError for missing permissions,
    another format, a broken file, or more than `max_pixels` pixels.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"image file {path} does not exist")
    if not path.is_file():
        raise ValueError(f"{path} is not a file, so it cannot be read as an image")
    return _open(path, path, max_pixels)


def read_image(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Like `open_image`, from the content of a file; `name` is used in errors."""
    return _open(io.BytesIO(data), name, max_pixels)


def data_url_bytes(url: str, name: str) -> bytes:
    """Return the file in an image's data URL; `name` is used in errors. Raises ValueError for other URLs."""
    if (head := DATA_URL.match(url)) is None:
        form = "a data URL of a PNG, JPEG or WEBP (data:image/png;base64,...)"
        raise ValueError(f"{name}: got {url[:40]!r} for an image, send {form}. Nothing is fetched.")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"{name}: the base64 of an image cannot be read ({error}).") from None


def image_size(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return width and height from an image's header. Raises ValueError as `open_image` if the header is invalid."""
    with _errors(name, max_pixels), _header(io.BytesIO(data), name, max_pixels) as image:
        return image.size


@contextmanager
def _errors(path: str | Path, max_pixels: int) -> Iterator[None]:
    try:
        yield
    except _TooLarge as error:
        raise ValueError(str(error)) from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"{path} has more pixels than the limit of {max_pixels}") from None
    except Image.UnidentifiedImageError:
        raise ValueError(f"{path} is not a readable {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image") from None
    except Exception as error:  # Pillow's decoders raise many kinds for broken files
        if isinstance(error, OSError) and error.errno is not None:  # raised by the system, not by the decoder
            raise ValueError(f"{path} could not be read ({error.strerror})") from None
        raise ValueError(f"{path} is broken or truncated and cannot be decoded ({error})") from None


class _TooLarge(Exception):
    pass


@contextmanager
def _header(file: Path | io.BytesIO, path: str | Path, max_pixels: int) -> Iterator[Image.Image]:
    with HEADERS, warnings.catch_warnings():  # warning filters are global
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = Image.open(file, formats=FORMATS)
    with image:
        width, height = image.size
        if width * height > max_pixels:
            raise _TooLarge(f"{path} has {width} x {height} pixels, more than the limit of {max_pixels}")
        yield image


def _open(file: Path | io.BytesIO, path: str | Path, max_pixels: int) -> Image.Image:
    with _errors(path, max_pixels):
        with _header(file, path, max_pixels) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
        del opened  # frees the pixels, which were copied
        if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey instead of scaling it
            image = image.convert("I").point(lambda v: v / 257).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return image if image.mode == "RGB" else image.convert("RGB")


def png_bytes(image: Image.Image, **options: bool) -> bytes:
    """Return an image as a PNG file; `options` are those of Pillow."""
    image.save(file := io.BytesIO(), "PNG", **options)
    return file.getvalue()


def natural_key(path: str | Path) -> list[tuple[int, int, str]]:
    """Return a sort key by which `img2.png` comes before `img10.png`, folder by folder."""
    parts = re.split(r"(\d+)", str(path).lower())
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts if part]


def image_files(folder: str | Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Return the files of a folder with one of the suffixes, in natural order, except hidden ones. Raises
    FileNotFoundError if the folder does not exist, OSError if a part of it can't be listed, and ValueError if it has no
    image.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {folder} does not exist")
    files = [path for path in _visible(folder) if path.suffix.lower() in suffixes]
    if not files:
        others = "".join(f", but {count} {kind}" for kind, count in unread_kinds(folder).items())
        raise ValueError(f"the folder {folder} holds no image ({', '.join(suffixes)}){others}")
    return sorted(files, key=natural_key)


def _visible(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for home, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(home, name) for name in names if not name.startswith("."))


def unread_kinds(files: Path | Iterable[Path]) -> Counter[str]:
    """Count, by suffix, the files of a list or folder that look like images of unsupported formats."""
    paths = _visible(files) if isinstance(files, Path) else files
    return Counter(kind for path in paths if (kind := path.suffix.lower()) in UNREAD)


def inside(folder: str | Path, name: str) -> Path:
    """Return a file of a folder. Raises ValueError if the name leads outside it."""
    folder = Path(folder)
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the image name {name!r} leads out of {folder}")
    return path


def iter_images(files: Iterable[Path], broken: list[tuple[Path, str]]) -> Iterator[tuple[Path, Image.Image]]:
    """Open files one at a time, in order. Unreadable files are appended to `broken` with the reason."""
    for path in files:
        try:
            image = open_image(path)
        except (ValueError, FileNotFoundError) as error:
            broken.append((path, str(error)))
            continue
        yield path, image
