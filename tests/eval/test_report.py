"""The report: what it shows by hand-made results, what it refuses, its size and time, and how a browser lays it out."""

import base64
import html
import html.parser
import io
import json
import math
import random
import re
import shutil
import subprocess
import time

import numpy as np
import pytest
from PIL import Image

from visspec.cli.main import main
from visspec.eval.report.page import build
from visspec.loop.stats import COLOURS

HOSTILE = "<img src=x onerror=alert(1)> \" ' & {{ 7*7 }} <script>alert(2)</script>"
VOID = {"meta", "img", "br", "hr", "link", "input"}


def caption(**changes):
    """The JSON of a caption bench with 64 prompts."""
    rng = random.Random(0)
    return {
        "bench": "caption", "guarantee": "exact", "target": "captioner", "drafter_name": "vispec", "drafter": "vispec",
        "acceptance": "exact", "n_prompts": 64, "batch_size": 1, "max_new_tokens": 96, "temperature": 0.0, "seed": 0,
        "speedup": 2.0, "speedup_ci95": [1.9, 2.1], "speedup_decode_only": 2.3, "speedup_total_time": 2.0,
        "ratios": [2.0 * math.exp(rng.gauss(0, 0.1)) for _ in range(64)], "identical": 64, "compared": 64,
        "identical_to": "transformers_generate", "tau": 3.5, "tau_without_bonus": 2.5, "nfe": 21.0, "nfe_plain": 72.0,
        "acceptance_by_depth": [0.9, 0.8, 0.25], "reached_by_depth": [800, 700, 12], "ideal_speedup": 2.6,
        "gap": {"tau": 3.5, "after_verify": 3.0, "after_draft": 2.8, "after_host": 2.6}, "drift_per_token": 0.0,
        "time_s": {"prefill": 1.0}, "failures": [],
        "baselines": {"transformers_generate": {"seconds_per_prompt": 0.3, "ours_is_faster_by": 2.0,
                                                "ci95": [1.9, 2.1], "identical": 64}},
        "texts": [[["this picture", "plain"], [" shows", "drafted"], [" a", "bonus"], [" star", "corrected"]]],
        "provenance": {"git": "abc1234", "torch": "2.15", "device": "cpu", "threads": 2},
    } | changes  # fmt: skip


def png(pixels) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def noise(seed: int, side: int = 32):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def image_bench(n: int = 3, side: int = 32, methods=("plain", "lossless", "relaxed"), **changes):
    """An image bench: the relaxed method differs from the others in its top left quarter."""
    rows = []
    for k, method in enumerate(methods):
        images = []
        for i in range(n):
            pixels = noise(i, side)
            if k == 2:
                pixels[: side // 2, : side // 2] ^= 255
            grid = None if k == 0 else [[0.25 * k, 0.5, None], [1.0, 0.0, 0.5]]
            images.append({"seed": i, "prompt": f"{i} red cubes", "png": png(pixels), "verdict": i != 1,
                           "acceptance": grid})  # fmt: skip
        speed = 1.0 + 0.5 * k
        rows.append({"method": method, "speedup": speed, "speedup_ci95": [speed - 0.1, speed + 0.1], "tau": 4.0,
                     "compared": n, "geneval": 0.9 - 0.1 * k, "fd": 10.0 + k, "images": images})  # fmt: skip
    return {"bench": "image", "target": "tiny", "provenance": {"device": "cpu"}, "rows": rows} | changes


@pytest.fixture
def write(tmp_path):
    def write(value, name="result.json"):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


@pytest.fixture
def page(write, tmp_path):
    def page(*values):
        paths = [write(value, f"r{i}.json") for i, value in enumerate(values)]
        return build(paths, tmp_path / "report.html").read_text()

    return page


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes and text; complains about tags that do not close."""

    def __init__(self, source: str):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(source)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        while self.open and self.open[-1] != tag and self.open[-1] in {"p", "li"}:
            self.open.pop()
        assert self.open and self.open.pop() == tag, f"closes {tag} out of turn"

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def outside(reader: Reader) -> list:
    """What would make a browser ask the network."""
    loading = ("src", "href", "srcset", "data", "action", "poster", "xlink:href")
    asked = [a for a in reader.attributes if a[1] in loading and not a[2].startswith("data:image/")]
    styled = [a for a in reader.attributes if "url(" in a[2]]
    return asked + styled + [t for t in reader.tags if t in {"script", "link", "iframe", "object", "embed", "base"}]


def test_everything_is_there_and_nothing_leaves(page):
    source = page(caption(), caption(acceptance="typical:epsilon=0.3", guarantee="approximate"), image_bench())
    reader = Reader(source)
    assert outside(reader) == []
    assert "http" not in source.replace("http-equiv", "")
    assert "default-src 'none'" in source and "overflow-x" not in source
    for title in ("Every prompt, paired", "From tau to the clock", "Speed against quality", "Acceptance by depth",
                  "Acceptance over the token grid", "Against each baseline", "Where each word came from",
                  "side by side", "Failures", "Where the numbers come from"):  # fmt: skip
        assert title in reader.text, title
    assert "2.00 [1.90, 2.10] n=64" in reader.text
    assert "✓ 64 of 64" in reader.text and "abc1234" in reader.text and "share of right pictures 0.667" in reader.text


def test_a_reader_of_the_network_would_be_seen():
    """Control of `outside`."""
    assert len(outside(Reader('<a href="//x"></a><img src="x.png"><p style="background:url(x)"></p>'))) == 3
    assert outside(Reader("<script></script>")) == ["script"]


def test_hostile_text_stays_text(page):
    bad = caption(
        drafter_name=HOSTILE, target=HOSTILE, failures=[HOSTILE], guarantee=HOSTILE, identical_to=HOSTILE,
        provenance={HOSTILE: HOSTILE}, texts=[[[HOSTILE, "drafted"], [HOSTILE, HOSTILE]]],
        baselines={HOSTILE: {"ours_is_faster_by": 2.0}},
    )  # fmt: skip
    rows = image_bench(target=HOSTILE)
    rows["rows"][0] |= {"method": HOSTILE}
    rows["rows"][0]["images"][0] |= {
        "prompt": HOSTILE,
        "seed": HOSTILE,
        "verdict": {"correct": False, "reason": HOSTILE},
    }
    source = page(bad, rows)
    reader = Reader(source)
    assert outside(reader) == [] and "<script" not in source and "onerror=alert(1)>" not in source
    assert not [a for a in reader.attributes if a[1].startswith("on")]
    assert "49" not in reader.text.replace(HOSTILE, "").split()
    assert reader.text.count("<script>alert(2)</script>") >= 12


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "bench: got 'list'"),
        ({"bench": 3}, "bench: got 3, expected the name of a bench"),
        ({"bench": "kernels"}, "rows: got NoneType, expected a list of kernels"),
        ({"bench": "kernels", "rows": [{}]}, "rows[0]: kernel: got NoneType, expected a name"),
        ({"bench": "caption"}, "no 'speedup'"),
        (caption(speedup="fast"), "speedup: got str, expected a number"),
        (caption(ratios={"a": 1}), "ratios: got dict"),
        (caption(ratios=["2"]), "ratios: got str"),
        (caption(gap={"tau": None}), "gap.tau: got NoneType"),
        (caption(baselines={"plain": 3}), "baselines.plain: got int"),
        (caption(texts=[[["a"]]]), "expected [piece, origin]"),
        ({"bench": "image", "rows": []}, "expected a list of methods"),
        ({"bench": "image", "rows": [3]}, "rows[0]: got int"),
        ({"bench": "image", "rows": [{"images": [{"seed": 0}]}]}, "rows[0].images[0]: got neither"),
        ({"bench": "image", "rows": [{"images": [{"png": "", "path": 3}]}]}, "expected either path or png"),
        ({"bench": "image", "rows": [{"images": [{"path": "a.png", "acceptance": [[1], [1, 2]]}]}]}, "rectangular"),
        ({"bench": "image", "rows": [{"images": [{"path": "a.png", "acceptance": [["1"]]}]}]}, "acceptance: got '1'"),
        ({"bench": "image", "rows": [{"images": [{"path": "../a.png"}]}]}, "inside the folder"),
        ({"bench": "image", "rows": [{"images": ["../a.png"]}]}, "inside the folder"),
        (
            {"bench": "image", "rows": [{"images": ["a.png"], "verdicts": [True, True]}]},
            "verdicts: got 2, expected one",
        ),
        ({"bench": "image", "rows": [{"acceptance_map": [[1], [-1]]}]}, "acceptance_map: got -1"),
        ({"bench": "image", "rows": [{"images": [{"path": "/etc/passwd"}]}]}, "inside the folder"),
    ],
)
def test_bad_results_are_one_sentence_and_exit_code_2(content, words, write, tmp_path, capsys):
    path, out = write(content), tmp_path / "out.html"
    assert main(["report", str(path), "-o", str(out)]) == 2
    line = capsys.readouterr().err.strip()
    assert words in line and "result.json" in line and "\n" not in line
    assert not out.exists()


def test_missing_file_folder_and_links(write, tmp_path, capsys):
    assert main(["report", str(tmp_path / "no.json")]) == 2
    assert "no.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is a folder"):
        build([write(caption())], tmp_path)
    with pytest.raises(ValueError, match="at least one"):
        build([], tmp_path / "report.html")
    (tmp_path / "deep").mkdir()
    Image.fromarray(noise(0)).save(tmp_path / "secret.png")
    (tmp_path / "deep" / "link.png").symlink_to(tmp_path / "secret.png")
    record = {"bench": "image", "rows": [{"images": [{"path": "link.png"}]}]}
    with pytest.raises(ValueError, match="inside the folder"):
        build([write(record, "deep/r.json")], tmp_path / "report.html")


def test_command_line_writes_the_page(write, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(write(caption())), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>") and list(out.parent.iterdir()) == [out]


def test_unreadable_pictures_are_listed_and_the_rest_is_shown(page, tmp_path):
    record = image_bench()
    Image.fromarray(noise(0)).save(tmp_path / "good.png")
    Image.fromarray(noise(0)).save(tmp_path / "picture.gif")
    (tmp_path / "broken.png").write_bytes((tmp_path / "good.png").read_bytes()[:80])
    for image, source in zip(record["rows"][0]["images"], ("good.png", "broken.png", "picture.gif")):
        del image["png"]
        image["path"] = source
    record["rows"][1]["images"][0]["png"] = "no base64!"
    record["rows"][1]["images"][1]["png"] = base64.b64encode(b"GIF89a").decode()
    record["rows"][2]["images"].pop()
    text = Reader(page(record)).text.partition("Failures")[2]
    for words in ("broken.png", "picture.gif", "png is not base64", "lossless: seed 1: png is not a readable",
                  "relaxed: no image of seed 2: 2 red cubes"):  # fmt: skip
        assert words in text, words
    assert "good.png" not in text


def test_open_failures_of_the_bench_are_listed_once(page):
    text = Reader(page(caption(failures=["prompt 7: RuntimeError: out of paint"]))).text
    assert text.count("out of paint") == 1
    assert "None: every prompt" in Reader(page(caption())).text


def test_same_seeds_stand_side_by_side(page):
    source = page(image_bench())
    case = source.split('<div class="case">')[2]
    text = " ".join(re.sub(r"<[^>]*>", " ", case).split())
    assert text.startswith("1 red cubes seed 1") and text.count("✗ wrong") == 3
    assert "2: lossless; identical pixels" in text and "3: relaxed; 25.0 % of pixels differ" in text
    assert case.count('alt="acceptance by token"') == 2


def test_heat_map_means_over_images(page):
    """Cell (0, 0) is 0.25 in every image of method 2; cell (0, 2) was never drafted."""
    source = page(image_bench(n=20))
    assert source.count("row 0, column 0: 0.25, n=20") == 1 and source.count("row 0, column 0: 0.50, n=20") == 1
    assert source.count("row 0, column 2: never drafted, n=0") == 2
    assert "2 x 3 tokens, n=0 to 20 a cell" in source


@pytest.mark.parametrize("n, grey", [(19, True), (20, False)])
def test_few_prompts_are_grey(page, n, grey):
    source = page(caption(compared=n, identical=n, ratios=[2.0] * n, n_prompts=n))
    assert ('<tr class="few">' in source) == grey
    assert f"n={n}" in source


def test_words_and_gaps(page):
    quick = caption(speedup=4.0, over_plain=4.0, over_plain_ci95=[3.8, 4.2])  # tau is 3.5
    stock = caption(speedup=4.0, over_plain=2.0, over_plain_ci95=[1.9, 2.1])  # a slow baseline is no suspect
    text = Reader(page(caption(speedup=0.8, speedup_ci95=[0.7, 0.9]), quick, stock, caption(speedup=2.0))).text
    assert "a slowdown: 1.25 times the time" in text and "SUSPECT: more than tau 3.50" in text
    assert text.count("times the time") == text.count("SUSPECT") == 1
    nothing = caption(speedup=None, speedup_ci95=[float("nan")] * 2, ratios=[], tau=float("nan"), gap={}, compared=0,
                      identical=0, acceptance_by_depth=[], drift_per_token=1e300, baselines={}, texts=[])  # fmt: skip
    text = Reader(page(nothing)).text
    assert "not measured" in text and "not compared" in text and "nan" not in text.lower().split()


def test_equality_is_judged_where_it_is_owed(page):
    assert "✗ 63 of 64" in Reader(page(caption(identical=63))).text
    text = Reader(page(caption(identical=63, guarantee="approximate"))).text
    assert "63 of 64" in text and "✗" not in text


def test_text_is_coloured_by_origin(page):
    source = page(caption(texts=[[["one", "drafted"], ["two", "corrected"], ["three", "unheard of"]]]))
    assert (
        '<span class="drafted">one</span><span class="corrected">two</span><span class="plain">three</span>' in source
    )
    for name, colour in COLOURS.items():
        assert f".{name} {{ color: {colour} }}" in source


def test_different_environments_are_kept_apart(page):
    text = Reader(page(caption(), caption(), caption(provenance={"device": "another"}))).text
    assert "Methods 1, 2" in text and "Methods 3" in text


def test_exact_rules_alone_trade_nothing(page):
    assert "drift per token (lower" not in page(caption())
    assert "drift per token (lower" in page(caption(), caption(drift_per_token=0.01))
    text = Reader(page(caption(drift_per_token=None, guarantee="approximate", unmetered="a reason"))).text
    assert "not measured: a reason" in text


def test_names_of_targets_without_their_folder(page):
    assert "caption: captioner" in Reader(page(caption(target="/home/me/models/captioner"))).text
    assert "/home" not in page(caption(target="/home/me/models/captioner"))
    assert "caption: org/model" in Reader(page(caption(target="org/model"))).text


@pytest.mark.parametrize("n", [25, pytest.param(250, marks=pytest.mark.nightly)])
def test_five_hundred_images(n, write, tmp_path):
    """At most 15 MB and 20 seconds of processor time, with pictures that do not compress; of fewer a share of that."""
    record = image_bench(n=n, side=128, methods=("plain", "lossless"))
    for i, image in enumerate(record["rows"][1]["images"]):
        image["png"] = png(noise(1000 + i, 128))
    path, start = write(record), time.process_time()
    out = build([path], tmp_path / "report.html")
    spent, size = time.process_time() - start, out.stat().st_size
    print(f"{size / 1e6:.1f} MB, {spent:.1f} s")
    source = out.read_text()
    assert source.count('alt="method ') == 2 * n and source.count('alt="difference') == n
    assert size <= 6e4 * n and spent <= 0.08 * n


def test_more_pictures_than_fit_are_said_to_be_left_out(page, monkeypatch):
    monkeypatch.setattr("visspec.eval.report.page.MOST_PICTURES", 6)
    source = page(image_bench(n=5))
    assert source.count('alt="method ') == 6 and "3 more prompts are left out here" in source


# --- other benches --------------------------------------------------------------------------------------------------


def kernel_bench(**changes):
    """The JSON of a kernel bench: a gain, a slowdown, one of few repeats, and what no GPU was there for."""
    row = {"kernel": "commit_kv", "shape": "8 x 4x8", "dtype": "float32", "device": "cpu", "time_us": 120.0,
           "bytes": 1000, "share_of_copy_bandwidth": 0.42, "ratio_to_eager": 2.5, "ratio_ci95": [2.0, 3.0],
           "eager": "index per row", "repeats": 40}  # fmt: skip
    blank = dict.fromkeys(("time_us", "share_of_copy_bandwidth", "ratio_to_eager", "ratio_ci95"), "not measured")
    rows = [row, row | {"kernel": "draft_topk", "ratio_to_eager": 0.5, "ratio_ci95": [0.4, 0.6]},
            row | {"kernel": "guided_warp", "repeats": 8}, row | blank | {"device": "cuda", "repeats": 0}]  # fmt: skip
    return {"bench": "kernels", "host_syncs_per_round": 0, "dispatched_ops_per_verification": 60,
            "copy_bandwidth_gb_s": 11.5, "rows": rows, "provenance": {"device": "a cpu"}} | changes  # fmt: skip


def test_kernels_have_a_table_and_bars(page):
    source = page(kernel_bench())
    text = Reader(source).text
    assert "copy bandwidth, GB/s: 11.5" in text and "for the ratios only" in text and "a cpu" in text
    assert "2.50 [2.00, 3.00] n=40 against index per row" in text and "42.0 % n=40" in text
    assert text.count("a slowdown") == 2 and text.count("not measured") == 3 and "tau" not in text.split("kernels")[1]
    fills = re.findall(r'fill="(#\w+)"><title>(\w+), against', source)
    assert fills == [("#0b5cad", "commit_kv"), ("#b34700", "draft_topk"), ("#9a9a9a", "guided_warp")]
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="10.0" fill', source)]
    assert widths[1] / widths[0] == pytest.approx(math.log(2) / math.log(2.5), rel=0.02)
    assert outside(Reader(source)) == []


def test_a_gpu_row_of_a_kernel_shows_both_times_and_what_they_are_shares_of(page):
    gpu = {"device": "cuda", "time_us": 12.34, "time_us_quartiles": [12.0, 13.0], "host_us": 61.0}
    gpu |= {"timed": "a CUDA graph", "share_of_reading_14_gb": 0.0037}
    record = kernel_bench(ms_to_read_14_gb_at_copy_bandwidth=3.3)
    record["rows"] = [record["rows"][0] | gpu, record["rows"][3] | {"failure": "RuntimeError: <no> shared memory"}]
    text = Reader(page(record)).text
    assert "12.3 µs [12.0, 13.0] n=40 , host 61.0 µs (a CUDA graph)" in text
    assert "0.37 % of the time to read 14 GB at the measured copy bandwidth" in text
    assert "time to read 14 GB at the measured copy bandwidth, ms: 3.3" in text and "for the ratios" not in text
    assert "failed: RuntimeError: <no> shared memory" in text


def test_kernels_and_methods_share_a_page(page):
    hostile = kernel_bench()
    hostile["rows"][0] |= {"kernel": HOSTILE, "shape": HOSTILE, "eager": HOSTILE, "ratio_to_eager": float("nan")}
    text = Reader(page(caption(), hostile)).text
    assert "Every prompt, paired" in text and text.count("<script>alert(2)</script>") == 2


def test_unknown_benches_are_listed(page):
    record = {"bench": "lunch", "peak_mb": 866.123456789, "arms": {"plain": 1}, HOSTILE: HOSTILE, "none": None}
    record["provenance"] = {"device": "a cpu"}
    text = Reader(page(caption(), record)).text
    assert "lunch r1.json" in text and "no figures for this bench" in text
    assert "peak_mb 866.123" in text and "arms 1 entries" in text and "device a cpu" in text
    assert "80 more are left out" in Reader(page({"bench": "x"} | {f"f{i}": i for i in range(140)})).text


def plain_image_bench(tmp_path, n: int = 3):
    """What an image bench writes: one map a method, bare paths, pictures on disk; the second method errs once."""
    common = {"guarantee": "exact", "drafter": "jacobi", "nfe_plain": 65.0, "ms_per_nfe": 12.5, "n_prompts": n}
    rows = []
    for k, name in enumerate(("plain", "relaxed")):
        paths = [f"{name}/{i:03d}.png" for i in range(n)]
        (tmp_path / name).mkdir(exist_ok=True)
        for i, path in enumerate(paths):
            pixels = noise(i, 16)
            pixels[:8] ^= 255 * (k * (i == 2))
            Image.fromarray(pixels).save(tmp_path / path)
        rows.append(common | {
            "name": name, "acceptance": "exact", "speedup": 1.0 + k, "speedup_ci95": [0.9 + k, 1.1 + k],
            "nfe": 65.0 / (1 + k), "geneval": 0.9, "strict": 0.8, "fd": 1.5, "drift_per_token": 0.01 * k,
            "latent_displacement": 0.2 * k, "acceptance_by_depth": [0.9, 0.5], "images": paths,
            "verdicts": [True, {"correct": k == 0, "reason": "no cube"}, None],
            "acceptance_map": [[0.25, None], [1.5, 0.75]] if k else None,
        })  # fmt: skip
    return {"bench": "image", "target": "painter", "rows": rows}


def test_image_bench_with_bare_paths_and_one_map_a_method(page, tmp_path):
    source = page(plain_image_bench(tmp_path))
    text = Reader(source).text
    assert "2: relaxed" in text and "12.5 ms a pass" in text and "no image of seed" not in text
    assert text.count("Speed against quality") == 6, "GenEval, strict, right, distance, displacement, drift"
    assert "2: relaxed, 2 x 2 tokens, n=3 a cell" in text
    assert "row 1, column 0: 1.50, n=3" in source and "row 0, column 1: never drafted, n=0" in source
    cases = source.split('<div class="case">')[1:]
    words = [" ".join(re.sub(r"<[^>]*>", " ", case).split()) for case in cases]
    assert len(cases) == 3 and words[0].startswith("picture 1 seed 0")
    assert "identical pixels" in words[0] and "✗ wrong 2: relaxed" in words[1] and "no cube" in words[1]
    assert "50.0 % of pixels differ" in words[2] and "✓" not in words[2]


def equality(benign: bool, **gap):
    """What the caption bench says of bfloat16."""
    gap = {"max": 0.125, "mean": 0.006, "margin_shift": 0.2} | gap
    return {"tier": "teacher-forced", "dtype": "bfloat16", "identical": 63, "compared": 64, "benign": benign,
            "gap": gap, "first_divergences": [{"margin": 0.0625, "benign": benign}]}  # fmt: skip


def test_differences_of_low_precision_are_judged_by_their_margin(page):
    text = Reader(page(caption(identical=63, equality=equality(True)))).text
    assert "63 of 64 as plain, the others near ties" in text and "widest margin 0.062" in text and "✗" not in text
    text = Reader(page(caption(identical=63, equality=equality(False)))).text
    assert "others NOT near ties" in text and "✗ 63 of 64" in text
    strange = {"gap": {"max": "x"}, "first_divergences": 3}
    assert "near ties" not in Reader(page(caption(equality=strange), caption(equality={"gap": {"max": 1}}))).text


# --- a real browser ---------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
]  # fmt: skip
PROBE = """<script>
addEventListener('load', () => {
  const wide = [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1);
  parent.document.body.setAttribute('data-measured', JSON.stringify(
    [innerWidth, document.documentElement.scrollWidth, wide.slice(0, 3).map(e => e.outerHTML.slice(0, 120)),
     [...document.images].filter(i => !i.complete || !i.naturalWidth).length, document.images.length]));
});
</script></body>"""
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")


def browse(tmp_path, *flags: str) -> str:
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def measured(source: str, tmp_path, width: int) -> list:
    """[inner width, scroll width, elements that stick out, broken images, images] as the browser lays it out."""
    inner = re.sub(r"<meta http-equiv[^>]*>", "", source).replace("</body>", PROBE)
    # a frame, because a headless window is never narrower than 500 pixels
    frame = f'<iframe style="border:0" width="{width}" height="1200" srcdoc="{html.escape(inner)}"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(f'<!doctype html><html><meta charset="utf-8"><body>{frame}</body></html>')
    dom = browse(tmp_path, "--window-size=1600,1400", "--dump-dom", outer.as_uri())
    return json.loads(html.unescape(re.search(r'data-measured="([^"]*)"', dom)[1]))


@needs_browser
@pytest.mark.slow
def test_browser_layout(page, tmp_path):
    """Nothing sticks out at 360 and 1200 pixels; every picture decodes; the screenshots are not blank."""
    long_name = "a_very_long_drafter_name_without_any_space_in_it:width=10,levels=5"
    others = [caption(acceptance=f"typical:epsilon={e}") for e in range(9)]  # many files: a long list of sources
    source = page(caption(drafter_name=long_name), caption(failures=["x" * 300]), *others, image_bench(),
                  kernel_bench(), {"bench": "memory", "peak": 3.5, "x" * 90: "y" * 300})  # fmt: skip
    for width, height in ((360, 1200), (1200, 1600)):
        inner, scroll, wide, broken, images = measured(source, tmp_path, width)
        assert inner == width and scroll <= width and wide == [], wide
        assert broken == 0 and images == 9 + 6 + 6
        shot = tmp_path / f"{width}.png"
        browse(tmp_path, f"--window-size={width},{height}", f"--screenshot={shot}", (tmp_path / "report.html").as_uri())
        picture = np.asarray(Image.open(shot).convert("L"))
        assert picture.shape == (height, width)
        inked = [(band < 160).mean() for band in np.array_split(picture, 4)]
        assert min(inked) > 0.005, "a quarter of the first screen is blank"


@needs_browser
@pytest.mark.slow
def test_browser_probe_sees_overflow_and_broken_images(tmp_path):
    """Control of the layout test."""
    wide, broken = '<div style="width:500px">x</div>', '<img src="data:image/png;base64,AAAA">'
    source = f"<!doctype html><html><body>{wide}{broken}</body></html>"
    inner, scroll, wide, broken, images = measured(source, tmp_path, 360)
    assert inner == 360 and scroll > 360 and len(wide) == 1 and (broken, images) == (1, 1)
