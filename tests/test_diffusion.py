"""Masked diffusion language models as block drafters: what a pass reads, how places are filled, the exact output."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

import visspec
from tests.distributions import SIZE, context_law, plain_law, process_law, total_variation
from tests.distributions import PositionalChain as Chain
from tests.doubles import NEW
from tests.published import begun
from tests.tiny import VOCAB, model_of, prompt, shapes
from visspec import registry
from visspec.api.training.drafter import request_of
from visspec.models.block.diffusion import DiffusionModel
from visspec.models.block.diffusion_trained import DiffusionDrafter
from visspec.models.block.trained import DECAY
from visspec.models.decoder.target import HFDecoder, content_ids
from visspec.models.published import assistant
from visspec.sampling import Uniform
from visspec.testing import check_drafter
from visspec.train.capture import capture
from visspec.types import Sampling

MASK = 7
SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def random_weights(model, gain=3.0):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(gain * torch.randn(p.shape, generator=generator) * p.shape[1] ** -0.5)
    return model.eval()


def bert(**changes):
    config = tf.BertConfig(**{**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 80, **changes})
    return random_weights(tf.BertForMaskedLM(config))


def modern_bert(**changes):
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    sizes = {**SIZES, "vocab_size": VOCAB, "local_attention": 8, "tie_word_embeddings": False, **changes}
    return random_weights(tf.ModernBertForMaskedLM(tf.ModernBertConfig(**ids, **sizes)))


NETWORKS = {"bert": bert, "modern bert": modern_bert}


def trained(seed=0, **options):
    head = DiffusionDrafter.for_model(model_of("llava"), seed=seed, layers=2, block=6).head
    random_weights(head, 1.3)
    return DiffusionDrafter(head, model_of("llava"), **options)


# --- a pass -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_pass_over_a_batch_is_that_of_every_row(name, shifted):
    network = NETWORKS[name]()
    drafter = DiffusionModel(network, model_of("llama"), mask=MASK, shifted=shifted)
    texts, filled = [[5, 9, 11], [4], [8, 3, 2, 12, 10, 9, 5]], torch.tensor([[20, 21], [30, 31], [40, 41]])
    for tokens in (None, filled):
        logits = drafter.denoised(texts, tokens, 3)
        for b, text in enumerate(texts):
            whole = [*text, *([] if tokens is None else tokens[b].tolist()), MASK, MASK, MASK]
            alone = network(input_ids=torch.tensor([whole])).logits[0]
            want = alone[-4:-1] if shifted else alone[-3:]
            torch.testing.assert_close(logits[b], want, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_own_network_uses_target_embedding():
    drafter, model = trained(), model_of("llava")
    texts, own = [[5, 9, 11], [4]], drafter.head.model
    logits = drafter.denoised(texts, None, 2)
    for b, text in enumerate(texts):
        known = torch.nn.functional.embedding(torch.tensor([text]), model.get_input_embeddings().weight)
        embeds = torch.cat([known, own.get_input_embeddings().weight[None].expand(1, 2, -1)], dim=1)
        hidden = own(inputs_embeds=embeds).last_hidden_state[0, -2:]
        want = model.get_output_embeddings()(hidden)
        torch.testing.assert_close(logits[b], want, rtol=1e-4, atol=1e-4)
    assert (logits[0, 0] - logits[0, 1]).abs().max() > 1e-2


@torch.inference_mode()
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_places_are_filled_from_left_to_right(steps):
    """Every pass fills its share of the block, and reads what stands above it."""
    drafter, model = DiffusionModel(bert(), model_of("llava"), mask=MASK, block=6, steps=steps), model_of("llava")
    inputs = prompt("llava", shapes("llava")["ragged"])
    _, state, _ = begun(drafter, model, inputs, NEW)
    draft, each = drafter.propose(state, 5), 6 // steps
    barred = [MASK, *content_ids(model.config)]
    for b, row in enumerate(state.rows):
        real = inputs["attention_mask"][b].bool()
        text = [i for i in inputs["input_ids"][b][real].tolist() if i not in content_ids(model.config)]
        text, drafted = [*text, *state.tokens[row]], []
        while len(drafted) < 5:
            ids = torch.tensor([[*text, *drafted, *[MASK] * (5 - len(drafted))]])
            logits = drafter.network(input_ids=ids).logits[0, len(text) + len(drafted) :]
            logits[:, barred] = float("-inf")
            drafted += logits.argmax(-1).tolist()[:each]
        assert draft.value[b, 1:].tolist() == drafted[:5]
    assert state.calls["draft_pass"] == -(-5 // each)


@torch.inference_mode()
def test_a_long_text_is_read_at_its_ends():
    drafter, seen = DiffusionModel(bert(), model_of("llama"), mask=MASK, block=4, reads=5), []
    drafter.denoised = lambda texts, filled, masks: seen.append(texts) or torch.zeros(len(texts), masks, VOCAB)
    state = SimpleNamespace(
        memory=[[9], [10, 11, 12, 13]], tokens=[[1, 2, 3], [4, 5, 6]], rows=[1, 0], calls=Counter(),
        pending=torch.tensor([6, 3]), noise=None, request=SimpleNamespace(sampling=Sampling()),
    )  # fmt: skip
    drafter.propose(state, 2)
    assert seen == [[[10, 13, 4, 5, 6], [9, 1, 2, 3]]]
    assert DiffusionModel(bert(max_position_embeddings=20), model_of("llama"), mask=MASK, block=6).reads == 14


# --- the output -------------------------------------------------------------------------------------------------------


def test_a_tree_of_blocks_changes_no_token():
    fast = check_drafter(trained().shaped(tree="3-2"), model_of("llava"), prompt("llava", shapes("llava")["ragged"]))
    assert max(r.levels for r in fast.last_state.trace.rounds) == 2


class Known(DiffusionModel):
    """A diffusion model of two ids by a table: the law of a place from the tokens above and the masks between."""

    def __init__(self, q, steps):
        self.q, self.steps, self.block, self.reads, self.width, self.stop = q, steps, 3, 99, 1, None

    def denoised(self, texts, filled, masks):
        above = (*texts[0], *([] if filled is None else filled[0].tolist()))
        return torch.stack([self.q((*above, *[0] * k)).log() for k in range(masks)])[None]

    def _mask_undraftable(self, logits):
        return logits


class Denoising(Chain):
    def __init__(self, q, steps):
        super().__init__(q)
        self.known = Known(q, steps)

    def cuts(self, committed, numbers, level):
        drafted = self.draft(committed, numbers, level).value[0, 1:].tolist() if level else []
        masks = level % self.known.each
        return [float(self.q((*committed, *drafted[: level - masks], *[0] * masks))[0])]

    def draft(self, committed, numbers, depth):
        state = SimpleNamespace(
            noise=Uniform.of(torch.tensor(numbers, dtype=torch.float64)[None, :, None]), rows=[0], calls=Counter(),
            request=SimpleNamespace(sampling=Sampling(temperature=1.0)), pending=torch.tensor([committed[-1]]),
            memory=[[]], tokens=[list(committed)],
        )  # fmt: skip
        return self.known.propose(state, depth)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_filled_blocks_keep_the_law_of_draws(steps, seed, unwarped):
    p, drafter = context_law(2, seed), Denoising(context_law(2, seed + 7), steps)
    assert total_variation(process_law(drafter, p), plain_law(p, 2, SIZE)) < 1e-12


# --- training ---------------------------------------------------------------------------------------------------------


def test_a_rollout_is_what_drafting_says(monkeypatch):
    """Behind a random token of each answer, of the prompt's words; places beyond the answer do not count."""
    model, drafter = model_of("llava"), trained()
    target = HFDecoder(model, (-1,), embeddings=True)
    inputs = prompt("llava", ["4 i 5", "6 i 3 i 2"], seed=2)
    lesson = capture(target, visspec.Exact(), request_of(model, inputs, temperature=1.0, max_new_tokens=9, seed=7))
    object.__setattr__(lesson, "lengths", [9, 5])
    drawn = iter([4, 3, 2, 2, 0, 1])  # masks and two anchors, twice
    asked = []
    monkeypatch.setattr(torch, "randint", lambda *given: asked.append(given[:-1]) or torch.tensor(next(drawn)))
    with torch.no_grad():
        steps = drafter.rollout(lesson, 2)
    assert asked == [(1, 7), (8,), (4,)] * 2
    monkeypatch.undo()
    prompts = drafter.words(inputs["input_ids"], inputs["attention_mask"])
    assert [len(words) for words in prompts] == [10, 12] and not content_ids(model.config) & {*prompts[0], *prompts[1]}
    for (states, weight, place), (masks, *anchors) in zip(steps, ((4, 3, 2), (2, 0, 1))):
        assert states.shape[:2] == weight.shape == place.shape == (2, masks)
        logits = drafter.trained_logits(states, place)
        for b, (anchor, length) in enumerate(zip(anchors, (9, 5))):
            text = prompts[b] + lesson.ids[b, lesson.prompt_length :][: anchor + 1].tolist()
            with torch.no_grad():
                want = drafter.denoised([text], None, masks)[0, : 8 - anchor]
            torch.testing.assert_close(logits[b, : 8 - anchor], want, rtol=1e-4, atol=1e-4)
            assert place[b].tolist() == [min(anchor + i, 7) for i in range(masks)]
            counted = [DECAY**i if anchor + i < length - 1 else 0 for i in range(masks)]
            torch.testing.assert_close(weight[b], torch.tensor(counted))


# --- loading ----------------------------------------------------------------------------------------------------------


def test_models_of_masked_tokens_are_told_by_form(tmp_path):
    target = model_of("llama")
    assert type(assistant(bert(), target, mask=MASK)) is DiffusionModel
    network = bert()
    network.config.mask_token_id = 9
    assert assistant(network, target).mask == 9
    modern_bert().save_pretrained(tmp_path / "folder")
    drafter, _ = registry.drafter(f"{tmp_path / 'folder'}:mask=5,steps=2,block=8", target)
    assert type(drafter) is DiffusionModel and (drafter.mask, drafter.each) == (5, 4)
    assert registry.drafter(f"{tmp_path / 'folder'}:mask=5,tree=2-2", target)[0].width == 2


BAD = {
    "mask": ({"mask": None}, "mask: got None, expected the id of the network"),
    "far mask": ({"mask": VOCAB}, f"mask: got {VOCAB}, expected a whole number from 0 to {VOCAB - 1}"),
    "block": ({"block": 0}, "block: got 0, expected a whole number from 1"),
    "steps": ({"steps": 5, "block": 4}, "steps: got 5, expected a whole number from 1 to 4"),
    "reads": ({"reads": 0}, "reads: got 0"),
    "vocabulary": ({"network": bert(vocab_size=5000)}, f"drafter: vocabulary of 5000, expected the target's {VOCAB}"),
    "trees": ({"steps": 2, "width": 2}, "steps: got 2 for trees, expected 1"),
    "positions": ({"block": 80}, "block: got 80, expected less than the 80 positions"),
}


@pytest.mark.parametrize("what", BAD)
def test_values_that_are_none_are_refused(what):
    options, sentence = BAD[what]
    with pytest.raises(ValueError, match=sentence):
        DiffusionModel(**{"network": bert(), "model": model_of("llama"), "mask": MASK, **options})


def test_trees_of_several_passes_are_refused():
    with pytest.raises(ValueError, match="tree: got '3-2' with 2 steps, expected chains"):
        DiffusionModel(bert(), model_of("llama"), mask=MASK, steps=2).shaped(tree="3-2")


@torch.inference_mode()
def test_ids_beyond_the_network_are_never_drafted():
    small = DiffusionModel(bert(vocab_size=VOCAB - 20), model_of("llama"), mask=MASK)
    logits = small._mask_undraftable(small.denoised([[3, 4]], None, 2))
    assert logits.shape == (1, 2, VOCAB) and logits[..., VOCAB - 20 :].isinf().all() and logits[..., MASK].isinf().all()
    assert logits.isfinite().sum() == 2 * (VOCAB - 21 - sum(i < VOCAB - 20 for i in small.content))
