"""Targets with layers that keep a state (linear attention, short convolutions): drafts are undone by replays."""

import functools
from itertools import zip_longest

import pytest
import torch
import transformers as tf
from transformers.models.qwen3_5 import modeling_qwen3_5

import visspec
from tests.doubles import Double, Oracle, TreeOracle, new_tokens, opened_model
from tests.tiny import IMAGE, MROPE, PAD, TEXT, VIDEO, VISION_IDS, built, packed_pixels
from tests.tiny_classes import tiny_model
from visspec import tree as trees
from visspec.models.attention import recurrent
from visspec.models.attention.pass_inputs import CACHE
from visspec.models.decoder.small_model import SmallModel
from visspec.models.decoder.target import HFDecoder
from visspec.types import Draft

NEW = 24
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
HYBRID = {**TEXT, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], **LINEAR}


def qwen3_5_vl():
    tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2}
    rope = {**MROPE, "mrope_section": [1, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.75}
    config = tf.Qwen3_5Config(
        text_config={**HYBRID, "rope_parameters": rope},
        vision_config={**tower, "out_hidden_size": 32, "num_position_embeddings": 16, "temporal_patch_size": 2},
        **VISION_IDS,
    )
    return built(tf.Qwen3_5ForConditionalGeneration, config)


def lfm2():
    kinds = ["conv", "conv", "full_attention", "conv"]
    config = tf.Lfm2Config(**{**TEXT, "num_hidden_layers": 4}, layer_types=kinds, conv_L_cache=3)
    return built(tf.Lfm2ForCausalLM, config)


MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_chunk_size": 8,
    **TEXT, "num_hidden_layers": 3,
}  # fmt: skip


def granite():
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = tf.GraniteMoeHybridConfig(**MAMBA, layer_types=kinds, num_local_experts=0, shared_intermediate_size=48)
    return built(tf.GraniteMoeHybridForCausalLM, config)


MODELS = {
    "qwen3_5": lambda: built(tf.Qwen3_5ForCausalLM, tf.Qwen3_5TextConfig(**HYBRID)),
    "qwen3_5_vl": qwen3_5_vl,
    "qwen3_next": lambda: built(
        tf.Qwen3NextForCausalLM, tf.Qwen3NextConfig(**HYBRID, num_experts=0, decoder_sparse_step=1)
    ),
    "olmo_hybrid": lambda: built(tf.OlmoHybridForCausalLM, tf.OlmoHybridConfig(**HYBRID)),
    "lfm2": lfm2,
    "bamba": lambda: built(tf.BambaForCausalLM, tf.BambaConfig(**MAMBA, attn_layer_indices=[1])),
    "granite_hybrid": granite,
    "falcon_h1": lambda: built(tf.FalconH1ForCausalLM, tf.FalconH1Config(**MAMBA, mamba_d_ssm=64)),
}
TWINS = {"qwen3_next", "bamba"}  # their layers are Qwen 3.5's and Granite's
KINDS = [pytest.param(name, marks=[pytest.mark.nightly] * (name in TWINS)) for name in MODELS]


@functools.cache
def model_of(name):
    with torch.inference_mode(False):
        return MODELS[name]()


MEDIA = {  # in front of a row: its grid, and its ids, of a video frame by frame behind their times
    "image": ([1, 4, 8], [92, *[IMAGE] * 8, 93]),
    "video": ([3, 4, 4], [7, 92, *[VIDEO] * 4, 93] * 3),
}


def prompt(name, lengths, seed=0):
    """Left-padded rows of ordinary ids; in the vision-language model with a picture, a video or nothing in front."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(5, 88, (n,), generator=generator).tolist() for n in lengths]
    visual = name.endswith("_vl")
    media = [("image", "video", None)[(b + seed) % 3] for b in range(len(rows))] if visual else []
    rows = [MEDIA[what][1] + row if what else row for what, row in zip_longest(media, rows)]
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(longest) >= longest - ids.ne(PAD).sum(1, True)).long()}
    if visual:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        for what in set(media) - {None}:
            inputs |= packed_pixels([MEDIA[what][0]] * media.count(what), seed, what)
    return inputs


@functools.cache
def stock(name, lengths):
    inputs = prompt(name, lengths)
    return new_tokens(model_of(name).generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)


class Erring(Oracle):
    """The known answer, each token wrong with probability `wrong`; every third draft is none."""

    def __init__(self, answers, wrong, seed=0, silent=False):
        super().__init__(answers)
        self.wrong, self.silent, self.random = wrong, silent, torch.Generator().manual_seed(seed)

    def propose(self, state, depth):
        if self.silent and torch.rand((), generator=self.random) < 0.3:
            return trees.empty_draft(state.pending)
        right = torch.tensor(self.ahead(state, depth)).clamp(min=5)
        miss = torch.rand(right.shape, generator=self.random) < self.wrong
        return trees.chain_draft(state.pending, torch.where(miss, 5 + (right + 1) % 80, right))


DRAFTERS = {  # by the lengths of a batch's rows, from answers
    (9,): lambda answers: ("ngram", Oracle(answers), TreeOracle(answers, 0.3)),
    (12, 7, 3): lambda answers: ("context", Erring(answers, 0.6, 1, True), TreeOracle(answers, 0.3, per_row=True)),
}


@pytest.mark.parametrize("name, lengths", [
    pytest.param(name, lengths, marks=[pytest.mark.nightly] * (name in TWINS and len(lengths) == 1))
    for name in MODELS for lengths in DRAFTERS
])  # fmt: skip
def test_greedy_equals_stock(name, lengths):
    inputs, expected = prompt(name, lengths), stock(name, lengths)
    assert max(len(set(row)) for row in expected) >= 6  # a model that repeats itself would hide faults
    for drafter in DRAFTERS[lengths](expected):
        fast = visspec.accelerate(model_of(name), drafter, adaptive=False)
        assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected, drafter
        assert fast.last_stats.faults == 0
        if type(drafter) is Oracle:
            assert fast.last_stats.rounds <= (NEW + 4) // 6 + 1


@pytest.mark.parametrize("name, most", [*((name, 1) for name in MODELS if name not in TWINS), ("qwen3_5_vl", 4)])
def test_replays_are_bounded(name, most, monkeypatch):
    """With a small bound they are settled often, in rows that stand apart."""
    monkeypatch.setattr(recurrent, "MOST", most)
    lengths = (12, 7, 3)
    inputs, expected = prompt(name, lengths), stock(name, lengths)
    fast = visspec.accelerate(model_of(name), Erring(expected, 0.5, 3, True), adaptive=False)
    result = fast.run(**inputs, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(result.output, inputs) == expected
    assert max(result.state.cache.past.replayed) <= most + 6


@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_a_seed_is_as_alone(name):
    lengths = (12, 7, 3)
    inputs = prompt(name, lengths)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": NEW}
    plain = visspec.accelerate(model_of(name), None)
    expected = new_tokens(plain.generate(**inputs, **options, seed=[1, 2, 3]), inputs)
    for drafter in (TreeOracle(expected, 0.4), Erring(expected, 0.4, 5)):
        fast = visspec.accelerate(model_of(name), drafter, adaptive=False)
        assert new_tokens(fast.generate(**inputs, **options, seed=[1, 2, 3]), inputs) == expected
    if not name.endswith("_vl"):
        alone = {"input_ids": inputs["input_ids"][1:2, -7:], "attention_mask": inputs["attention_mask"][1:2, -7:]}
        drafter.answers = expected[1:2]
        assert new_tokens(fast.generate(**alone, **options, seed=[2]), alone) == expected[1:2]


@pytest.mark.parametrize("name", KINDS)
def test_rows_enter_a_running_batch(name):
    """Continuous batching: states and replays move with their rows."""
    lengths = (12, 7, 3, 9, 5)
    single = [prompt(name, (n,), seed) for seed, n in enumerate(lengths)]
    fast = visspec.accelerate(model_of(name), "context", adaptive=False)
    limits = (NEW, 5, 9, 14, 3)
    entries = [inputs | {"max_new_tokens": n} for inputs, n in zip(single, limits)]
    expected = [new_tokens(model_of(name).generate(**entry, do_sample=False), entry)[0] for entry in entries]
    result = {answer.id: answer for answer in fast.stream(entries, slots=2)}
    assert [result[i].error for i in range(5)] == [None] * 5
    assert [result[i].tokens for i in range(5)] == expected


def test_a_rejection_costs_no_pass():
    """As many passes as rounds, whatever is rejected, up to the bound of replays."""
    name = "qwen3_5"
    inputs, expected = prompt(name, (9,)), stock(name, (9,))
    model, passes = model_of(name), []
    hook = model.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        fast = visspec.accelerate(model, Erring(expected, 0.5, 2), adaptive=False)
        passes.clear()
        result = fast.run(**inputs, max_new_tokens=NEW, do_sample=False)
    finally:
        hook.remove()
    trace = result.state.trace
    assert any(trace.rounds[n].had_rejection[0] for n in range(len(trace.rounds)))
    assert len(passes) == 1 + len(trace.rounds)


def next_round(target, state, draft, paths, following):
    """Commit paths of a draft, and these tokens behind them."""
    target.commit(state, draft, visspec.types.Outcome(paths, []))
    state.position = state.position + torch.tensor([len(path) for path in paths])
    state.pending = torch.tensor(following)


def random_draft(state, size, seed):
    """A tree of random ids, one row each where `state` has several."""
    generator = torch.Generator().manual_seed(seed)
    parent = (-1, *(int(torch.randint(n, (), generator=generator)) for n in range(1, size)))
    value = torch.randint(5, 88, (len(state.rows), size), generator=generator)
    value[:, 0] = state.pending
    return Draft(value, trees.static(parent))


def variation(model, target, state, draft, before):
    """The greatest total variation of the nodes' laws from those of one stock pass over their paths."""
    law_BNV = target.verify(state, draft).distribution.logits.double().softmax(-1)
    worst = 0.0
    for b, ids in enumerate(before):
        for n, path in enumerate(trees.paths(draft.tree)[0].tolist()):
            row = torch.tensor([*ids, *(int(draft.value[b, m]) for m in path if m >= 0)])
            expected = model(input_ids=row[None]).logits[0, -1].double().softmax(-1)
            worst = max(worst, float((law_BNV[b, n] - expected).abs().sum()) / 2)
    return worst


@torch.inference_mode()
@pytest.mark.parametrize("name", [kind for kind in KINDS if kind.values != ("qwen3_5_vl",)])
def test_law_of_trees(name, monkeypatch):
    """In float64 throughout, behind rows that replay different numbers of tokens. Control: each path as another one."""
    cast = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    wide = lambda args: (torch.float64 if a is torch.float32 else a for a in args)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **more: cast(self, *wide(args), **more))
    with torch.inference_mode(False):
        model = MODELS[name]().double()
    inputs = prompt(name, (8, 5, 3))
    target, state, _ = opened_model(model, inputs)
    before = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    draft = random_draft(state, 8, 1)
    assert variation(model, target, state, draft, before) < 1e-12
    paths = [[m for m in trees.paths(draft.tree)[0, n].tolist() if m >= 0] for n in (7, 0, 3)]
    before = [[*ids, *(int(draft.value[b, m]) for m in path)] for b, (ids, path) in enumerate(zip(before, paths))]
    next_round(target, state, draft, paths, [11, 12, 13])
    replayed = state.cache.past.replayed
    assert replayed == [0, 0, 0] if name == "lfm2" else len(set(replayed)) > 1  # windows of convolutions are kept
    assert variation(model, target, state, random_draft(state, 20, 2), before) < 1e-12
    made = recurrent.path_rows

    def swapped(tree):
        path_BPD, of_BN = made(tree)
        return path_BPD.roll(1, 1), of_BN

    monkeypatch.setattr(recurrent, "path_rows", swapped)
    assert variation(model, target, state, random_draft(state, 12, 3), before) > 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("most", [recurrent.MOST_BYTES, 0])
def test_the_longest_path_is_not_replayed(most, monkeypatch):
    """Its state is kept, and is that of stock decoding, unless the states of all paths take too much memory."""
    monkeypatch.setattr(recurrent, "MOST_BYTES", most)
    name = "qwen3_5"
    inputs, expected = prompt(name, (9, 6)), stock(name, (9, 6))
    target, state, _ = opened_model(model_of(name), inputs)
    value = torch.tensor([[row[0], 5, row[1], 6, row[2]] for row in expected])
    draft = Draft(value, trees.static((-1, 0, 0, 2, 2)))
    target.verify(state, draft)
    next_round(target, state, draft, [[0, 2, 4], [0, 2]], [expected[0][3], expected[1][2]])
    assert state.cache.past.replayed == [0 if most else 3, 2]
    if not most:
        return
    ids = torch.cat([inputs["input_ids"][0], torch.tensor(expected[0][:3])])
    cache = model_of(name)(input_ids=ids[None], use_cache=True)[CACHE]
    for i, layer in state.cache.past.layers.items():
        torch.testing.assert_close(layer.recurrent_states[0][0], cache.layers[i].recurrent_states[0][0])
        torch.testing.assert_close(layer.conv_states[0][0], cache.layers[i].conv_states[0][0])


@torch.inference_mode()
def test_rows_of_a_draft_are_one_chunk(monkeypatch):
    """torch's gated delta rule fills the rows of a prompt up to 64 tokens, but not those of a chain or a tree."""
    rule, sizes = modeling_qwen3_5.torch_chunk_gated_delta_rule, []

    @functools.wraps(rule)
    def spy(*args, **more):
        sizes.append(more.get("chunk_size"))
        return rule(*args, **more)

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", spy)
    target, state, _ = opened_model(model_of("qwen3_5"), prompt("qwen3_5", (9, 6)))
    assert sizes[-3:] == [None] * 3
    for parent, size in (((-1, 0, 1, 2), 4), ((-1, 0, 0, 1, 1), 3)):
        target.verify(state, Draft(torch.full((2, len(parent)), 7), trees.static(parent)))
        assert sizes[-3:] == [size] * 3


def test_windows_beyond_memory_limit(monkeypatch):
    """Short convolutions: such trees are replayed, the chains between them are not."""
    monkeypatch.setattr(recurrent, "MOST_BYTES", 0)
    monkeypatch.setattr(recurrent, "MOST", 3)
    lengths = (12, 7, 3)
    inputs, expected = prompt("lfm2", lengths), stock("lfm2", lengths)
    drafter, tree, replayed = Erring(expected, 0.5, 3, True), TreeOracle(expected, 0.3, per_row=True), []
    chain = drafter.propose

    def propose(state, depth):
        replayed.append(max(state.cache.past.replayed))
        return (tree.propose if len(replayed) % 2 else chain)(state, depth)

    drafter.propose = propose
    fast = visspec.accelerate(model_of("lfm2"), drafter, adaptive=False)
    assert new_tokens(fast.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs) == expected
    assert max(replayed[1::2]) > 3 and max(replayed[::2]) == 0


def test_recurrent_refusals():
    model = model_of("qwen3_5")
    with pytest.raises(ValueError, match="drafter: LayerSkip runs layers of the target"):
        visspec.accelerate(model, "layers")
    with pytest.raises(ValueError, match="drafter: got Qwen3_5ForCausalLM with recurrent layers"):
        SmallModel(model, model)
    bare = tf.Qwen3_5TextConfig(**{**HYBRID, "layer_types": ["linear_attention"] * 4})
    with pytest.raises(ValueError, match="has linear_attention, expected"):
        visspec.accelerate(tf.Qwen3_5ForCausalLM._from_config(bare), "ngram")
    with pytest.warns(RuntimeWarning, match="layers that keep a state"):
        HFDecoder(model, compile=True)
    inputs = prompt("qwen3_5", (9,))
    fast = visspec.accelerate(model, Double())
    output = fast.generate(**inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert getattr(output, CACHE) is None


def test_other_steps_than_passes_are_refused():
    """Zamba 2 computes several tokens behind a state otherwise than one by one, which shows from the third on."""
    with pytest.raises(ValueError, match="than for the same tokens one by one"):
        visspec.accelerate(tiny_model("Zamba2ForCausalLM"), "ngram")
