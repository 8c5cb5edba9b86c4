"""A small model with another tokenizer drafts through text: the target's tokens, whatever the tokenizers say."""

import functools
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, trainers

import visspec
from tests.doubles import one_sentence
from tests.tiny import llama
from visspec.models.decoder.retokenized import RetokenizedModel, _CachedRow

LETTERS = "abcd "
GREEDY = {"max_new_tokens": 24, "do_sample": False}
TEXTS = ["abba dab cab abba", "cad"]


def characters():
    """A tokenizer of single letters, whose ids are those of a tiny model."""
    made = Tokenizer(models.BPE({c: n for n, c in enumerate(["<pad>", "<s>", "</s>", *LETTERS])}, []))
    made.decoder = decoders.Fuse()
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", padding_side="left")


@functools.cache
def pieces():
    """A tokenizer of pieces of up to several letters, across words."""
    made = Tokenizer(models.BPE())
    generator = torch.Generator().manual_seed(0)
    text = "".join(LETTERS[i] for i in torch.randint(5, (4000,), generator=generator))
    made.train_from_iterator(
        [text[n : n + 40] for n in range(0, 4000, 40)],
        trainers.BpeTrainer(vocab_size=60, special_tokens=["<pad>", "<s>", "</s>"]),
    )
    made.decoder = decoders.Fuse()
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", padding_side="left")


@functools.cache
def model_of(size, seed=0):
    return llama(seed, vocab_size=size)


PAIRS = {
    "letters for pieces": (pieces, characters),
    "pieces for letters": (characters, pieces),
    "the same": (pieces,) * 2,
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_tokens_of_plain_decoding(name):
    tokenizer, theirs = (make() for make in PAIRS[name])
    model, small = (model_of(len(t.get_vocab())) for t in (tokenizer, theirs))
    drafter = RetokenizedModel(small, theirs, tokenizer)
    fast = visspec.accelerate(model, drafter, adaptive=False)
    for texts in (TEXTS[:1], TEXTS):
        inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
        inputs.pop("token_type_ids", None)
        assert torch.equal(fast.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    assert fast.last_stats.faults == 0 and (fast.last_stats.tau > 1 or name != "the same")
    sampled = [
        one.generate(**inputs, max_new_tokens=12, do_sample=True, seed=3)
        for one in (fast, visspec.accelerate(model, None))
    ]
    assert torch.equal(*sampled)


FOLLOWS = {  # what was said, what the small model says next
    "at the end of an id": ("cad", " cab"),
    "inside of an id": ("abba dab", " cab"),
    "no text": ("ab", ""),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_drafts_are_the_small_models_text_in_the_targets_ids(name, monkeypatch):
    """Where the text goes on inside of the last id, nothing is drafted."""
    tokenizer, theirs, (before, text) = pieces(), characters(), FOLLOWS[name]
    said = tokenizer(before, add_special_tokens=False)["input_ids"]
    follow = theirs(text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(_CachedRow, "follow", lambda self, small, read, count: follow)
    drafter = RetokenizedModel(model_of(60), theirs, tokenizer)
    state = SimpleNamespace(rows=[0], memory={0: _CachedRow()}, ids=lambda b: torch.tensor([said]))
    found = drafter._ahead(state, 0, 5)
    assert tokenizer.decode(found) == ("" if name == "inside of an id" else text)
    assert bool(found) == (name == "at the end of an id")


def test_keys_and_values_of_what_is_left_of_the_text():
    small, row = model_of(60), _CachedRow()
    for read in ([5, 6, 7], [5, 6, 7, 9], [5, 6, 8], [5], [5, 6, 7, 9, 4, 4, 9]):
        ids = torch.tensor([read])
        expected = small.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, len(read) :].tolist()
        assert row.follow(small, read, 3) == expected


def test_a_tokenizer_that_is_none_is_refused():
    with one_sentence("tokenizer: got int, expected a tokenizer"):
        RetokenizedModel(model_of(60), pieces(), 3)
