"""Figures and picture maps of the report, by hand: what is drawn where, in which colour."""

import base64
import io
import re

import numpy as np
import pytest
import scipy.stats
from PIL import Image

from tests.eval.test_report import noise
from visspec.eval.metrics.intervals import wilson
from visspec.eval.report import figures, overview
from visspec.eval.report import images as pictures
from visspec.loop.stats import COLOURS


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("L"))


def test_difference_maps():
    one, other = noise(0), noise(0)
    uri, share = pictures.difference(Image.fromarray(one), Image.fromarray(other))
    assert share == 0 and decoded(uri).max() == 0
    wide, lone = np.zeros((1000, 500, 3), np.uint8), np.zeros((1000, 500, 3), np.uint8)
    lone[700, 300, 1] = 1
    uri, share = pictures.difference(Image.fromarray(lone), Image.fromarray(wide))
    assert share == pytest.approx(1 / 500_000)
    assert decoded(uri).max() >= 40 and (decoded(uri) > 0).sum() == 1, "a lone pixel must not be averaged away"
    assert pictures.difference(Image.fromarray(one), Image.fromarray(wide)) is None


def test_heat_map_by_hand():
    count = [[20, 19], [0, 40]]
    drawing = figures.heat([[10.0, 9.5], [0.0, 40.0]], count)
    titles = re.findall(r'fill="(#\w+)"><title>(row[^<]*)', drawing)
    assert [t for _, t in titles] == [
        "row 0, column 0: 0.50, n=20", "row 0, column 1: 0.50, n=19",
        "row 1, column 0: never drafted, n=0", "row 1, column 1: 1.00, n=40",
    ]  # fmt: skip
    grey = lambda c: c[1:3] == c[3:5] == c[5:7]  # noqa: E731
    assert [grey(c) for c, _ in titles] == [False, True, True, False]
    assert "n=19" in re.findall(r">(n=\d+)</text>", drawing)


def test_large_grids_are_pooled():
    small = figures.pool_grid([[1] * 70 for _ in range(33)])
    assert len(small) == 11 and len(small[0]) == 24 and small[0][0] == 9 and small[0][23] == 3
    assert sum(map(sum, small)) == 70 * 33


@pytest.mark.parametrize("higher", [True, False])
def test_pareto_right_and_up_is_better(higher):
    points = [
        overview.Point(1, "a", "tokens", 1.0, 0.8, None, None, 64),
        overview.Point(2, "b", "tokens", 2.0, 0.6, (1.8, 2.2), (0.5, 0.7), 64),
        overview.Point(3, "c", "tokens", 1.5, 0.7, None, None, 19),
    ]
    drawing = overview.frontier(points, "score", "times faster", higher)
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*stroke="(#\w+)"[^>]*><title>(\d)', drawing)
    places = {number: (float(x), float(y), colour) for x, y, colour, number in found}
    (x1, y1, c1), (x2, y2, _), (x3, y3, c3) = (places[number] for number in "123")
    assert x1 < x3 < x2 and ((y1 < y3 < y2) if higher else (y1 > y3 > y2))
    assert x3 - x1 == pytest.approx(x2 - x3, abs=0.2)
    assert c1 == figures.BLUE and c3 == figures.GREY
    assert len(re.findall('stroke-width="0.8"', drawing)) == 2, "one interval each way, for the second point only"


def test_waterfall_by_hand():
    drawing = figures.waterfall([("tau", 4.0), ("draft", 3.0), ("luck", 3.5), ("measured", 2.0)])
    bars = [
        (float(x), float(w), c)
        for x, w, c in re.findall(r'<rect x="([\d.]+)".*?width="([\d.]+)".*?fill="(#\w+)"', drawing)
    ]
    unit = bars[0][1] / 4
    assert [w / unit for _, w, _ in bars] == pytest.approx([4, 1, 0.5, 2], abs=0.01)
    assert bars[1][0] - bars[0][0] == pytest.approx(3 * unit, abs=0.2) and bars[3][0] == bars[0][0]
    assert [c for *_, c in bars] == [figures.BLUE, figures.ORANGE, figures.GREEN, figures.BLUE]
    assert "draft (-1.00)" in drawing and "luck (+0.50)" in drawing


def test_strip_by_hand():
    drawing = figures.strip([("ours", [0.5, 1.0, 2.0], 1.0, (0.6, 1.8))])
    x = [float(v) for v in re.findall(r'<circle cx="([\d.]+)"[^>]*r="2.6"', drawing)]
    assert len(x) == 3 and x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2), "equal ratios at equal distances"
    (line,) = re.findall(r'x1="([\d.]+)" y1="16.0" x2="\1" [^>]*stroke="#1b1b1b"', drawing)
    assert float(line) == pytest.approx(x[1], abs=0.1)


def test_depth_bars_by_hand():
    drawing = figures.depth_bars([1.0, 0.5], [100, 19])
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" fill="#\w+"><title>depth', drawing)]
    assert heights == [100.0, 50.0]
    assert re.findall(r'fill="(#\w+)"><title>depth', drawing) == [figures.BLUE, figures.GREY]
    assert "n=19" in drawing


def test_narrow_strips_have_ticks():
    drawing = figures.strip([("ours", [1.04, 1.06, 1.08], 1.06, (1.05, 1.07))])
    assert len(re.findall(r'text-anchor="middle" fill="#5f5f5f" font-size="11" class="halo">1[.\d]*<', drawing)) >= 3


@pytest.mark.parametrize("hits, n", [(0, 5), (3, 8), (64, 64)])
def test_wilson(hits, n):
    expected = scipy.stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-4)


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read():
    words = [*COLOURS.values(), figures.INK, figures.FAINT, "#767676", "#b34700", "#00724d"]
    assert min(contrast(c, "#ffffff") for c in words) >= 4.5
    lightness = [0.3 * r + 0.59 * g + 0.11 * b for r, g, b in (figures.rgb(i / 20) for i in range(21))]
    assert lightness == sorted(lightness), "the map must read without colour"
