"""The image pipeline and `visspec generate`: diffusers' habits, one image in any batch, bad input in a sentence."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.doubles import raises_line
from visspec import registry
from visspec.api import grid
from visspec.api.images.pipeline import ImagePipeline
from visspec.cli import main as cli
from visspec.io import included
from visspec.models.jacobi.drafter import Jacobi
from visspec.toys.world.detector import ShapeDetector

PROMPTS = ["a photo of a red cross left of a blue ring", "a photo of two stars", "a photo of a circle"]
TOKENS = 36


def test_default_preset(pipe):
    assert "`pipe(prompt)`, which is preset `gumbel`" in (Path(__file__).parents[1] / "README.md").read_text()
    fresh = type(pipe)(pipe.model, pipe.processor)
    assert (fresh.drafter, fresh.acceptance) == registry.preset("gumbel", "codes")[:2]


def test_images_tokens_maps_and_statistics(pipe):
    out = pipe(PROMPTS[:2], num_images_per_prompt=2, seed=5)
    assert [i.size for i in out.images] == [(48, 48)] * 4 and all(isinstance(i, Image.Image) for i in out.images)
    assert out.prompts == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2 and out.seeds == [5, 6, 7, 8]
    assert all(len(t) == TOKENS for t in out.tokens) and out.maps[0].shape == out.passes[0].shape == (6, 6)
    assert out.stats[0].guarantee == "exact" and out.stats[0].tokens == 4 * TOKENS
    assert out.passes[0].reshape(-1)[0] == 0 and (np.diff(out.passes[0].reshape(-1)) >= 0).all()


@pytest.mark.parametrize("method", [("jacobi", "exact"), ("jacobi:redraw=maximal,window=5", "rejection"),
                                    ("jacobi:redraw=maximal", "lantern:k=20,delta=0.2")])  # fmt: skip
def test_image_alone_and_in_batch(pipe, method):
    options = {"drafter": method[0], "acceptance": method[1]}
    together = pipe(PROMPTS, seed=3, **options)
    split = pipe(PROMPTS, seed=3, batch_size=2, **options)
    alone = [pipe(p, seed=3 + i, **options).tokens[0] for i, p in enumerate(PROMPTS)]
    for b in range(3):
        assert torch.equal(together.tokens[b], alone[b]) and torch.equal(split.tokens[b], alone[b])


def test_greedy_equals_stock_generate(pipe):
    batch = pipe.processor(text=PROMPTS, generation_mode="image", padding=True, return_tensors="pt")
    stock = pipe.model.generate(**batch, generation_mode="image", do_sample=False, guidance_scale=3.0)
    for drafter in (None, Jacobi(7)):
        ours = pipe(PROMPTS, temperature=0, guidance_scale=3.0, drafter=drafter)
        assert torch.equal(torch.stack(ours.tokens), stock)


def test_output_types(pipe):
    kinds = {k: pipe(PROMPTS[0], seed=2, output_type=k).images[0] for k in ("pil", "np", "pt", "latent")}
    assert kinds["np"].shape == (48, 48, 3) and kinds["pt"].shape == (3, 48, 48) and kinds["latent"].shape == (6, 6)
    assert 0 <= kinds["np"].min() and kinds["np"].max() <= 1
    both = [pipe(PROMPTS[:2], seed=2, output_type=kind).images.shape for kind in ("np", "pt")]
    assert both == [(2, 48, 48, 3), (2, 3, 48, 48)]
    assert np.abs(np.asarray(kinds["pil"], float) / 255 - kinds["np"]).max() < 0.003
    assert torch.allclose(torch.from_numpy(kinds["np"]).permute(2, 0, 1), kinds["pt"])


RAGGED = {"drafter": "jacobi:redraw=maximal,window=8", "acceptance": "rejection", "seed": 0}


def whole(state):
    return sum(len(tokens) == TOKENS for tokens in state.tokens)


@pytest.mark.parametrize("how", ["flag", "keyboard"])
def test_interrupt_keeps_finished_images(pipe, how):
    result = []

    def stop(pipeline, step, done, extra):
        result.append(whole(extra["state"]))
        if result[-1] and how == "keyboard":
            raise KeyboardInterrupt
        pipeline.interrupt = bool(result[-1])

    every = pipe(PROMPTS * 2, **RAGGED)
    with pytest.raises(KeyboardInterrupt) if how == "keyboard" else contextlib.nullcontext():
        pipe(PROMPTS * 2, **RAGGED, callback_on_step_end=stop)
    out = pipe.last_output
    assert result[:-1] == [0] * (len(result) - 1) and 0 < result[-1] == len(out.images) < 6
    for seed, image, tokens in zip(out.seeds, out.images, out.tokens):
        assert np.array_equal(image, every.images[seed]) and torch.equal(tokens, every.tokens[seed])


def test_interrupt_skips_later_batches(pipe):
    def stop(pipeline, step, done, extra):
        pipeline.interrupt = bool(pipeline.last_output.images)

    out = pipe(PROMPTS * 2, seed=0, batch_size=2, callback_on_step_end=stop)
    assert out.seeds == [0, 1] and len(out.images) == 2
    assert all(np.array_equal(a, b) for a, b in zip(out.images, pipe(PROMPTS[:2], seed=0).images))


def test_parts_move_with_model(folder):
    result = ImagePipeline.from_pretrained(str(folder), torch_dtype=torch.bfloat16, acceptance="lantern:k=4,delta=0.1")
    result.setup("jacobi:redraw=maximal", "lantern:k=4,delta=0.1")
    assert result.model.dtype == torch.bfloat16 and result._built
    result.to("meta")
    assert result.family.codebook.device.type == "meta" and not result._built
    assert result.setup("jacobi", "exact").drafter.limits.device.type == "meta"


@pytest.mark.parametrize("change,words", [
    ({"prompt": []}, "prompt: got"), ({"prompt": "red " * 300}, "prompt: got"),
    ({"num_images_per_prompt": 0}, "num_images_per_prompt: got 0"), ({"batch_size": 0}, "batch_size: got 0"),
    ({"output_type": "jpg"}, "output_type: got 'jpg'"), ({"height": 64}, "height, width: got 64"),
    ({"temperature": -1}, "temperature: got -1"), ({"top_p": 1.5}, "top_p: got 1.5"),
    ({"guidance_scale": -2}, "guidance: got -2"), ({"height": 0}, "height: got 0"),
    ({"acceptance": "lantern:k=5000,delta=0.1"}, "k: got 5000"),
    ({"drafter": "jacobi:redraw=independent"}, "drafter: Jacobi samples, expected point masses for the rule Exact"),
    ({"drafter": "jacobi:window=2.5"}, "window: got 2.5"),
])  # fmt: skip
def test_bad_calls_refused_first(pipe, change, words, monkeypatch):
    monkeypatch.setattr("visspec.loop.setup.DecodingSetup.decode", lambda *a: pytest.fail("decoding began"))
    with raises_line(f"^{re.escape(words)}") as error:
        pipe(**({"prompt": PROMPTS[0]} | change))
    assert "expected" in str(error.value)


def test_unknown_words_warn(folder):
    pipe = ImagePipeline.from_pretrained(str(folder))
    with pytest.warns(UserWarning, match="^prompt: got astronaut, riding, horse, expected words that the model was ta"):
        pipe(["an astronaut riding a horse", PROMPTS[0]], seed=0, output_type="latent")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(PROMPTS[0], seed=0, output_type="latent")


def test_the_command(folder, tmp_path, capsys):
    arguments = ["generate", PROMPTS[0], "-n", "3", "--model", str(folder), "--out", str(tmp_path / "o")]
    arguments += ["--grid", str(tmp_path / "g.png"), "--maps", "--json", str(tmp_path / "r.json"), "--stats"]
    arguments += ["--acceptance", "lantern:k=10,delta=0.1", "--batch-size", "2"]
    assert cli.main(arguments) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert [r["seed"] for r in record["results"]] == [0, 1, 2] and record["provenance"]
    assert all(r["guarantee"] == "approximate" and r["drift_per_token"] > 0 for r in record["results"])
    assert len(list((tmp_path / "o").glob("*.png"))) == 3 and Image.open(tmp_path / "g.png").width > 100
    assert "guarantee: approximate" in capsys.readouterr().out


def test_file_numbers_continue(folder, tmp_path, capsys):
    out, record = tmp_path / "o", tmp_path / "r.json"
    out.mkdir()
    (out / "00041.png").write_text("of an earlier run")
    (out / "notes.png").write_text("no number")
    arguments = ["generate", PROMPTS[0], "-n", "2", "--model", str(folder), "--out", str(out), "--json", str(record)]
    assert cli.main(arguments) == 0
    assert sorted(p.name for p in out.iterdir()) == ["00041.png", "00042.png", "00043.png", "notes.png"]
    assert (out / "00041.png").read_text() == "of an earlier run"
    assert "up to number 41; continuing" in capsys.readouterr().err
    assert [r["path"][-9:] for r in json.loads(record.read_text())["results"]] == ["00042.png", "00043.png"]


def test_bench_refuses_method_first(folder, capsys, monkeypatch):
    monkeypatch.setattr("visspec.cli.bench_image.StockImageArm.__call__", lambda *a: pytest.fail("drawing began"))
    wrong = {"jacobi/nope": "acceptance: got 'nope'", "islands/exact": "Pass order='islands'"}
    for pair, words in wrong.items():
        assert cli.main(["bench", "image", "--model", str(folder), "--count", "2", "--method", f"x={pair}"]) == 2
        assert words in capsys.readouterr().err


def test_a_bench_judges_and_resumes(folder, tmp_path, capsys, monkeypatch):
    few = included.scenes().prompts()[:4]
    monkeypatch.setattr(type(included.scenes()), "prompts", lambda self: few)
    monkeypatch.setattr(ShapeDetector, "_explain", lambda *_: None)  # a random painter's noise takes it seconds
    record = tmp_path / "bench.json"
    near = "near=jacobi:redraw=maximal,window=6/lantern:k=10,delta=0.2"

    def run(prompts, *methods):
        argv = ["bench", "image", "--model", folder, "--quality", 2, "--out", tmp_path / "i", "--count", prompts]
        argv += ["--world", "shapes"]
        argv += [part for method in methods for part in ("--method", method)]
        return cli.main(list(map(str, [*argv, "--json", record])))

    assert run(2, "plain", "gumbel", near) == 0
    rows = {r["name"]: r for r in json.loads(record.read_text())["rows"]}
    assert list(rows) == ["plain", "gumbel", "near"] and rows["plain"]["nfe"] == TOKENS
    assert rows["gumbel"]["identical"] == 2 and rows["gumbel"]["guarantee"] == "exact"
    assert rows["near"]["nfe"] < TOKENS
    assert rows["plain"]["geneval"] == rows["gumbel"]["geneval"] and rows["plain"]["fd"] == rows["gumbel"]["fd"] > 0
    assert rows["gumbel"]["drift_per_token"] == 0 < rows["near"]["drift_per_token"]
    shutil.rmtree(tmp_path / "i" / "near" / "00001")  # lost in a kill: it alone is drawn again
    kept = (tmp_path / "i" / "near" / "00000" / "samples" / "0000.png").stat().st_mtime_ns
    assert run(1, "plain", near) == 0
    assert (tmp_path / "i" / "near" / "00001" / "samples" / "0000.png").exists()
    assert (tmp_path / "i" / "near" / "00000" / "samples" / "0000.png").stat().st_mtime_ns == kept
    assert cli.main(["bench", "image", "--model", str(folder), "--method", "odd"]) == 2
    assert "preset: got 'odd'" in capsys.readouterr().err


def test_grid_and_maps():
    images = [Image.new("RGB", (20, 20), c) for c in ("red", "green", "blue")]
    sheet = grid.grid(images, ["a b c d e f g", "", "x"], columns=2)
    assert sheet.getpixel((grid.MARGIN, grid.MARGIN)) == (255, 0, 0) and sheet.width == 2 * 20 + 3 * grid.MARGIN
    assert grid.origin_image(np.zeros((2, 3), np.uint8), 30).size == (30, 30)


def test_chart_axes_and_legend():
    series = {"a": ("#ff0000", [(1, 1), (4, 2)]), "b": ("#0000ff", [(1, 0.5), (4, 0.5)])}
    page = grid.chart(series, "x", "y", (300, 200))
    assert page.size == (300, 200) and page.getpixel((5, 195)) == (255, 255, 255)
    colours = {colour for _, colour in page.getcolors(60_000)}
    assert {(255, 0, 0), (0, 0, 255)} <= colours  # both lines
    left = np.asarray(page)[60:140, 56]
    assert (left < 100).all(), "the vertical axis"
