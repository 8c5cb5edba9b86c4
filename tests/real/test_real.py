"""Identity with `generate` on published weights (`make real`) in float32; in bfloat16 under `batch_invariant=True`."""

import copy
import json
from pathlib import Path

import pytest
import torch

import visspec
from visspec.cli import bench_text

ROOT = Path(__file__).resolve().parents[2] / "real"
MODELS = [name for name in ("smollm2", "gemma3") if (ROOT / name / "config.json").is_file()]
NEW = 48
DRAFTERS = ("none", "ngram", "recycling", "context")
pytestmark = pytest.mark.skipif(not MODELS, reason="published weights are not there: run `make real`")


@pytest.fixture(scope="module", params=MODELS)
def loaded(request):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / request.param
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left")


def prompts(count):
    """Prompts of different kinds."""
    result = bench_text.read_prompts(None)
    return [prompt.prompt for prompt in result[:: max(len(result) // count, 1)]][:count]


def encode(tokenizer, texts):
    """A padded batch, in the chat template if there is one."""
    if tokenizer.chat_template is not None:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False)
            for t in texts
        ]
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_equals_generate(loaded, drafter):
    model, tokenizer = loaded
    fast = visspec.accelerate(model, drafter)
    for texts in ([text] for text in prompts(3)):
        inputs = encode(tokenizer, texts)
        stock = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), stock)


def test_ragged_batch_equals_generate(loaded):
    model, tokenizer = loaded
    inputs = encode(tokenizer, prompts(4))
    stock = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(visspec.accelerate(model).generate(**inputs, max_new_tokens=NEW, do_sample=False), stock)


def test_stream_equals_generate(loaded):
    model, tokenizer = loaded
    inputs = [encode(tokenizer, [text]) for text in prompts(5)]
    fast = visspec.accelerate(model)
    answers = {a.id: list(a.tokens) for a in fast.stream(iter(inputs), slots=3, max_new_tokens=NEW, do_sample=False)}
    for i, one in enumerate(inputs):
        stock = model.generate(**one, max_new_tokens=NEW, do_sample=False)[0, one["input_ids"].shape[1] :].tolist()
        assert answers[i][: len(stock)] == stock


def test_sampling_equals_plain_decoding(loaded):
    model, tokenizer = loaded
    inputs = encode(tokenizer, prompts(2))
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.0, "seed": 7}
    plain = visspec.accelerate(model, None).generate(**inputs, **options)
    assert torch.equal(visspec.accelerate(model).generate(**inputs, **options), plain)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 1.0}], ids=["greedy", "sampled"]
)
def test_bfloat16_batch_invariance(loaded, options):
    """Whatever drafts, in a ragged batch and in a stream of any order."""
    (model, tokenizer), texts = loaded, prompts(4)
    model = copy.deepcopy(model).bfloat16()
    options = options | {"max_new_tokens": NEW}
    seed = {"seed": 7} if options["do_sample"] else {}
    inputs = [encode(tokenizer, [text]) for text in texts]
    fast = {d: visspec.accelerate(model, d, batch_invariant=True, debug=True) for d in ("none", "recycling", "context")}
    alone = {d: [f.run(**one, **options, **seed).state.tokens[0] for one in inputs] for d, f in fast.items()}
    assert alone["recycling"] == alone["none"] and alone["context"] == alone["none"]
    seeds = {"seed": [7] * len(texts)} if seed else {}
    batch = fast["recycling"].run(**encode(tokenizer, texts), **options, **seeds).state.tokens
    assert batch == alone["none"]
    entries = [{**one, **seed, "id": i} for i, one in enumerate(inputs)]
    answers = {a.id: a.tokens for a in fast["context"].stream(entries[::-1], slots=3, **options)}
    assert [answers[i] for i in range(len(texts))] == alone["none"]


def test_lora_equals_generate(loaded):
    peft = pytest.importorskip("peft")
    model, tokenizer = loaded
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, config)
    try:
        inputs = encode(tokenizer, prompts(1))
        stock = tuned.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(visspec.accelerate(tuned).generate(**inputs, max_new_tokens=NEW, do_sample=False), stock)
    finally:
        tuned.unload()


def test_json_schema_is_kept(loaded):
    pytest.importorskip("xgrammar")
    from visspec.api.schemas import JsonGrammars

    model, tokenizer = loaded
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema |= {"required": ["name", "age"], "additionalProperties": False}
    inputs = encode(tokenizer, ["Give me the name and the age of a person as JSON."])
    options = {"max_new_tokens": 64, "do_sample": False} | JsonGrammars(tokenizer, model, "schema").options(schema)
    outputs = [visspec.accelerate(model, drafter).generate(**inputs, **options) for drafter in (None, "context")]
    assert torch.equal(*outputs)
    text = tokenizer.decode(outputs[0][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert set(json.loads(text)) == {"name", "age"}
