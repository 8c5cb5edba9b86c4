"""Quality of the methods of `visspec bench image` on pictures of the same prompts and seeds.

Held-out prompts are evaluated with the world's detector (GenEval) and a Frechet distance to renders, a user's own
prompts with CLIPScore and FID to photographs.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from visspec import registry
from visspec.api.images.pipeline import ImagePipeline
from visspec.cli.eval import LEAST, check_images
from visspec.cli.generate import save
from visspec.eval.metrics import clipscore, features, fid, geneval, intervals, kid, named
from visspec.eval.metrics.features import FeatureExtractor, FeatureTable, RandomConv
from visspec.eval.report.data import RecordImage
from visspec.eval.report.images import small_png
from visspec.io import included
from visspec.io.checkpoint import read_json
from visspec.io.files import loads, same_settings, write_json
from visspec.io.images import open_image

Drawn = tuple[Path, RecordImage]  # the file of a picture, and its entry in the record
Arms = Mapping[str, tuple[ImagePipeline, str]]  # by name: a pipeline and its "drafter/rule"
REFERENCES = 4  # number of reference renders per prompt
SHOWN = 8  # number of images per method in the record
REFERENCE_SEED = 20261121


@dataclass(frozen=True)
class Judges:
    """Evaluation of the pictures of a method.

    Args:
        prompts: What is drawn, one image each.
        extractor: The feature extractor of the distance.
        reference: Returns the features of reference pictures for the width of a drawn one.
        score: Maps a method's folder and pictures to fields of its row, and to verdicts by picture, if any.
    """

    prompts: list[dict[str, Any]]
    extractor: FeatureExtractor
    reference: Callable[[int], FeatureTable]
    score: Callable[[Path, list[Drawn]], tuple[dict[str, Any], dict[Path, dict[str, Any]]]]


def by_detector(scenes: included.World, count: int, tasks: Sequence[str] | None = None) -> Judges:
    """Evaluate held-out prompts, or some of their tasks, with GenEval and a distance to renders."""
    extractor, detector = RandomConv(), scenes.detector()

    def score(root: Path, drawn: list[Drawn]) -> tuple[dict[str, Any], dict[Path, dict[str, Any]]]:
        report = geneval.evaluate(root, root.with_suffix(".jsonl"), detector)
        verdicts = {root / r["filename"]: {"correct": r["correct"], "reason": r["reason"]} for r in report.rows}
        return scores(report.summary) | {"right": report.summary["correct_images"]}, verdicts

    reference = partial(render_references, extractor, scenes=scenes, tasks=tasks)
    return Judges(spread(scenes.prompts(), count, tasks), extractor, reference, score)


def by_photos(texts: Sequence[str], photos: Path, extractor: str, clip: str, device: str) -> Judges:
    """Evaluate a user's prompts with CLIPScore and FID to photographs. Raises ValueError, before drawing, for a folder
    without photographs, or an extractor or CLIP model that can't be loaded.
    """
    count = check_images("--reference", photos, LEAST["fid"])
    if len(texts) < 2:
        raise ValueError(f"--prompts: got {len(texts)}, expected at least 2.")
    if count != len(texts):
        what = "a distance depends on both counts, so only compare rows of one table"
        print(f"visspec: {len(texts)} images per method against {count} photographs; {what}", file=sys.stderr)
    features_of = named.extractor(extractor, device)
    scorer = None if clip == "none" else named.clip(clip, device, "--clip")

    def score(root: Path, drawn: list[Drawn]) -> tuple[dict[str, Any], dict[Path, dict[str, Any]]]:
        if scorer is None:
            return {}, {}
        pairs = [(path, str(picture.prompt)) for path, picture in drawn]
        row = clipscore.of_pairs(pairs, scorer, root.with_name(f"{root.name}.clipscore.jsonl"), [])
        return {"clipscore": row["value"], "clipscore_se": row["standard_error"], "clip": scorer.name}, {}

    prompts = [{"prompt": text} for text in texts]
    return Judges(prompts, features_of, lambda side: features.read_features(photos, features_of), score)


def judge(
    record: dict[str, Any], arms: Arms, options: dict[str, Any], judges: Judges, seed: int, folder: Path | None
) -> None:
    """Draw the prompts with every method and add scores, distances and thumbnails to the rows, in place. Images already
    in the folder are kept, so an interrupted run continues.
    """
    extractor, reference = judges.extractor, None
    plain: Tensor | None = None
    with tempfile.TemporaryDirectory() as spare:
        for line in record["rows"]:
            root = Path(folder or spare) / line["name"]
            pictures = draw(*arms[line["name"]], judges.prompts, options, seed, root)
            reference = reference or judges.reference(open_image(pictures[0][0]).width)
            fields, verdicts = judges.score(root, pictures)
            table = features.read_features(root, extractor)
            distance = fid.compare(table, reference, extractor)
            line |= fields | {"quality_n": len(judges.prompts), "fd": distance["value"], "fd_name": distance["name"]}
            line["fd_ratio"] = line["fd"] / record["rows"][0]["fd"]  # the first row is plain decoding
            plain = table.features if plain is None else plain
            if plain.shape == table.features.shape and len(plain) > 1:
                line["fd_paired"], line["fd_paired_floor"] = kid.paired(table.features, plain)
            examples = [(path, replace(one, verdict=verdicts.get(path))) for path, one in pictures[:SHOWN]]
            line["images"] = [record_image(path, picture).entry() for path, picture in examples]


def scores(summary: dict[str, Any]) -> dict[str, Any]:
    """Return GenEval and strict with their intervals."""
    tasks = summary["tasks"].values()
    right = [(task["correct"], task["images"]) for task in tasks]
    fields = {"geneval": summary["overall"], "geneval_ci95": intervals.of_mean_share(right)}
    exactly = [(task["strict"] * task["images"], task["images"]) for task in tasks]
    return fields | {"strict": summary["strict"], "strict_ci95": intervals.of_mean_share(exactly)}


def record_image(path: Path, picture: RecordImage) -> RecordImage:
    """Return a picture's entry in the record, with the map of its tokens."""
    origins = read_json(path.parent, path.with_suffix(".json").name).get("origins")
    return replace(picture, origins=origins, png=small_png(open_image(path)))


def check_folder(folder: Path, arms: Arms, judges: Judges, options: dict[str, Any], seed: int) -> None:
    """Raise ValueError, before any measurement, if a folder holds images of another run."""
    for name, arm in arms.items():
        prepare_folder(*arm, judges.prompts, options, seed, folder / name)


def prepare_folder(
    pipe: ImagePipeline, method: str, prompts: Sequence[dict], options: dict[str, Any], seed: int, root: Path
) -> list[Drawn]:
    """Return the files of one image per prompt in GenEval's folder layout. Image i has the seed `seed + i`. Raises
    ValueError if the folder has images of other prompts, or of another method, seed or model.
    """
    about = {"model": getattr(pipe.model.config, "_name_or_path", ""), "method": method, "seed": seed, **options}
    same_settings(root.with_name(f"{root.name}.about.json"), root, about)
    entries = []
    for i, prompt in enumerate(prompts):
        file = root / f"{i:05d}" / "metadata.jsonl"
        if file.is_file() and loads(file.read_bytes()) != prompt:
            raise ValueError(f"--out: {file.parent} has the image of another prompt. Choose another folder.")
        path = geneval.write_prompt(root, i, prompt) / "0000.png"
        entries.append((path, RecordImage(prompt["prompt"], seed + i)))
    return entries


def draw(pipe, method: str, prompts: list[dict], options: dict[str, Any], seed: int, root: Path) -> list[Drawn]:
    """Draw the images that a folder lacks, each with a JSON file of its token map. Raises as `prepare_folder`."""
    entries = prepare_folder(pipe, method, prompts, options, seed, root)
    missing = [entry for entry in entries if not entry[0].exists()]
    for start in tqdm(range(0, len(missing), 16), desc=root.name, leave=False):
        group = missing[start : start + 16]
        texts, seeds = [picture.prompt for _, picture in group], [picture.seed for _, picture in group]
        out = pipe(texts, seed=seeds, batch_size=16, **as_arguments(method), **options)
        for (path, _), image, origins in zip(group, out.images, out.maps):
            write_json(path.with_suffix(".json"), {"origins": origins.tolist()})
            save(image, path)  # written last, so an existing image is complete
    return entries


def render_references(
    extractor: RandomConv, side: int, scenes: included.World, tasks: Sequence[str] | None = None
) -> FeatureTable:
    """Return features of several renders of each prompt of the scenes or of these tasks, `side` pixels wide."""
    rng, prompts = np.random.default_rng(REFERENCE_SEED), scenes.prompts()
    rows = spread(prompts, len(prompts), tasks)
    stack = torch.from_numpy(np.stack([scenes.render(p, rng, side) for p in rows for _ in range(REFERENCES)]))
    stack = stack.permute(0, 3, 1, 2)
    return FeatureTable(torch.cat([extractor(part) for part in stack.split(32)]), [])


def spread(prompts: Sequence[dict[str, Any]], count: int, tasks: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return `count` prompts, evenly spread over all prompts or those of these tasks."""
    rows = [row for row in prompts if tasks is None or row["tag"] in tasks]
    return rows[:: max(1, len(rows) // count)][:count]


def as_arguments(method: str) -> dict[str, Any]:
    """Convert "drafter/rule" or "drafter/rule/order" to arguments of an `ImagePipeline`."""
    return dict(itertools.zip_longest(("drafter", "acceptance", "order"), method.split("/", 2)))


def plain_setup(pipe: ImagePipeline) -> str:
    """Return the "drafter/rule" of plain decoding."""
    return str(registry.preset("plain", pipe.family.draws))
