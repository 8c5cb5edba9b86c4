"""The report shows what the benches write: real records of tiny models, their maps, texts and promises."""

import base64
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny
from visspec.accept.exact import Exact
from visspec.accept.lantern import Lantern
from visspec.accept.rejection import Rejection
from visspec.api.images.pipeline import ORIGINS, ImagePipeline
from visspec.api.sources import Record
from visspec.cli import bench_caption as bench
from visspec.cli import bench_image
from visspec.cli.bench_image_quality import by_detector, judge, plain_setup
from visspec.eval.bench import paired as speed
from visspec.eval.bench.paired import ArmRun
from visspec.eval.metrics import intervals
from visspec.eval.report import page as report
from visspec.io import included
from visspec.loop.draft_length import AdaptiveLength
from visspec.loop.orders import Raster, RejectedRegions
from visspec.loop.setup import DecodingSetup
from visspec.toys.world.detector import ShapeDetector

SEEDS = {"plain": "none/exact", "window": "jacobi:window=6/exact", "coins": "jacobi:redraw=maximal,window=6/rejection",
         "loose": "none/typical"}  # fmt: skip


class Processor:
    """Images and requests as the tiny LLaVA of `tiny` takes them; words are numbers."""

    chat_template, image_token = None, "<image>"
    tokenizer = SimpleNamespace(padding_side="left", decode=lambda ids, **_: " ".join(map(str, ids)))

    def __call__(self, text, images, **_):
        inputs = tiny.prompt("llava", ["i 3"] * len(text))
        return type("Batch", (dict,), {"to": lambda self, device: self})(inputs)


@pytest.fixture(scope="module")
def caption_records():
    torch.manual_seed(0)
    model = tiny.model_of("llava")
    prompts = [Record(colour, Image.new("RGB", (200, 100), colour), "i 3") for colour in ("red", "blue", "grey")]
    options = {"max_new_tokens": 6}, {"max_new_tokens": 6, "acceptance": "rejection", "temperature": 1.0}
    greedy, sampled = (
        bench.bench_prompts("caption", model, Processor(), prompts[:2], prompts[2:], bench.Options(**some))
        for some in ({"drafter": ["ngram"], **one} for one in options)
    )
    return json.loads(json.dumps(greedy)), json.loads(json.dumps(sampled))


@pytest.fixture(scope="module")
def image_record(folder, tmp_path_factory):
    """A quality bench of 2 pictures a method, kept in a folder; references of few prompts."""
    home = tmp_path_factory.mktemp("bench")
    pipe = ImagePipeline.from_pretrained(str(folder))
    with pytest.MonkeyPatch.context() as patch:
        scenes = included.scenes()
        few = scenes.prompts()[:6]
        patch.setattr(type(scenes), "prompts", lambda self: few)
        patch.setattr(ShapeDetector, "_explain", lambda *_: None)  # a random painter's noise takes it seconds
        texts = [p["prompt"] for p in few[:2]]
        record = bench_image.bench(pipe, texts, SEEDS, {}, warmup=1)
        judges = by_detector(scenes, 2)
        arms = {row["name"]: (pipe, SEEDS.get(row["name"], plain_setup(pipe))) for row in record["rows"]}
        judge(record, arms, {}, judges, 0, home / "pictures")
    return json.loads(json.dumps(record))


def page_of(tmp_path, *values):
    paths = []
    for i, value in enumerate(values):
        paths.append(value if not isinstance(value, dict) else tmp_path / f"{i}.json")
        if isinstance(value, dict):
            paths[-1].write_text(json.dumps(value))
    return report.build(paths, tmp_path / "report.html").read_text()


def words(source):
    return " ".join(re.sub(r"<[^>]*>", " ", source).split())


def test_the_page_of_a_real_image_bench(tmp_path, image_record):
    rows = image_record["rows"]
    for row in rows[1:]:  # a clock over two tiny pictures shows anything: what the page makes of ratios, test below
        assert row["over_plain"] > 0
    level = {"over_plain": 1.0, "over_plain_ci95": [0.9, 1.1]}
    source = page_of(tmp_path, image_record | {"rows": [row | level for row in rows]})
    text, cases = words(source), source.split('<div class="case">')[1:]
    assert "share of right pictures 0.000 [0.000, 0.658]" in text
    assert len(cases) == 2 and source.count("✗ wrong") == 8 and "of the pixels are unexplained" in words(cases[0])
    assert all(case.count('alt="origin of each token"') == 4 for case in cases)
    assert "✓ 2 of 2" in text and "SUSPECT" not in text
    table = source.split("<tbody>")[1].split("</tbody>")[0]
    assert "✗" not in table, "what promises no tokens of plain decoding breaks no promise"


def test_maps_of_a_bench(image_record):
    line = next(r for r in image_record["rows"] if r["name"] == "window")
    grids = [image["origins"] for image in line["images"]]
    assert all(np.shape(g) == (6, 6) for g in grids)
    names = [{ORIGINS[v] for row in g for v in row} for g in grids]
    assert all({"plain", "drafted", "corrected"} <= result for result in names), names
    assert all(ORIGINS[g[0][0]] == "plain" for g in grids), "the prefill drafts nothing"
    plain = image_record["rows"][0]["images"][0]["origins"]
    assert {ORIGINS[v] for row in plain for v in row} == {"plain"}
    promises = {r["name"]: r["promises_tokens"] for r in image_record["rows"]}
    assert promises == {"plain": True, "window": True, "coins": False, "loose": False}


def test_the_page_of_real_caption_benches(tmp_path, caption_records):
    source = page_of(tmp_path, *caption_records)
    result = re.findall(r'<img src="data:image/(?:png|jpeg);base64,([^"]+)" alt="picture \d">', source)
    assert len(result) == 4, "two pictures in each of two benches"
    opened = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in result]
    assert [max(i.size) for i in opened] == [96] * 4
    assert [i.getpixel((9, 9))[0] > 128 for i in opened] == [True, False] * 2
    assert source.count('<span class="drafted">') > 0
    table = words(source.split("<tbody>")[1].split("</tbody>")[0])
    assert "✓ 2 of 2" in table and "0 of 2" in table and "✗" not in table
    assert caption_records[0]["promises_tokens"] and not caption_records[1]["promises_tokens"]


def test_pictures_keep_to_their_captions():
    """A prompt that failed is in no run: the pictures are those of the runs there are."""
    images = [Image.new("RGB", (4, 4), c) for c in ("red", "lime", "blue")]
    runs = [ArmRun(1.0, [[1], [2]], prompt=1), ArmRun(1.0, [[3]], prompt=2)]
    groups = [[Record("", image) for image in some] for some in (images[:1], images[1:], ["no picture"])]
    result = bench.thumbnails(runs, groups)
    colours = [None if t is None else Image.open(io.BytesIO(base64.b64decode(t))).getpixel((0, 0)) for t in result]
    assert colours == [(0, 255, 0), (0, 0, 255), None]


def test_promised_tokens():
    target = SimpleNamespace(capabilities=SimpleNamespace(guarantee="exact"))

    def promises(rule, greedy, order=None):
        return DecodingSetup(target, None, "", rule, AdaptiveLength(), order or Raster()).promises_tokens(greedy)

    assert promises(Exact(), False) and promises(Rejection(), True)
    assert not promises(Rejection(), False) and not promises(Exact(), True, RejectedRegions())
    assert not promises(Lantern(), False) and not promises(Lantern(), True)


def test_tau_bounds_ratio_over_plain(tmp_path, caption_records):
    """Plain decoding with tau 1 is 1.13 times as fast as the stock loop and no suspect; 1.13 over itself would be."""
    assert speed.suspicion(1.0, [1.0, 1.0], 1.0) == "" == speed.suspicion(None, None, 1.0)
    assert speed.suspicion(1.13, [0.98, 1.2], 1.0) == "", "noise of equal loops"
    message = speed.suspicion(1.13, [1.1, 1.2], 1.0)
    assert message == "over our plain loop 1.13 times faster, SUSPECT: more than tau 1.00"
    assert "SUSPECT" in speed.suspicion(4.0, [float("nan")] * 2, 3.5), "a single prompt has no interval"
    record = caption_records[0] | {"speedup": 1.13, "speedup_ci95": [1.1, 1.2], "tau": 1.0}
    ratios = ({"over_plain": 1.0, "over_plain_ci95": [0.9, 1.1]}, {"over_plain": 1.5, "over_plain_ci95": [1.4, 1.6]})
    assert ["SUSPECT" in page_of(tmp_path, record | ratio) for ratio in ratios] == [False, True]


def test_the_interval_of_a_mean_of_shares():
    """Of one share it is Wilson's; of two equal ones narrower by the root of two; where all are hits it ends at 1."""
    one, two = intervals.of_mean_share([(90, 100)]), intervals.of_mean_share([(90, 100)] * 2)
    assert one == pytest.approx(intervals.wilson(90, 100))
    assert (one[1] - one[0]) / (two[1] - two[0]) == pytest.approx(2**0.5)
    low, high = intervals.of_mean_share([(4, 4)] * 6)
    assert high == 1.0 and 0.75 < low < 1.0
