"""Drafters of image codes: trained on pictures that the target draws, saved, loaded, resumed; what is refused."""

import json

import pytest
import torch

from tests import tiny_images as tiny
from tests.doubles import raises_line
from tests.image_cases import llamagen_model
from visspec import ImagePipeline, registry
from visspec.accept.exact import Exact
from visspec.api import sources
from visspec.api.training import image_drafter as training
from visspec.cli.main import main
from visspec.io import included
from visspec.models.distilled import drafter as distilled
from visspec.models.distilled.drafter import DistilledDrafter
from visspec.models.distilled.head import BLANK, GUESSED, KNOWN
from visspec.models.eagle.image_drafter import CaptureTarget
from visspec.presets import RECIPES
from visspec.sampling import gumbel_given
from visspec.train.capture import capture
from visspec.train.loop import Trainer

WORDS = ["a red cube", "blue", "a blue cube on grass"]
TARGETS = {
    "janus": lambda: ImagePipeline(tiny.janus(), tiny.Words()),
    "emu3": lambda: ImagePipeline(tiny.emu3(), tiny.emu3_processor()),
    "glm_image": lambda: ImagePipeline(tiny.glm_image(), tiny.glm_processor()),
    "chameleon": lambda: ImagePipeline(tiny.chameleon(), tiny.ChameleonTexts(), parts={"style": "lumina"}),
    "llamagen": lambda: ImagePipeline(llamagen_model("class"), None),
}
SMALL = {"steps": 4, "rows": 2, "group": 1, "reuse": 2, "unroll": 2, "save_every": 1, "eval_every": 2}
SIZES = {
    "emu3": {"height": 8, "width": 6},
    "glm_image": {"height": 32, "width": 64},
    "chameleon": {"height": 64, "width": 64},
}


class Stopped(Exception): ...


@pytest.fixture
def texts(tmp_path):
    """A file of prompts, one for words and one for class numbers."""
    (tmp_path / "words.txt").write_text("\n\n".join(WORDS))
    (tmp_path / "classes.txt").write_text("1\n2\n3\n")
    return lambda name: tmp_path / ("classes.txt" if name == "llamagen" else "words.txt")


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("preset, name", [
    pytest.param(preset, name, marks=[pytest.mark.nightly] * (name == "glm_image" or preset + name == "distilledemu3"))
    for preset in ("image-eagle", "distilled") for name in TARGETS
])  # fmt: skip
def test_train_and_draw(texts, tmp_path, name, preset):
    pipe, size, out = TARGETS[name](), SIZES.get(name, {}), tmp_path / "out"
    result = training.run(pipe, out, prompts=texts(name), preset=preset, **SMALL, **size)
    assert [entry["step"] for entry in result] == [2, 4] and all(entry["tau_sampled"] >= 1.0 for entry in result)
    prompts = sources.texts(texts(name))[:2]
    asked = {"seed": 3, "output_type": "latent", "acceptance": "exact", **size}
    fast, plain = (pipe(prompts, drafter=spec, **asked) for spec in (str(out), "none"))
    assert all(torch.equal(a, b) for a, b in zip(fast.tokens, plain.tokens)) and fast.stats[0].faults == 0
    fresh = registry.drafter_class(preset).for_model(pipe.family, **RECIPES[preset].network)
    trained = registry.drafter(str(out), pipe.model, pipe.family)[0].head.state_dict()
    assert any(not torch.equal(p, trained[name]) for name, p in fresh.head.state_dict().items())
    card = (out / "README.md").read_text()
    assert f"preset `{preset}`" in card and f"ImagePipeline.from_pretrained('', drafter='{out}')" in card


@pytest.mark.parametrize("preset", ["image-eagle", "distilled"])
def test_killed_run(texts, tmp_path, monkeypatch, preset):
    options = {"prompts": texts("janus"), "preset": preset, **SMALL, "store": tmp_path / "store"}
    training.run(TARGETS["janus"](), tmp_path / "whole", **options)
    update, steps = Trainer.update, []

    def stop(trainer, lessons):
        if len(steps) == 3:
            raise Stopped
        steps.append(1)
        return update(trainer, lessons)

    monkeypatch.setattr(Trainer, "update", stop)
    options["store"] = None  # drawn again, and not read
    with pytest.raises(Stopped):
        training.run(TARGETS["janus"](), tmp_path / "part", **options)
    monkeypatch.undo()
    training.run(TARGETS["janus"](), tmp_path / "part", **options, resume=True)
    assert weights(tmp_path / "part") == weights(tmp_path / "whole")
    with raises_line("resume: got data '2 prompts, "):
        (tmp_path / "words.txt").write_text("blue\nred")
        training.run(TARGETS["janus"](), tmp_path / "part", **options, resume=True)


@pytest.mark.slow
@pytest.mark.skipif(not included.present("painter-lowres"), reason="the included image model is not in this checkout")
def test_prompts_of_included_model(tmp_path):
    training.run("painter-lowres", tmp_path, steps=1, rows=1, group=1, reuse=1, validate_every=0, eval_rows=1)
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert record["target"] == "painter-lowres" and int(record["settings"]["data"].split()[0]) > 50
    assert "from_pretrained('painter-lowres', drafter=" in (tmp_path / "README.md").read_text()


def test_the_shell_trains_for_a_folder(texts, tmp_path, capsys):
    pipe, out = TARGETS["emu3"](), tmp_path / "out"
    pipe.save_pretrained(tmp_path / "model")
    argv = ["train", "drafter", "--target", str(tmp_path / "model"), "--out", str(out), "--steps", "2", "--rows", "2"]
    asked = [*argv, "--prompts", str(texts("emu3")), "--height", "8", "--width", "6"]
    assert main([*asked, "--intermediate", "16"]) == 0
    record = json.loads((out / "provenance.json").read_text())
    assert record["settings"]["intermediate"] == 16 and record["preset"] == "image-eagle"
    again = ImagePipeline.from_pretrained(str(tmp_path / "model"), drafter=str(out))
    assert again("blue", height=8, width=6, output_type="latent").tokens[0].shape == (12,)
    again.save_pretrained(tmp_path / "both")
    assert ImagePipeline.from_pretrained(str(tmp_path / "both")).drafter == str(tmp_path / "both" / "drafter")
    capsys.readouterr()
    for more, message in (
        ([], "prompts: got none. Pass --prompts FILE"),
        (["--max-pixels", "9", "--prompts", "x"], "max_pixels: This run has no such option. --data trains"),
        (["--data", "x", "--height", "9"], "height: This run has no such option"),
        (["--preset", "eagle3", "--prompts", "x"], "preset: got 'eagle3', which is for models of text"),
        (["--layers", "2", "--prompts", "x"], "layers: got 2 with the preset 'image-eagle', which has no such value"),
        (
            ["--prompts", str(texts("emu3"))],
            "already holds a drafter. Choose another folder, or pass --resume or --overwrite",
        ),
    ):
        assert main([*argv, *more]) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(("model", "draws"), [("continuous", "vectors"), ("var", "maps"), ("randar", "any order")])
def test_models_of_other_kinds_are_refused(texts, tmp_path, model, draws):
    pipe = TARGETS["janus"]()
    pipe.family.draws, pipe.family.name = draws, model
    with pytest.raises(ValueError, match=f"target: {model} draws {draws}, expected one that draws code after code"):
        training.run(pipe, tmp_path / "out", prompts=texts(model))
    assert not (tmp_path / "out").exists()


# --- the distilled drafter's lessons ----------------------------------------------------------------------------------


def lesson_of(pipe, rows=3):
    prompts = training.ImagePrompts(pipe, pipe.family.layout(), WORDS, rows, seed=1)
    return capture(CaptureTarget(pipe.family), Exact(), prompts(0))


def test_gumbel_given_codes():
    torch.manual_seed(0)
    logp = torch.randn(5).log_softmax(-1).expand(20000, -1)
    noise = -torch.empty_like(logp).exponential_().log()
    codes = (logp + noise).argmax(-1)
    again = gumbel_given(logp, codes)
    assert torch.equal((logp + again).argmax(-1), codes)
    for which in (again, noise):  # the same law, and that of independent Gumbel numbers
        share = torch.exp(-torch.exp(-which)).sort(dim=0).values  # uniform
        assert (share - torch.linspace(0, 1, len(share))[:, None]).abs().max() < 0.015
        assert (torch.corrcoef(which.T) - torch.eye(5)).abs().max() < 0.03
    cut = gumbel_given(torch.tensor([0.0, -torch.inf]), torch.tensor(0))
    assert cut.isfinite().all() and cut[0] > -1e3


@pytest.mark.parametrize(("shares", "kinds"), [((1.0, 0.0), {KNOWN, BLANK}), ((0.0, 1.0), {KNOWN, GUESSED})])
def test_guess_weights(monkeypatch, shares, kinds):
    pipe = TARGETS["janus"]()
    lesson, used = lesson_of(pipe), DistilledDrafter.for_model(pipe.model, layers=2)
    monkeypatch.setattr(distilled, "BLANKS", shares[0])
    monkeypatch.setattr(distilled, "GUESSES", shares[1])
    seen = []
    used.head.register_forward_pre_hook(lambda module, given: seen.append(given[1]))
    torch.manual_seed(0)
    ((states, weight),) = used.rollout(lesson, 1)
    assert set(seen[-1].flatten().tolist()) == kinds and states.shape[:2] == weight.shape == (3, 15)
    for row, kind in zip(weight, seen[-1]):
        known = int((kind == KNOWN).sum())
        expected = [1.0] * known + [distilled.FADE**n for n in range(1, len(row) - known + 1)]
        torch.testing.assert_close(row, torch.tensor(expected))


def test_guesses_of_knowing_drafter(monkeypatch):
    """With the target's own logits every guess is the code that the noise was drawn for."""
    pipe = TARGETS["janus"]()
    lesson, used = lesson_of(pipe), DistilledDrafter.for_model(pipe.model, layers=2)
    logits = lesson.logits.clone()
    monkeypatch.setattr(used, "trained_logits", lambda states, tokens: logits.log_softmax(-1))
    torch.manual_seed(0)
    codes = lesson.ids[:, lesson.prompt_length : -1]
    ahead = torch.arange(15).expand(3, -1) - 4
    result = used._guesses(lesson, torch.arange(3), ahead, torch.where(ahead > 0, BLANK, KNOWN))
    assert torch.equal(result, codes)


def test_starts_from_target_layers():
    """All layers and the head: the target's distributions, whatever the layout of rotations and of grouped heads."""
    pipe = TARGETS["janus"]()
    family, lesson = pipe.family, lesson_of(pipe)
    used = DistilledDrafter.for_model(pipe.model, layers=2)
    codes = lesson.ids[:, lesson.prompt_length : -1]
    with torch.no_grad():
        states = used._pass(lesson, slice(None), codes, torch.full_like(codes, KNOWN))
        result = used.head.logits(states)
        for b in range(3):
            prompt = lesson.embeddings[b, lesson.attention[b]]
            inputs = torch.cat([prompt, family.embed(codes[b])])[None]
            hidden = family.decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
            expected = family.head(hidden)[:, -codes.shape[1] :]
            torch.testing.assert_close(result[b : b + 1], expected, rtol=1e-3, atol=1e-3)
