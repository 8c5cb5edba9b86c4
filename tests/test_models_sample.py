"""A sample of the table in docs/models.md, which `make models` makes of all classes: identical to stock, or refused."""

import re
from pathlib import Path

import pytest
import torch
import transformers as tf

import visspec
from tests import sweep, tiny_classes
from tests.doubles import raises_line
from visspec.models.decoder.target import HFDecoder

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "models.md").read_text()
SAMPLE = (  # identical to stock
    "LlamaForCausalLM",
    "GPT2LMHeadModel",  # learned positions
    "GPTNeoXForCausalLM",  # partial rotation
    "Gemma2ForCausalLM",  # windows in every other layer
    "Qwen2ForCausalLM",
    "GptOssForCausalLM",  # sinks
    "DeepseekV3ForCausalLM",  # latent attention, experts
    "Qwen3_5ForCausalLM",  # recurrent layers among others
    "Blip2ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",  # its generate calls an inner language model
    "Qwen2VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Gemma4ForConditionalGeneration",  # heads of different size
    "Idefics2ForConditionalGeneration",
    "WhisperForCausalLM",  # positions count padding
)
LATER = {  # refused with these words for some of the sample's prompts
    "Qwen2_5OmniForConditionalGeneration": "output_hidden_states: got True",  # a generate around another
    "Phi3ForCausalLM": "recomputes its cache",  # behind a limit
    "GitForCausalLM": "attention_mask: got padding",  # its image takes slots but no ids
    "BlipForConditionalGeneration": "states that every pass attends to",
    "GlmImageForConditionalGeneration": "counts positions itself",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "counts positions itself",
}
REFUSED = {  # before any prompt
    "GPTNeoForCausalLM": "gives different logits for a draft",  # windows in a buffer
    "OpenAIGPTLMHeadModel": "keeps no cache",
    "XLMWithLMHeadModel": "keeps no cache",
    "BloomForCausalLM": "derives positions from its mask",
    "MptForCausalLM": "derives positions from its mask",
    "MambaForCausalLM": "has linear_attention",
    "RecurrentGemmaForCausalLM": "has linear_attention",
    "JambaForCausalLM": "than for the same tokens one by one",  # its state takes one token at a time
    "Llama4ForCausalLM": "has chunked_attention",
    "T5ForConditionalGeneration": "is an encoder-decoder",
    "CsmForConditionalGeneration": "has its own decoding loop",
    "ImageGPTForCausalImageModeling": "expected a decoder of ids",
    "IdeficsForVisionText2Text": "can't run a draft",
    "Kosmos2ForConditionalGeneration": "can't run a draft",
    "MllamaForConditionalGeneration": "wrote keys and values in 1 of 2 layers (not in layer 1)",
}
COVERED = {"Gemma2ForCausalLM", "Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration"}  # by `test_contract`
COVERED |= {"LlamaForCausalLM", "Glm4vForConditionalGeneration"}  # the latter by Qwen2-VL
COVERED |= {"Blip2ForConditionalGeneration"}  # by InstructBLIP


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once(name):
    model = tiny_classes.tiny_model(name)
    for _ in range(2):  # asked, then known
        with raises_line(re.escape(REFUSED[name])):
            visspec.accelerate(model, "ngram")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in COVERED)) for n in (*SAMPLE, *LATER)]
)
def test_identical_or_refused(name, monkeypatch):
    """With half of the drafters: `make models` takes all."""
    monkeypatch.setattr(sweep, "DRAFTERS", {kind: sweep.DRAFTERS[kind] for kind in ("ngram", "tree")})
    monkeypatch.setattr(sweep, "STREAMED", ("ngram",))
    for row in sweep.verdicts(name):
        message = LATER.get(name, "")
        assert row.outcome == ("refused" if message else "identical") and message in row.reason, row
        if f"transformers {tf.__version__} " in PAGE:
            start = f"| {row.outcome} | " + (f"with {row.inputs} |" if row.outcome == "identical" else "")
            lines = [line for line in PAGE.splitlines() if line.startswith(start)]
            assert f"`{name}`" in " ".join(lines), f"run `make models`: {row}"


@pytest.mark.nightly
def test_every_class_has_a_row():
    if f"transformers {tf.__version__} " not in PAGE:
        pytest.skip("docs/models.md is of another version of transformers")
    table = PAGE.partition("| classes |")[2]
    assert set(re.findall(r"`(\w+)`[ ,]", table)) == set(tiny_classes.generating())


def test_table_has_no_wrong_tokens():
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
