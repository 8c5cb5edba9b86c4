"""Habits of diffusers and transformers: negative prompts, tuples, what callbacks get, saved pipelines, a logger."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

import visspec
from tests import tiny_images as tiny
from tests.doubles import raises_line
from tests.image_cases import TEXTS, Case, draw, made, named
from visspec import registry
from visspec.accept.exact import Exact
from visspec.accept.graphed_rule import GraphedRule
from visspec.accept.rejection import Rejection
from visspec.api import saving
from visspec.api.images.pipeline import ImagePipeline
from visspec.models.eagle.image_drafter import ImageFeatureDrafter
from visspec.models.image_codes.family import family_of
from visspec.models.jacobi.drafter import Jacobi
from visspec.types import State

PROMPTS = ["a photo of a red cross left of a blue ring", "a photo of two stars", "a photo of a circle"]
WORDED = ["janus", "emu3", "anole", "lumina", "llamagen-class", "llamagen-caption"]


@cache
@torch.inference_mode(False)
def drawn() -> ImagePipeline:
    return ImagePipeline(tiny.janus(), tiny.Words())


# --- negative prompts -------------------------------------------------------------------------------------------------


def reading(name: str) -> Case:
    if name == "janus":
        family = family_of(tiny.janus(), tiny.Words())
        return Case(family, family.layout(), 3.0, None, None)
    return made(name)


def texts_for(name: str) -> list[str]:
    return ["3", "7", "1"] if name == "llamagen-class" else TEXTS


def rows_of(prompt) -> list[torch.Tensor]:
    """What each cache row reads: embeddings of its real positions."""
    return [embeds[seen] for embeds, seen in zip(prompt.embeds, prompt.attention)]


@pytest.mark.parametrize("name", WORDED)
def test_negative_prompt_rows(name):
    """A negative prompt is read as a prompt is; an empty one is the model's own unconditional prompt."""
    case, texts = reading(name), texts_for(name)
    family, layout = case.family, case.layout
    negative = [texts[2], "", texts[0]]
    result = rows_of(family.prompt(texts, True, layout, negative))
    alone = rows_of(family.prompt(texts, True, layout))
    assert all(a.equal(b) for a, b in zip(result[:3], alone[:3]))
    assert result[3].equal(alone[2]) and result[5].equal(alone[0])
    if name == "emu3":
        bare = replace(case, family=family_of(family.model, family.processor, negative="")).family
        assert result[4].equal(rows_of(bare.prompt(texts, True, layout))[4]) and not result[4].equal(alone[4])
    else:
        assert result[4].equal(alone[4])
    unguided = family.prompt(texts, False, layout, negative)
    assert len(unguided.embeds) == 3 and unguided.embeds.equal(family.prompt(texts, False, layout).embeds)


@pytest.mark.parametrize("name", WORDED)
def test_guidance_away_from_prompt(name):
    """u + s (c - u) = c where both rows read the same."""
    case, texts = reading(name), texts_for(name)
    family, layout = case.family, case.layout

    def with_negative(negative, guidance):
        def prompt(rows):
            chosen = None if negative is None else [negative[r] for r in rows]
            return family.prompt([texts[r] for r in rows], guidance != 1.0, layout, chosen)

        return replace(case, guidance=guidance, prompt=prompt)

    rows = [0, 1, 2]
    same, none = draw(with_negative(texts, 3.0), rows)[0], draw(with_negative(None, 1.0), rows)[0]
    assert same == none
    other = with_negative([texts[1], "", texts[0]], 3.0)
    together = draw(other, rows, Jacobi(6), temperature=1.0)[0]
    assert together == [draw(other, [r], temperature=1.0)[0][0] for r in rows], "in any batch, drafted or not"


def test_a_call_with_negative_prompts():
    pipe, options = drawn(), {"output_type": "latent", "seed": 0}
    usual = pipe(TEXTS, **options).tokens
    assert all(a.equal(b) for a, b in zip(usual, pipe(TEXTS, negative_prompt="", **options).tokens))
    result = pipe(TEXTS, negative_prompt=["blue", "", "grass"], batch_size=2, **options).tokens
    assert result[1].equal(usual[1]) and not result[0].equal(usual[0]) and not result[2].equal(usual[2])
    for i, negative in enumerate(["blue", None, "grass"]):
        assert pipe(TEXTS[i], negative_prompt=negative, output_type="latent", seed=i).tokens[0].equal(result[i])
    twice = pipe(TEXTS[:2], negative_prompt=["blue", "grass"], num_images_per_prompt=2, batch_size=3, **options)
    assert twice.tokens[3].equal(pipe(TEXTS[1], negative_prompt=["grass"], output_type="latent", seed=3).tokens[0])
    assert pipe(TEXTS[0], negative_prompt="", guidance_scale=1, **options).tokens


def test_negative_prompt_of_call_wins():
    parts = ImagePipeline(tiny.emu3(), tiny.emu3_processor(), parts={"negative": "a blue sphere"})
    usual = ImagePipeline(tiny.emu3(), tiny.emu3_processor(), parts={"negative": "lowres, blurry."})
    options = {"height": 4, "width": 10, "output_type": "latent", "seed": 0}
    other, own = parts(TEXTS[0], **options).tokens[0], usual(TEXTS[0], **options).tokens[0]
    asked = usual(TEXTS[0], negative_prompt="a blue sphere", **options).tokens[0]
    assert asked.equal(other) and not asked.equal(own)


def refused(call, error=ValueError) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_negative_prompts_that_are_refused(monkeypatch):
    monkeypatch.setattr("visspec.loop.setup.DecodingSetup.decode", lambda *a: pytest.fail("decoding began"))
    pipe, glm, classes = drawn(), named("glm_image")[1], named("llamagen-class")[1]
    for caller, text, negative, more, start in (
        (pipe, ["a", "b"], ["b"], {}, "negative_prompt: got 1 texts, expected 2"),
        (pipe, "a", "b", {"guidance_scale": 1.0}, "negative_prompt: got 'b', expected None: without guidance"),
        (glm, "a", "b", {}, "negative_prompt: got 'b', expected None: glm_image has no unconditional"),
        (classes, "3", "b", {}, "negative_prompt: got 'b', expected a class number 0..9"),
        (pipe, "a", "b" * 140, {}, "negative_prompt: got 158 tokens including the image's, expected at most 128"),
    ):
        with raises_line(re.escape(start)):
            caller(text, negative_prompt=negative, output_type="latent", **more)


def test_unknown_negative_words_warn(pipe):
    with pytest.warns(UserWarning, match="^negative_prompt: got moose, expected words that the model was taught"):
        pipe(PROMPTS[0], negative_prompt="a moose", seed=0, output_type="latent")


# --- arguments of a call ----------------------------------------------------------------------------------------------


def test_arguments_of_diffusers(pipe):
    """A tuple in place of an output; what is diffusers' alone is unexpected."""
    out = pipe(PROMPTS[:2], seed=1, output_type="np")
    result = pipe(PROMPTS[:2], seed=1, output_type="np", return_dict=False)
    assert isinstance(result, tuple) and len(result) == 1 and (result[0] == out.images).all()
    assert pipe.last_output.seeds == [1, 2] and "Trace" not in repr(out)
    for call in (drawn(), lambda *given, **options: next(drawn().stream(*given, **options))):
        with pytest.raises(TypeError, match="unexpected keyword argument 'num_inference_steps'"):
            call("a", num_inference_steps=50)


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_callback_codes():
    pipe, seen = drawn(), []

    def watch(pipeline, step, done, given):
        seen.append({k: v.clone() for k, v in given.items() if k != "state"})
        assert isinstance(given["state"], State) and pipeline is pipe
        return given

    out = pipe(TEXTS[:2], seed=0, output_type="latent", callback_on_step_end=watch, drafter="jacobi:window=4",
               callback_on_step_end_tensor_inputs=["tokens", "latents"])  # fmt: skip
    assert all(list(s) == ["tokens", "latents"] for s in seen)
    last, final = seen[-1], torch.stack(out.tokens)
    assert last["tokens"].equal(final) and last["latents"].equal(torch.stack(out.images))
    undrawn = [int((s["tokens"] == -1).sum()) for s in seen]
    assert undrawn == sorted(undrawn, reverse=True) and undrawn[0] > 0 == undrawn[-1]
    for s in seen:
        there = s["tokens"] != -1
        assert s["tokens"][there].equal(final[there]) and s["latents"].flatten(1).equal(s["tokens"])
    assert pipe._callback_tensor_inputs == ("latents", "tokens")


def test_callback_without_tensors():
    names, seen = [], []
    pipe = drawn()
    watch = lambda p, i, t, given: names.append(tuple(sorted(given)))  # noqa: E731
    pipe("a", seed=0, callback_on_step_end=watch)
    pipe("a", seed=0, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=[])
    assert set(names) == {("latents", "state"), ("state",)} and names[0] != names[-1] == ("state",)
    out = ImagePipeline(tiny.emu3(), tiny.emu3_processor())(
        TEXTS[0], height=4, width=10, output_type="latent", seed=0,
        callback_on_step_end=lambda p, i, t, given: seen.append(given["latents"]),
    )  # fmt: skip
    assert seen[-1].shape == (1, 2, 5) and seen[-1][0].equal(out.images[0])


def test_callback_cannot_change_values():
    for change in ("latents", "state", "prompt_embeds"):
        text = refused(lambda: drawn()("a", callback_on_step_end=lambda *given: {change: torch.zeros(1)}))  # noqa: B023
        assert (
            text.startswith(f"callback_on_step_end: The callback changed {change!r}, which is read-only")
            and not drawn()._jobs
        )
    text = refused(lambda: drawn()("a", callback_on_step_end_tensor_inputs=["timesteps"]))
    assert text == "callback_on_step_end_tensor_inputs: got ['timesteps'], expected latents, tokens."


# --- saved pipelines --------------------------------------------------------------------------------------------------


def saved(pipe, where, **changes):
    ImagePipeline(**(pipe.components | changes)).save_pretrained(where)
    return json.loads((where / "visspec.json").read_text())


def test_drafter_rule_and_levels_are_kept(pipe, tmp_path):
    changes = {"drafter": "jacobi:window=5,redraw=maximal", "acceptance": "lantern:k=20,delta=0.25", "levels": 3}
    entries = saved(pipe, tmp_path, **changes)
    assert entries == {
        "drafter": "jacobi:window=5,redraw=maximal", "acceptance": "lantern:k=20,delta=0.25",
        "order": None, "levels": 3, "batch_invariant": False, "parts": {},
    }  # fmt: skip
    again = ImagePipeline.from_pretrained(str(tmp_path))
    assert (again.drafter, again.acceptance, again.levels) == (entries["drafter"], entries["acceptance"], 3)
    before = ImagePipeline(**(pipe.components | changes))
    options = {"seed": 4, "output_type": "latent"}
    kept, drawn = before(PROMPTS[0], **options), again(PROMPTS[0], **options)
    assert kept.tokens[0].equal(drawn.tokens[0]) and kept.stats[0].rounds == drawn.stats[0].rounds
    other = ImagePipeline.from_pretrained(str(tmp_path), drafter=None, acceptance="exact")
    assert (other.drafter, other.acceptance, other.levels) == (None, "exact", 3), "what is given wins"


def test_drafter_weights_saved(pipe, tmp_path):
    learned = ImageFeatureDrafter.for_model(pipe.family, seed=3)
    assert saved(pipe, tmp_path / "a", drafter=learned)["drafter"] == {"folder": "drafter"}
    shutil.move(tmp_path / "a", tmp_path / "b")  # nothing in it depends on where it lies
    again = ImagePipeline.from_pretrained(str(tmp_path / "b"))
    assert again.drafter == str((tmp_path / "b" / "drafter").resolve())
    options = {"seed": 4, "output_type": "latent"}
    kept, drawn = pipe(PROMPTS[0], drafter=learned, **options), again(PROMPTS[0], **options)
    assert kept.tokens[0].equal(drawn.tokens[0]) and drawn.stats[0].drafter == "drafter"
    weights = load_file(tmp_path / "b" / "drafter" / "model.safetensors")
    assert all(weights[name].equal(value) for name, value in learned.head.state_dict().items())
    record = {"trained": "elsewhere"}
    (tmp_path / "b" / "drafter" / "provenance.json").write_text(json.dumps(record))
    again.save_pretrained(tmp_path / "c")  # a drafter by folder is written as its weights
    assert json.loads((tmp_path / "c" / "drafter" / "provenance.json").read_text()) == record
    assert ImagePipeline.from_pretrained(str(tmp_path / "c"))(PROMPTS[0], **options).tokens[0].equal(drawn.tokens[0])


def test_unsaved_parts_requested(tmp_path):
    pipe = ImagePipeline(tiny.emu3(), tiny.emu3_processor(), parts={"negative": "a blue sphere"})
    pipe.save_pretrained(tmp_path)
    assert ImagePipeline.from_pretrained(str(tmp_path)).family.negative == "a blue sphere"
    assert ImagePipeline.from_pretrained(str(tmp_path), parts={"negative": "x"}).family.negative == "x"
    entries = json.loads((tmp_path / "visspec.json").read_text())
    (tmp_path / "visspec.json").write_text(json.dumps(entries | {"parts": {"style": "lumina", "codec": None}}))
    text = refused(lambda: ImagePipeline.from_pretrained(str(tmp_path)))
    assert text.startswith("parts: ") and text.endswith("does not contain codec. Pass parts={'codec': ...}.")
    result = saving.read(str(tmp_path), {"parts": {"codec": 3}})
    assert result["parts"] == {"style": "lumina", "codec": 3}


class Unknown(Rejection):
    pass


@pytest.mark.parametrize("change, words", [
    ({"acceptance": Unknown()}, "acceptance: got a Unknown, expected its name"),
    ({"acceptance": GraphedRule(Exact())}, "acceptance: got a GraphedRule, expected its name"),
    ({"acceptance": "nothing"}, "acceptance: got 'nothing', expected a name of"),
    ({"acceptance": "lantern:k=5000"}, "k: got 5000"), ({"levels": 0}, "levels: got 0"),
    ({"drafter": "nothing"}, "drafter: got 'nothing', expected a name of"),
    ({"drafter": "lowres:model=/etc"}, "model: got '/etc', expected no path"),
    ({"drafter": "lowres:model=.."}, "model: got '..', expected no path"),
    ({"drafter": f"lowres:model={registry.CHECKPOINTS}/../x"}, "model: got "),
    ({"drafter": torch.nn.Linear(1, 1)}, "drafter: got a Linear, expected its name"),
    ({"drafter": type("Own", (Jacobi,), {})()}, "drafter: got a Own, expected its name"),
    ({"processor": tiny.Words()}, "processor: got Words"),
])  # fmt: skip
def test_save_refusals(pipe, tmp_path, change, words):
    other = ImagePipeline(**pipe.components)
    for name, value in change.items():
        setattr(other, name, value)
    assert (text := refused(lambda: other.save_pretrained(tmp_path / "out"))).startswith(words), text
    assert not (tmp_path / "out").exists()


def test_save_refuses_drafter_options(pipe, tmp_path):
    head = ImageFeatureDrafter.for_model(pipe.family, seed=3).head
    for options in ({"tree": "dynamic"}, {"tree": "static"}, {"levels": 2}):
        other = ImagePipeline(**(pipe.components | {"drafter": ImageFeatureDrafter(head, pipe.family, **options)}))
        text = refused(lambda other=other: other.save_pretrained(tmp_path / "out"))
        assert text.startswith("drafter: got a ImageFeatureDrafter with ") and not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert refused(lambda: pipe.save_pretrained(tmp_path / "file")).startswith("folder: ")


@pytest.mark.parametrize("entries, words", [
    ({"seed": 3}, "checkpoint: visspec.json of "), ({"drafter": 3}, "checkpoint: drafter of "),
    ({"drafter": {"folder": "../drafter"}}, "checkpoint: drafter of "), ({"levels": 10**9}, "levels: got 1000000000"),
    ({"drafter": {"folder": "drafter"}}, "checkpoint: "), ({"drafter": "tests"}, "drafter: got 'tests'"),
    ({"drafter": "lowres:model=some/where"}, "model: got 'some/where', expected no path"),
    ({"drafter": "lowres:upsample=models"}, "upsample: got 'models', expected no path"),
    ({"drafter": "lowres:model=\0"}, "model: got "), ({"acceptance": None}, "checkpoint: acceptance of "),
    ({"acceptance": "lantern:k=0"}, "k: got 0"), ({"acceptance": "exact:k=3"}, "acceptance: exact does not take"),
    ({"parts": []}, "checkpoint: parts of "), ({"parts": {"codec": 3}}, "checkpoint: parts of "),
    ({"levels": True}, "levels: got True"), ([], "checkpoint: "), ("{", "checkpoint: "),
    ({"parts": {"nothing": "x"}}, "nothing: models of type 'janus' do not take it"),
])  # fmt: skip
def test_contradictory_folder_refused(folder, tmp_path, entries, words, monkeypatch):
    monkeypatch.chdir(visspec.registry.CHECKPOINTS.parent.parent)  # where `models` and `tests` are folders
    shutil.copytree(folder, tmp_path / "p")
    (tmp_path / "p" / "visspec.json").write_text(entries if isinstance(entries, str) else json.dumps(entries))
    text = refused(lambda: ImagePipeline.from_pretrained(str(tmp_path / "p")))
    assert text.startswith(words) and ("expected" in text or "is not JSON" in text or "take" in text), text


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "p")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "config.json").write_text("{}")
    (tmp_path / "p" / "drafter").symlink_to(tmp_path / "else")
    (tmp_path / "p" / "visspec.json").write_text('{"drafter": {"folder": "drafter"}}')
    text = refused(lambda: ImagePipeline.from_pretrained(str(tmp_path / "p")))
    assert text.startswith("checkpoint: ") and "expected a file inside the folder" in text
    (tmp_path / "p" / "visspec.json").write_text(" " * (16 << 20) + "{}")
    text = refused(lambda: saving.read(str(tmp_path / "p"), {}))
    assert text.startswith("checkpoint: visspec.json has 16777218 bytes, expected at most")


def test_the_order_is_kept(pipe, tmp_path):
    for order in (None, "islands"):
        ImagePipeline(**pipe.components | {"order": order, "parts": None}).save_pretrained(tmp_path)
        assert saving.read(str(tmp_path), {})["order"] == order
    with pytest.raises(ValueError, match=r"^order: got 'spiral', expected a name of `visspec list orders`, such as "):
        saving._named("order", tmp_path, "spiral")


# --- the logger -------------------------------------------------------------------------------------------------------


def test_loading_and_saving_logged(pipe, tmp_path, caplog, capsys, monkeypatch):
    with caplog.at_level(logging.INFO, "visspec"):
        pipe.save_pretrained(tmp_path)
        ImagePipeline.from_pretrained(str(tmp_path))
    told = [(r.name, r.getMessage()) for r in caplog.records if r.name.startswith("visspec")]
    assert [name for name, _ in told] == ["visspec.api.saving"] * 2 + ["visspec.api.loading"]
    assert "'drafter': 'jacobi:window=12'" in told[0][1] and "JanusForConditionalGeneration" in told[2][1]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # nothing is printed where logging isn't configured
    logging.getLogger("visspec.x").warning("nobody asked")
    assert capsys.readouterr().err == ""
