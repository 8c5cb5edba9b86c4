"""The report's first screen: who is on the frontier, in which colour and shape, names apart, the colour schemes."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.eval.test_report import Reader, caption, image_bench, outside, page, write  # noqa: F401
from tests.eval.test_report_figures import contrast
from visspec.eval.report import figures, overview
from visspec.eval.report.overview import GUARANTEES, Point


def point(number, x, y, kind="approximate", n=64, label=None):
    return Point(number, label or f"method {number}", kind, x, y, (x * 0.95, x * 1.05), None, n)


POINTS = [
    point(1, 1.0, 1.0, "tokens"),
    point(2, 3.0, 1.0, "law"),
    point(3, 2.0, 1.5),
    point(4, 4.0, 1.3),
    point(5, 4.0, 1.2, n=19),
]


def test_the_frontier_is_filled_and_named():
    drawing = overview.frontier(POINTS, "distance", "times faster")
    assert [p.number for p in overview.on_frontier(POINTS, False)] == [2, 5]
    assert [p.number for p in overview.on_frontier(POINTS, True)] == [3, 4]
    marks = re.findall(r'<(circle|polygon)[^>]*class="mark" fill="(#\w+)" stroke="(#\w+)"[^>]*><title>(\d)', drawing)
    found = {number: (shape, fill, stroke) for shape, fill, stroke, number in marks}
    assert found == {
        "1": ("circle", "#ffffff", figures.BLUE),
        "2": ("polygon", figures.GREEN, figures.GREEN),
        "3": ("polygon", "#ffffff", figures.ORANGE),
        "4": ("polygon", "#ffffff", figures.ORANGE),
        "5": ("polygon", figures.GREY, figures.GREY),
    }
    words = re.findall(r">([^<>]+)</text>", drawing)
    assert {"method 2", "method 5", "1", "3", "4"} <= set(words) and not {"method 1", "method 3"} & set(words)


def test_bars_stand_in_order_with_the_colour_of_their_guarantee():
    drawing = overview.bars([(1, "a", "tokens", 1.0, None, 64), (2, "b", "law", 4.0, (3.5, 4.5), 64),
                             (3, "c", "approximate", 2.0, None, 3)])  # fmt: skip
    bars = re.findall(r'width="([\d.]+)" height="11.0" fill="(#\w+)"><title>(\d)', drawing)
    assert [(number, colour) for _, colour, number in bars] == [
        ("2", figures.GREEN),
        ("3", figures.GREY),
        ("1", figures.BLUE),
    ]
    widths = [float(width) for width, *_ in bars]
    assert widths[0] / widths[2] == pytest.approx(4, abs=0.05) and widths[1] / widths[2] == pytest.approx(2, abs=0.05)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 5), st.floats(0, 2)), min_size=1, max_size=16))
def test_names_do_not_overlap(places):
    taken = []
    for k, (x, y) in enumerate(places):
        overview.place_label(f"some method {k}", 40 + 60 * x, 26 + 100 * y, 10, figures.INK, taken)
    assert not any(overview.overlap(a, b) for i, a in enumerate(taken) for b in taken[:i])
    assert all(box[0] >= figures.LEFT and box[2] <= figures.RIGHT + 4 for box in taken)


def test_kinds_of_guarantees():
    kinds = [
        ({"guarantee": "exact"}, "tokens"),
        ({"guarantee": "exact", "promises_tokens": False}, "law"),
        ({"guarantee": "exact for the declared target", "promises_tokens": False}, "law"),
        ({"guarantee": "approximate", "promises_tokens": False}, "approximate"),
        ({}, "unknown"),
    ]
    assert [overview.kind_of(record) for record, _ in kinds] == [kind for _, kind in kinds]
    assert {kind for _, kind in kinds} == set(GUARANTEES)


def test_what_is_not_first_is_folded_without_scripts(page):  # noqa: F811
    source = page(caption(), image_bench())
    assert outside(Reader(source)) == [] and "<details open" not in source
    for title in ("Every prompt, paired", "Acceptance by depth", "Where the numbers come from", "abc1234"):
        before = source.split(title)[0] + ("</summary>" if title == "Where the numbers come from" else "")
        inside = before.count("<details>") - before.count("</details>")
        assert inside >= 1, f"{title} is not folded"
    for title in (
        "Speed-up by method",
        "Speed against Fréchet distance",
        "The same prompt and seed",
        "Where each word",
    ):
        before = source.split(title)[0]
        assert before.count("<details>") == before.count("</details>"), f"{title} is folded"
    assert "details::details-content { content-visibility: visible" in source, "print shows what is folded"


def test_every_colour_of_a_figure_has_one_for_dark_pages(page):  # noqa: F811
    source = page(caption(), image_bench())
    dark = source.split("prefers-color-scheme: dark")[1].split("</style>")[0]
    swapped = dict(re.findall(r'\[fill="(#\w+)"\] { fill: (#\w+) }', dark))
    used = {colour for colour, *_ in GUARANTEES.values()} | {figures.INK, figures.FAINT}
    assert used <= set(swapped)
    paper = re.search(r"--page: (#\w+)", dark)[1]
    assert min(contrast(swapped[colour], paper) for colour in used) >= 4.5
    assert min(contrast(colour, "#ffffff") for colour in used - {figures.GREY}) >= 4.5
    lines = dict(re.findall(r'\[stroke="(#\w+)"\] { stroke: (#\w+) }', dark))
    assert set(lines) == set(swapped) - {figures.FAINT, "#ffffff"} | {figures.RULE}
