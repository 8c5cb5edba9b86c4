"""A decoder of text alone, with a tokenizer in place of a processor, in every command that it makes sense in."""

import json
import shutil

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import visspec
from tests.doubles import raises_line, refused
from tests.tiny import llama
from visspec import registry
from visspec.api import loading
from visspec.api.captions import prepare, process_chats
from visspec.api.sources import seed_of
from visspec.api.text.accelerate import Accelerated, default_drafter
from visspec.api.training import self_prompts
from visspec.api.training.data import TrainingData
from visspec.api.training.options import DrafterTraining
from visspec.cli import arguments, caption, serve
from visspec.cli.main import main
from visspec.loop.stream import Answer
from visspec.models.lookup.context import ContextDrafter

TEMPLATE = (  # it concatenates contents, as templates of text models do
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '!' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PROMPTS = ["Hello", "Name a color", "Count to nine", "Say it again"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model and its tokenizer, of which every id is a character; there is no pad token."""
    where = tmp_path_factory.mktemp("text")
    core = Tokenizer(models.BPE({c: i for i, c in enumerate([*map(chr, range(33, 127)), "Ġ", "Ċ"])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    llama().save_pretrained(where)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="#", chat_template=TEMPLATE).save_pretrained(where)
    Image.new("RGB", (9, 9)).save(where / "x.png")
    (where / "prompts.txt").write_text("\n".join(PROMPTS))
    (where / "data.jsonl").write_text("\n".join(json.dumps({"prompt": p, "answer": "Yes"}) for p in PROMPTS * 2))
    return where


def test_inputs_of_a_tokenizer(folder):
    model, tokenizer = loading.load(str(folder))
    chats = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in PROMPTS[:2]]
    inputs = process_chats(tokenizer, chats, [[], []])
    assert tokenizer.batch_decode(inputs["input_ids"])[1] == "<user>Name a color!<assistant>"
    assert inputs["attention_mask"].sum(1).tolist() == [len("<user>Hello!<assistant>"), 30]  # left-padded
    assert inputs["attention_mask"][:, -1].all() and type(model).__name__ == "LlamaForCausalLM"
    with pytest.raises(ValueError, match="sees no pictures"):
        process_chats(tokenizer, chats[:1], [[object()]])


@pytest.mark.parametrize("preset,form,answers", [((), None, "target"), (("--preset", "eagle3"), "eagle3", "own")])
def test_train_and_export_a_drafter(preset, form, answers, folder, tmp_path, capsys):
    argv = ["train", "drafter", "--target", folder, "--data", folder / "data.jsonl", "--out", tmp_path / "d", *preset]
    argv += ["--answers", answers, "--steps", 2, "--rows", 2, "--max-new-tokens", 6]
    assert main([*map(str, argv)]) == 0, capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5, 25)[None]
    fast = visspec.accelerate(model, tmp_path / "d")
    assert fast.generate(ids, max_new_tokens=9).equal(model.generate(ids, max_new_tokens=9, do_sample=False))
    entries = [{"input_ids": ids[:, :n]} for n in (20, 9, 14)]
    for answer in fast.stream(entries, slots=2, max_new_tokens=9, do_sample=False):
        expected = model.generate(**entries[answer.id], max_new_tokens=9, do_sample=False)[0]
        assert answer.tokens == expected[entries[answer.id]["input_ids"].shape[1] :].tolist()
    if form is not None:
        assert main(["export", str(tmp_path / "d"), "--form", form, "--out", str(tmp_path / form)]) == 0


@pytest.mark.parametrize("structure", [None, "width=4,nodes=16"])
def test_printed_tau_is_that_of_the_folder(structure, folder, tmp_path, capsys):
    """Greedy, the same held-out prompts, by a user who loads the folder; chosen by measurement, or asked for."""
    model, tokenizer = loading.load(str(folder))
    path, argv = tmp_path / "d" / "prompts.jsonl", ["--data", "self:3", "--structure", structure]
    if structure is None:
        path, argv = tmp_path / "data.jsonl", ["--data", tmp_path / "data.jsonl"]
        path.write_text("\n".join(json.dumps({"prompt": f"Say {n}"}) for n in range(80)))
    argv += ["--target", folder, "--out", tmp_path / "d", "--preset", "eagle3", "--steps", 1, "--rows", 2]
    assert main(["train", "drafter", *map(str, argv), "--max-new-tokens", "12"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    config = json.loads((tmp_path / "d" / "config.json").read_text())["structure"]
    tried = [line["structure"] for line in printed if "tau_adaptive" in line]
    if structure is None:
        assert tried == ["tree=chain", "width=3,nodes=8", "width=4,nodes=16", "width=10,nodes=60"]
        assert registry.joined("", config) == f":{printed[-1]['structure']}"
    else:
        assert not tried and config == {"width": 4, "nodes": 16}
    _, held = TrainingData(path).hold_out(64, 0)
    prompts = [json.loads(path.read_text().splitlines()[n])["prompt"] for n in held]
    parts = [prompts[n : n + 2] for n in range(0, len(prompts), 2)]
    inputs = [prepare(tokenizer, [[]] * len(part), part, model) for part in parts]

    def tau(spec):
        fast, rounds = visspec.accelerate(model, spec, adaptive=False), []
        for each in inputs:
            fast.generate(**each, max_new_tokens=12, do_sample=False)
            rounds += fast.last_state.trace.rounds
        return sum(sum(one.committed) for one in rounds) / sum(len(one.committed) for one in rounds)

    card = (tmp_path / "d" / "README.md").read_text()
    assert f"| tau_greedy | {round(tau(tmp_path / 'd'), 3)} |" in card
    trees = tau(f"{tmp_path / 'd'}:tree=chain"), tau(f"{tmp_path / 'd'}:width=10,nodes=60")
    assert structure or trees[0] < trees[1], "the figure tells structures apart"


def test_a_model_writes_its_prompts(folder, tmp_path, capsys):
    """Each is what plain decoding samples as the user; those that are cut or there already are left out."""
    model, tokenizer = loading.load(str(folder))
    asked = DrafterTraining(target=str(folder), data="self", out=tmp_path, rows=4, max_new_tokens=30)
    lines = self_prompts.write(model, tokenizer, asked, 4).read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len({row["prompt"].casefold() for row in rows}) == 4
    assert "prompts.jsonl holds 4 prompts; 0.0% duplicates among" in capsys.readouterr().err
    ids, fast = tokenizer("<user>", return_tensors="pt")["input_ids"], visspec.accelerate(model, None)
    for row in rows[:2]:
        options = {"seed": seed_of(0, row["id"]), "eos_token_id": tokenizer.all_special_ids, "max_new_tokens": 30}
        sampled = fast.generate(ids, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **options)
        text = tokenizer.decode(sampled[0, ids.shape[1] :], skip_special_tokens=True)
        assert row["prompt"] == text.partition("!<assistant>")[0].strip()
    (tmp_path / "prompts.jsonl").write_text("".join(lines[:2]) + lines[2][:9])  # as a killed run leaves it
    again = self_prompts.write(model, tokenizer, asked, 4).read_text().splitlines(keepends=True)
    assert again[:2] == lines[:2] and len(set(again)) == 4
    tokenizer.chat_template = None
    with raises_line("data: got self for a model without a chat template. Pass a file of prompts."):
        self_prompts.write(model, tokenizer, asked, 4)


def test_duplicate_prompts_are_left_out(folder, tmp_path, monkeypatch, capsys):
    model, tokenizer = loading.load(str(folder))
    texts = iter(["Say it", "say  IT.", "...", "Say that", "Cut", "Say what"])

    def stream(self, entries, **options):
        for entry in entries:
            text = next(texts)
            yield Answer(entry["id"], ended="length" if text == "Cut" else "eos", text=text)

    monkeypatch.setattr(Accelerated, "stream", stream)
    path = self_prompts.write(model, tokenizer, DrafterTraining(target="x", data="self", out=tmp_path), 3)
    prompts = [(row["id"], row["prompt"]) for row in map(json.loads, path.read_text().splitlines())]
    assert prompts == [("0", "Say it"), ("3", "Say that"), ("5", "Say what")]
    message = capsys.readouterr().err
    assert "25.0% duplicates among 6 samples: {'new': 3, 'duplicate': 1, 'empty': 1, 'cut': 1}" in message


def test_pictures_of_own_prompts_alone(folder, tmp_path, capsys):
    argv = ["train", "drafter", "--target", folder, "--out", tmp_path / "d", "--images", "photos", "--data", "x.jsonl"]
    assert "images: --data x.jsonl has its own images" in refused(capsys, *argv)


def test_a_table_for_the_default_drafter(folder, tmp_path, capsys):
    """The ids that the model ranks highest after each id at the start of an answer."""
    argv = ["train", "drafter", "--target", str(folder), "--preset", "context", "--out", str(tmp_path / "d")]
    assert main(argv) == 0, capsys.readouterr().err
    model, tokenizer = loading.load(str(folder))
    table_VK = ContextDrafter.from_pretrained(tmp_path / "d", model).common.successors
    assert len(table_VK) == model.config.vocab_size
    start = tokenizer("<user>Hello.!<assistant>")["input_ids"]
    rows = torch.tensor([[*start, id] for id in range(len(table_VK))])
    logits = model(rows).logits[:, -1]
    assert torch.allclose(logits.gather(1, table_VK.long()), logits.topk(table_VK.shape[1]).values, atol=1e-4)

    ids = torch.arange(5, 25)[None]
    stock = model.generate(ids, max_new_tokens=9, do_sample=False)
    for drafter, drafts in (("recycling", False), (f"{tmp_path / 'd'}:sources=candidates", True)):
        fast = visspec.accelerate(model, drafter, length="fixed")
        assert fast.generate(ids, max_new_tokens=9).equal(stock)
        assert (fast.last_state.trace.rounds[0].levels > 0) == drafts, "the first round"
    fast.save_pretrained(tmp_path / "saved")
    again = Accelerated.from_pretrained(tmp_path / "saved", length="fixed")
    assert again.generate(ids, max_new_tokens=9).equal(stock)
    assert again.last_state.trace.rounds[0].levels

    assert main(argv) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--steps", "9"]) == 2 and "--steps" in capsys.readouterr().err
    small = llama(vocab_size=99)
    with pytest.raises(ValueError, match="ids, but the model has 99"):
        visspec.accelerate(small, tmp_path / "d")


def test_auto_is_the_same_everywhere(folder, tmp_path, capsys, short_bench):
    """A drafter that was trained into the model's folder, from every entry point."""
    home = shutil.copytree(folder, tmp_path / "model")
    argv = ["train", "drafter", "--target", home, "--data", home / "data.jsonl", "--out", home / "drafter"]
    assert main([*map(str, argv), "--answers", "own", "--steps", "2", "--rows", "2"]) == 0
    model, _ = loading.load(str(home))
    assert default_drafter(model)[0] == f"{home / 'drafter'}:copies=true"
    hook = visspec.speculative()
    model.generate(torch.arange(5, 25)[None], max_new_tokens=3, custom_generate=hook)
    result = [visspec.accelerate(model), Accelerated.from_pretrained(home), hook.fast]
    result.append(arguments.load(caption.Options(model=str(home), image=[]))[0])
    result.append(arguments.load(serve.Options(model=str(home)))[0])
    assert [type(fast.drafter).__name__ for fast in result] == ["MergedDrafter"] * len(result)
    short = ["--max-new-tokens", "2", "--count", "1", "--json", str(tmp_path / "b")]
    assert main(["bench", "text", "--model", str(home), *short]) == 0
    record = json.loads((tmp_path / "b").read_text())
    assert record["drafter"] == "auto" and record["auto"] == "drafter"
    assert "auto: drafter drafter, because it is in the model's folder" in " ".join(capsys.readouterr().out.split())


def test_bench_text(folder, tmp_path, short_bench):
    argv = ["bench", "text", "--model", folder, "--prompts", folder / "prompts.txt", "--max-new-tokens", 8]
    assert main([*map(str, argv), "--json", str(tmp_path / "b.json")]) == 0
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["n_prompts"] == result["identical"] == result["compared"] == 4
    kinds = [{"kind": "greeting"}, {"kind": "greeting"}, {"category": "numbers"}, {"category": "numbers"}]
    lines = [json.dumps({"prompt": prompt, **kind}) for prompt, kind in zip(PROMPTS, kinds)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    argv[5:6] = [tmp_path / "p.jsonl", "--count", 2]
    assert main([*map(str, argv), "--json", str(tmp_path / "b.json")]) == 0
    result = json.loads((tmp_path / "b.json").read_text())
    assert {name: row["compared"] for name, row in result["categories"].items()} == {"greeting": 1, "numbers": 1}
    assert main(["report", str(tmp_path / "b.json"), "-o", str(tmp_path / "page.html")]) == 0
    assert "prompt lookup" in (tmp_path / "page.html").read_text()


def test_tune_takes_prompts(folder, tmp_path):
    argv = ["tune", "--model", folder, "--prompts", folder / "prompts.txt", "--count", 2, "--max-new-tokens", 8]
    argv += ["--lengths", 2, "--batches", 1, 2, "--drafters", "ngram", "--json", tmp_path / "t.json"]
    assert main([*map(str, argv), "--out", str(tmp_path / "p.json")]) == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["n_prompts"] == result["n_checked"] == 2
    assert all(row["identical"] == row["compared"] for row in result["rows"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert visspec.accelerate(model, preset=tmp_path / "p.json").name in ("ngram", "none", "plain")


@pytest.mark.parametrize("command", [
    "caption {}/x.png", "caption {} --out {}/o.jsonl", "bench caption", "tune --images {}",
    "answer {}/x.png what --drafts {} {}",
])  # fmt: skip
def test_a_text_model_sees_no_pictures(command, folder, capsys):
    message = refused(capsys, *command.replace("{}", str(folder)).split(), "--model", folder)
    assert f"{folder} generates text and sees no pictures" in message and "visspec bench text" in message


def test_serve_answers_a_chat(folder):
    testclient = pytest.importorskip("fastapi.testclient", reason="the extra `serve` is not installed")
    from visspec.api.server.app import Service, application
    from visspec.api.server.worker import TextWorker

    model, tokenizer = loading.load(str(folder))
    worker = TextWorker("tiny", visspec.accelerate(model, "ngram"), tokenizer)
    client = testclient.TestClient(application(Service(worker, None, None)), base_url="http://127.0.0.1")
    messages = [{"role": "user", "content": PROMPTS[0]}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 9, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=9, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True).strip()
    worker.close()
