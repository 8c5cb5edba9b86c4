"""`visspec bench image`: ways to draw against stock generate, in the field's table: passes, time, quality, drift.

Speed: arms interleaved prompt by prompt, pixels included. Quality: the suite's prompts drawn by each method with the
same seeds, judged by the world's detector, and a Frechet distance against renders. A method is "drafter/rule".
"""

import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from visspec import registry
from visspec.api import sources
from visspec.api.images import ORIGINS, ImageOutput, ImagePipeline
from visspec.cli.arguments import DrawingOptions, Positive
from visspec.cli.bench import ScenesOptions, compilations, groups_of, measured_on, row_seeds
from visspec.cli.bench_image_table import view
from visspec.cli.generate import save
from visspec.eval.bench import paired as speed
from visspec.eval.metrics import features, fid, geneval, intervals, paired_kid
from visspec.eval.metrics.features import FeatureTable, RandomConv
from visspec.eval.report.images import small_png
from visspec.eval.report.records import RecordImage
from visspec.io import included
from visspec.io.checkpoint import read_json
from visspec.io.files import write_json
from visspec.io.images import open_image
from visspec.io.options import option
from visspec.models.image_codes.families import family_of
from visspec.models.image_codes.target import Family
from visspec.models.runner.compiled import stepwise
from visspec.types import Sampling

CACHES = ("static", "dynamic")  # stock generate gets the faster of these
REFERENCES = 4  # renders of each prompt that the distance is taken to
HEAD_CALLS = ("head", "draft_head")  # networks of models of vectors whose sequential calls are counted
SHOWN = 8  # images a method keeps in the record
REFERENCE_SEED = 20261121


@dataclass(kw_only=True)
class Options(DrawingOptions, ScenesOptions):
    prompts: Path | None = option("lines, or JSON lines of {prompt, id} (default: held-out prompts)", None)
    count: Positive = option("how many prompts, at most", 24)
    model: str | None = option("included name, folder or hub id of an image model (default: an included one)", None)
    method: list[str] | None = option(
        "preset, file of `visspec tune` or name=drafter/rule; repeat; default: all presets", None, repeat=True
    )
    quality: int = option("images a method for GenEval and FD ; 0: none", 0)
    batch_size: Positive = option("images at a time in the speed part", 1)
    out: Path | None = option("keep the images of the quality part in this folder; it resumes", None, writes="folder")
    compile: bool = option("ours compiled, and the stock class compiled beside it", False)


def run(arguments: Options) -> None:
    arguments.begin()
    pipe = ImagePipeline.from_pretrained(arguments.model, **arguments.hardware, compile=arguments.compile)
    pipe.set_progress_bar_config(disable=True)
    draws = pipe.family.draws
    named = arguments.method or registry.presets(draws)
    others = other_targets(pipe, named)
    methods = dict(parse_method(m, draws, pipe.model) for m in named if m not in others)
    if not arguments.method:
        methods = fitting(pipe, methods)
    if arguments.quality and (pipe.family.no_pixels or arguments.prompts):
        why = pipe.family.no_pixels or "the detector judges held-out prompts only"
        raise ValueError(f"--quality: got {arguments.quality}, expected 0: {why}")
    options = {"guidance_scale": arguments.guidance_scale, "temperature": arguments.temperature}
    seed, scenes, tasks = arguments.seed, None, None
    if arguments.prompts is None:
        scenes = arguments.scenes(pipe.processor or pipe.model, "prompts")
        tasks = taught(pipe.family, scenes.prompts())
        texts = [row["prompt"] for row in spread(scenes.prompts(), arguments.count, tasks)]
    else:
        texts = read_prompts(arguments.prompts, arguments.count)
    record = bench(pipe, texts, methods, options, seed, arguments.batch_size, others=others)
    if arguments.quality and scenes is not None:
        home = arguments.json.resolve().parent if arguments.json else None
        judge(pipe, record, methods, options, scenes, arguments.quality, seed, arguments.out, home, tasks, others)
    arguments.end(record, view(record))


def spread(prompts: Sequence[dict[str, Any]], count: int, tasks: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """`count` prompts from all over those given, or over these tasks of them."""
    rows = [row for row in prompts if tasks is None or row["tag"] in tasks]
    return rows[:: max(1, len(rows) // count)][:count]


def read_prompts(file: Path, count: int) -> list[str]:
    """The first `count` prompts of a file. Raises ValueError if there are none."""
    found = [record.prompt for record in sources.prompts(file) if record.prompt][:count]
    if not found:
        raise ValueError(f"--prompts: got {file} without a prompt, expected one a line")
    return found


def parse_method(method: str, draws: str, model: PreTrainedModel | None = None) -> tuple[str, str]:
    """A method's name and its "drafter/rule", from a preset's name or "name=drafter/rule"; an order may follow."""
    name, equals, pair = method.partition("=")
    if not equals:
        return Path(name).stem, str(registry.preset(name, draws, model))
    if "/" not in pair:
        raise ValueError(f"--method: got {method}, expected a preset or name=drafter/acceptance[/order]")
    return name, pair


def as_arguments(method: str) -> dict[str, Any]:
    """ "drafter/rule" or "drafter/rule/order" as arguments of an `ImagePipeline`."""
    return dict(itertools.zip_longest(("drafter", "acceptance", "order"), method.split("/", 2)))


def fitting(pipe: ImagePipeline, methods: dict[str, str]) -> dict[str, str]:
    """Those of the presets that this model takes; why it takes another is said."""
    found = {}
    for name, method in methods.items():
        try:
            pipe.setup(**as_arguments(method))
        except ValueError as error:
            print(f"left out: {name} ({error})")
        else:
            found[name] = method
    return found


def other_targets(pipe: ImagePipeline, named: Iterable[str]) -> dict[str, ImagePipeline]:
    """Pipelines of the presets `named` that change the target (a refiner, a budget of cache), each drawn plainly."""
    table = registry.presets(pipe.family.draws)
    return {name: pipe.with_parts(table[name].parts) for name in named if name in table and table[name].parts}


def plain_setup(pipe: ImagePipeline) -> str:
    """The "drafter/rule" of plain decoding."""
    return str(registry.preset("plain", pipe.family.draws))


def taught(family: Family, rows: Sequence[dict]) -> list[str] | None:
    """The tasks whose prompts are all classes of a family that has named classes; None for any other."""
    known = set(family.labels)
    tasks = list(dict.fromkeys(row["tag"] for row in rows))
    return [tag for tag in tasks if all(row["prompt"] in known for row in rows if row["tag"] == tag)] or None


class StockImageArm:
    """The model's own generate, then its own pixel decoder where it has one."""

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
        self.setup = setup = pipe.setup(**self.method)  # what can't be is refused here
        plain = pipe.setup(**as_arguments(plain_setup(pipe)))
        same = type(setup.order) is type(plain.order)  # another is another distribution
        self.whole, self.promise = not setup.order.raster, same and setup.promises_tokens(sampling.greedy)
        self.output_type = "latent" if pipe.family.no_pixels else "pil"
        self.outputs: list[ImageOutput] = []
        self.displacement: list[float] = []

    def __call__(self, prompt: tuple[int, list[str]]) -> speed.ArmRun:
        index, texts = prompt
        start = time.perf_counter()
        options = {**self.method, "output_type": self.output_type, **self.options}
        out = self.pipe(texts, seed=row_seeds(self.seed, index, len(texts)), batch_size=len(texts), **options)
        seconds = time.perf_counter() - start
        self.outputs.append(out)
        stats, trace = out.stats[0], out.traces[0]
        if stats.displacement_per_token is not None:
            self.displacement.append(stats.displacement_per_token)
        tokens = [t.tolist() for t in out.tokens]
        return speed.ArmRun.of_trace(seconds, tokens, trace, trace.times["prefill"], drift=stats.drift_per_token)


def bench(
    pipe: ImagePipeline, texts: Sequence[str], methods: dict[str, str], options: dict[str, Any], seed=0, batch_size=1,
    warmup=2, others: Mapping[str, ImagePipeline] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Speed of every method against the stock generate at its better cache, and against our plain loop. others:
    pipelines with plain decoding of their own, by name.

    Where the stock class draws no images, `stock` of the record is None and the plain loop is the only baseline.
    """
    prompts = list(enumerate(groups_of(list(texts), batch_size)))
    sampling = pipe.sampling(options.get("guidance_scale"), options.get("temperature"), None, None)
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
    warm = [(len(prompts) + i, texts) for i, texts in prompts[:warmup]]  # other seeds, so other pictures
    runs, failures = speed.interleave(arms, prompts, warm, "bench image")
    if not runs["plain"]:
        raise ValueError(f"--method: got {', '.join(ours)}, expected some prompt that all of them draw; {failures[0]}")
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
    found, plain, outputs = runs[name], runs["plain"], arm.outputs[-len(runs[name]) :]
    stats, traces = arm.outputs[-1].stats[0], [trace for out in outputs for trace in out.traces]
    each, before = ([len(run.rounds) + 1 for run in some] for some in (found, plain))  # passes
    tokens, memory = max(sum(run.count for run in found), 1), [trace.memory for trace in traces if trace.memory]
    row: dict[str, Any] = {"name": name, **arm.method, "order": arm.method["order"] or "raster"}
    row |= {"guarantee": stats.guarantee, "promises_tokens": arm.promise}
    row |= {"n_prompts": len(found), **speed.compare(runs.get("stock", plain), found)}
    row |= {"identical": speed.compare(plain, found)["identical"], "identical_to": "plain (same seeds)"}
    row |= speed.tau(found) | speed.over("over_plain", plain, found) | speed.acceptance(found)
    row |= {"nfe_plain": speed.tau(plain)["nfe"], "nfe_reduction": speed.tau(plain)["nfe"] / row["nfe"]}
    row["nfe_reduction_ci95"] = list(speed.bootstrap([slow / fast for slow, fast in zip(before, each)]))
    row |= {"trunk_passes": sum(each) / tokens, "ms_per_nfe": 1e3 * sum(r.seconds for r in found) / max(sum(each), 1)}
    row |= {f"{part}_calls": sum(trace.calls[part] for trace in traces) / tokens for part in HEAD_CALLS}
    row |= {f"{part}_bytes": max(one.get(part, 0) for one in memory) for part in ("cache", "pass") if memory}
    maps = mean_map([acceptance_map(grid, arm.whole) for out in outputs for grid in out.maps])
    row |= dict(zip(("acceptance_map", "acceptance_map_n"), maps))
    row["drift_per_token"] = speed.drift(found)
    row["latent_displacement"] = float(np.mean(arm.displacement[-len(found) :])) if arm.displacement else None
    costs = {key: value for key, value in speed.ideal(plain, found).items() if key != "gap"}
    return row | costs | {"time_s": speed.time_by_stage(found)}


def acceptance_map(origins: np.ndarray, whole: bool) -> np.ndarray | None:
    """(rows, columns) float: 1 where a drafted code stayed, 0 where the target put another in its place, NaN where
    nothing was drafted; None for an image without drafts. `whole`: all of it was drafted at once, or nothing.
    """
    stayed = origins == ORIGINS.index("drafted")
    replaced = ~stayed if whole else origins == ORIGINS.index("corrected")
    if not stayed.any() and (whole or not replaced.any()):
        return None
    return np.where(stayed, 1.0, np.where(replaced, 0.0, np.nan))


def mean_map(maps: Sequence[np.ndarray | None]) -> tuple[list | None, list | None]:
    """Mean over images and how many it is of, place by place; None where no image had a draft."""
    drafted = [m for m in maps if m is not None]
    if not drafted:
        return None, None
    stack = np.stack(drafted)
    count = (~np.isnan(stack)).sum(axis=0)
    mean = np.nansum(stack, axis=0) / np.maximum(count, 1)
    return numbers(np.where(count > 0, mean, np.nan)), count.tolist()


def numbers(grid: np.ndarray) -> list[list[float | None]]:
    """As JSON has it: null for NaN."""
    return [[None if math.isnan(value) else round(value, 4) for value in row] for row in grid.tolist()]


def judge(
    pipe: ImagePipeline, record: dict[str, Any], methods: Mapping[str, str], options: dict[str, Any],
    scenes: included.World, count: int, seed: int, folder: Path | None, home: Path | None = None,
    tasks: Sequence[str] | None = None, others: Mapping[str, ImagePipeline] | None = None,
) -> None:  # fmt: skip
    """Draw `count` prompts of the scenes', or of some of their tasks, with every method and add GenEval, strict and FD
    to the rows, in place.

    Images already in the folder are kept: a killed run goes on where it was. The record names those inside `home`, its
    own folder, by path; reports open nothing else, so of others it holds thumbnails.
    """
    prompts = spread(scenes.prompts(), count, tasks)
    extractor, reference, detector = RandomConv(), None, scenes.detector()
    plain: Tensor | None = None
    with tempfile.TemporaryDirectory() as spare:
        for line in record["rows"]:
            root = Path(folder or spare) / line["name"]
            source = (others or {}).get(line["name"], pipe)
            drawn = draw(source, methods.get(line["name"], plain_setup(pipe)), prompts, options, seed, root)
            reference = reference or render_references(extractor, open_image(drawn[0][0]).width, scenes, tasks)
            report = geneval.evaluate(root, root.with_suffix(".jsonl"), detector)
            table = features.read_features(root, extractor)
            found, distance = table.features, fid.compare(table, reference, extractor)
            line |= scores(report.summary) | {"right": report.summary["correct_images"], "quality_n": len(prompts)}
            line |= {"fd": distance["value"], "fd_name": distance["name"]}
            line["fd_noise_floor"] = distance["noise_floor_here"]
            line["fd_ratio"] = line["fd"] / record["rows"][0]["fd"]  # the first is plain decoding
            plain = found if plain is None else plain
            if plain.shape == found.shape and len(found) > 1:
                line["fd_paired"], line["fd_paired_floor"] = paired_kid.from_features(found, plain)
            judged = {r["filename"]: {"correct": r["correct"], "reason": r["reason"]} for r in report.rows}
            seen = [(path, replace(one, verdict=judged[str(path.relative_to(root))])) for path, one in drawn[:SHOWN]]
            line["images"] = [record_image(path, picture, home).entry() for path, picture in seen]


def scores(summary: dict[str, Any]) -> dict[str, Any]:
    """GenEval and strict with their intervals; None for a strict that the detector can't say."""
    tasks = summary["tasks"].values()
    right = [(task["correct"], task["images"]) for task in tasks]
    found = {"geneval": summary["overall"], "geneval_ci95": intervals.of_mean_share(right)}
    if summary["strict"] is None:
        return found | {"strict": None, "strict_ci95": None}
    exactly = [(task["strict"] * task["images"], task["images"]) for task in tasks]
    return found | {"strict": summary["strict"], "strict_ci95": intervals.of_mean_share(exactly)}


def record_image(path: Path, picture: RecordImage, home: Path | None) -> RecordImage:
    """A picture as the record holds it, with the map of its tokens where that was kept beside it."""
    sidecar = path.with_suffix(".json")
    if sidecar.is_file():
        picture = replace(picture, acceptance=read_json(sidecar.parent, sidecar.name).get("acceptance"))
    if home is not None and path.resolve().is_relative_to(home):
        return replace(picture, path=str(path.resolve().relative_to(home)))
    return replace(picture, png=small_png(open_image(path)))


def draw(
    pipe, method: str, prompts: list[dict], options: dict[str, Any], seed: int, root: Path
) -> list[tuple[Path, RecordImage]]:
    """One image a prompt in GenEval's folder layout, those that are missing; image i has the seed `seed + i`. Beside
    each is a JSON file with the map of its tokens.
    """
    whole = not pipe.setup(**as_arguments(method)).order.raster
    entries = []
    for i, prompt in enumerate(prompts):
        path = geneval.write_prompt(root, i, prompt) / "0000.png"
        entries.append((path, RecordImage(prompt["prompt"], seed + i)))
    missing = [entry for entry in entries if not entry[0].exists()]
    for start in tqdm(range(0, len(missing), 16), desc=root.name, leave=False):
        group = missing[start : start + 16]
        texts, seeds = [picture.prompt for _, picture in group], [picture.seed for _, picture in group]
        out = pipe(texts, seed=seeds, batch_size=16, **as_arguments(method), **options)
        for (path, _), image, origins in zip(group, out.images, out.maps):
            grid = acceptance_map(origins, whole)
            write_json(path.with_suffix(".json"), {"acceptance": None if grid is None else numbers(grid)})
            save(image, path)  # last: what is there is whole
    return entries


def render_references(
    extractor: RandomConv, side: int, scenes: included.World, tasks: Sequence[str] | None = None
) -> FeatureTable:
    """Features of several renders of each of the scenes' prompts, or of those of these tasks, `side` pixels wide."""
    rng, known = np.random.default_rng(REFERENCE_SEED), scenes.prompts()
    rows = spread(known, len(known), tasks)
    stack = torch.from_numpy(np.stack([scenes.render(p, rng, side) for p in rows for _ in range(REFERENCES)]))
    stack = stack.permute(0, 3, 1, 2)
    return FeatureTable(torch.cat([extractor(part) for part in stack.split(32)]), [])
