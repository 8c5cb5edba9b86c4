"""Videos: which frames are read, captions of clips, and files that are refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import av
import pytest
import torch
import transformers as tf
from PIL import Image

from tests import tiny
from tests.doubles import raises_line
from tests.test_recurrent import qwen3_5_vl
from tests.tiny_images import glm_processor, word_tokenizer
from visspec.api.captions import Captions, process_batch
from visspec.api.sources import records
from visspec.api.text.accelerate import accelerate
from visspec.cli.main import main
from visspec.io.videos import Clip, read_clip
from visspec.models.eagle.drafter import EagleDrafter

FRAMES, SIDE = 25, 16
SPECIAL = {tiny.IMAGE: "<|image_pad|>", tiny.VIDEO: "<|video_pad|>"}
SPECIAL |= {tiny.VISION_START: "<|vision_start|>", tiny.VISION_END: "<|vision_end|>", tiny.PAD: "<pad>"}
TEMPLATE = (
    "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %} {{ c.text }}{% else %}"
    "<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


@cache
def processor(name: str = "qwen2_5") -> tf.ProcessorMixin:
    names = [SPECIAL.get(i, "<unk>" if i == 3 else f"w{i}") for i in range(tiny.VOCAB)]
    kinds = {tiny.IMAGE: "image", tiny.VIDEO: "video", tiny.VISION_START: "vision_start", tiny.VISION_END: "vision_end"}
    tokenizer = word_tokenizer(names, pad_token="<pad>", **{f"{kind}_token": SPECIAL[i] for i, kind in kinds.items()})
    sizes = {"patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 8 * SIDE**2}}
    pixels = tf.Qwen2VLImageProcessor(**sizes)
    if name == "qwen3_5":  # frame by frame, behind their times
        frames = tf.Qwen3VLVideoProcessor(**sizes, cap_pixels_per_frame=False)
        return tf.Qwen3VLProcessor(pixels, tokenizer, frames, chat_template=TEMPLATE)
    return tf.Qwen2_5_VLProcessor(pixels, tokenizer, tf.Qwen2VLVideoProcessor(**sizes), chat_template=TEMPLATE)


@cache
def model(name: str = "qwen2_5"):
    return qwen3_5_vl() if name == "qwen3_5" else tiny.qwen2_5_vl()


def write(path: Path) -> Path:
    """A clip of 10 frames a second whose frame i has red 10 i."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("h264", rate=10)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for i in range(FRAMES):
            frame = av.VideoFrame.from_image(Image.new("RGB", (SIDE, SIDE), (10 * i, 0, 0)))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("video") / "clip.mp4")


@pytest.mark.parametrize("count, indices", [(1, [12]), (4, [3, 9, 15, 21]), (100, list(range(FRAMES)))])
def test_frame_positions(clip, count, indices):
    result = read_clip(clip, count)
    about = {"frames_indices": indices, "total_num_frames": FRAMES, "fps": 10.0, "duration": 2.5}
    assert result.metadata == about
    reds = [frame.getpixel((5, 5))[0] for frame in result.frames]
    assert max(abs(red - 10 * i) for red, i in zip(reds, indices, strict=True)) < 5


@pytest.mark.parametrize(
    "name, drafter", [("qwen2_5", None), ("qwen2_5", "ngram"), ("qwen2_5", "vispec"), ("qwen3_5", "context")]
)
def test_clip_captions_equal_generate(clip, tmp_path, name, drafter):
    Image.new("RGB", (SIDE, SIDE), (0, 90, 0)).save(tmp_path / "still.png")
    files = [clip, tmp_path / "still.png"]
    if drafter == "vispec":
        drafter = EagleDrafter.for_model(model(), image_latents=2)
    fast, reads = accelerate(model(name), drafter), processor(name)
    captions = Captions(fast, reads, request="w7 w8", slots=2, frames=4, max_new_tokens=9)
    result = {made.path: made for made in captions(files)}
    with torch.inference_mode():
        for path, media in zip(files, (read_clip(clip, 4), Image.open(files[1]))):
            made = result[str(path)]
            inputs = process_batch(reads, [media], ["w7 w8"])
            grid = inputs.get("video_grid_thw", inputs.get("image_grid_thw"))
            ids, slots = inputs["input_ids"], int(grid.prod()) // 4
            if isinstance(media, Clip) and name == "qwen2_5":  # two frames a patch, 1.6 frames a second
                assert float(inputs["second_per_grid_ts"][0]) == pytest.approx(2 / 1.6)
            assert (ids == (tiny.VIDEO if isinstance(media, Clip) else tiny.IMAGE)).sum() == slots > 8
            stock = model(name).generate(**inputs, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
            assert made.text == reads.tokenizer.decode(stock, skip_special_tokens=True).strip()


def test_stream_of_clips_and_images(clip, tmp_path):
    home = tmp_path / "media"
    home.mkdir()
    (home / "a.mp4").write_bytes(clip.read_bytes())
    Image.new("RGB", (SIDE, SIDE), (0, 90, 0)).save(home / "b.png")
    lines = tmp_path / "more.jsonl"
    lines.write_text(json.dumps({"video": "media/a.mp4", "id": "again", "prompt": "w7"}))
    with Captions(accelerate(model(), None), processor(), request="w7", frames=2, max_new_tokens=5) as captions:
        result = {made.path: made for made in captions(records([home, lines]))}
    assert not any(made.error for made in result.values())
    assert result["again"].text == result[str(home / "a.mp4")].text != result[str(home / "b.png")].text


def test_the_command_captions_a_clip(clip, tmp_path, capsys):
    model().save_pretrained(tmp_path / "model")
    processor().save_pretrained(tmp_path / "model")
    given = ["--model", str(tmp_path / "model"), "--prompt", "w7", "--max-new-tokens", "4", "--drafter", "ngram"]
    texts = []
    for frames in ("2", "8"):
        assert main(["caption", str(clip), *given, "--frames", frames]) in (0, None)
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("w") and texts[0] != texts[1]


def test_refusals(clip, tmp_path):
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{clip}\n#EXT-X-ENDLIST\n"
    (tmp_path / "playlist.mp4").write_text(playlist)
    (tmp_path / "cut.mp4").write_bytes(clip.read_bytes()[:900])
    (tmp_path / "still.mp4").write_bytes(b"")
    cases = {
        "playlist.mp4 is broken or not a video of mov": lambda: read_clip(tmp_path / "playlist.mp4"),
        "cut.mp4 is broken": lambda: read_clip(tmp_path / "cut.mp4"),
        "still.mp4 is broken": lambda: read_clip(tmp_path / "still.mp4"),
        "has 16 x 16 pixels, more than the limit of 255": lambda: read_clip(clip, 2, 255),
        "video: got a clip, expected an image: GlmImageProcessor": lambda: process_batch(
            glm_processor(), [read_clip(clip, 2)], ["w7"]
        ),
    }
    for why, call in cases.items():
        with raises_line(why):
            call()
    with pytest.raises(FileNotFoundError, match=r"video file .* does not exist"):
        read_clip(tmp_path / "none.mp4")
