"""Draws docs/race.gif, plain and accelerated decoding side by side in real time: `python -P tests/race.py FILE`.

Every token and code appears at the time at which it was committed: first a caption, against transformers' `generate`,
then a picture, against plain decoding in our loop.
"""

import sys
from bisect import bisect_right
from dataclasses import dataclass
from time import perf_counter

from PIL import Image, ImageDraw
from transformers.generation.streamers import BaseStreamer

from visspec.api import loading
from visspec.api.captions import PROMPT, prepare
from visspec.api.grid import MARGIN, font_of
from visspec.api.images.pipeline import ImagePipeline
from visspec.api.text.accelerate import accelerate
from visspec.io import included
from visspec.loop.stats import COLOURS, text_pieces

STEP = 0.05  # seconds per frame
WAIT = 2.0  # seconds after the slower one has finished
WIDTH, HEIGHT, SIDE = 920, 330, 256  # pixels of the animation, and the side of a picture
SCENE, PRESET = 206, "gumbel"  # as in `demo`
PAPER, INK = "#ffffff", "#1b1b1b"


class Clock(BaseStreamer):
    """Records the seconds at which each token arrived."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = perf_counter()

    def put(self, value) -> None:
        self.seconds += [perf_counter() - self.start] * value.numel()

    def end(self) -> None:
        pass

    def round(self, pipe, number, tokens, tensors) -> dict:
        """Record a round, as a callback of an `ImagePipeline`."""
        self.seconds += [perf_counter() - self.start] * (tokens - len(self.seconds))
        return {}


@dataclass
class Lane:
    """One of the two racers: its name, and the seconds at which each of its tokens arrived."""

    name: str
    seconds: list[float]
    pieces: list[tuple[str, str]]  # text and origin of each token; empty for a picture
    picture: Image.Image | None = None

    def draw(self, frame: Image.Image, left: int, now: float) -> None:
        """Draw the state at the time `now` in the column that begins at `left`."""
        pen, done, top = ImageDraw.Draw(frame), bisect_right(self.seconds, now), 5 * MARGIN
        pen.text((left, MARGIN), f"{self.name}   {min(now, self.seconds[-1]):.2f} s", fill=INK, font=font_of(18))
        if self.picture is not None:
            columns = round(len(self.seconds) ** 0.5)
            patch = self.picture.width // columns
            for code in range(done):
                x, y = code % columns * patch, code // columns * patch
                frame.paste(self.picture.crop((x, y, x + patch, y + patch)), (left + x, top + y))
        x, y, font, right = left, top, font_of(16), left + WIDTH // 2 - 2 * MARGIN
        for text, origin in self.pieces[:done]:
            if x + font.getlength(text) > right:
                x, y, text = left, y + 22, text.lstrip()
            pen.text((x, y), text, fill=COLOURS[origin], font=font)
            x += int(font.getlength(text))


def captions(name: str) -> list[Lane]:
    """Caption a held-out scene with an included captioner, by `generate` and by ours."""
    model, processor = loading.load(name)
    fast = accelerate(model, tokenizer=processor.tokenizer)
    images = included.scenes("shapes").images(2, first=SCENE)
    scene, other = (prepare(processor, [image], PROMPT, model) for image in images)
    prompt, lanes = scene["input_ids"].shape[1], []
    for title in ("transformers", "visspec"):
        for inputs in (other, scene):  # warms up on another scene, because the default drafter remembers answers
            options = {"max_new_tokens": 160, "do_sample": False, "streamer": (clock := Clock())}
            run = fast.run(**inputs, **options) if title == "visspec" else None
            output = model.generate(**inputs, **options) if run is None else run.output
        tokens = output[0, prompt:].tolist()
        origins = ["plain"] * len(tokens) if run is None else run.state.trace.origin[0]
        lanes.append(Lane(title, clock.seconds[-len(tokens) :], text_pieces(processor.tokenizer, tokens, origins)))
    return lanes


def pictures(name: str, prompt: str) -> list[Lane]:
    """Draw a picture with an included painter, by plain decoding and by its default."""
    lanes = []
    for title, preset in (("plain decoding", "plain"), ("visspec", PRESET)):
        pipe = ImagePipeline.from_pretrained(name, preset=preset)
        pipe.set_progress_bar_config(disable=True)
        for _ in range(2):  # the first run warms up
            clock = Clock()
            made = pipe(prompt, seed=0, callback_on_step_end=clock.round)
        picture = made.images[0].resize((SIDE, SIDE))
        lanes.append(Lane(title, clock.seconds, [], picture))
    return lanes


def main(path: str) -> None:
    captioner = "captioner-smollm2" if (included.PUBLISHED / "smollm2").is_dir() else "captioner"
    frames: list[Image.Image] = []
    for lanes in captions(captioner), pictures("painter", "a photo of three stars"):
        last = max(lane.seconds[-1] for lane in lanes)
        for number in range(int((last + WAIT) / STEP)):
            frame = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
            for place, lane in enumerate(lanes):
                lane.draw(frame, MARGIN + place * WIDTH // 2, number * STEP)
            frames.append(frame.quantize(255))
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=int(1000 * STEP), loop=0, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
