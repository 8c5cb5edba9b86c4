"""Drafters that transformers itself loads: driven by our loop, in batches, under sampling, as chains and trees."""

import functools

import pytest
import torch
import transformers as tf
from transformers.modeling_layers import MtpModel

import visspec
from tests import tiny
from tests.doubles import new_tokens, raises_line
from tests.tiny import PAD, TEXT, built, enliven, llama
from visspec.models.block.drafter import BlockModel, bare
from visspec.models.decoder.mtp import MultiToken
from visspec.models.decoder.shared_cache import SharedCache, providers
from visspec.models.decoder.small_model import SmallModel
from visspec.models.published import assistant
from visspec.testing import check_drafter

NEW = 24
LENGTHS = (19, 12, 3)
WINDOW = 8


def muse_glimmer():
    tower = {"patch_size": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16,
             "intermediate_size": 24, "pos_emb_height": 4, "pos_emb_width": 4}  # fmt: skip
    config = tf.MuseGlimmerConfig(
        text_config={**TEXT, "num_hidden_layers": 4, "sliding_window": WINDOW}, vision_config=tower,
        out_hidden_size=64, projector_hidden_size=32, image_token_id=90, video_token_id=91,
    )  # fmt: skip
    return built(tf.MuseGlimmerForConditionalGeneration, config)


def block_assistant(kinds=("sliding_attention", "full_attention"), window=WINDOW, **changes):
    config = tf.MuseGlimmerAssistantConfig(**{
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": window, "layer_types": list(kinds),
        "block_size": 5, "mask_token_id": 4, "target_layer_ids": [0, 2], "pad_token_id": PAD, "bos_token_id": 1,
        "eos_token_id": 2, **changes,
    })  # fmt: skip
    torch.manual_seed(1)
    model = tf.MuseGlimmerAssistantModel(config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 1.3 * p.shape[1] ** -0.5)
    return model


KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def gemma4(shared=2):
    config = tf.Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 4}, layer_types=KINDS, sliding_window=WINDOW, num_kv_shared_layers=shared,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=TEXT["vocab_size"], global_head_dim=8,
    )  # fmt: skip
    return built(tf.Gemma4ForCausalLM, config)


def gemma4_assistant(**changes):
    text = tf.Gemma4TextConfig(
        **{**TEXT, "hidden_size": 16, "num_hidden_layers": 2}, layer_types=KINDS[:2], sliding_window=WINDOW,
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, global_head_dim=8,
    )  # fmt: skip
    config = tf.Gemma4AssistantConfig(**{"text_config": text, "backbone_hidden_size": 32, **changes})
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        # transformers 5.23 wants a layer with keys of its own, which an assistant has not, and can't build any
        patch.setattr(tf.Gemma4TextConfig, "kv_sharing_modes", ["reuse"] * text.num_hidden_layers)
        model = enliven(tf.Gemma4AssistantForCausalLM(config), 3)
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def glm4_moe(layers=2):
    config = tf.Glm4MoeConfig(
        **{**TEXT, "num_hidden_layers": 2}, num_mtp_layers=layers, moe_intermediate_size=24, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    return built(tf.Glm4MoeForCausalLM, config)


def heads_of(model):
    torch.manual_seed(4)
    heads = MtpModel(model, model.config.num_mtp_layers).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in heads.layers.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 1.3 * p.shape[-1] ** -0.5)
    return heads


PAIRS = {"dflash": (muse_glimmer, block_assistant), "gemma4": (gemma4, gemma4_assistant), "mtp": (glm4_moe, None)}
each_pair = pytest.mark.parametrize("name", PAIRS)


@functools.cache
def pair_of(name):
    with torch.inference_mode(False):
        target, make = PAIRS[name]
        model = target()
        return model, heads_of(model) if make is None else make()


def prompt(lengths):
    return tiny.prompt("llama", [str(n - 1) for n in lengths])  # behind BOS


def of_transformers(name, target, drafter, inputs):
    options = {
        "dflash": {"speculation_type": "dflash", "assistant_model": drafter}, "gemma4": {"assistant_model": drafter},
        "mtp": {"use_mtp": True},
    }[name]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MtpModel, "from_pretrained", lambda *_, **__: drafter)  # it has no checkpoint
        return target.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


@each_pair
def test_same_tokens_as_transformers(name):
    target, drafter = pair_of(name)
    inputs = prompt((19,))
    expected = new_tokens(target.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)
    assert new_tokens(of_transformers(name, target, drafter, inputs), inputs) == expected
    check_drafter(made(name, target, drafter), target, inputs, NEW)
    if name != "mtp":
        assert visspec.accelerate(target, drafter).name == type(drafter).__name__


@each_pair
@pytest.mark.parametrize("width", [1, 2])
def test_ragged_batches_greedy_and_seeded(name, width):
    target, drafter = pair_of(name)
    if name == "mtp" and width > 1:
        with raises_line("width: got 2, but a checkpoint with a layer for each level drafts chains"):
            visspec.accelerate(target, made(name, target, drafter, width))
        return
    check_drafter(made(name, target, drafter, width), target, prompt(LENGTHS), NEW)


def made(name, target, drafter, width=1):
    if name == "mtp":
        return MultiToken(drafter, width=width)
    return {"dflash": BlockModel, "gemma4": SharedCache}[name](drafter, target, width=width)


class Spy:
    def __init__(self, drafter):
        self.drafter, self.first = drafter, None
        self.propose, drafter.propose = drafter.propose, self

    def __call__(self, state, depth):
        draft = self.propose(state, depth)
        self.first = self.first or draft.value[:, 1:].tolist()
        return draft


@each_pair
def test_first_draft_equals_transformers(name):
    target, drafter = pair_of(name)
    inputs, spy = prompt(LENGTHS), Spy(made(name, target, drafter))
    visspec.accelerate(target, spy.drafter, adaptive=False).generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for b, n in enumerate(LENGTHS):
        alone = {k: v[b : b + 1, -n:] for k, v in inputs.items()}
        assert spy.first[b] == stock_draft(name, target, drafter, alone)


def stock_draft(name, target, drafter, inputs):
    from transformers.generation import candidate_generator as theirs

    kind = {
        "dflash": "DFlashTokenCandidateGenerator", "gemma4": "SinglePositionMultiTokenCandidateGenerator",
        "mtp": "MTPCandidateGenerator",
    }[name]  # fmt: skip
    generate, result = getattr(theirs, kind).get_candidates, []

    def spy(self, input_ids, *args, **kwargs):
        ids, logits = generate(self, input_ids, *args, **kwargs)
        result.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    getattr(theirs, kind).get_candidates = spy
    try:
        of_transformers(name, target, drafter, inputs)
    finally:
        getattr(theirs, kind).get_candidates = generate
    return next(draft for draft in result if draft)


@pytest.mark.parametrize("layers", [1, 3])
def test_heads_of_any_number(layers):
    model = glm4_moe(layers)
    quick = check_drafter(MultiToken(heads_of(model)), model, prompt(LENGTHS), NEW)
    assert max(round.levels for round in quick.last_state.trace.rounds) == layers


def test_heads_are_read_from_the_checkpoint(tmp_path):
    """As transformers names them there; a checkpoint without them is refused."""
    glm4_moe(1).save_pretrained(tmp_path)
    model = tf.Glm4MoeForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="drafter: no weights of such layers"):
        visspec.accelerate(model, "mtp")
    with pytest.raises(ValueError, match="drafter: got LlamaForCausalLM, expected a model with MTP layers"):
        visspec.accelerate(llama(), "mtp")
    with pytest.MonkeyPatch.context() as patch:
        heads = heads_of(model)
        patch.setattr(MtpModel, "from_pretrained", lambda *_, **__: heads)
        fast = visspec.accelerate(model, "mtp", adaptive=False)
    inputs = prompt((19,))
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), expected)


def test_processors_are_applied():
    target, drafter = pair_of("gemma4")
    inputs = prompt((19,))
    options = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    expected = target.generate(**inputs, **options)
    assert torch.equal(visspec.accelerate(target, drafter, adaptive=False).generate(**inputs, **options), expected)


def test_masked_language_models_are_refused():
    bert = tf.BertForMaskedLM(tf.BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="drafter: BertForMaskedLM does not generate"):
        assistant(bert, llama())


def test_kinds_are_told_apart_by_form():
    target, drafter = pair_of("dflash")
    assert type(assistant(drafter, target)) is BlockModel
    target, drafter = pair_of("gemma4")
    assert type(assistant(drafter, target)) is SharedCache
    assert type(assistant(llama(), llama())) is SmallModel
    assert providers(target.config) == {"sliding_attention": 0, "full_attention": 1}
    assert providers(gemma4(shared=0).config) == {"sliding_attention": 2, "full_attention": 3}
    embed = pair_of("dflash")[0].get_input_embeddings()
    ids = torch.tensor([5, 9])
    torch.testing.assert_close(bare(embed)(ids), embed.weight[ids])
    assert bare(llama().get_input_embeddings()).num_embeddings == TEXT["vocab_size"]


def test_refuses_other_targets():
    muse, gemma = pair_of("dflash")[0], pair_of("gemma4")[0]
    wide = gemma4_assistant(backbone_hidden_size=48)
    for target, drafter, message in (
        (muse, block_assistant(hidden_size=48, num_attention_heads=4), "hidden size of 48"),
        (muse, block_assistant(target_layer_ids=[0, 9]), "contains layer 9"),
        (muse, block_assistant(mask_token_id=400), "mask_token_id 400"),
        (gemma, wide, "hidden size of 48"),
        (llama(), gemma4_assistant(), "reads layers of"),
    ):
        with raises_line(message):
            visspec.accelerate(target, drafter)
