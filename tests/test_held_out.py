"""The held-out sets of the included worlds, their reader, and the generator that made them; the included captioners."""

import json
import re
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from PIL import Image

from tests.doubles import raises_line
from visspec.api.captions import PROMPT, Captions, prepare
from visspec.api.images.pipeline import ImagePipeline
from visspec.api.loading import load, load_image_model
from visspec.api.sources import Record
from visspec.api.text.accelerate import accelerate
from visspec.cli import demo
from visspec.eval.metrics.detection import DetectedColours
from visspec.eval.metrics.geneval import judge_image
from visspec.io import included
from visspec.io.images import MAX_PIXELS
from visspec.toys.generate import picture, write_pictures
from visspec.toys.judges import foreign
from visspec.toys.world.detector import ShapeDetector
from visspec.toys.world.scene import HELD_OUT_SEED

PICTURED = ("shapes", "emoji")


@pytest.mark.parametrize("name", PICTURED)
def test_row_fields(name):
    world = included.scenes(name)
    assert len(world.rows) == 256 == len({row["caption"] for row in world.rows})
    for row in world.rows:
        assert len(row["questions"]) == len(row["answers"]) > 10
        answers = dict(zip(row["questions"], row["answers"]))
        count = sum(item["count"] for item in row["include"])
        number = ("zero", "one", "two", "three", "four", "five", "six")[count]
        assert next(a for q, a in answers.items() if q.startswith("how many")) == f"{number} ."
        assert sum(answer == "nothing ." for answer in row["answers"]) == 9 - count
        assert all(item["class"] in row["caption"] for item in row["include"])


@pytest.mark.parametrize("name", PICTURED)
def test_generator_makes_held_out(name):
    world = included.scenes(name)
    for i, (image, row) in enumerate(zip(world.images(12, first=200), world.rows[200:])):
        made, caption = picture(name, HELD_OUT_SEED + 200 + i)
        assert np.array_equal(made, image) and caption == row["caption"]
    with raises_line("^world: got 'moon', expected one of shapes, emoji"):
        picture("moon", 0)


def test_written_image_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    write_pictures("emoji", tmp_path / "scenes", 3, first=5)
    read = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "scenes"), split="train", cache_dir=tmp_path)
    image, caption = picture("emoji", 6)
    assert read.num_rows == 3 and read[1]["caption"] == caption and np.array_equal(read[1]["image"], image)


@pytest.mark.parametrize("name, every", [("shapes", 16), ("emoji", 256)])
def test_detectors_agree_with_metadata(name, every):
    world = included.scenes(name)
    detector = ShapeDetector(0.07, 0.135) if name == "shapes" else world.detector()
    for first in range(0, 256, every):
        (image,), row = world.images(1, first=first), world.rows[first]
        result = judge_image(image, row | {"prompt": row["caption"]}, detector, DetectedColours())
        assert result[:2] == (True, True), row


def test_prompts_are_fixed_and_painted():
    counts = {name: len(world.prompts()) for name, world in included.table().worlds.items()}
    assert counts == {"shapes": 368, "emoji": 160, "animals": 48}
    for name, world in included.table().worlds.items():
        row = world.prompts()[5]
        assert row["prompt"].startswith("a photo of ") and included.parse(row["prompt"])["prompt"] == row["prompt"]
        first, again = (world.render(row, np.random.default_rng(1), 96) for _ in range(2))
        assert first.shape == (96, 96, 3) and first.dtype == np.uint8 and np.array_equal(first, again)
        assert judge_image(Image.fromarray(first), row, world.detector(), DetectedColours())[0], name
    with raises_line("^prompt: got 'a photo of a dog', expected GenEval's metadata or a prompt"):
        included.parse("a photo of a dog")


@pytest.mark.parametrize("model, use, world", [
    ("captioner", "captions", "shapes"), ("captioner-small", "captions", "shapes"),
    ("captioner-emoji", "captions", "emoji"), ("painter", "prompts", "shapes"), ("painter-emoji", "prompts", "emoji"),
    ("painter-any-order", "prompts", "animals"), ("painter-var", "prompts", "animals"),
])  # fmt: skip
def test_world_of_a_model(model, use, world):
    if not included.present(model):
        pytest.skip("weights not in this tree")
    folder = included.folder(model)
    if use == "captions":
        words = transformers.AutoProcessor.from_pretrained(folder)
    else:
        loaded, processor = load_image_model(str(folder))
        words = processor or loaded
    assert included.scenes(None, words, use) is included.scenes(world)


def test_default_world():
    words = SimpleNamespace(get_vocab=lambda: {"a": 0, "photo": 1})
    for world in (included.scenes(), included.scenes(None, words), included.scenes(None, words, "prompts")):
        assert world.name == "shapes"
    with raises_line("^world: got 'seas', expected one of shapes, emoji, animals"):
        included.scenes("seas")
    for name, first in (("shapes", 250), ("animals", 0)):
        with raises_line(rf"^images: got {first + 8}, but the world '{name}' has \d+ pictures"):
            included.scenes(name).images(8, first=first)


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[.,]", text)


@pytest.mark.skipif(not included.present("captioner-small"), reason="weights not in this tree")
def test_small_captioner_recall():
    folder, scenes = included.folder("captioner-small"), included.scenes("shapes")
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).float().eval()
    assert not model.generation_config.do_sample and model.generation_config.eos_token_id is not None
    inputs = prepare(processor, scenes.images(4), PROMPT, model)
    new = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    result = [words(text) for text in processor.batch_decode(new, skip_special_tokens=True)]
    captions = [row["caption"].split() for row in scenes.rows[:4]]
    alike = [SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in zip(result, captions)]
    assert sum(alike) / len(alike) >= 0.5 and min(map(len, result)) >= 55


@pytest.mark.parametrize("world", demo.WORLDS)
def test_demo_captions_are_right(world):
    captioner, drafter = demo.WORLDS[world]
    scenes, (model, processor) = included.scenes(world), load(captioner)
    captions = Captions(accelerate(model, drafter), processor, do_sample=False, max_new_tokens=128)
    images = enumerate(scenes.images(4, first=demo.FIRST), demo.FIRST)
    for made in captions(Record(str(number), image) for number, image in images):
        assert words(made.text) == scenes.rows[int(made.path)]["caption"].split()


def test_readme_snippet():
    """That of a published model, with the lines that README has for the included one."""
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.S)
    snippet, count = re.subn(r"^name, picture = .*\n", lambda line: blocks[1], blocks[0], flags=re.M)
    names: dict = {}
    exec(snippet, names)
    assert count == 1
    new = names["out"][0, names["inputs"]["input_ids"].shape[1] :]
    text = names["processor"].decode(new, skip_special_tokens=True)
    assert words(text) == included.scenes("shapes").rows[0]["caption"].split()


def test_foreign_pictures(tmp_path):
    """They look like its world, and it describes things that are not there."""
    pipe, scenes = ImagePipeline.from_pretrained("painter"), included.scenes("shapes")
    pipe("a photo of a cross left of a ring", seed=0).images[0].save(tmp_path / "drawn.png")
    assert foreign([tmp_path / "drawn.png"], MAX_PIXELS) is not None
    assert foreign((scenes.folder / row["file_name"] for row in scenes.rows[:2]), MAX_PIXELS) is None
    scenes.images(1)[0].save(tmp_path / "own.jpg", quality=75)
    assert foreign([tmp_path / "own.jpg"], MAX_PIXELS) is None


@pytest.mark.skipif(not included.present("captioner"), reason="weights not in this tree")
def test_processor_call_forms():
    processor = transformers.AutoProcessor.from_pretrained(included.folder("captioner"))
    image = Image.new("RGBA", (300, 170), (200, 10, 10, 255)).convert("RGB")
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Describe the picture in detail."}]
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    chat = processor.apply_chat_template([{"role": "user", "content": content}], **given)
    text = "user : <image> describe the picture in detail . assistant :"
    plain = processor(text=text, images=image, return_tensors="pt")
    assert chat["input_ids"].tolist() == plain["input_ids"].tolist()
    assert int((plain["input_ids"] == processor.image_token_id).sum()) == 36
    assert chat["pixel_values"].shape == (1, 3, 96, 96)
    assert processor.tokenizer.unk_token_id not in plain["input_ids"][0].tolist()


@pytest.mark.parametrize("folder", sorted(path.parent for path in included.FOLDER.glob("*/provenance.json")), ids=str)
def test_provenance_names_code(folder):
    record = json.loads((folder / "provenance.json").read_text())
    own = rf"models/zoo/{folder.name}/train\.py"
    assert re.fullmatch(
        rf"visspec/toys/recipes/\w+\.py at tag before-reduction|train_(context|drafter)|{own}", record["recipe"]
    )
    assert "python -m visspec.toys" not in (folder / "README.md").read_text()
