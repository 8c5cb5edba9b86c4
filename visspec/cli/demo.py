"""`visspec demo`: the included models at work, plain and accelerated side by side.

Captions of two worlds by transformers' generate and by ours, and pictures with a map of what was drafted.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from visspec import registry
from visspec.api import loading
from visspec.api.captions import PROMPT, prepare
from visspec.api.grid import origin_image
from visspec.api.text.accelerate import accelerate
from visspec.eval.bench.clock import seconds_of
from visspec.eval.bench.paired import geometric_mean, in_words
from visspec.eval.report.images import data_uri
from visspec.eval.report.rendering import write_page
from visspec.io import included
from visspec.io.options import Positive, option
from visspec.loop.stats import COLOURS, MEANING

WORLDS = {"shapes": ("captioner", "vispec"), "emoji": ("captioner-emoji", "vispec-emoji")}
PUBLISHED = ("captioner-smollm2", "auto")  # used for shapes if `make real` has downloaded the language model
PAINTERS = {  # painters and their prompts
    "painter": ("a photo of three stars", "a photo of a cross left of a ring"),
    "painter-emoji": ("a photo of a penguin on a cloudy blue ground", "a photo of a parrot on a grainy pink ground"),
}
PRESET = "gumbel"  # draws the pictures of plain decoding
SIDE = 192  # side of a picture on the page in pixels
FIRST = 206  # first held-out scene; from here, each captioner describes four without a mistake


@dataclass
class Section:
    """The results of one world's captions, or of all pictures. `figures` are data URIs and pieces of captions."""

    view: Table
    figures: list[tuple[list[str], list[tuple[str, str]]]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    equal: int = 0
    summary: str = ""

    def add(self, name: str, slow: float, fast: float, tau: float, same: bool) -> None:
        """Count one caption or picture, and show it in a row. `slow` and `fast` are seconds."""
        self.equal += same
        self.ratios.append(slow / fast)
        times = (f"{1e3 * seconds:.0f} ms" for seconds in (slow, fast))
        self.view.add_row(name, *times, f"{slow / fast:.2f}", f"{tau:.2f}", "yes" if same else "NO")

    def end(self, console: Console, what: str, baseline: str, same: str) -> None:
        """Print the rows and a summary."""
        count, ratio = len(self.ratios), in_words(geometric_mean(self.ratios))
        self.summary = f"{count} {what} against {baseline} on {torch.get_num_threads()} threads: {ratio}; "
        self.summary += f"{self.equal} of {count} {same}."
        console.print(self.view, self.summary, "", sep="\n")


@dataclass(kw_only=True)
class Options:
    count: Positive = option("number of scenes of each world", 4)
    world: str | None = option(
        "only caption scenes of this world (default: both, and draw pictures)", None, choices=list(WORLDS)
    )
    out: Path = option("folder of the page", Path("out/demo"), writes="folder")


def run(arguments: Options) -> int:
    """Run the demo and write out/index.html. Returns 0 if all words and pictures are equal."""
    console, page = Console(), arguments.out / "index.html"
    worlds = [arguments.world] if arguments.world else WORLDS
    captions = [caption_section(name, arguments.count, console) for name in worlds]
    console.print(" ".join(f"[{COLOURS[name]}]■[/] {meaning}" for name, meaning in MEANING.items()))
    images = [] if arguments.world else [draw_pictures(console)]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_page(page, "demo", {"groups": {"Same words, fewer passes": captions, "Same pictures, fewer passes": images}})
    console.print(f"page: {page}")
    return 0 if all(section.equal == len(section.ratios) for section in captions + images) else 1


def captioner_of(world: str) -> tuple[str, str]:
    """Return the captioner of a world and its drafter; for shapes the one around SmolLM2, if available."""
    return PUBLISHED if world == "shapes" and (included.PUBLISHED / "smollm2").is_dir() else WORLDS[world]


def caption_section(name: str, count: int, console: Console) -> Section:
    """Caption held-out scenes of a world with transformers' generate and ours, and print them one by one."""
    images = included.scenes(name).images(count + 1, first=FIRST - 1)
    captioner, drafter = captioner_of(name)
    model, processor = loading.load(captioner)
    fast = accelerate(model, drafter, tokenizer=processor.tokenizer)
    options = {"max_new_tokens": 160, "do_sample": False}
    other, *inputs = [prepare(processor, [image], PROMPT, model) for image in images]
    for generate in (model.generate, fast.generate, fast.generate):  # another scene, because drafters remember answers
        generate(**other, **options)
    section = Section(Table(name, "transformers", "visspec", "faster", "tau", "same words"))
    for i, (image, prompt) in enumerate(zip(images[1:], inputs), 1):
        slow, stock = seconds_of(partial(model.generate, **prompt, **options))
        quick, ours = seconds_of(partial(fast.run, **prompt, **options))
        pieces = ours.stats.pieces[0]
        console.print(f"[bold]{name} {i}[/bold] ", Text.assemble(*((p, COLOURS[o]) for p, o in pieces)), "\n")
        section.add(str(i), slow, quick, ours.stats.tau, torch.equal(stock, ours.output))
        section.figures.append(([data_uri(image.resize((SIDE, SIDE), Image.Resampling.NEAREST), True)], pieces))
    section.end(console, f"captions of {name}", "transformers' generate", "word for word the same")
    return section


def draw_pictures(console: Console) -> Section:
    """Draw the pictures of PAINTERS by plain decoding and accelerated, each with the map of its token origins."""
    from visspec.api.images.pipeline import ImagePipeline  # imports diffusers, which takes seconds

    section = Section(Table("picture", "plain decoding", "visspec", "faster", "tau", "same picture"))
    for painter, prompts in PAINTERS.items():
        pipe = ImagePipeline.from_pretrained(painter)
        presets = (registry.preset(name, "codes") for name in ("plain", PRESET))
        plain, fast = (ImagePipeline(**pipe.components | preset.method) for preset in presets)
        for each in (plain, fast):
            each.set_progress_bar_config(disable=True)
            each(prompts[0], seed=0)
        for i, prompt in enumerate(prompts):
            slow, expected = seconds_of(partial(plain, prompt, seed=i))
            quick, output = seconds_of(partial(fast, prompt, seed=i))
            same = expected.images[0].tobytes() == output.images[0].tobytes()
            section.add(f"{painter} {i + 1}", slow, quick, output.stats[0].tau, same)
            images = output.images[0].resize((SIDE, SIDE)), origin_image(output.maps[0], SIDE)
            section.figures.append(([data_uri(image, True) for image in images], [(prompt, "")]))
    section.end(console, "pictures", "plain decoding in the same loop", "the same picture")
    return section
