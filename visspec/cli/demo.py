"""`visspec demo`: the embedded models at work. Captions of two worlds, stock and accelerated, the same words in less
time, and pictures, plain and accelerated, the same codes in less time, with the map of what was drafted.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from visspec.cli.arguments import Positive
from visspec.io.options import option

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console
    from rich.table import Table

WORLDS = {"shapes": ("captioner", "vispec"), "emoji": ("captioner-emoji", "vispec-emoji")}  # captioner and drafter
PAINTERS = {  # and what they draw
    "painter": ("a photo of three stars", "a photo of a cross left of a ring"),
    "painter-emoji": ("a photo of a penguin on a cloudy blue ground", "a photo of a parrot on a grainy pink ground"),
}
PRESET = "gumbel"  # the fastest of both painters that draws the pictures of plain decoding (docs/presets.md)
FIRST = 500  # of the held-out scenes
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>visspec demo</title>
<style>:root{{color-scheme:light dark}}body{{font:16px/1.5 sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}}
.worlds{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:0 2rem}}
figure{{display:flex;gap:1rem;flex-wrap:wrap;align-items:start;margin:1.5rem 0}}
img{{width:192px;image-rendering:pixelated}}
.drawn img{{width:100%;max-width:{width}px}}figcaption{{flex:1;min-width:14rem}}</style>
<h1>Same words, fewer passes</h1><p>{legend}</p><div class="worlds">{captions}</div>
<h1>Same pictures, fewer passes</h1>{drawn}</html>
"""


@dataclass
class Section:
    """What one world's captions, or all pictures, came to."""

    figures: list[str] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    equal: int = 0

    def add(self, view: Table, name: str, slow: float, fast: float, tau: float, same: bool) -> None:
        """Count one caption or picture, and show it in a row; slow, fast: seconds."""
        self.equal += same
        self.ratios.append(slow / fast)
        times = (f"{1e3 * seconds:.0f} ms" for seconds in (slow, fast))
        view.add_row(name, *times, f"{slow / fast:.2f}", f"{tau:.2f}", "yes" if same else "NO")


@dataclass(kw_only=True)
class Options:
    images: Positive = option("how many scenes of each world", 4)
    world: str | None = option("captions of this world alone; default: both, and pictures", None, choices=list(WORLDS))
    out: Path = option("where the pictures and the page go", Path("out/demo"), writes="folder")


def run(arguments: Options) -> int:
    """Caption held-out scenes both ways, draw both ways, print and write out/index.html. Returns 0 when all words and
    pictures are equal.
    """
    import torch
    from rich.console import Console

    from visspec.eval.bench.paired import geometric_mean, in_words
    from visspec.loop.stats import COLOURS, MEANING

    console, count, out = Console(), arguments.images, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    threads, same, parts = torch.get_num_threads(), True, []
    for name in [arguments.world] if arguments.world else WORLDS:
        section = captioned(name, count, console)
        summary = (
            f"{count} captions of {name} against transformers' generate on {threads} threads: "
            f"{in_words(geometric_mean(section.ratios))}; {section.equal} of {count} word for word the same."
        )
        console.print(summary, "\n")
        parts.append(f"<section><p>{html.escape(summary)}</p>{''.join(section.figures)}</section>")
        same = same and section.equal == count
    origins = {name: MEANING[name] for name in COLOURS if name != "given"}
    console.print(" ".join(f"[{COLOURS[name]}]■[/] {meaning}" for name, meaning in origins.items()))
    marked = (f'<b style="color:{COLOURS[name]}">{html.escape(meaning)}</b>' for name, meaning in origins.items())
    picture, width, alike = ("", 0, True) if arguments.world else drawn(out, console)
    same = same and alike
    page = PAGE.format(legend=" · ".join(marked), captions="".join(parts), drawn=picture, width=width)
    (out / "index.html").write_text(page)
    console.print(f"page: {out / 'index.html'}")
    return 0 if same else 1


def captioned(name: str, count: int, console: Console) -> Section:
    """Captions of a world's held-out scenes by transformers' generate and by ours, printed one by one."""
    import torch
    from rich.table import Table
    from rich.text import Text

    from visspec.api import loading
    from visspec.api.accelerate import accelerate
    from visspec.api.captions import PROMPT, prepare
    from visspec.eval.bench.clock import seconds_of
    from visspec.io import included
    from visspec.loop.stats import COLOURS

    images = included.scenes(name).images(count, first=FIRST)
    captioner, drafter = WORLDS[name]
    model, processor = loading.load(captioner)
    fast = accelerate(model, drafter, tokenizer=processor.tokenizer)
    options = {"max_new_tokens": 128, "do_sample": False}
    inputs = [prepare(processor, [image], PROMPT, model) for image in images]
    for generate in (model.generate, fast.generate, fast.generate):
        generate(**inputs[0], **options)
    view, section = Table(name, "transformers", "visspec", "faster", "tau", "same words"), Section()
    for i, (image, prompt) in enumerate(zip(images, inputs), 1):
        slow, stock = seconds_of(partial(model.generate, **prompt, **options))
        quick, ours = seconds_of(partial(fast.run, **prompt, **options))
        pieces = ours.stats.pieces[0]
        console.print(f"[bold]{name} {i}[/bold] ", Text.assemble(*((p, COLOURS[o]) for p, o in pieces)), "\n")
        section.add(view, str(i), slow, quick, ours.stats.tau, torch.equal(stock, ours.output))
        section.figures.append(figure(image, pieces, name))
    console.print(view)
    return section


def figure(image, pieces: list[tuple[str, str]], name: str) -> str:
    """HTML of a scene and its caption, coloured by the origin of its pieces."""
    from visspec.eval.report.images import small_png
    from visspec.loop.stats import coloured

    return (
        f'<figure><img alt="a rendered scene of {name}" src="data:image/png;base64,{small_png(image)}">'
        f"<figcaption>{coloured(pieces)}</figcaption></figure>"
    )


def drawn(out: Path, console: Console) -> tuple[str, int, bool]:
    """Pictures of PAINTERS, each beside the map of its tokens' origins, in `out`/drawn.png: HTML, width, and whether
    they are those of plain decoding.
    """
    import torch
    from rich.table import Table

    from visspec.api import zoo
    from visspec.api.grid import grid
    from visspec.api.images import ImagePipeline
    from visspec.cli.generate import beside, save
    from visspec.eval.bench.clock import seconds_of
    from visspec.eval.bench.paired import geometric_mean, in_words
    from visspec.eval.report.images import data_uri

    pictures: list[Image.Image] = []
    section, view = Section(), Table("picture", "plain decoding", "visspec", "faster", "tau", "same picture")
    for painter, prompts in PAINTERS.items():
        fast = ImagePipeline.from_pretrained(painter, drafter=zoo.preset(PRESET, "codes").drafter)
        plain = ImagePipeline(**fast.components | {"drafter": None})
        for pipe in (plain, fast):
            pipe.set_progress_bar_config(disable=True)
            pipe(prompts[0], seed=0)
        for i, prompt in enumerate(prompts):
            slow, wanted = seconds_of(partial(plain, prompt, seed=i))
            quick, made = seconds_of(partial(fast, prompt, seed=i))
            same = wanted.images[0].tobytes() == made.images[0].tobytes()
            section.add(view, f"{painter} {i + 1}", slow, quick, made.stats[0].tau, same)
            pictures.append(beside(made.images[0], made, 0))
    console.print(view)
    page = grid(pictures, [prompt for prompts in PAINTERS.values() for prompt in prompts], columns=2)
    save(page, out / "drawn.png")
    summary = (
        f"{len(pictures)} pictures against plain decoding in the same loop on {torch.get_num_threads()} threads: "
        f"{in_words(geometric_mean(section.ratios))}; {section.equal} of {len(pictures)} the same picture."
    )
    console.print(summary, f"pictures: {out / 'drawn.png'}")
    alt = "drawn shapes and animals, each beside a map of which of its tokens were drafted"
    picture = f'<p class="drawn"><img alt="{alt}" src="{data_uri(page, True)}"></p>'
    return f"<p>{html.escape(summary)}</p>{picture}", page.width, section.equal == len(pictures)
