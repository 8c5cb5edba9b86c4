"""`visspec bench image`: methods of image generation against stock generate: passes, time, quality, drift.

Arms are interleaved prompt by prompt, and times include pixels. `bench_image_quality` measures quality. A method is
"drafter/rule".
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from visspec import registry
from visspec.api import sources
from visspec.api.images.pipeline import ImageOutput, ImagePipeline
from visspec.api.loading import resolve_device
from visspec.cli.arguments import DrawingOptions
from visspec.cli.bench import Cell, ScenesOptions, cell, compilations, groups_of, measured_on, row_seeds, table
from visspec.cli.bench_image_quality import (
    Judges,
    as_arguments,
    by_detector,
    by_photos,
    check_folder,
    judge,
    plain_setup,
    spread,
)
from visspec.eval.bench import paired as speed
from visspec.io.options import Count, Positive, option
from visspec.loop.stats import drift_text
from visspec.models.image_codes.family import Family, family_of
from visspec.models.runner.compiled import stepwise
from visspec.types import Sampling

CACHES = ("static", "dynamic")  # stock generate uses the faster of these
HEAD_CALLS = ("head", "draft_head")  # networks of vector models whose sequential calls are counted


@dataclass(kw_only=True)
class Options(DrawingOptions, ScenesOptions):
    prompts: Path | None = option(
        "file of prompts, as lines or JSON lines of {prompt, id} (default: held-out prompts)", None
    )
    count: Positive = option("maximum number of prompts", 24)
    model: str | None = option("included name, folder or hub id of an image model (default: an included one)", None)
    method: list[str] | None = option(
        "preset, file of `visspec tune` or name=drafter/rule; may be repeated (default: all presets)", None, repeat=True
    )
    reference: Path | None = option("folder of photographs, to evaluate --prompts with FID and CLIPScore", None)
    extractor: str = option("feature extractor for --reference: inception, random-conv, or a model", "inception")
    clip: str = option("CLIP model for --reference, or none", "openai/clip-vit-large-patch14")
    quality: Count | None = option(
        "number of images per method to evaluate: FID and CLIPScore of --prompts, GenEval and FD of held-out prompts"
        " (default: --count with --reference, else 0)",
        None,
    )
    batch_size: Positive = option("number of images drawn together in the speed part", 1)
    out: Path | None = option("folder for the images of the quality part, which can be resumed", None, writes="folder")
    compile: bool = option("compile our passes, and add a compiled stock arm", False)


def run(arguments: Options) -> None:
    arguments.begin()
    pipe = ImagePipeline.from_pretrained(arguments.model, **arguments.hardware, compile=arguments.compile)
    pipe.set_progress_bar_config(disable=True)
    draws = pipe.family.draws
    named = arguments.method or registry.presets(draws)
    others = other_targets(pipe, named)
    methods = dict(parse_method(m, draws, pipe.model) for m in named if m not in others)
    methods = fitting(pipe, methods, needed=bool(arguments.method))
    photos, quality = arguments.reference, arguments.quality
    quality = (0 if photos is None else arguments.count) if quality is None else quality
    if photos is not None and arguments.prompts is None:
        raise ValueError(f"--reference: got {photos} without --prompts. Pass both.")
    if quality and (pipe.family.no_pixels or (arguments.prompts and photos is None)):
        why = pipe.family.no_pixels or "--prompts are evaluated against photographs, --reference FOLDER"
        raise ValueError(f"--quality: got {quality}, expected 0: {why}")
    judges: Judges | None = None
    options = {"guidance_scale": arguments.guidance_scale, "temperature": arguments.temperature}
    seed = arguments.seed
    if arguments.prompts is None:
        arguments.check_scenes(arguments.model, "--prompts")
        scenes = arguments.scenes(pipe.processor or pipe.model, "prompts")
        tasks = taught(pipe.family, scenes.prompts())
        texts = [row["prompt"] for row in spread(scenes.prompts(), arguments.count, tasks)]
        judges = by_detector(scenes, quality, tasks) if quality else None
    else:
        texts = sources.texts(arguments.prompts)
        if photos is not None and quality:
            device = resolve_device(arguments.device)
            judges = by_photos(texts[:quality], photos, arguments.extractor, arguments.clip, device)
        texts = texts[: arguments.count]
    arms = {name: (pipe, method) for name, method in ({"plain": plain_setup(pipe)} | methods).items()}
    arms |= {name: (other, plain_setup(other)) for name, other in others.items()}
    if judges is not None and arguments.out is not None:
        check_folder(arguments.out, arms, judges, options, seed)
    record = bench(pipe, texts, methods, options, seed, arguments.batch_size, others=others)
    if judges is not None:
        judge(record, arms, options, judges, seed, arguments.out)
    arguments.end(record, view(record))


def parse_method(method: str, draws: str, model: PreTrainedModel | None = None) -> tuple[str, str]:
    """Return a method's name and "drafter/rule[/order]", from a preset or "name=drafter/rule[/order]"."""
    name, equals, pair = method.partition("=")
    if not equals:
        return Path(name).stem, str(registry.preset(name, draws, model))
    if "/" not in pair:
        raise ValueError(f"--method: got {method}, expected a preset or name=drafter/acceptance[/order].")
    return name, pair


def fitting(pipe: ImagePipeline, methods: dict[str, str], needed: bool = False) -> dict[str, str]:
    """Return the methods that fit this model, and report why others don't. If they are `needed`, raise ValueError."""
    selection = {}
    for name, method in methods.items():
        try:
            pipe.setup(**as_arguments(method))
        except ValueError as error:
            if needed:
                raise ValueError(f"--method {name}: {error}") from None
            print(f"left out: {name} ({error})")
        else:
            selection[name] = method
    return selection


def other_targets(pipe: ImagePipeline, named: Iterable[str]) -> dict[str, ImagePipeline]:
    """Return pipelines of presets that change the target (a refiner, a cache budget), for plain decoding."""
    presets = registry.presets(pipe.family.draws)
    return {name: pipe.with_parts(presets[name].parts) for name in named if name in presets and presets[name].parts}


def taught(family: Family, rows: Sequence[dict]) -> list[str] | None:
    """Return the tasks whose prompts are all classes of a family with named classes; None for other families."""
    labels = set(family.labels)
    tasks = list(dict.fromkeys(row["tag"] for row in rows))
    return [tag for tag in tasks if all(row["prompt"] in labels for row in rows if row["tag"] == tag)] or None


class StockImageArm:
    """The model's own generate, then its own pixel decoder if it has one."""

    def __init__(self, family: Family, sampling: Sampling, seed: int, cache: str):
        self.family, self.sampling, self.seed, self.cache = family, sampling, seed, cache

    def __call__(self, prompt: tuple[int, list[str]]) -> speed.ArmRun:
        index, texts = prompt
        torch.manual_seed(self.seed + index)
        layout = self.family.layout()
        start = time.perf_counter()
        tokens = self.family.stock(texts, self.sampling, layout, cache_implementation=self.cache)
        if not self.family.no_pixels:
            with torch.inference_mode():
                self.family.render(tokens[:, layout.free], layout, texts, row_seeds(self.seed, index, len(texts)))
        return speed.ArmRun(time.perf_counter() - start, tokens[:, layout.free].tolist())


class ImageArm:
    """The pipeline with one method."""

    def __init__(self, pipe: ImagePipeline, method: str, options: dict[str, Any], seed: int, sampling: Sampling):
        self.pipe, self.seed, self.options = pipe, seed, options
        self.method: dict[str, Any] = {**as_arguments(method)}
        self.setup = setup = pipe.setup(**self.method)  # raises for invalid combinations
        plain = pipe.setup(**as_arguments(plain_setup(pipe)))
        same = type(setup.order) is type(plain.order)  # another order is another distribution
        self.promise = same and setup.promises_tokens(sampling.greedy)
        self.output_type = "latent" if pipe.family.no_pixels else "pil"
        self.outputs: list[ImageOutput] = []

    def __call__(self, prompt: tuple[int, list[str]]) -> speed.ArmRun:
        index, texts = prompt
        start = time.perf_counter()
        options = {**self.method, "output_type": self.output_type, **self.options}
        out = self.pipe(texts, seed=row_seeds(self.seed, index, len(texts)), batch_size=len(texts), **options)
        seconds = time.perf_counter() - start
        self.outputs.append(out)
        stats, trace = out.stats[0], out.traces[0]
        tokens = [t.tolist() for t in out.tokens]
        return speed.ArmRun.of_trace(seconds, tokens, trace, trace.times["prefill"], drift=stats.drift_per_token)


def bench(
    pipe: ImagePipeline, texts: Sequence[str], methods: dict[str, str], options: dict[str, Any], seed=0, batch_size=1,
    warmup=2, others: Mapping[str, ImagePipeline] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure the speed of every method against stock generate with its better cache, and against our plain loop.
    `others` are pipelines by name that have their own plain decoding. If the stock class draws no images, `stock` of
    the record is None and the plain loop is the only baseline.
    """
    prompts = list(enumerate(groups_of(list(texts), batch_size)))
    sampling = pipe.sampling(options.get("guidance_scale"), options.get("temperature"))
    ours = {name: ImageArm(pipe, method, options, seed, sampling) for name, method in methods.items()}
    ours = ({} if "plain" in ours else {"plain": ImageArm(pipe, plain_setup(pipe), options, seed, sampling)}) | ours
    for name, other in (others or {}).items():
        other.set_progress_bar_config(disable=True)
        ours[name] = ImageArm(other, plain_setup(other), options, seed, sampling)
    caches = [StockImageArm(pipe.family, sampling, seed, cache) for cache in CACHES]
    try:
        stock = speed.fastest(caches, prompts[: max(1, warmup)])
    except NotImplementedError:
        stock = None
    arms: dict[str, Any] = ({} if stock is None else {"stock": stock}) | ours
    if pipe.compile and stock is not None:
        compiled = family_of(stepwise(pipe.model, pipe.family.decoder), pipe.processor, **pipe.parts)
        arms["stock_compiled"] = StockImageArm(compiled, sampling, seed, "static")
    warm = [(len(prompts) + i, texts) for i, texts in prompts[:warmup]]  # other seeds give other pictures
    runs, failures = speed.interleave(arms, prompts, warm, "bench image")
    if not runs["plain"]:
        raise ValueError(f"--method: No prompt was drawn by all of {', '.join(ours)}; {failures[0]}")
    rows = [row(name, arm, runs) for name, arm in ours.items()]
    record = measured_on(pipe.model, seed=seed) | {"bench": "image", "rows": rows, "n_prompts": len(texts)}
    if "stock_compiled" in arms:
        seconds = sum(run.seconds for run in runs["stock_compiled"]) / len(texts)
        record["baselines"] = {"transformers_compiled": {"seconds_per_image": seconds}}
        for line in rows:
            line |= speed.over("speedup_over_compiled", runs["stock_compiled"], runs[line["name"]])
            line |= compilations(ours[line["name"]].setup)
    record |= {"batch_size": batch_size, "seed": seed, "failures": failures, "stock": None}
    if stock is not None:
        seconds = sum(r.seconds for r in runs["stock"]) / max(len(texts), 1)
        record["stock"] = {"cache": stock.cache, "seconds_per_image": seconds, "nfe": pipe.family.layout().positions}
    return record | {"guidance_scale": sampling.guidance, "temperature": sampling.temperature}


def row(name: str, arm: ImageArm, runs: dict[str, list[speed.ArmRun]]) -> dict[str, Any]:
    arm_runs, plain, outputs = runs[name], runs["plain"], arm.outputs[-len(runs[name]) :]
    stats, traces = arm.outputs[-1].stats[0], [trace for out in outputs for trace in out.traces]
    passes = sum(len(run.rounds) + 1 for run in arm_runs)
    tokens, memory = max(sum(run.count for run in arm_runs), 1), [trace.memory for trace in traces if trace.memory]
    row: dict[str, Any] = {"name": name, **arm.method, "order": arm.method["order"] or "raster"}
    row |= {"guarantee": stats.guarantee, "promises_tokens": arm.promise}
    row |= {"n_prompts": len(arm_runs), **speed.figures(runs.get("stock", plain), plain, arm_runs)}
    row |= {"identical": speed.compare(plain, arm_runs)["identical"], "identical_to": "plain (same seeds)"}
    row["nfe_reduction"] = row["nfe_plain"] / row["nfe"]
    row |= {"trunk_passes": passes / tokens, "ms_per_nfe": 1e3 * sum(r.seconds for r in arm_runs) / max(passes, 1)}
    row |= {f"{part}_calls": sum(trace.calls[part] for trace in traces) / tokens for part in HEAD_CALLS}
    row |= {f"{part}_bytes": max(one.get(part, 0) for one in memory) for part in ("cache", "pass") if memory}
    return row


COLUMNS: dict[str, Cell] = {
    "method": "{name}",
    "NFE": "{nfe:.1f}",
    "head calls / token": lambda row: f"{row['head_calls']:.1f}" if row.get("head_calls") else "",
    "fewer by": "{nfe_reduction:.2f}",
    "ms / NFE": "{ms_per_nfe:.1f}",
    "over stock": "{speedup:.2f}",
    "95 %": "{speedup_ci95[0]:.2f}..{speedup_ci95[1]:.2f}",
    "GenEval": "{geneval:.3f}",
    "CLIPScore": "{clipscore:.2f} ({clipscore_se:.2f})",
    "FD": "{fd:.3f}",
    "FD of pairs": "{fd_paired:.2g}",
    "drift / token": lambda row: "" if "stock" in row else drift_text(row["drift_per_token"]),
    "guarantee": "{guarantee}",
}


def view(record: dict[str, Any]) -> Table:
    """Return the table of a record, with the columns for which any row has a value."""
    title = f"{record['n_prompts']} prompts, batch {record['batch_size']}, guidance {record['guidance_scale']}"
    stock, baselines = record["stock"], record.get("baselines", {})
    title += f", stock with its {stock['cache']} cache" if stock else ", speed-up over plain decoding"
    rows: list[dict[str, Any]] = []
    arms = {"stock": stock, "stock, compiled": baselines.get("transformers_compiled")} if stock else {}
    for name, arm in arms.items():
        if arm is not None:
            seconds, nfe = arm["seconds_per_image"], stock["nfe"]
            rows.append({"name": name, "stock": True, "nfe": nfe, "ms_per_nfe": 1e3 * seconds / nfe})
            rows[-1] |= {"speedup": stock["seconds_per_image"] / seconds, "guarantee": "the model's own"}
    rows += record["rows"]
    columns = {head: form for head, form in COLUMNS.items() if any(cell(form, row) for row in rows)}
    floor = max((row.get("fd_paired_floor", 0.0) for row in rows), default=0.0)
    distance = next((row["fd_name"] for row in rows if "fd_name" in row), "FD")  # only Inception's is called FID
    columns = {escape(distance) if head == "FD" else head: form for head, form in columns.items()}
    caption = f"FD of pairs with plain decoding: by chance below {floor:.2g}" if "FD of pairs" in columns else None
    return table(title, rows, columns, caption, left=["guarantee"], whole=columns)
