"""Data of `visspec train drafter`: records as people have them, where they are read from, what can't be read."""

import io
import json

import pytest
import torch
from PIL import Image

import visspec
from tests.doubles import raises_line, tar_of
from tests.test_videos import model as qwen
from tests.test_videos import processor, write
from visspec.api.captions import PROMPT, process_chats
from visspec.api.training import drafter as train_drafter
from visspec.api.training import self_prompts
from visspec.api.training.conversations import conversation_of
from visspec.api.training.data import Reader, TrainingData, read_media, shrink
from visspec.api.training.drafter import Prompts
from visspec.api.training.options import DrafterTraining
from visspec.api.training.self_prompts import opening
from visspec.models.decoder.target import HFDecoder
from visspec.train.capture import AnsweredRequest, capture

RED = "data:image/png;base64,"
LLAVA = {
    "id": "7", "image": "a.png",
    "conversations": [{"from": "human", "value": "<image>\nw5 ü ?"}, {"from": "gpt", "value": "w6 w7"},
                      {"from": "human", "value": "w8"}, {"from": "gpt", "value": "w9"}],
}  # fmt: skip
TEXT = [{"type": "text", "text": "w5"}]


def picture(colour=(9, 0, 0), size=(8, 8)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def home(tmp_path):
    for name, colour in (("a.png", (9, 0, 0)), ("b.png", (0, 9, 0))):
        (tmp_path / name).write_bytes(picture(colour))
    return tmp_path


def lines(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def shown(conversation):
    """Turns with their pictures as <image>, and names of the media."""
    parts = [(m["role"][0], [p.get("text", f"<{p['type']}>") for p in m["content"]]) for m in conversation.messages]
    turns = [f"{role}:{'|'.join(texts)}" for role, texts in parts]
    return turns, [getattr(media, "name", media) for media in conversation.media]


@pytest.mark.parametrize("entry,turns,media,questions", [
    ({"image": "a.png"}, [f"u:<image>|{PROMPT}"], ["a.png"], [1]),
    ({"image": "a.png", "prompt": "w5", "id": "x", "width": 3}, ["u:<image>|w5"], ["a.png"], [1]),
    ({"image": "a.png", "prompt": "w5", "answer": "w6"}, ["u:<image>|w5", "a:w6"], ["a.png"], [1]),
    ({"prompt": "w5", "answer": "<image>"}, ["u:w5", "a:<image>"], [], [1]),
    ({"video": "v.mp4", "system": "w1"}, ["s:w1", f"u:<video>|{PROMPT}"], ["v.mp4"], [2]),
    (LLAVA, ["u:<image>|w5 ü ?", "a:w6 w7", "u:w8", "a:w9"], ["a.png"], [1, 3]),
    ({"images": ["a.png", "b.png"], "conversations": [{"from": "human", "value": "w1 <image> w2 <image>"}]},
     ["u:w1 |<image>| w2 |<image>"], ["a.png", "b.png"], [1]),
    ({"video": "v.mp4", "conversations": [{"from": "human", "value": "<image>\nw1"}]},
     ["u:<video>|w1"], ["v.mp4"], [1]),
    ({"messages": [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]}, ["s:w1", "u:w2"], [], [2]),
    ({"images": [{"bytes": b"x", "path": None}], "messages": [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "w2"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "w3"}]},
        {"role": "user", "content": "w4"}]}, ["u:<image>|w2", "a:w3", "u:w4"], [b"x"], [1, 3]),
    ({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": RED + "eA=="}}, {"type": "image", "path": "b.png"},
        {"type": "text", "text": "w2"}]}]}, ["u:<image>|<image>|w2"], [b"x", "b.png"], [1]),
    ({"id": 1, "image": "a.png", "turns": ["w1"], "category": "chart"}, ["u:<image>|w1"], ["a.png"], [1]),
    ({"prompt": "w1", "image_files": ["a.png", "b.png"]}, ["u:<image>|<image>|w1"], ["a.png", "b.png"], [1]),
])  # fmt: skip
def test_records_are_conversations(tmp_path, entry, turns, media, questions):
    result = conversation_of(entry, tmp_path)
    assert shown(result) == (turns, media) and result.questions() == questions
    known = [result.answer(turn) for turn in questions if turn < len(turns)]
    assert known == [text[2:] for text in turns if text[0] == "a"]
    for turn in questions:
        before = result.until(turn)
        assert len(before.media) == sum(text.count("<") for text in shown(before)[0] if text[0] == "u")


REFUSED = {
    "line 1 of .*: got int, expected an object": 3,
    "line 1 of .*: got no image, expected an object with image": {"id": 1},
    "line 1 of .*: got caption, which training does not use. Pass --ignore caption": {
        "image": "a.png", "caption": "w1"
    },
    "got image and images, expected one of the two": {"image": "a.png", "images": ["b.png"]},
    "got prompt and messages, expected one of the two": {"prompt": "w1", "messages": []},
    "got answer and conversations": LLAVA | {"answer": "w1"},
    "turns: got .*, expected one text": {"turns": ["w1", "w2"]},
    r"messages: got \[\], expected a list of objects of role and content": {"messages": []},
    "messages: got tool_calls in a turn": {"messages": [{"role": "user", "content": "w1", "tool_calls": [1]}]},
    "messages: got role 'tool', expected one of user": {"messages": [{"role": "tool", "content": "w1"}]},
    "got a turn of assistant, expected user and assistant alternately": {
        "messages": [{"role": "assistant", "content": "w1"}]
    },
    "got a turn of system, expected user": {
        "messages": [{"role": "user", "content": "w1"}, {"role": "system", "content": "w1"}]
    },
    "got an empty turn of user": {"messages": [{"role": "user", "content": ""}]},
    "got an empty turn of assistant": {"prompt": "w1", "answer": " "},
    "got an answer that is not a single text": {"messages": [{"role": "user", "content": "w1"}, {
        "role": "assistant", "content": 2 * TEXT}]},
    "got a part .*audio.*, expected one of text, image, video": {"messages": [{"role": "user", "content": [
        {"type": "audio", "audio": "a.wav"}]}]},
    "got a part .*, expected one of text": {"prompt": 7},
    "got more marks of images than the 0": {"prompt": "<image> w1"},
    "got 1 images without a mark": LLAVA | {"image": ["a.png", "b.png"]},
    "image: got int, expected a path": {"image": 3},
    "image: got 'https://x.org/a.png', expected a file. Nothing is downloaded": {"image": "https://x.org/a.png"},
    "image: the base64 of an image cannot be read": {"image": RED + "é"},
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_used_is_refused_by_name(home, said):
    with raises_line(f"data: .*{said}"):
        TrainingData(lines(home / "d.jsonl", REFUSED[said]))


def test_unreadable_data_refused(home, monkeypatch):
    (home / "empty.jsonl").write_text("\n")
    (home / "torn.json").write_text('[{"image": "a.png"}, {"image"')
    (home / "line.jsonl").write_text('{"image": "a.png"}\nno\n')
    (home / "torn.tar").write_bytes(b"torn")
    (home / "torn.parquet").write_bytes(b"torn")
    tar_of(home / "txt.tar", {"x.png": picture(), "x.txt": b"w1"})
    tar_of(home / "two.tar", {"x.png": picture(), "x.jpg": b"w1"})
    tar_of(home / "list.tar", {"x.png": picture(), "x.json": b"[]"})
    for message, file in {
        "neither a folder nor a file": "nothing",
        "holds no line, expected": "empty.jsonl",
        "torn.json: Expecting ':' delimiter": "torn.json",
        "line 2 of .*line.jsonl: Expecting value": "line.jsonl",
        "torn.tar: ": "torn.tar",
        "torn.parquet: ": "torn.parquet",
        "txt.tar: got x.txt, expected it to be an image, .json, .prompt or among --ignore": "txt.tar",
        "two.tar: got x.jpg, expected one image of a name": "two.tar",
        "x of .*list.tar: got a .json that is not an object": "list.tar",
    }.items():
        if file == "torn.parquet":
            datasets = pytest.importorskip("datasets")
            monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
        with raises_line(f"data: .*{message}"):
            TrainingData(home / file)
    assert len(TrainingData(home / "txt.tar", ignore=["txt"])) == 1
    with raises_line("answers: got 'x', expected one of target, own"):
        TrainingData(home, "x")
    with raises_line("data: .*a.png: got no answer, which --answers own requires"):
        TrainingData(home, "own")


def sources(home, monkeypatch):
    """The same three records in every kind of data."""
    more = [LLAVA, LLAVA | {"image": "b.png"}, {"image": "a.png", "prompt": "w5"}]
    yield lines(home / "d.jsonl", *more)
    (home / "d.json").write_text(json.dumps(more, indent=1, ensure_ascii=False), encoding="utf-8")
    yield home / "d.json"
    entries = [{k: v for k, v in one.items() if k != "image"} for one in more]
    pictures = [(home / one["image"]).read_bytes() for one in more]
    files = {f"k/{n}.{kind}": data for n in range(3) for kind, data in
             (("png", pictures[n]), ("json", json.dumps(entries[n]).encode()))}  # fmt: skip
    yield tar_of(home / "d.tar", files)
    table = [
        {"prompt": None} | entry | {"image": {"bytes": data, "path": None}} for entry, data in zip(entries, pictures)
    ]
    try:
        import datasets
    except ImportError:
        return
    datasets.Dataset.from_list(table).to_parquet(home / "d.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
    yield home / "d.parquet"
    datasets.Dataset.from_list(table).save_to_disk(home / "saved")
    yield home / "saved"


def test_same_items_from_every_format(home, monkeypatch):
    seen = []
    for source in sources(home, monkeypatch):
        data = TrainingData(source)
        assert len(data) == 5 and data.answers == 4, source
        items = [data[n] for n in range(5)]
        seen.append([(*shown(item.conversation)[:1], item.answer) for item in items])
        colours = [read_media(item.conversation.media[0]).getpixel((0, 0))[0] for item in items]
        assert colours == [9, 9, 0, 0, 9], source
    assert len(seen) >= 3 and all(one == seen[0] for one in seen)
    assert seen[0][1] == ((["u:<image>|w5 ü ?", "a:w6 w7", "u:w8"]), "w9") and seen[0][4][1] is None
    assert TrainingData(home / "d.jsonl").digest == TrainingData(home / "d.json").digest
    assert TrainingData(home / "d.jsonl").digest != TrainingData(home).digest


def test_folder_of_images(home):
    data = TrainingData(home)
    assert [shown(data[n].conversation) for n in range(2)] == [([f"u:<image>|{PROMPT}"], [f"{x}.png"]) for x in "ab"]
    assert shown(TrainingData(home, prompt="w3")[0].conversation) == (["u:<image>|w3"], ["a.png"])


def test_orders_are_permutations_by_seed(home):
    data = TrainingData(lines(home / "d.jsonl", *[{"prompt": f"w{n}"} for n in range(60)]))
    some = torch.arange(5, 60)
    orders = [data.shuffle(some, seed).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and all(sorted(order) == some.tolist() for order in orders)
    training, held = data.hold_out(64, 3)
    assert len(held) == 3 and sorted([*training.tolist(), *held.tolist()]) == [*range(60)]
    assert held.tolist() != [0, 1, 2] and not torch.equal(held, data.hold_out(64, 4)[1])
    assert len(data.hold_out(2, 3)[1]) == 2


def test_whole_records_are_held_out(home):
    data = TrainingData(lines(home / "d.jsonl", *[LLAVA] * 40))
    training, held = data.hold_out(64, 0)
    assert len(held) == 4 and not {n // 2 for n in training.tolist()} & {n // 2 for n in held.tolist()}


def test_pictures_are_scaled_down_to_a_limit():
    image = Image.new("RGB", (400, 100))
    assert shrink(image, 40_000) is image and shrink(image, 10_000).size == (200, 50)
    assert read_media(picture(size=(40, 10)), 100).size == (20, 5)


# --- batches ----------------------------------------------------------------------------------------------------------


def prompts(home, *entries, rows=2, new=8, max_bad=100, own=False, max_pixels=None):
    data = TrainingData(lines(home / "d.jsonl", *entries), "own" if own else "target")
    reader = Reader(data, max_bad, max_pixels)
    return Prompts(qwen(), processor(), reader, torch.arange(len(data)), rows, new, 0, own=own), reader


def texts(item):
    return [part["text"] for m in item.conversation.messages for part in m["content"] if "text" in part]


def test_mixed_batches(home):
    """Prompts of one batch are those of each alone, history and system prompt among them."""
    write(home / "v.mp4")
    entries = [
        {"prompt": "w5 w6", "system": "w9"},
        {"video": "v.mp4", "prompt": "w7"},
        {"images": ["a.png", "b.png"], "prompt": "<image> w8 <image>"},
        {"conversations": [{"from": who, "value": f"w{n}"} for n, who in enumerate(("human", "gpt", "human"), 5)]},
    ]
    batches, _ = prompts(home, *entries, rows=5)
    inputs, items = batches.batch(0)
    assert len(items) == 5 and inputs["image_grid_thw"].shape[0] == 2 and inputs["video_grid_thw"].shape[0] == 1
    for item, text in zip(items, processor().tokenizer.batch_decode(inputs["input_ids"])):
        assert [w for w in text.split() if w[0] == "w"] == " ".join(texts(item)).split()
    policy = visspec.loop.draft_length.FixedLength(1)
    state = visspec.loop.decode.decode(HFDecoder(qwen()), None, visspec.Exact(), batches(0), policy)
    assert all(state.tokens)


def test_questions_about_pictures(home):
    """A model that reads a picture and the template up to the user's text asks about each picture in turn."""
    (home / "data").mkdir()
    for name in "ab":
        (home / f"{name}.png").rename(home / "data" / f"{name}.png")
    names = {"target": "x", "data": "self", "images": str(home / "data"), "out": home}
    asked = DrafterTraining(**names, rows=2, max_new_tokens=100)
    data = TrainingData(self_prompts.write(qwen(), processor(), asked, 2))
    items = [data[n] for n in range(2)]
    assert {item.conversation.media[0] for item in items} == {home / "data" / "a.png", home / "data" / "b.png"}
    assert all(texts(item)[0].split()[0].startswith("w") for item in items)
    inputs = process_chats(processor(), [self_prompts.user_turn("image")], [[Image.new("RGB", (8, 8))]], opening)
    assert processor().tokenizer.decode(inputs["input_ids"][0, -1]) == "<|vision_end|>"


def test_own_answers_in_one_pass(home):
    """The target's sampled answers, given to it as the data's own, are recorded as they were when it made them."""
    target = HFDecoder(qwen(), (2, -1), embeddings=True)
    sampled, _ = prompts(home, {"image": "a.png", "prompt": "w5"}, {"image": "b.png", "prompt": "w7 w8"}, new=9)
    request = sampled(0)
    want = capture(target, visspec.Exact(), request)
    assert min(want.lengths) > 1
    answers = [ids[:n].tolist() for ids, n in zip(want.ids[:, want.prompt_length :], want.lengths)]
    result = capture(target, visspec.Exact(), AnsweredRequest(**vars(sampled(0)), answers=answers))
    assert result.lengths == want.lengths and result.prompt_length == want.prompt_length
    for name in ("ids", "positions", "attention", "embeddings"):
        assert torch.equal(getattr(result, name), getattr(want, name)), name
    for row, length in enumerate(want.lengths):  # behind an answer there is nothing
        for name, end in (("features", want.prompt_length + length - 1), ("logits", length - 1)):
            a, b = getattr(result, name)[row, :end], getattr(want, name)[row, :end]
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    one = capture(target, visspec.Exact(), AnsweredRequest(**vars(sampled(0)), answers=[[5], [6]]))
    assert one.logits.shape[1] == 0 and one.features.shape[1] == want.prompt_length


def test_own_answers_end_with_stop(home, monkeypatch):
    monkeypatch.setattr(qwen().generation_config, "eos_token_id", [3, 4])
    batches, _ = prompts(home, LLAVA, own=True, new=3)
    request = batches(0)
    assert isinstance(request, AnsweredRequest)
    words = [processor().tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("w6 w7", "w9")]
    assert sorted(request.answers) == sorted([*ids, 3] for ids in words)
    batches.max_new_tokens = 2
    assert sorted(batches(0).answers) == sorted([*ids, 3][:2] for ids in words)
    validating = Prompts(batches.model, batches.processor, batches.reader, batches.number_N, 2, 3, 0)
    assert not isinstance(validating(0), AnsweredRequest)


def test_broken_image(home):
    (home / "c.png").write_bytes(b"broken")
    entries = [{"image": f"{'abc'[n % 3]}.png", "prompt": f"w{n + 5}"} for n in range(9)]
    batches, reader = prompts(home, *entries)
    first = [[texts(item)[0] for item in batches.batch(n)[1]] for n in range(8)]
    assert set(reader.bad) == {2, 5, 8} and all("c.png" in why or "line" in why for why in reader.bad.values())
    assert all(len(own) == 2 for own in first) and not {"w7", "w10", "w13"} & {text for own in first for text in own}
    again, _ = prompts(home, *entries)
    assert [texts(item)[0] for item in again.batch(6)[1]] == first[6]
    few, _ = prompts(home, *entries, max_bad=1)
    with raises_line(r"data: got 2 items that can't be read, the last of them line . of .*, expected at most 1 \(--m"):
        [few.batch(n) for n in range(8)]
    none, _ = prompts(home, *[entries[2]] * 3)
    with raises_line("data: got 0 items that can be read, expected the 2 of a batch"):
        none.batch(0)


def test_processor_errors_counted(home):
    """A text with the token of an image, and a prompt longer than the model's context."""
    entries = [{"prompt": "w5"}, {"prompt": "w6 <|image_pad|>"}, {"prompt": "w7"}, {"prompt": "w8 " * 5000}]
    batches, reader = prompts(home, *entries)
    assert {text for n in range(3) for item in batches.batch(n)[1] for text in texts(item)} == {"w5", "w7"}
    assert reader.bad.keys() == {1, 3}
    assert "with 1 <|image_pad|>" in reader.bad[1] and "the model's context" in reader.bad[3]


def test_run_reports_epochs(home):
    data = TrainingData(lines(home / "d.jsonl", *[{"prompt": "w5"}] * 4), "target")
    options = train_drafter.TrainingOptions(steps=2000, batch=16, rows=8, group=8)
    message = train_drafter.what_is_seen(data, 100_000, 64, options, 1, "target")
    assert message.startswith("2,000 steps see 4,096 of 100,000 items (0.041 epochs)")
    assert message.endswith("target's answers")
    assert train_drafter.steps_of(4096, options, 1) == 2048 and train_drafter.steps_of(4096, options, 2) == 1024
