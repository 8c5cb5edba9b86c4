"""The report: what it shows of real and hand-made results, what it refuses, colours that can be read, its layout."""

import base64
import html
import html.parser
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import scipy.stats
from PIL import Image, ImageColor

from visspec.cli.main import main
from visspec.eval.metrics.intervals import wilson
from visspec.eval.report import rendering
from visspec.eval.report.page import build
from visspec.loop.stats import COLOURS

HOSTILE = "<img src=x onerror=alert(1)> \" ' & {{ 7*7 }} <script>alert(2)</script>"
VOID = {"meta", "img", "br"}


def caption(**changes):
    return {
        "bench": "caption", "guarantee": "exact", "target": "captioner", "drafter_name": "vispec", "drafter": "vispec",
        "acceptance": "exact", "n_prompts": 64, "speedup": 2.0, "speedup_ci95": [1.9, 2.1], "speedup_decode_only": 2.3,
        "identical": 64, "compared": 64, "tau": 3.5, "tau_without_bonus": 2.5, "nfe": 21.0, "nfe_plain": 72.0,
        "acceptance_by_depth": [0.9, 0.8, 0.25], "reached_by_depth": [800, 700, 12], "ideal_speedup": 2.6,
        "gap": {"tau": 3.5, "after_verify": 3.0, "after_draft": 2.8, "after_host": 2.6}, "drift_per_token": 0.0,
        "failures": [], "texts": [[["this picture", "plain"], [" shows", "drafted"], [" a star", "corrected"]]],
        "baselines": {"transformers_generate": {"seconds_per_prompt": 0.3, "ours_is_faster_by": 2.0, "identical": 64}},
        "provenance": {"git": "abc1234", "torch": "2.15", "device": "cpu", "threads": 2},
    } | changes  # fmt: skip


def png(pixels) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def noise(seed: int, side: int = 32):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def image_bench(n: int = 3, **changes):
    """An image bench: the relaxed method differs from the others in its top left quarter."""
    rows = []
    for k, name in enumerate(("plain", "lossless", "relaxed")):
        images = []
        for i in range(n):
            pixels = noise(i)
            pixels[:16, :16] ^= 255 * (k == 2)
            verdict = {"correct": i != 1, "reason": "" if i != 1 else "two cubes"}
            grid = None if k == 0 else [[0, 1, 1], [2, 0, 3]]
            images.append({"seed": i, "prompt": f"{i} red cubes", "png": png(pixels), "verdict": verdict,
                           "origins": grid})  # fmt: skip
        speed = 1.0 + 0.5 * k
        rows.append({"name": name, "guarantee": "approximate" if k == 2 else "exact", "speedup": speed, "tau": 4.0,
                     "speedup_ci95": [speed - 0.1, speed + 0.1], "compared": n, "geneval": 0.9 - 0.1 * k,
                     "right": 2 / 3, "quality_n": n, "fd": 10.0 + k, "images": images})  # fmt: skip
    return {"bench": "image", "target": "tiny", "provenance": {"device": "cpu"}, "rows": rows} | changes


def kernels(**row):
    common = {"kernel": "warp", "shape": "59x16384", "dtype": "bfloat16", "device": "cuda", "time_us": 37.0}
    rows = [common | {"ratio_to_eager": 3.4} | row, common | {"kernel": "groups", "ratio_to_eager": 0.5}]
    return {"bench": "kernels", "rows": rows, "provenance": {"device": "a gpu"}}


def sizes():
    row = {"size": "llamagen-xl", "batch_size": 8, "arm": "oracle 0.8", "tau": 3.5, "speedup": 2.25, "identical": 4}
    return {"bench": "sizes", "rows": [row | {"length_share": 0.97}, row | {"arm": "plain", "tau": None}]}


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
    def __init__(self, source: str):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(source)
        assert not self.open, f"left open: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"closes {tag} out of turn"

    def handle_data(self, data):
        self.words.append(data)


def outside(reader: Reader) -> list:
    """What would make a browser ask the network."""
    loading = ("src", "href", "srcset", "data", "action", "poster", "xlink:href")
    asked = [a for a in reader.attributes if a[1] in loading and not a[2].startswith("data:image/")]
    styled = [a for a in reader.attributes if "url(" in a[2]]
    return asked + styled + [t for t in reader.tags if t in {"script", "link", "iframe", "object", "embed", "base"}]


def test_network_access_is_detected():
    """Control of `outside`."""
    assert len(outside(Reader('<a href="//x"></a><img src="x.png"><p style="background:url(x)"></p>'))) == 3
    assert outside(Reader("<script></script>")) == ["script"]


def test_page_is_complete_and_offline(page):
    relaxed = caption(acceptance="typical:epsilon=0.3", guarantee="approximate", drift_per_token=0.01)
    source = page(caption(), relaxed, image_bench(), sizes(), kernels())
    reader = Reader(source)
    assert outside(reader) == [] and "http" not in source.replace("http-equiv", "")
    assert "default-src 'none'" in source
    for title in ("Speed-up by method", "Speed against quality", "Where each word came from", "side by side",
                  "From tau to the clock", "Acceptance by depth",
                  "Against each baseline", "Failures", "Where the numbers come from"):  # fmt: skip
        assert title in reader.text, title
    assert "2.00 [1.90, 2.10]" in reader.text and "✓ 64 of 64" in reader.text and "abc1234" in reader.text
    assert "share of right pictures 0.667" in reader.text and "drift per token (lower is better)" in reader.text
    for title in ("Acceptance by depth", "abc1234"):
        before = source.split(title)[0]
        assert before.count("<details>") > before.count("</details>"), f"{title} is not folded"


def test_several_drafters_sizes_and_kernels(page):
    rows = [caption(drafter_name=name, speedup=k) for k, name in enumerate(("ngram", "suffix"), start=1)]
    record = rows[0] | {"rows": rows, "failures": ["prompt 7: out of paint"]}
    text = Reader(page(record, sizes(), kernels())).text
    assert "1: ngram · exact" in text and "2: suffix · exact" in text and text.count("out of paint") == 1
    assert "llamagen-xl 8 oracle 0.8 3.50 2.25 – 0.97 4" in text
    assert "warp 59x16384 bfloat16 cuda 37.00 3.40" in text
    assert text.count("groups: 0.50, n=20") == 1 and "times eager torch, log scale" in text


def test_hostile_text_stays_text(page):
    bad = caption(
        drafter_name=HOSTILE, target=HOSTILE, failures=[HOSTILE], guarantee=HOSTILE, provenance={HOSTILE: HOSTILE},
        texts=[[[HOSTILE, "drafted"], [HOSTILE, HOSTILE]]], baselines={HOSTILE: {"ours_is_faster_by": 2.0}},
    )  # fmt: skip
    rows = image_bench(target=HOSTILE)
    rows["rows"][0] |= {"name": HOSTILE}
    rows["rows"][0]["images"][0] |= {"prompt": HOSTILE, "seed": HOSTILE, "verdict": {"reason": HOSTILE}}
    source = page(bad, rows, kernels(kernel=HOSTILE, shape=HOSTILE))
    reader = Reader(source)
    assert outside(reader) == [] and "<script" not in source and "onerror=alert(1)>" not in source
    assert not [a for a in reader.attributes if a[1].startswith("on")]
    assert "49" not in reader.text.replace(HOSTILE, "").split()
    assert reader.text.count("<script>alert(2)</script>") >= 12


@pytest.mark.parametrize("content, words", [
    ("{", "not JSON"), ("[" * 100_000, "not JSON"),
    ("[]", "bench: got 'list', expected caption, image, text, sizes, kernels"),
    ({"bench": "lunch"}, "bench: got 'lunch', expected caption"),
    ({"bench": "caption"}, "no 'speedup', expected the JSON of visspec bench caption"),
    ({"bench": "kernels"}, "no 'rows'"), ({"bench": "image", "rows": []}, "no 'rows'"),
    ({"bench": "image", "rows": [3]}, "expected a list of objects"),
])  # fmt: skip
def test_bad_results_exit_code(content, words, write, tmp_path, capsys):
    path, out = write(content), tmp_path / "out.html"
    assert main(["report", str(path), "-o", str(out)]) == 2
    line = capsys.readouterr().err.strip()
    assert words in line and "result.json" in line and "\n" not in line
    assert not out.exists()


def test_command_line_and_missing_files(write, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(write(caption())), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>") and list(out.parent.iterdir()) == [out]
    assert main(["report", str(tmp_path / "no.json")]) == 2
    assert "no.json" in capsys.readouterr().err


def test_unreadable_pictures_listed(page):
    record = image_bench()
    first, second, _ = record["rows"][0]["images"]
    first["png"], second["png"] = "no base64!", base64.b64encode(b"broken").decode()
    text = Reader(page(record)).text.partition("Failures")[2]
    assert "seed 0: png is not base64" in text and "seed 1: png is not a readable" in text and "seed 2" not in text


def test_same_seeds_stand_side_by_side(page, monkeypatch):
    monkeypatch.setattr("visspec.eval.report.page.MOST_PICTURES", 6)
    source = page(image_bench(n=5))
    assert source.count('alt="method ') == 6 and "3 more prompts are left out here" in source
    case = source.split('<div class="case">')[2]
    text = " ".join(re.sub(r"<[^>]*>", " ", case).split())
    assert text.startswith("1 red cubes seed 1") and text.count("✗ wrong") == 3 and "two cubes" in text
    assert "2: lossless; identical pixels" in text and "3: relaxed; 25.0 % of pixels differ" in text
    maps = re.findall(r'base64,([^"]*)" alt="origin of each token"', case)
    (drawn, again) = (np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in maps)
    assert drawn.shape == (2, 3, 3) and (drawn == again).all()
    colours = [ImageColor.getrgb(colour) for colour in COLOURS.values()]
    assert [tuple(pixel) for pixel in drawn.reshape(-1, 3).tolist()] == [colours[k] for k in (0, 1, 1, 2, 0, 3)]


def test_words_and_gaps(page):
    quick = caption(speedup=4.0, over_plain=4.0, over_plain_ci95=[3.8, 4.2])  # tau is 3.5
    stock = caption(speedup=4.0, over_plain=2.0, over_plain_ci95=[1.9, 2.1])  # a slow baseline is no suspect
    text = Reader(page(caption(speedup=0.8, speedup_ci95=[0.7, 0.9]), quick, stock, caption())).text
    assert "a slowdown: 1.25 times the time" in text and "SUSPECT: more than tau 3.50" in text
    assert text.count("times the time") == text.count("SUSPECT") == 1
    nothing = caption(speedup=float("nan"), speedup_ci95=None, tau=float("nan"), gap={}, compared=0, identical=0,
                      acceptance_by_depth=[], drift_per_token=None, baselines={})  # fmt: skip
    text = Reader(page(nothing)).text
    assert "not measured" in text and "not compared" in text and "nan" not in text.lower().split()


def test_equality_is_judged_where_it_is_owed(page):
    def text(**changes):
        return Reader(page(caption(identical=63, **changes))).text

    assert "✗ 63 of 64" in text()
    half = text(provenance={"dtype": "bfloat16"})
    assert "63 of 64 in bfloat16" in half and "✗" not in half
    for other in ({"guarantee": "approximate"}, {"promises_tokens": False}):
        assert "63 of 64" in text(**other) and "✗" not in text(**other)


def test_grey_rows_and_coloured_text(page):
    for n in (19, 20):
        source = page(caption(compared=n, identical=n, n_prompts=n))
        assert ('<tr class="few">' in source) == (n < 20) and f"n={n}" in source
    source = page(caption(texts=[[["one", "drafted"], ["two", "unheard of"]]], target="/home/me/models/captioner"))
    assert '<span class="drafted">one</span><span class="plain">two</span>' in source
    assert "caption: captioner" in Reader(source).text and "/home" not in source.split("<details>")[0]


@pytest.mark.parametrize("hits, n", [(0, 5), (3, 8), (64, 64)])
def test_wilson(hits, n):
    expected = scipy.stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-4)


# --- colours and layout -----------------------------------------------------------------------------------------------


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def palettes() -> list[dict[str, str]]:
    source = rendering.environment().get_template("palette.css.j2").render()
    return [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in re.findall(r":root {(.*?)}", source)]


def test_contrast_in_both_palettes():
    light, dark = palettes()
    assert light.keys() == dark.keys() >= {"page", "ink", "faint", "grey", "blue", "green", "orange", *COLOURS}
    for palette in (light, dark):
        text = [colour for name, colour in palette.items() if name not in ("page", "rule")]
        assert min(contrast(colour, palette["page"]) for colour in text) >= 4.5


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1600,1400", "--dump-dom"]
PROBE = """<script>
addEventListener('load', () => parent.document.body.setAttribute('data-measured', JSON.stringify(
  [document.documentElement.scrollWidth, [...document.images].filter(i => !i.naturalWidth).length])));
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_browser_layout(page, tmp_path, width):
    """Every picture decodes, and the page is no wider than its frame: wide tables scroll in boxes of their own."""
    long = caption(drafter_name="a_very_long_drafter_name_without_any_space_in_it:width=10,levels=5")
    source = page(long, caption(failures=["x" * 300]), image_bench(), sizes(), kernels(shape="y" * 90))
    for body, wide in (
        (source, 0),
        (source.replace("<h2>Failures", '<div style="width:2000px">x</div><h2>Failures'), 1),
    ):
        inner = re.sub("<meta http-equiv[^>]*>", "", body).replace("</body>", PROBE)
        # a frame, because a headless window is never narrower than 500 pixels
        frame = f'<iframe style="border:0" width="{width}" height="1200" srcdoc="{html.escape(inner)}"></iframe>'
        outer = tmp_path / "outer.html"
        outer.write_text(f'<!doctype html><html><meta charset="utf-8"><body>{frame}</body></html>')
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", outer.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        scroll, broken = json.loads(html.unescape(re.search(r'data-measured="([^"]*)"', dom)[1]))
        assert broken == 0 and (scroll > width) == bool(wide), scroll
