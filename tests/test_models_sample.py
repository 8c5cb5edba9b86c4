"""A sample of the table in docs/models.md, which `make models` makes of all classes: identical to stock, or refused."""

import re
from pathlib import Path

import pytest
import torch
import transformers as tf

from tests import sweep, tiny_classes
from visspec.models.decoder.target import HFDecoder

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "models.md").read_text()
SAMPLE = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",  # learned positions
    "Gemma2ForCausalLM",  # windows in every other layer
    "Qwen2ForCausalLM",
    "GptOssForCausalLM",  # sinks
    "DeepseekV3ForCausalLM",  # latent attention, experts
    "GPTNeoForCausalLM",  # windows in a buffer
    "Phi3ForCausalLM",  # throws its cache away behind a limit
    "OpenAIGPTLMHeadModel",  # has no cache
    "BloomForCausalLM",  # positions from the mask
    "MambaForCausalLM",  # a state instead of a cache
    "Qwen3_5ForCausalLM",  # recurrent layers among others
    "Llama4ForCausalLM",  # chunks
    "T5ForConditionalGeneration",
    "CsmForConditionalGeneration",  # a loop of its own
    "Qwen2_5OmniForConditionalGeneration",  # a generate of its own around another model
    "Blip2ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Gemma4ForConditionalGeneration",  # heads of different size
    "Idefics2ForConditionalGeneration",
    "GitForCausalLM",
    "WhisperForCausalLM",  # positions count padding
    "GlmImageForConditionalGeneration",  # positions are counted in the model
    "Kosmos2ForConditionalGeneration",
)


COVERED = {"Gemma2ForCausalLM", "Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration"}  # by `test_contract`
COVERED |= {"CsmForConditionalGeneration", "Glm4vForConditionalGeneration"}  # by `test_probe` and GlmImage above


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in COVERED)) for n in SAMPLE])
def test_identical_or_refused_as_the_table_says(name):
    for row in sweep.verdicts(name):
        assert row.outcome in ("identical", "refused"), row
        if f"transformers {tf.__version__} " in PAGE:
            assert unmeasured(sweep.line(row)) in unmeasured(PAGE).splitlines(), f"run `make models`: {row}"


def unmeasured(text: str) -> str:
    """Without what a refusal measured, which another machine may round otherwise."""
    return re.sub(r"\d+\.\d+", "x", text)


@pytest.mark.nightly
def test_every_class_has_a_row():
    if f"transformers {tf.__version__} " not in PAGE:
        pytest.skip("docs/models.md is of another version of transformers")
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(tiny_classes.generating())


def test_the_table_has_no_wrong_tokens_and_no_stray_errors():
    for outcome in ("WRONG", "traceback"):
        assert f"| {outcome} | 0 | 0 |" in PAGE


def test_wrong_tokens_are_seen(monkeypatch):
    """Slots of the wrong path are committed: chains are prefixes and stand, trees are not."""
    commit = HFDecoder.commit

    def prefix(self, state, draft, outcome):
        length = draft.tree.size
        for path in outcome.path:
            path[:] = list(range(min(len(path), length)))
        commit(self, state, draft, outcome)

    monkeypatch.setattr(HFDecoder, "commit", prefix)
    _, model, batches = tiny_classes.cases("LlamaForCausalLM")[0]
    row = sweep.compare(sweep.Row("LlamaForCausalLM", "text"), model, {"1": batches["1"]})
    assert row.cells["none 1"] == row.cells["chain 1"] == "identical"
    assert row.cells["tree 1"] == row.outcome == "WRONG"


def test_a_refusal_is_one_sentence_of_ours():
    """A ValueError of torch or transformers is a traceback, and so is any other error of ours."""
    with pytest.raises(ValueError) as refusal:
        sweep.visspec.accelerate(tiny_classes.tiny_model("MambaForCausalLM"))
    assert sweep.sentence_of(refusal.value) == str(refusal.value)
    with pytest.raises(ValueError) as theirs:
        tiny_classes.tiny_model("LlamaForCausalLM").generate(torch.tensor([[1, 5]]), max_new_tokens=-1)
    assert sweep.sentence_of(theirs.value) is None
    with pytest.raises(TypeError) as other:
        sweep.visspec.accelerate()
    assert sweep.sentence_of(other.value) is None
