"""`visspec train vq`: gradients of the quantiser, a short training through the command line, its folder, refusals."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.doubles import one_sentence
from visspec.api import train_vq
from visspec.cli.main import main
from visspec.models.scales.multiscale import MultiScaleShape, MultiScaleVAE, Quantizer, ScaleSizes
from visspec.models.var.layout import CONFIG, load_var_vae, save_vae

SMALL = ["--sides", "1,2,4", "--levels", "2", "--codes", "32", "--size", "4", "--rows", "4", "--every", "40"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of one colour with a square of another; the first, which is held out, is the second again."""
    where, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(12):
        pixels = np.zeros((20, 16, 3), np.uint8) + rng.integers(0, 256, 3, dtype=np.uint8)
        top, left = rng.integers(0, 8, 2)
        pixels[top : top + 8, left : left + 8] = rng.integers(0, 256, 3, dtype=np.uint8)
        for name in ("0", "1") if i == 1 else (str(i),):
            Image.fromarray(pixels).save(where / f"{name}.png")
    return where


def command(folder, out, *more):
    return ["train", "vq", "--data", str(folder), "--out", str(out), *SMALL, *more]


# --- the quantiser ----------------------------------------------------------------------------------------------------


def test_gradients_go_where_they_should():
    """The sum's to the features unchanged; the codes' to codebook and convolutions, and a share to the features."""
    torch.manual_seed(0)
    quantize, scales = Quantizer(16, 4, 2), ScaleSizes.square(1, 2, 3)
    features = torch.randn(2, 4, 3, 3, requires_grad=True)
    summed, loss, brought, codes = train_vq.quantise(quantize, features, scales)
    assert torch.equal(codes, quantize.encode(features.detach(), scales))
    torch.testing.assert_close(summed, quantize.features(codes, scales))
    assert [part.shape for part in brought] == [(2, 1, 4), (2, 4, 4), (2, 9, 4)]
    weight = torch.randn_like(summed)
    (found,) = torch.autograd.grad((summed * weight).sum(), features, retain_graph=True)
    assert torch.equal(found, weight)
    total, by_hand, pull = torch.zeros_like(summed), 0.0, torch.zeros_like(summed)
    for k, own in enumerate(codes.split(scales.sizes, dim=1)):
        total = total + quantize.part(k, scales, own)
        by_hand = by_hand + 1.25 * (total - features).square().mean()
        pull = pull + 0.25 * 2 * (features - total) / features.numel()
    torch.testing.assert_close(loss, by_hand / 3)
    moved = torch.autograd.grad(loss, [features, *quantize.parameters()], allow_unused=True)
    torch.testing.assert_close(moved[0], pull / 3)
    assert moved[1].abs().sum() > 0 and moved[1][~torch.isin(torch.arange(16), codes)].abs().sum() == 0


def test_unused_codes_start_again_at_what_a_map_was_to_bring():
    stage = object.__new__(train_vq.MultiScaleVQStage)
    stage.model = MultiScaleVAE(MultiScaleShape(6, 2, 32, (1, 2), 1))
    stage.options, stage.step, stage.workers = type("O", (), {"seed": 0}), 3, 1
    before = stage.model.quantize.embedding.weight.detach().clone()
    stage.used = torch.tensor([True, False, True, True, False, True])
    brought = [torch.full((2, 1, 2), 7.0), torch.full((2, 4, 2), 9.0)]
    stage.restart(brought, all_of_them=False)
    after = stage.model.quantize.embedding.weight.detach()
    kept = torch.tensor([0, 2, 3, 5])
    assert torch.equal(after[kept], before[kept]) and not stage.used.any()
    assert all(row.tolist() in ([7.0, 7.0], [9.0, 9.0]) for row in after[[1, 4]])
    stage.restart(brought, all_of_them=True)
    assert set(stage.model.quantize.embedding.weight.flatten().tolist()) <= {7.0, 9.0}


# --- the command ------------------------------------------------------------------------------------------------------


def measured(out):
    return json.loads((out / "provenance.json").read_text())


def test_a_finished_training_is_left_as_it_is_and_goes_on_when_asked(folder, tmp_path, capsys):
    assert main(command(folder, tmp_path, "--steps", "2")) == 0
    first, early = load_file(tmp_path / "model.safetensors"), measured(tmp_path)
    assert early["step"] == 2 and early["recipe"] == "train_vq" and early["measured"]["held_out"] == 1
    assert early["options"]["sides"] == "(1, 2, 4)"
    assert main(command(folder, tmp_path, "--steps", "2", "--resume")) == 0
    assert all(torch.equal(value, first[name]) for name, value in load_file(tmp_path / "model.safetensors").items())
    assert main(command(folder, tmp_path, "--steps", "4", "--resume")) == 0
    assert measured(tmp_path)["step"] == 4
    assert not torch.equal(load_file(tmp_path / "model.safetensors")["quant_conv.bias"], first["quant_conv.bias"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["images"] == 12 and any("psnr" in line for line in lines)


@pytest.mark.nightly
def test_training_makes_pictures_better(folder, tmp_path):
    assert main(command(folder, tmp_path, "--steps", "20")) == 0
    early = measured(tmp_path)["measured"]["psnr"]
    assert main(command(folder, tmp_path, "--steps", "120", "--resume")) == 0
    late = measured(tmp_path)["measured"]
    assert late["psnr"] > early + 2 and late["codes_used"] > 2


@pytest.mark.nightly
def test_two_processes_train_one_autoencoder(folder, tmp_path):
    out = tmp_path / "vq"
    assert main(command(folder, out, "--steps", "2", "--workers", "2")) == 0
    assert load_var_vae(out).shape.codes == 32


def test_a_folder_is_what_the_loader_reads(folder, tmp_path):
    assert main(command(folder, tmp_path, "--steps", "2")) == 0
    model, scales = load_var_vae(tmp_path), ScaleSizes.square(1, 2, 4)
    assert json.loads((tmp_path / CONFIG).read_text())["scales"] == [list(grid) for grid in scales.grids]
    assert not model.training and model.factor == 2
    pixels = (
        torch.from_numpy(train_vq.square(Image.open(folder / "0.png"), 8).copy()).permute(2, 0, 1)[None] / 127.5 - 1
    )
    codes = model.encode(pixels, scales)
    assert codes.shape == (1, 21) and model.decode(codes, scales).shape == (1, 3, 8, 8)
    assert load_var_vae(tmp_path, torch.bfloat16).quantize.embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, c: t.pop("quant_conv.bias"), "lacks tensor 'quant_conv.bias'"),
        (lambda t, c: t.update(more=torch.ones(1)), "unknown tensor 'more'"),
        (lambda t, c: c["shape"].update(codes=33), "has shape"),
        (lambda t, c: c["shape"].update(colour=3), "config.json of .* has a wrong entry"),
        (lambda t, c: c["shape"].update(size=0), "size: got 0, expected a whole number"),
    ],
)
def test_another_folder_is_refused(tmp_path, change, said):
    save_vae(tmp_path, MultiScaleVAE(MultiScaleShape(8, 4, 32, (1, 2), 1)), ScaleSizes.square(1, 2))
    tensors, entries = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    change(tensors, entries)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with one_sentence(said):
        load_var_vae(tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--channels", "40"], "channels: got 40, expected a multiple of 32"),
        (["--rate", "0"], "rate: got 0.0, expected a positive number"),
        (["--workers", "2", "--device", "cuda"], "workers: got 2 on cuda, expected 1"),
        (["--data", "/nowhere"], "data: /nowhere is neither a folder nor a file"),
    ],
)
def test_bad_options_are_refused_before_work(folder, tmp_path, capsys, more, said):
    assert main(command(folder, tmp_path, "--steps", "1", *more)) == 2
    text = capsys.readouterr().err
    assert said in text and text.count("\n") == 1 and not (tmp_path / "model.safetensors").exists()


def test_sides_and_checkpoints_are_checked(folder, tmp_path, capsys):
    for sides in ("4,2", "a", "0,1", ""):
        with pytest.raises(SystemExit) as ended:
            main(command(folder, tmp_path, "--steps", "1", "--sides", sides))
        assert ended.value.code == 2 and "expected rising whole numbers" in capsys.readouterr().err
    (tmp_path / "training.pt").write_bytes(b"")
    assert main(command(folder, tmp_path, "--steps", "1")) == 2
    assert "has a checkpoint already, expected --resume or another folder" in capsys.readouterr().err
