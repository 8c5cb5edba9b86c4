"""`visspec demo`: the embedded captioner on rendered scenes, stock and accelerated, the same words in less time."""

from __future__ import annotations

import argparse
import html
import time
from pathlib import Path

from visspec.cli.arguments import positive

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>visspec demo</title>
<style>body{{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
figure{{display:flex;gap:1rem;flex-wrap:wrap;margin:1.5rem 0}}img{{width:192px;image-rendering:pixelated}}
figcaption{{flex:1;min-width:16rem}}</style>
<h1>Same words, fewer passes</h1><p>{summary}</p><p>{legend}</p>{figures}</html>
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=positive, default=4, help="how many scenes")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where the pictures and the page go")


def run(arguments: argparse.Namespace) -> int:
    """Caption held-out scenes both ways, print and write out/index.html. Returns 0 when all words are equal."""
    import torch
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from visspec.api import loading
    from visspec.api.accelerate import accelerate
    from visspec.api.captions import PROMPT, prepare
    from visspec.eval.speed.paired import geometric_mean, in_words
    from visspec.eval.world.render import to_image
    from visspec.eval.world.scene import held_out_scenes
    from visspec.loop.stats import COLOURS, MEANING

    console, count, out = Console(), arguments.images, arguments.out
    model, processor = loading.load()
    fast = accelerate(model, "vispec", tokenizer=processor.tokenizer)
    options = {"max_new_tokens": 128, "do_sample": False}
    images = [to_image(scene) for scene in held_out_scenes(count, first=500)]
    inputs = [prepare(processor, [image], PROMPT, model) for image in images]
    for generate in (model.generate, fast.generate, fast.generate):
        generate(**inputs[0], **options)
    view = Table("scene", "transformers", "visspec", "faster", "tau", "same words")
    ratios, figures, equal = [], [], 0
    for i, (image, prompt) in enumerate(zip(images, inputs)):
        start = time.perf_counter()
        stock = model.generate(**prompt, **options)
        middle = time.perf_counter()
        ours = fast.run(**prompt, **options)
        end = time.perf_counter()
        same = torch.equal(stock, ours.output)
        equal += same
        ratios.append((middle - start) / (end - middle))
        stats, pieces = ours.stats, ours.stats.pieces[0]
        console.print(
            f"[bold]scene {i + 1}[/bold] ", Text.assemble(*((piece, COLOURS[o]) for piece, o in pieces)), "\n"
        )
        view.add_row(
            str(i + 1), f"{1e3 * (middle - start):.0f} ms", f"{1e3 * (end - middle):.0f} ms",
            f"{ratios[-1]:.2f}", f"{stats.tau:.2f}", "yes" if same else "NO",
        )  # fmt: skip
        figures.append(figure(image, pieces))
    summary = (
        f"{count} captions against transformers' generate on {torch.get_num_threads()} threads: "
        f"{in_words(geometric_mean(ratios))}; {equal} of {count} word for word the same."
    )
    console.print(view)
    console.print(" ".join(f"[{COLOURS[o]}]■[/] {MEANING[o]}" for o in COLOURS))
    console.print(summary)
    out.mkdir(parents=True, exist_ok=True)
    legend = " · ".join(f'<b style="color:{COLOURS[o]}">{html.escape(MEANING[o])}</b>' for o in COLOURS)
    (out / "index.html").write_text(PAGE.format(summary=html.escape(summary), legend=legend, figures="".join(figures)))
    console.print(f"page: {out / 'index.html'}")
    return 0 if equal == count else 1


def figure(image, pieces: list[tuple[str, str]]) -> str:
    """HTML of a scene and its caption, coloured by the origin of its pieces."""
    from visspec.eval.report.images import small_png
    from visspec.loop.stats import coloured

    return (
        f'<figure><img alt="a rendered scene of coloured shapes" src="data:image/png;base64,{small_png(image)}">'
        f"<figcaption>{coloured(pieces)}</figcaption></figure>"
    )
