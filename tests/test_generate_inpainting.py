"""`visspec generate --image FILE --mask FILE`: pictures from files, and files of what is drawn into them."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.doubles import refused
from tests.test_any_order_painter import PIXELS, TEXTS, fresh, masked
from tests.tiny_images import painter_processor
from visspec import ImagePipeline
from visspec.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any-order")
    ImagePipeline(fresh(), painter_processor()).save_pretrained(folder)
    return folder


@pytest.fixture
def files(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    paths = {name: tmp_path / f"{name}.png" for name in ("picture", "mask", "narrow", "small")}
    Image.fromarray(noise).save(paths["picture"])
    Image.fromarray(noise[:8]).save(paths["small"])
    Image.fromarray(masked()).save(paths["mask"])
    Image.fromarray(masked()[:, :24]).save(paths["narrow"])
    return paths


def test_files_are_drawn_into(folder, files, tmp_path, capsys):
    """Two images of a picture: black pixels of what is saved are the picture's, white ones are not."""
    out, record = tmp_path / "out", tmp_path / "r.json"
    argv = ["generate", TEXTS[0], "-n", 2, "--seed", 3, "--model", folder, "--out", out, "--json", record]
    argv += ["--image", files["picture"], "--mask", files["mask"]]
    assert main(list(map(str, argv))) == 0
    saved = [np.asarray(Image.open(path)) for path in sorted(out.glob("*.png"))]
    before, black = np.asarray(Image.open(files["picture"])), masked() == 0
    assert len(saved) == 2 and (saved[0] != saved[1]).any()
    for image in saved:
        assert (image[black] == before[black]).all() and (image[~black] != before[~black]).any()
    assert [row["seed"] for row in json.loads(record.read_text())["results"]] == [3, 4]
    pipe = ImagePipeline.from_pretrained(str(folder))
    own = pipe(TEXTS[0], Image.open(files["picture"]), Image.open(files["mask"]), seed=3)
    assert (np.asarray(own.images[0]) == saved[0]).all()


BAD = [
    (["--mask", "mask"], "visspec: --image: got none, expected both --image and --mask"),
    (["--image", "nowhere", "--mask", "mask"], "visspec: --image: got nowhere, expected an image file"),
    (["--image", "picture", "--mask", "nowhere"], "visspec: --mask: got nowhere, expected an image file"),
    (["--image", "tga", "--mask", "mask"], "is not a readable PNG, JPEG, WEBP"),
    (["--image", "huge", "--mask", "mask"], "more than the limit of 64000000"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=[" ".join(options) for options, _ in BAD])
def test_bad_files_are_refused_before_a_model_is_loaded(options, said, files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("visspec.cli.generate.pipeline", lambda *a, **k: pytest.fail("work began"))
    if "tga" in options:
        files["tga"] = tmp_path / "picture.tga"
        Image.open(files["picture"]).save(files["tga"])
    if "huge" in options:
        files["huge"] = tmp_path / "huge.png"
        Image.new("1", (8001, 8000)).save(files["huge"])
    argv = [str(files.get(option, option)) for option in options]
    assert said in refused(capsys, "generate", TEXTS[0], "--out", tmp_path / "out", *argv)
    assert not (tmp_path / "out").exists()


def test_inpainting_refusals(folder, files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("visspec.api.images.ImagePipeline._batch", lambda *a, **k: pytest.fail("work began"))
    size = f"{PIXELS} x {PIXELS}"
    for model, image, mask, said in (
        (folder, "small", "mask", f"visspec: image: got a size of 8 x {PIXELS}, expected {size}"),
        (folder, "picture", "narrow", f"visspec: mask_image: got a size of {PIXELS} x 24, expected {size}"),
        ("painter", "picture", "mask", "visspec: image: got one (Image), expected none: janus draws from texts"),
    ):
        argv = ["--model", model, "--image", files[image], "--mask", files[mask], "--out", tmp_path / "out"]
        assert refused(capsys, "generate", TEXTS[0], *argv).startswith(said)
    assert not (tmp_path / "out").exists()
