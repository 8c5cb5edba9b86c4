"""Reads and checks result files of the benches for the report. Errors name file and field."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visspec.eval.metrics.intervals import wilson
from visspec.eval.report import records
from visspec.eval.report.records import RecordImage

Interval = tuple[float, float] | None

MAX_BYTES = 256 << 20
LARGEST = 1e12
KINDS = ("caption", "image")  # benches of methods; `kernels` has a separate table, other benches are listed
QUALITY = {  # field -> (name, higher is better)
    "geneval": ("GenEval score", True),
    "strict": ("strict score", True),
    "right": ("share of right pictures", True),
    "fd": ("Fréchet distance", False),
    "fd_ratio": ("FD over plain", False),
    "latent_displacement": ("latent displacement", False),
    "drift_per_token": ("drift per token", False),
}
JUDGED = ("geneval", "strict", "right", "fd", "fd_ratio")  # of the quality part's images, not of the speed runs
REQUIRED = {"caption": ("speedup", "tau", "baselines", "provenance"), "image": ("rows",)}


@dataclass(frozen=True)
class Quality:
    """A method's value of a quality measure with interval, n and a note."""

    name: str
    value: float
    interval: Interval
    n: int
    words: str = ""


@dataclass
class Method:
    """One way of decoding, measured: a caption record or a row of an image record."""

    index: int  # on the page, from 1
    kind: str
    record: dict[str, Any]
    folder: Path  # base of its image paths
    source: str
    images: list[RecordImage] = field(default_factory=list)

    @property
    def label(self) -> str:
        given = self.record.get("method") or self.record.get("name")
        parts = [self.record.get("drafter_name") or self.record.get("drafter"), self.record.get("acceptance")]
        return str(given or " · ".join(str(p) for p in parts if p) or f"method {self.index}")

    @property
    def n(self) -> int:
        """Number of prompts."""
        for found in (self.record.get("compared"), len(self.record.get("ratios") or ()), self.record.get("n_prompts")):
            if prompts := number(found):
                return int(prompts)
        return len(self.images)

    def value(self, field: str) -> float | None:
        """A field of its record that is a number."""
        return number(self.record.get(field))

    @property
    def speed(self) -> float | None:
        """Its speed-up if that is a positive number."""
        found = self.value("speedup")
        return found if found and found > 0 else None

    @property
    def speed_interval(self) -> Interval:
        return interval(self.record.get("speedup_ci95"))

    @property
    def exact(self) -> bool:
        return str(self.record.get("guarantee") or "").startswith("exact")

    def quality(self, field: str) -> Quality | None:
        """Its measure of that name in `QUALITY`; None if it was not measured."""
        name, drawn = QUALITY[field][0], self.value("quality_n") if field in JUDGED else None
        value, n = self.value(field), int(drawn or self.n)
        if field == "right":
            judged = [right for right in (image.judged[0] for image in self.images) if right is not None]
            if value is None and judged:  # no share over all images: use the images of the record
                value, n = sum(judged) / len(judged), len(judged)
            return None if value is None else Quality(name, value, wilson(value * n, n) if n else None, n)
        if value is None:
            return None
        floor = self.value("fd_noise_floor") if field == "fd" else None
        words = "" if floor is None else f"noise floor about {floor:.3g} at this n"
        spread = interval(self.record.get(f"{field}_ci95")) if f"{field}_ci95" in records.METHOD else None
        return Quality(name, value, spread, n, words)


def number(value: object) -> float | None:
    """A number that can be plotted, or None for anything else (null, NaN, absent, beyond `LARGEST`)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        return None
    return float(value)


def interval(value: object) -> Interval:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = number(value[0]), number(value[1])
    return None if low is None or high is None else (low, high)


def positive(pair: Interval) -> Interval:
    return pair if pair and min(pair) > 0 else None


def read(path: str | Path) -> dict[str, Any]:
    """The object of a result file; its `bench` is a name. Raises ValueError or FileNotFoundError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"report: there is no result file {path}")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"report: {path} has {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"report: {path} is not JSON ({error})") from None
    bench = record.get("bench") if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or not isinstance(bench, str) or not bench:
        raise ValueError(f"report: {path.name}: bench: got {bench!r}, expected the name of a bench")
    return record


def methods_of(record: dict[str, Any], path: Path) -> list[Method]:
    """The methods of a caption or image record read from `path`, numbered from 0. Raises ValueError."""
    kind = record["bench"]
    for name in REQUIRED[kind]:
        if name not in record:
            raise ValueError(f"report: {path.name}: got no {name!r}, expected the JSON of visspec bench {kind}")
    check(record, path.name)
    if kind == "caption":
        return [Method(0, kind, record, path.parent, path.name)]
    methods = []
    for i, row in enumerate(rows_of(record, path.name, "methods")):
        where = f"{path.name}: rows[{i}]"
        check(row, where)
        images = pictures_of(row, where)
        shared = {k: record[k] for k in ("provenance", "target", "batch_size", "temperature") if k in record}
        methods.append(Method(i, kind, shared | row, path.parent, path.name, images))
    if record.get("failures"):  # for the whole bench: shown once, with the first method
        methods[0].record["failures"] = [*record["failures"], *(methods[0].record.get("failures") or [])]
    return methods


def pairs_of(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The provenance of a record, as text."""
    found = record.get("provenance")
    return [(str(key), str(value)) for key, value in found.items()] if isinstance(found, dict) else []


def rows_of(record: Mapping[str, Any], where: str, what: str) -> list[Any]:
    """The rows of a record. Raises ValueError unless they are a list that is not empty."""
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"report: {where}: rows: got {type(rows).__name__}, expected a list of {what}")
    return rows


class Section:
    """A bench without methods on the page: its rows, checked by `row_of`, and its provenance. Raises ValueError for
    rows of another kind.
    """

    def __init__(self, record: Mapping[str, Any], source: str, what: str, row_of: Callable[[object, str], dict]):
        self.source, self.provenance = source, pairs_of(record)
        self.rows = [row_of(row, f"{source}: rows[{i}]") for i, row in enumerate(rows_of(record, source, what))]


def pictures_of(row: dict[str, Any], where: str) -> list[RecordImage]:
    """The images of a row. Plain paths become entries: images with the same index belong to one prompt and seed, and
    `verdicts`, if the row has them, are in the same order.
    """
    images, verdicts = row.get("images") or [], row.get("verdicts")
    if verdicts is not None and (not isinstance(verdicts, list) or len(verdicts) != len(images)):
        got = len(verdicts) if isinstance(verdicts, list) else type(verdicts).__name__
        raise ValueError(f"report: {where}: verdicts: got {got}, expected one for each of {len(images)} images")
    found = []
    for k, image in enumerate(images):
        entry = {"path": image, "prompt": f"picture {k + 1}", "seed": k} if isinstance(image, str) else image
        check_image(entry, f"{where}.images[{k}]")
        found.append(RecordImage.of(entry if verdicts is None else entry | {"verdict": verdicts[k]}))
    return found


def check(record: Any, where: str) -> None:
    """Checks the types of known fields; unknown fields are ignored."""
    _expect(record, dict, where)
    lists = records.INTERVAL, records.NUMBERS, records.LIST
    types: dict = {records.NUMBER: (int, float), records.OBJECT: dict, **dict.fromkeys(lists, list)}
    for name, kind in records.METHOD.items():
        value, there = record.get(name), f"{where}: {name}"
        if value is None:
            continue
        if kind in types:
            _expect(value, types[kind], there)
        for entry in value if kind == records.NUMBERS else ():
            _expect(entry, (int, float), there)
        if kind == records.GRID:
            check_grid(value, there)
    for name, value in (record.get("gap") or {}).items():
        _expect(value, (int, float), f"{where}: gap.{name}")
    for name, value in (record.get("baselines") or {}).items():
        _expect(value, dict, f"{where}: baselines.{name}")
    check_maps(record, where)
    check_texts(record, where)


def check_maps(record: Mapping[str, Any], where: str) -> None:
    """Checks that the counts of an acceptance map, if any, have its size."""
    grid, count = record.get("acceptance_map"), record.get("acceptance_map_n")
    if grid and count and (len(grid), len(grid[0])) != (len(count), len(count[0])):
        got = f"{len(count)} x {len(count[0])}"
        raise ValueError(f"report: {where}: acceptance_map_n: got {got}, expected {len(grid)} x {len(grid[0])}")


def check_texts(record: Mapping[str, Any], where: str) -> None:
    """Checks texts, lists of [text, origin], and that there are as many thumbnails, if any."""
    texts, thumbnails = record.get("texts") or [], record.get("thumbnails")
    for row in texts:
        _expect(row, list, f"{where}: texts")
        for piece in row:
            if not (isinstance(piece, list) and len(piece) == 2 and all(isinstance(p, str) for p in piece)):
                raise ValueError(f"report: {where}: texts: got {piece!r}, expected [piece, origin]")
    if thumbnails is None:
        return
    if len(thumbnails) != len(texts) or not all(t is None or isinstance(t, str) for t in thumbnails):
        got = f"{len(thumbnails)} for {len(texts)} texts"
        raise ValueError(f"report: {where}: thumbnails: got {got}, expected a PNG in base64, or null, for each")


def check_image(image: Any, where: str) -> None:
    """{seed, prompt, path or png, verdict, acceptance}: a prompt and one source of pixels; a rectangular grid."""
    _expect(image, dict, where)
    sources = [s for s in ("path", "png") if image.get(s)]
    if len(sources) != 1 or not isinstance(image[sources[0]], str):
        raise ValueError(f"report: {where}: got {' and '.join(sources) or 'neither'}, expected either path or png")
    if image.get("acceptance") is not None:
        check_grid(image["acceptance"], f"{where}.acceptance")


def check_grid(grid: Any, where: str) -> None:
    """One number of at least 0, or null, for each token; rows of one length."""
    _expect(grid, list, where)
    for row in grid:
        _expect(row, list, where)
        for value in row:
            if value is not None and (number(value) is None or value < 0):
                raise ValueError(f"report: {where}: got {value!r}, expected numbers of at least 0 or null")
    if not grid or not grid[0] or len({len(row) for row in grid}) != 1:
        raise ValueError(f"report: {where}: got rows of different length, expected a rectangular grid")


def _expect(value: object, kind: type | tuple[type, ...], where: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        name = "a number" if isinstance(kind, tuple) else f"a {kind.__name__}"
        raise ValueError(f"report: {where}: got {type(value).__name__}, expected {name}")
