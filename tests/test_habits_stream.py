"""Habits around generate: transformers' pipeline, a streamer in a thread, a map over a data set."""

import pytest
import transformers as tf

import visspec
from visspec.api.captions import PROMPT, chat_prompt, prepare
from visspec.io import included

NEW = 12


@pytest.fixture(scope="module")
def loaded(captioner):
    model, processor = captioner
    return visspec.accelerate(model, "vispec"), processor, included.scenes("shapes").images(2)


def expected(fast, processor, image) -> str:
    inputs = prepare(processor, [image], PROMPT, fast.model)
    out = fast.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_transformers_pipeline(loaded):
    fast, processor, images = loaded
    pipe = tf.pipeline("image-text-to-text", model=fast, processor=processor)
    options = {"max_new_tokens": NEW, "do_sample": False}
    before = fast.last_stats
    result = pipe(images[0], text=chat_prompt(processor, PROMPT), return_full_text=False, generate_kwargs=options)
    assert result[0]["generated_text"].strip() == expected(fast, processor, images[0]).strip()
    assert fast.last_stats is not before and fast.last_stats.tau > 1


def test_a_map_over_a_data_set(loaded):
    datasets = pytest.importorskip("datasets")
    fast, processor, images = loaded

    def captioned(batch):
        inputs = prepare(processor, [images[i] for i in batch["index"]], PROMPT, fast.model)
        out = fast.generate(**inputs, max_new_tokens=NEW)[:, inputs["input_ids"].shape[1] :]
        return {"caption": processor.tokenizer.batch_decode(out, skip_special_tokens=True)}

    table = datasets.table.InMemoryTable.from_pydict({"index": [0, 1]})
    given = datasets.Dataset(table, fingerprint="two")  # named, as its hash pickles whatever the function refers to
    result = given.map(captioned, batched=True, batch_size=2, new_fingerprint="captions")
    assert result["caption"][0] == expected(fast, processor, images[0])
