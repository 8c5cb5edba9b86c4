"""The harnesses of others: item by item the score of a model with and without us, through the real packages."""

import json
from types import SimpleNamespace

import pytest
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import visspec
from tests.tiny import llama
from visspec.io import included

WORDS = ["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(3, 96))]


def words_of(target=tf.PreTrainedTokenizerFast):
    """A tokenizer whose ids are those of the tiny models."""
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return target(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def rows_of(home, count=6):
    rows = [{"question": " ".join(f"w{5 + (n * k) % 60}" for k in range(1, 9)), "answer": "w9"} for n in range(count)]
    (home / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(home / "task.jsonl")}},
        "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
    }  # fmt: skip


def same(plain, ours):
    for task, samples in plain["samples"].items():
        for key in ("doc_id", "resps", "filtered_resps"):
            assert [s[key] for s in ours["samples"][task]] == [s[key] for s in samples], (task, key)
        scores = [{k: v for k, v in run["results"][task].items() if not isinstance(v, str)} for run in (plain, ours)]
        assert scores[0] == scores[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.slow
def test_lm_eval_takes_an_accelerated_model(tmp_path):
    evaluator, task = pytest.importorskip("lm_eval.evaluator"), pytest.importorskip("lm_eval.api.task")
    from lm_eval.models.huggingface import HFLM

    means = {"aggregation": "mean", "higher_is_better": True}
    until = {"until": ["w70", "w9"], "max_gen_toks": 12, "do_sample": False}
    texts = {"task": "texts", "output_type": "generate_until", "generation_kwargs": until}
    choices = {"task": "choices", "output_type": "multiple_choice", "doc_to_choice": ["w20", "w30"], "doc_to_target": 1}
    metrics = [{"metric_list": [{"metric": name, **means}]} for name in ("exact_match", "acc")]
    configs = [rows_of(tmp_path) | kind | metric for kind, metric in zip((texts, choices), metrics)]
    model = llama(3)
    fast = visspec.accelerate(model, llama(3), adaptive=False)  # a drafter that is always right

    def run(subject):
        tasks = {config["task"]: task.ConfigurableTask(config=dict(config)) for config in configs}
        subject = HFLM(pretrained=subject, tokenizer=words_of(), batch_size=1)
        return evaluator.evaluate(subject, tasks, log_samples=True, bootstrap_iters=0)

    same(run(model), ours := run(fast))
    assert fast.last_stats.tau > 1 and len(ours["samples"]["texts"]) == len(ours["samples"]["choices"]) == 6


@pytest.mark.slow
def test_lmms_eval_takes_an_accelerated_model(tmp_path, captioner):
    evaluator, task = pytest.importorskip("lmms_eval.evaluator"), pytest.importorskip("lmms_eval.api.task")
    from lmms_eval.models.simple.llava_hf import LlavaHf

    own = {
        "task": "pictures", "output_type": "generate_until", "doc_to_text": lambda doc: "what is there ?",
        "doc_to_visual": lambda doc: [Image.new("RGB", (96, 96), "red")],
        "generation_kwargs": {"max_new_tokens": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip

    def run(accelerated):
        lm = LlavaHf(pretrained=str(included.folder("captioner")), device="cpu", device_map="cpu", dtype="float32")
        if accelerated:
            lm._model = visspec.accelerate(lm._model)
        tasks = {"pictures": task.ConfigurableTask(config=rows_of(tmp_path, 3) | own, model_name="llava_hf")}
        lm.task_dict["pictures"] = tasks["pictures"].dataset
        given, model = SimpleNamespace(process_with_media=True), lm._model
        return evaluator.evaluate(lm, tasks, log_samples=True, bootstrap_iters=0, cli_args=given), model

    (plain, _), (ours, fast) = run(False), run(True)
    same(plain, ours)
    assert fast.last_stats.tau > 1 and all(s["filtered_resps"][0] for s in plain["samples"]["pictures"])
