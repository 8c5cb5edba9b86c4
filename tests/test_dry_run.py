"""What a training run will take, told before it."""

import pytest
from PIL import Image

from visspec.api import loading, train_drafter
from visspec.cli.main import main
from visspec.models.eagle.drafter import EagleDrafter

TARGET, SIZES = "captioner-emoji", {"rows": 2, "group": 3, "unroll": 2}


@pytest.fixture
def data(tmp_path):
    for i in range(3):
        Image.new("RGB", (96, 96), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
    return tmp_path


def taken(data, **options):
    (found,) = train_drafter.run(TARGET, data, data / "out", dry_run=True, **SIZES, **options)
    return found


def test_a_dry_run_tells_what_a_run_takes(data):
    model, _ = loading.load(TARGET)
    found, longer = (taken(data, max_new_tokens=count, intermediate=96) for count in (9, 17))
    assert (found["depth"], found["layers"]) == (model.config.text_config.num_hidden_layers, 2)
    assert found["target_bytes"] == sum(p.nbytes for p in model.parameters())
    drafter = EagleDrafter.for_model(model, image_latents=1, intermediate=96)
    assert found["drafter_bytes"] == 16 * sum(p.numel() for p in drafter.head.parameters())
    hidden = model.config.text_config.hidden_size
    grown = 2 * 8 * (2 * 4 * hidden + 8 + 8 + 8 + 8)  # states, features; best, both copies of ids, positions
    assert longer["group_bytes"] - found["group_bytes"] == pytest.approx(3 * grown, rel=0.1)
    assert found["step_s"] > 0 and found["run_s"] > 2000 * found["step_s"]
    assert not (data / "out").exists()


def test_what_is_in_the_folder_is_neither_read_nor_refused(data):
    (data / "out").mkdir()
    (data / "out" / "config.json").write_text("{}")
    assert taken(data, max_new_tokens=4, intermediate=96, resume=True)["parameters"] > 0
    assert [path.name for path in (data / "out").iterdir()] == ["config.json"]


def test_the_shell_prints_it_and_writes_nothing(data, capsys):
    argv = ["train", "drafter", "--target", TARGET, "--data", str(data), "--out", str(data / "out"), "--dry-run"]
    assert main([*argv, "--preset", "eagle3", "--rows", "2", "--max-new-tokens", "8", "--steps", "40"]) == 0
    said = capsys.readouterr().out
    parts = ("weights of 12 layers", "M parameters", "of a group", "in all", "with 8 of 12 layers on cpu; 40 steps")
    assert all(part in said for part in parts), said
    assert not (data / "out").exists()
    assert main(["train", "drafter", "--target", "none/of-this", *argv[4:]]) == 2
    assert "none/of-this is neither a folder nor in the cache" in capsys.readouterr().err
