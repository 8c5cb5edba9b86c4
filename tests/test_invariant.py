"""`batch_invariant=True`: a request's logits in half precision depend on the request alone, bit for bit."""

import functools

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.pytorch_utils import Conv1D

import visspec
from tests import tiny
from tests.doubles import ProductRows, raises_line
from visspec.models.attention.draft_attention import folded_attention
from visspec.models.decoder.prefix import PrefixCache
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.runner.widths import REFERENCE, PassWidths, ProductsInParts

NEW = 24
LENGTHS = (5, 33, 12, 58)
SAMPLED = {"do_sample": True, "temperature": 1.0}


@functools.cache
def model(dtype=torch.bfloat16):
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "head_dim": 16}
    return tiny.llama(**sizes, num_hidden_layers=3).to(dtype)


@functools.cache
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(*tiny.TEXT_IDS, (1, n), generator=generator) for n in LENGTHS]


def fast(drafter, dtype=torch.bfloat16, invariant=True):
    # adaptive drafts rest on a loaded machine, and a control needs them
    levels = {} if drafter == "none" else {"adaptive": drafter == "context" and invariant}
    return visspec.accelerate(model(dtype), drafter, batch_invariant=invariant, debug=True, **levels)


def answers(quick, ids=None, mask=None, **options):
    result, options = [], {"do_sample": False, **options}
    batches = [(ids, mask)] if ids is not None else [(one, torch.ones_like(one)) for one in prompts()]
    for ids, mask in batches:
        more = {"seed": [7] * len(ids)} if options["do_sample"] else {}
        kept = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
        output = quick.generate(input_ids=ids, attention_mask=mask, **kept, **options, **more)
        logits = torch.stack(output.logits, dim=1)
        result += [(row[ids.shape[1] :].tolist(), each) for row, each in zip(output.sequences, logits)]
    return result


def batch():
    longest = max(LENGTHS)
    ids = torch.stack([nn.functional.pad(one[0], (longest - len(one[0]), 0)) for one in prompts()])
    return ids, torch.stack([(torch.arange(longest) >= longest - n).long() for n in LENGTHS])


@functools.cache
def alone(dtype=torch.bfloat16, invariant=True, sampled=False):
    return answers(fast("none", dtype, invariant), **(SAMPLED if sampled else {}))


def same(found, expected):
    return [a == b and torch.equal(x, y) for (a, x), (b, y) in zip(found, expected, strict=True)]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("drafter, dtype", [("ngram", BF16), ("recycling", FP16), ("context", FP32), ("context", BF16)])
def test_drafts_change_no_bit(drafter, dtype):
    assert all(same(answers(fast(drafter, dtype)), alone(dtype)))


@pytest.mark.parametrize("drafter, dtype", [("none", BF16), ("none", FP32), ("context", FP16)])
def test_neighbours_change_no_bit(drafter, dtype):
    assert all(same(answers(fast(drafter, dtype), *batch()), alone(dtype)))


@pytest.mark.parametrize("invariant", (True, False))
def test_control(invariant):
    """Without the mode drafts and neighbours change bits, in this very model."""
    expected = alone(invariant=invariant)
    for result in (answers(fast("context", invariant=invariant)), answers(fast("none", invariant=invariant), *batch())):
        assert all(same(result, expected)) == invariant


@pytest.mark.parametrize("drafter", ["none", "context"])
def test_sampled_tokens(drafter):
    expected = alone(sampled=True)
    assert all(same(answers(fast(drafter), **SAMPLED), expected))
    assert all(same(answers(fast(drafter), *batch(), **SAMPLED), expected))


@pytest.mark.parametrize("drafter, slots", [("none", 3), ("ngram", 3), ("recycling", 1), ("context", 3)])
def test_stream_in_any_order(drafter, slots):
    entries = [{"input_ids": ids, "id": n} for n, ids in enumerate(prompts())]
    entries += [e | SAMPLED | {"seed": 7, "id": (e["id"],)} for e in entries]
    expected = {n: tokens for n, (tokens, _) in enumerate(alone())}
    expected |= {(n,): tokens for n, (tokens, _) in enumerate(alone(sampled=True))}
    result, quick = {}, fast(drafter)
    for most in (3, len(entries)):  # killed after three answers, and resumed with the others
        left = [entry for entry in entries[::-1] if entry["id"] not in result]
        for answer in quick.stream(left, slots=slots, max_new_tokens=NEW):
            assert answer.error is None, answer.error
            result[answer.id] = answer.tokens
            if len(result) == most:
                break
    assert result == expected


def test_rules_whose_tokens_depend_on_drafts():
    """They take one row at a time, and drafts of a fixed length."""
    quick = visspec.accelerate(model(), "ngram", acceptance="typical", batch_invariant=True, debug=True)
    expected = [tokens for tokens, _ in answers(quick, **SAMPLED)]
    entries = [{"input_ids": ids, "seed": 7} for ids in prompts()]
    result = sorted(quick.stream(entries, slots=3, max_new_tokens=NEW, **SAMPLED), key=lambda answer: answer.id)
    assert [answer.tokens for answer in result] == expected
    with raises_line("batch_invariant: got 4 rows for the rule Typical"):
        answers(quick, *batch(), **SAMPLED)


@pytest.mark.parametrize("name", ("llava", "qwen2_vl", "gemma3"))
def test_pictures(name):
    """They are encoded one request at a time: in a stream, not in a batch."""
    rows, kind = tiny.shapes(name)["ragged"], tiny.FAMILIES[name].make().to(torch.bfloat16)
    together = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tiny.prompt(name, rows, 0).items()}
    entries = [tiny.single_row(name, rows, together, b) for b in range(len(rows))]
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain, quick = (visspec.accelerate(kind, one, batch_invariant=True, debug=True) for one in (None, "context"))
    expected = [plain.run(**one, **options).state.tokens[0] for one in entries]
    assert [quick.run(**one, **options).state.tokens[0] for one in entries] == expected
    if name == "llava":
        drafter = EagleDrafter.for_model(kind)
        trained = visspec.accelerate(kind, drafter, batch_invariant=True, debug=True, adaptive=False)
        assert [trained.run(**one, **options).state.tokens[0] for one in entries] == expected
        texts = [plain.run(input_ids=one, **options).state.tokens[0] for one in prompts()]
        ids, mask = batch()  # without pictures, rows may share a call
        assert quick.run(input_ids=ids, attention_mask=mask, **options).state.tokens == texts
    result = sorted(quick.stream(entries, slots=3, **options), key=lambda answer: answer.id)
    assert [answer.tokens for answer in result] == expected
    with raises_line("batch_invariant: .*stream"):
        plain.generate(**together, **options)


def test_positions_end_with_the_model():
    """Nodes that only widen a pass have no positions beyond the model's last one."""
    config = tf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=24)
    gpt2 = tiny.built(tf.GPT2LMHeadModel, config).to(torch.bfloat16)
    ids = prompts()[0]
    both = [visspec.accelerate(gpt2, drafter, batch_invariant=True, debug=True) for drafter in (None, "context")]
    outputs = [quick.generate(ids, max_new_tokens=24 - ids.shape[1], do_sample=False) for quick in both]
    assert torch.equal(*outputs) and outputs[0].shape[1] == 24


def test_widths_agree_with_many_rows():
    linear = nn.Linear(200, 72, bias=False, dtype=torch.float32)
    widths = PassWidths([linear], [(2, 3, 16)], torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 200, generator=generator)
    expected = torch.cat([linear(part) for part in x.split(REFERENCE)])
    for rows, nodes in ((1, 1), (1, 5), (3, 2), (5, 11)):
        count = rows * widths.nodes(rows, nodes)
        assert count >= rows * nodes
        assert torch.equal(linear(x[:count]), expected[:count])


@pytest.mark.parametrize(("options", "match"), [({"compile": True}, "compile=True"), ({"graphs": True}, "graphs=True")])
def test_refused_options(options, match):
    with raises_line(f"batch_invariant: .*{match}"):
        visspec.accelerate(model(), None, batch_invariant=True, **options)


def refused_model(kind):
    if kind == "eager":
        return tiny.gemma2()
    if kind == "quantized":
        result = tiny.llama()
        result.is_quantized = True  # as transformers marks them
        return result
    if kind == "experts":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}
        return tiny.built(tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig(**tiny.TEXT, **more))
    kinds = ["conv", "full_attention"]
    return tiny.built(tf.Lfm2ForCausalLM, tf.Lfm2Config(**tiny.TEXT, layer_types=kinds, conv_L_cache=3))


@pytest.mark.parametrize("kind", ["eager", "experts", "quantized", "keep a state"])
def test_refused_models(kind):
    with raises_line(f"batch_invariant: .*{kind}"):
        visspec.accelerate(refused_model(kind).to(torch.bfloat16), None, batch_invariant=True)


def test_layers_with_heads_of_several_sizes():
    """Gemma 4's, whose configuration has no size of all layers."""
    kinds = ["sliding_attention", "full_attention"]
    more = {"global_head_dim": 16, "layer_types": kinds, "sliding_window": 8, "hidden_size_per_layer_input": 0}
    config = tf.Gemma4TextConfig(**tiny.TEXT | more | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96})
    gemma4 = tiny.built(tf.Gemma4ForCausalLM, config).to(torch.bfloat16)
    plain, quick = (visspec.accelerate(gemma4, one, batch_invariant=True, debug=True) for one in (None, "ngram"))
    options = {"input_ids": prompts()[1], "max_new_tokens": NEW, "do_sample": False}
    assert quick.run(**options).state.tokens == plain.run(**options).state.tokens
    assert sorted(size for _, _, size in plain.setup.target.widths.heads) == [8, 16]


def test_sliding_windows():
    """Prompts beyond a block of keys, of which all but the window's are masked."""
    config = tf.MistralConfig(**tiny.TEXT | {"max_position_embeddings": 1024}, sliding_window=8)
    slides = tiny.built(tf.MistralForCausalLM, config).to(torch.bfloat16)
    plain, quick = (visspec.accelerate(slides, one, batch_invariant=True, debug=True) for one in (None, "ngram"))
    rows = [torch.randint(*tiny.TEXT_IDS, (1, n), generator=torch.Generator().manual_seed(n)) for n in (600, 20)]
    expected = [plain.run(input_ids=ids, max_new_tokens=NEW, do_sample=False).state.tokens[0] for ids in rows]
    result = quick.stream([{"input_ids": ids} for ids in rows], slots=2, max_new_tokens=NEW, do_sample=False)
    assert [answer.tokens for answer in sorted(result, key=lambda answer: answer.id)] == expected


def test_no_prefix_is_kept():
    kept = PrefixCache()
    entries = [{"input_ids": prompts()[3], "id": n} for n in range(3)]
    result = list(fast("none").stream(entries, slots=1, max_new_tokens=4, do_sample=False, prefix_cache=kept))
    assert all(answer.tokens == result[0].tokens for answer in result) and kept.hits == 0
    assert "batch_invariant" in kept.refused
    with raises_line("prefix_cache: got 1024 with batch_invariant=True, which reads each prompt in one pass"):
        fast("none").stream(entries, prefix_cache=1024)


def test_padding_behind_a_prompt_is_refused():
    ids = prompts()[0]
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    with raises_line("batch_invariant: .*padding in front"):
        fast("none").generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)


def pictures(pipe, texts, seeds, drafter=None, **options):
    images = pipe(texts, seed=seeds, drafter=drafter, output_type="latent", **options).images
    return [torch.as_tensor(image).tolist() for image in images]


def painter(name, **options):
    pipe = visspec.ImagePipeline.from_pretrained(name, dtype="bfloat16", debug=True, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_pictures_of_codes():
    texts = ["a photo of a blue square left of a green circle", "two yellow triangles"]
    pipe = painter("painter-lowres", batch_invariant=True)
    alone = [pictures(pipe, [text], [seed])[0] for seed, text in enumerate(texts)]
    assert [pictures(pipe, [text], [seed], "jacobi")[0] for seed, text in enumerate(texts)] == alone
    assert pictures(pipe, texts, [0, 1], "jacobi") == pictures(pipe, texts, [0, 1]) == alone


def check_each_by_itself(pipe, texts, **options):
    """Equal bits alone and in a batch, and products of no more rows: that shows it on every processor."""
    alone = pictures(pipe, texts[:1], [0], **options)  # measures widths, too
    with ProductRows() as one:
        alone += pictures(pipe, texts[1:], [1], **options)
    with ProductRows() as several:
        assert pictures(pipe, texts, [0, 1], **options) == alone
    assert max(several.rows) == max(one.rows)


def test_pictures_of_maps():
    pipe, texts = painter("painter-var-small", batch_invariant=True), ["a photo of a pig", "a photo of an octopus"]
    check_each_by_itself(pipe, texts)
    with raises_line("batch_invariant: got drafts of maps in torch.bfloat16, which change codes"):
        pictures(pipe, texts, [0, 1], "var")


def test_relaxed_rules_and_batches():
    """What they accept depends on drafts, so each picture is drawn by itself."""
    texts = ["two yellow triangles", "a photo of a blue square left of a green circle"]
    check_each_by_itself(painter("painter-lowres", batch_invariant=True), texts, drafter="jacobi", acceptance="lantern")


def test_refused_pipelines():
    with raises_line("batch_invariant: .*graphs=True"):
        visspec.ImagePipeline.from_pretrained("painter", batch_invariant=True, graphs=True)
    pipe = visspec.ImagePipeline.from_pretrained("painter-any-order", batch_invariant=True)
    with raises_line("batch_invariant: .*raster order"):
        pipe("a photo of a red ring")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_beside_longer_rows(dtype):
    """Sums over some numbers of keys are split otherwise than those over more: such a pass reads more."""
    widths = PassWidths([], [(2, 3, 16)], dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 6, 4, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 2, 1200, 16, generator=generator).to(dtype)

    def attended(seen, extent):
        mask = torch.where(torch.arange(extent) < seen, 0.0, torch.finfo(dtype).min).to(dtype).expand(1, 1, 12, -1)
        return folded_attention(query, key[:, :, :extent], value[:, :, :extent], mask, None)

    for seen in (100, 200, 300, 500, 530, 700):
        assert torch.equal(attended(seen, widths.extent(seen)), attended(seen, widths.extent(seen + 300)))
    shorter = [(200, 256), (300, 384)]  # which of them differs depends on the processor
    assert dtype == torch.bfloat16 or not all(torch.equal(attended(*each), attended(each[0], 1024)) for each in shorter)


@pytest.mark.parametrize("rows", [(3, 12), (37,), (2, 8), (4, 16)])
@pytest.mark.parametrize("layer", [torch.nn.Linear(24, 40), Conv1D(40, 24)])
@torch.no_grad()
def test_large_products_in_parts(layer, rows):
    """Every product that a layer asks for has 16 rows, and the result is that of the whole."""
    x = torch.randn(*rows, 24)
    with ProductRows() as products, ProductsInParts(16):
        parts = layer(x)
    torch.testing.assert_close(parts, layer(x))
    assert set(products.rows) == {16}


def test_products_are_split(monkeypatch):
    """As in bfloat16 on CPUs with AMX, where more than 32 rows agree with no fewer."""
    monkeypatch.setattr(PassWidths, "_agrees", lambda self, rows: rows <= 32 or rows == 64)
    widths = PassWidths([], [], torch.bfloat16, torch.device("cpu"))
    assert [widths.nodes(rows, 17) for rows in (1, 2, 8)] == [17, 17, 17]
    assert [widths.part(rows) for rows in (16, 32, 34, 64, 136)] == [16, 32, 32, 64, 64]
    assert isinstance(widths.in_parts(34), ProductsInParts) and not isinstance(widths.in_parts(32), ProductsInParts)
