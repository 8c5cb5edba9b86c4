"""The user's habits: every option of generate does what it does in transformers, or is refused in one sentence."""

import copy
import threading
import warnings

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.generation.streamers import BaseStreamer

import visspec
from tests.doubles import NEW, Oracle, TreeOracle, fast, forced, new_tokens, raises_line, stock
from tests.tiny import PAD, VOCAB, llava, model_of, prompt, shapes
from visspec.models.attention.pass_inputs import CACHE, CACHE_NAMES

GREEDY = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture
def ragged():
    return prompt("llava", shapes("llava")["ragged"])


@pytest.fixture
def one():
    return prompt("llava", shapes("llava")["one"])


@pytest.fixture(scope="module")
def tokenizer():
    core = Tokenizer(models.BPE({c: i for i, c in enumerate([*map(chr, range(33, 127)), "Ġ", "Ċ"])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(tokenizer_object=core)


def models_of(shape, wrong=0.3):
    answers = stock("llava", shape)
    return [fast("llava", drafter) for drafter in (None, "ngram", Oracle(answers), TreeOracle(answers, wrong))]


def assert_same(inputs, shape, **options):
    expected = model_of("llava").generate(**inputs, **options)
    for model in models_of(shape):
        assert torch.equal(model.generate(**inputs, **options), expected), model.name
    return expected


# --- where to stop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 2, 11, 23])
def test_end_of_sequence_anywhere(one, at):
    """Also as the very first token, inside an accepted block, as the bonus, and at the limit."""
    answer = stock("llava", "one")[0]
    assert_same(one, "one", **GREEDY, eos_token_id=answer[at])


@pytest.mark.parametrize("at", [0, 4, 20])
def test_rows_end_at_different_times(ragged, at):
    answers = stock("llava", "ragged")
    ends = [answers[0][at], answers[1][(at * 7) % NEW], answers[2][at // 2]]
    assert_same(ragged, "ragged", **GREEDY, eos_token_id=ends[:2])
    assert_same(ragged, "ragged", **GREEDY, eos_token_id=ends)
    assert_same(ragged, "ragged", **GREEDY, eos_token_id=ends[2], pad_token_id=4)


@pytest.mark.parametrize("options", [
    {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"max_new_tokens": 7}, {"max_length": 40}, {"max_length": 27},
    {"min_length": 30, "max_new_tokens": 12, "eos_token_id": list(range(5, 60))},
    {"min_new_tokens": 5, "max_new_tokens": 12, "eos_token_id": list(range(5, 90))},
 {"cache_implementation": "static", "max_new_tokens": 12},
    {"cache_implementation": "dynamic", "max_new_tokens": 12}, {"num_return_sequences": 1, "max_new_tokens": 6},
], ids=str)  # fmt: skip
def test_limits_and_caches(ragged, options):
    assert_same(ragged, "ragged", do_sample=False, **options)


class Ends(tf.StoppingCriteria):
    def __init__(self, divisor):
        self.divisor, self.seen = divisor, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape)
        return input_ids[:, -1] % self.divisor == 0


@pytest.mark.parametrize("divisor", [2, 11])
@pytest.mark.parametrize("shape", ["one", "ragged"])
def test_stopping_criteria(shape, divisor):
    inputs = prompt("llava", shapes("llava")[shape])
    unused = ({*range(VOCAB)} - {t for row in stock("llava", shape) for t in row}).pop()
    options = {**GREEDY, "eos_token_id": unused}  # without any, stopped rows run on until all have stopped
    expected = model_of("llava").generate(**inputs, **options, stopping_criteria=[Ends(divisor)])
    for model in models_of(shape):
        criteria = tf.StoppingCriteriaList([Ends(divisor)])
        assert torch.equal(model.generate(**inputs, **options, stopping_criteria=criteria), expected)
        first = inputs["input_ids"].shape[1] + 1
        seen = sorted({length for _, length in criteria[0].seen})
        assert seen == list(range(first, expected.shape[1] + 1)), "called behind every token"


def test_stop_strings(one, tokenizer):
    text = tokenizer.decode(stock("llava", "one")[0])
    assert len(text) == NEW
    for stop in (text[6], text[8:10], text[5:9], [text[3], "~~~~"]):
        options = {**GREEDY, "stop_strings": stop, "tokenizer": tokenizer}
        expected = assert_same(one, "one", **options)
        assert expected.shape[1] < one["input_ids"].shape[1] + NEW
    config = tf.GenerationConfig(**GREEDY, stop_strings=[text[6:8]], pad_token_id=PAD)
    assert_same(one, "one", generation_config=config, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="stop_strings"):
        fast("llava", None).generate(**one, stop_strings="w7")


def test_max_time(one):
    for limit, expected in ((0.0, 1), (60.0, NEW)):
        for model in models_of("one"):
            output = model.generate(**one, **GREEDY, stopping_criteria=[tf.MaxTimeCriteria(limit)])
            assert len(new_tokens(output, one)[0]) == expected
            assert len(new_tokens(model.generate(**one, **GREEDY, max_time=limit), one)[0]) == expected


# --- streamers ------------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((value.device.type, tuple(value.shape), value.flatten().tolist()))

    def end(self):
        self.calls.append("end")


def test_streamer_equals_transformers(one, ragged):
    expected = Recorder()
    model_of("llava").generate(**one, **GREEDY, streamer=expected, eos_token_id=stock("llava", "one")[0][13])
    assert expected.calls[-1] == "end" and len(expected.calls) > 5
    for model in models_of("one"):
        ours = Recorder()
        model.generate(**one, **GREEDY, streamer=ours, eos_token_id=stock("llava", "one")[0][13])
        assert ours.calls == expected.calls
    with pytest.raises(ValueError, match="streamer: got a batch of 3, expected 1"):
        fast("llava", None).generate(**ragged, **GREEDY, streamer=Recorder())


def test_tokens_are_streamed_before_the_end(one):
    passes, when = [], []

    class Watch(Recorder):
        def put(self, value):
            when.append(len(passes))

    handle = model_of("llava").register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        fast("llava", Oracle(stock("llava", "one"))).generate(**one, **GREEDY, streamer=Watch())
    finally:
        handle.remove()
    assert len(set(when)) >= 4 and when == sorted(when)


def test_text_streamers(one, tokenizer, capsys):
    model_of("llava").generate(**one, **GREEDY, streamer=tf.TextStreamer(tokenizer, skip_prompt=True))
    expected = capsys.readouterr().out
    fast("llava", "ngram").generate(**one, **GREEDY, streamer=tf.TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == expected != ""
    streamer = tf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    job = threading.Thread(target=fast("llava", "ngram").generate, kwargs={**one, **GREEDY, "streamer": streamer})
    job.start()
    assert "".join(streamer).split() == expected.split()
    job.join()


# --- ways to call -----------------------------------------------------------------------------------------------------


def test_generation_config(ragged):
    config = tf.GenerationConfig(max_new_tokens=9, do_sample=False, repetition_penalty=1.5, pad_token_id=PAD)
    before = config.to_dict()
    assert_same(ragged, "ragged", generation_config=config)
    assert_same(ragged, "ragged", generation_config=config, max_new_tokens=14)
    assert config.to_dict() == before


def test_model_defaults_are_used(ragged):
    model, end = llava(), {"eos_token_id": stock("llava", "ragged")[0][2]}
    defaults = {"max_new_tokens": 9, "do_sample": False, "repetition_penalty": 1.4, "pad_token_id": 7}
    model.generation_config = tf.GenerationConfig(**defaults)
    assert torch.equal(visspec.accelerate(model).generate(**ragged, **end), model.generate(**ragged, **end))


@pytest.mark.parametrize("shape", ["one", "ragged"])
def test_dictionary_output(shape):
    inputs = prompt("llava", shapes("llava")[shape])
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.2}
    expected = model_of("llava").generate(**inputs, **options)
    for model in models_of(shape):
        output = model.generate(**inputs, **options)
        assert type(output) is type(expected)
        assert torch.equal(output.sequences, expected.sequences)
        assert len(output.scores) == len(expected.scores)
        for a, b in zip(output.scores, expected.scores):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
        given = {"sequences": output.sequences, "scores": output.scores, "normalize_logits": True}
        transitions = model_of("llava").compute_transition_scores(**given)
        assert transitions.shape == (len(inputs["input_ids"]), NEW)
    plain = fast("llava", "ngram").generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert plain.scores is None and torch.equal(plain.sequences[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])


@pytest.mark.parametrize(("name", "shape", "sampled"), [
    ("llama", "one", False), ("llava", "ragged", False), ("llava", "ragged", True), ("mistral", "ragged", True),
])  # fmt: skip
def test_raw_logits(name, shape, sampled):
    """The model's own at every token, before processors and warp, beside the scores after them."""
    inputs = prompt(name, shapes(name)[shape])
    given = {**GREEDY, "do_sample": sampled, "repetition_penalty": 1.3} | ({"top_k": 5, "seed": 3} if sampled else {})
    keep = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    tokens = new_tokens(fast(name, None).generate(**inputs, **given), inputs)
    expected = forced(name, shapes(name)[shape], [row[:-1] for row in tokens])
    for drafter in (None, TreeOracle(tokens, 0.3)):
        output = fast(name, drafter).generate(**inputs, **given, **keep)
        assert new_tokens(output, inputs) == tokens
        torch.testing.assert_close(torch.stack(output.logits, dim=1), expected, atol=2e-4, rtol=1e-4)
        assert len(output.scores) == len(output.logits) and not torch.equal(output.scores[3], output.logits[3])
    assert fast(name, None).generate(**inputs, **given, return_dict_in_generate=True).logits is None


@pytest.mark.parametrize("name,shape", [
    ("llama", "one"), ("llama", "ragged"), ("mistral", "ragged"), ("gemma2", "one"), ("llava", "ragged"),
])  # fmt: skip
def test_the_cache_goes_on(name, shape):
    """The cache is what transformers would hand out: it goes on from there, and a training pass may too."""
    inputs, model = prompt(name, shapes(name)[shape]), model_of(name)
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole, part = (model.generate(**inputs, **options, max_new_tokens=n) for n in (NEW, 9))
    for drafter in (None, Oracle(stock(name, shape)), TreeOracle(stock(name, shape), 0.4, per_row=True)):
        cache = fast(name, drafter).generate(**inputs, **options, max_new_tokens=9)[CACHE]
        assert type(cache) is tf.DynamicCache and cache.get_seq_length() == part[CACHE].get_seq_length()
        more = {k: v for k, v in inputs.items() if k not in ("pixel_values", "input_ids", "attention_mask")}
        ids, behind = part.sequences, torch.ones(len(part.sequences), 9, dtype=torch.long)
        mask = torch.cat([inputs["attention_mask"], behind], dim=1)
        with torch.enable_grad():
            loss = model(input_ids=ids[:, -1:], attention_mask=mask, **{CACHE: copy.deepcopy(cache)}).logits.sum()
            torch.autograd.grad(loss, model.get_output_embeddings().weight)
        again = model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **options, **more,
                               max_new_tokens=NEW - 9)  # fmt: skip
        assert torch.equal(again.sequences, whole.sequences)
    without = fast(name, "ngram").generate(**inputs, **options, max_new_tokens=3, use_cache=False)
    assert getattr(without, CACHE) is None


@pytest.mark.parametrize("at", [(2, 11), (4, 7), (3, 3)])
def test_the_cache_of_rows_that_end_apart(ragged, at):
    """Rows that left early keep what they held; behind a row's end stand zeros, as masked as padding."""
    answers = stock("llava", "ragged")
    ends = [answers[0][at[0]], answers[1][at[1]]]
    options = {**GREEDY, "return_dict_in_generate": True, "eos_token_id": ends}
    expected = model_of("llava").generate(**ragged, **options)
    for drafter in (None, Oracle(answers)):
        output = fast("llava", drafter).generate(**ragged, **options)
        assert torch.equal(output.sequences, expected.sequences)
        start = ragged["input_ids"].shape[1]
        for ours, theirs in zip(output[CACHE].layers, expected[CACHE].layers, strict=True):
            for b, row in enumerate(answers):
                stop = next((i for i, t in enumerate(row) if t in ends), NEW - 1)
                real = [*ragged["attention_mask"][b].nonzero()[:, 0].tolist(), *range(start, start + stop)]
                for a, c in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                    assert a.shape == c.shape
                    torch.testing.assert_close(a[b][:, real], c[b][:, real], atol=1e-4, rtol=1e-4)
                    assert not a[b][:, start + stop :].any()


def test_positional_prompt_and_no_mask():
    """generate infers the mask of a left-padded batch from the padding ids, and so do we."""
    inputs = prompt("llama", ["19", "12", "3"])
    expected = model_of("llama").generate(inputs["input_ids"], **GREEDY)
    assert torch.equal(fast("llama", "ngram").generate(inputs["input_ids"], **GREEDY), expected)
    assert torch.equal(fast("llama", "ngram").generate(inputs=inputs["input_ids"], **GREEDY), expected)
    assert torch.equal(fast("llama", "ngram").generate(inputs["input_ids"], tf.GenerationConfig(**GREEDY)), expected)
    assert torch.equal(fast("llama", "ngram").generate(inputs["input_ids"], **GREEDY, use_cache=False), expected)
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        fast("llama", "ngram").generate(inputs["input_ids"], inputs=inputs["input_ids"])


@pytest.mark.parametrize(("name", "rows"), [
    ("llama", ["19", "12", "3"]), ("gemma2", ["19", "12", "3"]), ("llava", ["14"]),
])  # fmt: skip
def test_embeddings_as_the_prompt(name, rows):
    """generate returns the new tokens alone; n-grams have only those to look at."""
    inputs = prompt(name, rows)
    embeds = model_of(name).get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    expected = model_of(name).generate(**given, **GREEDY)
    assert expected.shape[1] == NEW
    for drafter in (None, "ngram", Oracle(expected.tolist()), TreeOracle(expected.tolist(), 0.3)):
        model = fast(name, drafter)
        assert torch.equal(model.generate(**given, **GREEDY), expected)
        assert model.last_stats.faults == 0
    more = {**GREEDY, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    assert torch.equal(fast(name, "ngram").generate(**given, **more), model_of(name).generate(**given, **more))


def test_custom_generate(one, ragged):
    hook = visspec.speculative(drafter="ngram", adaptive=False)
    assert hook.last_stats is None
    for inputs, shape in ((one, "one"), (ragged, "ragged")):
        output = model_of("llava").generate(**inputs, **GREEDY, custom_generate=hook)
        assert new_tokens(output, inputs) == stock("llava", shape)
        assert hook.last_stats.tokens == NEW * len(output)
    inputs = prompt("llama", ["14"])
    output = model_of("llama").generate(**inputs, **GREEDY, custom_generate=hook)  # the same hook, another model
    assert new_tokens(output, inputs) == stock("llama", "one")
    options = {**one, "max_new_tokens": 8, "do_sample": True, "custom_generate": hook}
    sampled = [model_of("llava").generate(**options, seed=seed).tolist() for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    recorder = Recorder()
    model_of("llava").generate(**one, **GREEDY, custom_generate=hook, tok_streamer=recorder)
    assert recorder.calls[0][2] == one["input_ids"][0].tolist() and recorder.calls[-1] == "end"
    assert [t for call in recorder.calls[1:-1] for t in call[2]] == stock("llava", "one")[0]


def test_model_passes_through(one):
    model = fast("llava", "ngram")
    assert model.config is model_of("llava").config and model.device == model_of("llava").device
    assert torch.equal(model(**one).logits, model_of("llava")(**one).logits)
    with pytest.raises(AttributeError):
        _ = model.nothing_of_the_kind


def test_the_model_is_left_as_it_was(ragged):
    model = llava()
    model.generate(**ragged, **GREEDY)  # transformers installs hooks of its own the first time
    hooks = lambda: sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())  # noqa: E731
    before = {k: v.clone() for k, v in model.state_dict().items()}, hooks(), model.config.to_dict()
    visspec.accelerate(model, "ngram").generate(**ragged, **GREEDY)
    after = model.state_dict(), hooks(), model.config.to_dict()
    assert before[1:] == after[1:] and all(torch.equal(v, after[0][k]) for k, v in before[0].items())


# --- refusals -------------------------------------------------------------------------------------------------------


class OtherCache(tf.DynamicCache):
    """A cache that may give attention other numbers than were computed, as quantized ones do."""


REFUSED = {
    "config": ({"generation_config": tf.GenerationConfig(num_beams=3)}, "num_beams: got 3, expected 1"),
    "beams": ({"num_beams": 4}, "num_beams: got 4, expected 1"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: got 0.6"),
    "dola": ({"dola_layers": "high"}, "dola_layers: got high"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: got 3"),
    "guidance": ({"guidance_scale": 3.0}, "guidance_scale: got 3.0"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: got True"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states: got True"),
    "custom": ({"custom_generate": print}, "custom_generate: got builtin_function_or_method, expected None"),
    "quantized": ({"cache_implementation": "quantized"}, "cache_implementation: got 'quantized', expected 'dynamic'"),
    "offloaded": ({"cache_implementation": "offloaded"}, "cache_implementation: got 'offloaded'"),
    "cache": ({CACHE: OtherCache()}, f"{CACHE}: got OtherCache, expected an empty DynamicCache"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(one, kind):
    options, sentence = REFUSED[kind]
    calls, model = [], fast("llava", "ngram")  # whose probe runs passes
    handle = model_of("llava").model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ValueError, match=sentence) as caught:
            model.generate(**one, **options)
    finally:
        handle.remove()
    assert "\n" not in str(caught.value) and not calls, "one sentence, before the model runs"
    if kind in ("quantized", "cache"):
        with raises_line(sentence):
            model_of("llava").generate(**one, **options, custom_generate=visspec.speculative("ngram"))


def test_refuses_assistant_and_filled_cache(one):
    with pytest.raises(ValueError, match="assistant_model: got LlamaForCausalLM"):
        fast("llava", "ngram").generate(**one, assistant_model=model_of("llama"))
    inputs, cache = prompt("llama", ["9"]), tf.DynamicCache()
    model_of("llama")(**{k: v[:, :4] for k, v in inputs.items()}, **{CACHE: cache})
    plain = model_of("llama").generate(**inputs, **GREEDY)
    for name in CACHE_NAMES:  # both, whatever transformers is installed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ValueError, match=f"{CACHE}: got 4 cached tokens, expected an empty cache"):
                fast("llama", "ngram").generate(**inputs, **{name: cache}, max_new_tokens=3)
            empty = fast("llama", "ngram").generate(**inputs, **{name: tf.DynamicCache()}, **GREEDY)
            streamed = next(fast("llama", "ngram").stream([inputs | {name: tf.DynamicCache()}], **GREEDY))
        assert torch.equal(empty, plain) and streamed.tokens == plain[0, -NEW:].tolist()


@pytest.mark.parametrize("arguments,sentence", [
    ({"drafter": "nothing"}, "drafter: got 'nothing'"), ({"acceptance": "nothing"}, "acceptance: got 'nothing'"),
    ({"acceptance": "exact:k=3"}, "acceptance: exact does not take"), ({"levels": -1}, "levels: got -1"),
    ({"acceptance": "exact:k"}, "expected key=value"), ({"drafter": "none:k=3"}, "drafter: 'none' takes no options"),
    ({"model": "captioner"}, "model: got 'captioner', expected a loaded model, such as visspec.api.loading.load"),
    ({"model": None}, "model: got None, expected a loaded model"),
], ids=str)  # fmt: skip
def test_accelerate_refuses(arguments, sentence):
    with raises_line(sentence):
        visspec.accelerate(**{"model": model_of("llava"), **arguments})


def test_stats(ragged):
    model = fast("llava", Oracle(stock("llava", "ragged")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is to be said
        model.generate(**ragged, **GREEDY)
    stats = model.last_stats
    assert stats.tokens == 3 * NEW and stats.guarantee == "exact" and stats.drafter == "Oracle"
    assert stats.tau == pytest.approx(stats.tau_without_bonus + 1)
    assert [len(row) for row in stats.pieces] == [NEW] * 3
    assert {origin for row in stats.pieces for _, origin in row} <= {"plain", "drafted", "bonus", "corrected"}
    assert "tau" in str(stats) and "<span" in stats._repr_html_()
    assert all(0 <= a <= 1 for a in stats.acceptance_by_depth)
