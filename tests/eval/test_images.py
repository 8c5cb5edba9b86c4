"""Image opening: three formats, a pixel cap, one sentence for everything else."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from visspec.io.images import image_files, iter_images, open_image


@pytest.fixture
def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif", "tiff", "avif"])
def test_opens_common_formats_as_rgb(tmp_path: Path, picture: Image.Image, suffix: str):
    if suffix == "avif" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    picture.save(tmp_path / f"a.{suffix}")
    image = open_image(tmp_path / f"a.{suffix}")
    assert image.mode == "RGB" and image.size == (30, 20)
    if suffix == "png":
        assert np.array_equal(np.asarray(image), np.asarray(picture))


def test_pixel_cap_before_decoding(tmp_path: Path, picture: Image.Image):
    picture.save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png", max_pixels=600).size == (30, 20)
    with pytest.raises(ValueError, match="30 x 20 pixels, more than the limit of 599"):
        open_image(tmp_path / "a.png", max_pixels=599)


def test_transparency_and_16_bit(tmp_path: Path):
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert np.asarray(open_image(tmp_path / "clear.png")).min() == 255
    Image.fromarray(np.full((4, 4), 128 * 257, np.uint16)).save(tmp_path / "deep.png")
    assert abs(int(np.asarray(open_image(tmp_path / "deep.png")).mean()) - 128) <= 1


def test_folder_order_and_broken_files(tmp_path: Path, picture: Image.Image):
    for i in (10, 2, 1):
        picture.save(tmp_path / f"img{i}.png")
    (tmp_path / "img3.png").write_bytes(b"nothing")
    (tmp_path / "notes.txt").write_text("x")
    files = image_files(tmp_path)
    assert [path.name for path in files] == ["img1.png", "img2.png", "img3.png", "img10.png"]
    broken: list[tuple[Path, str]] = []
    opened = [path.name for path, _ in iter_images(files, broken)]
    assert opened == ["img1.png", "img2.png", "img10.png"]
    assert [path.name for path, _ in broken] == ["img3.png"] and "img3.png" in broken[0][1]
