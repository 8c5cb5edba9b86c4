"""A sample of the table in docs/models.md, which `make models` makes of all classes: identical to stock, or refused."""

from pathlib import Path

import pytest
import torch
import transformers as tf

from tests import sweep
from tests.tiny_class_inputs import cases
from visspec.models.targets.hf_decoder import HFDecoder

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "models.md").read_text()
SAMPLE = (
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",  # windows in every other layer
    "DeepseekV3ForCausalLM",  # latent attention, experts
    "GPTNeoForCausalLM",  # windows in a buffer
    "Phi3ForCausalLM",  # throws its cache away behind a limit
    "OpenAIGPTLMHeadModel",  # has no cache
    "BloomForCausalLM",  # positions from the mask
    "MambaForCausalLM",  # a state instead of a cache
    "T5ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "MllamaForConditionalGeneration",  # cross-attention
    "Blip2ForConditionalGeneration",  # a generate of its own around another model's
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_identical_or_refused_as_the_table_says(name):
    rows = sweep.verdicts(name)
    assert rows
    for row in rows:
        assert row.outcome in ("identical", "refused"), row.details
        if f"transformers {tf.__version__} " in PAGE:
            assert sweep.line(row) in PAGE.splitlines(), f"run `make models`: {sweep.line(row)}"


def test_the_table_has_no_wrong_tokens_and_no_stray_errors():
    assert f"## {sweep.SECTIONS['identical'][0]}\n" in PAGE
    for outcome in ("WRONG", "traceback"):
        assert f"## {sweep.SECTIONS[outcome][0]}\n" not in PAGE


def test_wrong_tokens_are_seen(monkeypatch):
    """Slots of the wrong path are committed: chains are prefixes and stand, trees are not."""
    commit = HFDecoder.commit

    def prefix(self, state, draft, outcome):
        length = draft.tree.size
        for path in outcome.path:
            path[:] = list(range(min(len(path), length)))
        commit(self, state, draft, outcome)

    monkeypatch.setattr(HFDecoder, "commit", prefix)
    _, model, batches = cases("LlamaForCausalLM")[0]
    row = sweep.compared(sweep.Row("Llama", "llama", "text"), model, {"1": batches["1"]})
    assert row.cells["none"]["1"] == row.cells["chain"]["1"] == "identical"
    assert row.cells["tree"]["1"] == row.outcome == "WRONG"


def test_errors_of_others_are_no_refusals():
    """One sentence of ours refuses; a ValueError of torch or transformers is a traceback."""
    try:
        sweep.visspec.accelerate(torch.nn.Linear(2, 2), drafter=3)
    except Exception as error:
        assert sweep.sentence_of(error) is None or "\n" not in str(error)
    try:
        tf.LlamaConfig(hidden_size=30, num_attention_heads=4)
    except Exception as error:
        assert sweep.sentence_of(error) is None
    else:
        pytest.fail("transformers took a hidden size that its heads don't divide")
