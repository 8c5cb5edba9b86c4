"""`visspec bench image --sweep`: rows by rule and setting, passes by count, resumed after a kill; laws by hand."""

import json

import pytest
import torch

from tests import tiny_images
from visspec.api.images import ImagePipeline
from visspec.cli import bench_sweep
from visspec.cli.main import main
from visspec.distributions import Categorical
from visspec.io import included
from visspec.tree import empty_draft
from visspec.types import Capabilities, Scores

PROMPTS = included.scenes().prompts()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    home = tmp_path_factory.mktemp("sweep")
    tiny_images.painter(home / "model")
    return home / "model"


@pytest.fixture
def few(monkeypatch):
    rows = PROMPTS[:4]
    monkeypatch.setattr(type(included.scenes()), "prompts", lambda self: rows)
    monkeypatch.setitem(bench_sweep.FAMILIES, "cool", ("cool:omega={},nu=0.7", (1.0, 3.0)))


def swept(model, home, *more):
    target = home / "r.json"
    options = ["--model", str(model), "--prompts", "2", "--images", str(home / "i"), "--json", str(target)]
    code = main(
        ["bench", "image", *options, "--sweep", "cool", "--sweep-drafter", "jacobi:redraw=maximal,window=4", *more]
    )
    return code, json.loads(target.read_text()) if target.exists() else None


def test_a_sweep_and_its_report(model, few, tmp_path, monkeypatch, capsys):
    code, record = swept(model, tmp_path)
    assert code == 0 and [r["name"] for r in record["rows"]] == ["plain", "exact", "cool 1.0", "cool 3.0"]
    plain, exact, same, loose = record["rows"]
    assert (plain["nfe_reduction"], plain["drift_per_token"], plain["fd_ratio"]) == (1.0, 0.0, 1.0)
    assert plain["fd_paired"] == plain["fd_paired_floor"] == 0.0 and exact["fd_paired"] == same["fd_paired"] != 0.0
    assert plain["nfe"] > exact["nfe"] == same["nfe"] and same["drift_per_token"] == 0.0, "omega 1 is exact"
    assert loose["drift_per_token"] > 0 and (loose["family"], loose["setting"]) == ("cool", "3.0")
    low, high = exact["nfe_reduction_ci95"]
    assert low <= exact["nfe_reduction"] * 1.01 and high >= exact["nfe_reduction"] * 0.99
    assert plain["family"] is None and not loose["promises_tokens"] and loose["geneval_ci95"] and loose["fd"] > 0
    assert set(record["law"]) == {"entropy", "top1", "top10", "n"} and record["law"]["n"] > 0
    assert "cool 3.0" in capsys.readouterr().out
    # a killed run: one image and its file are missing
    lost = sorted((tmp_path / "i" / "cool 3.0").rglob("*.png"))[1]
    lost.unlink()
    drawn = []
    whole = ImagePipeline.__call__
    monkeypatch.setattr(ImagePipeline, "__call__", lambda self, t, **k: drawn.append(list(t)) or whole(self, t, **k))
    code, again = swept(model, tmp_path)
    assert code == 0 and len(drawn) == 2 and len(drawn[1]) == 1, "the laws, and the lost image"
    assert [r["nfe"] for r in again["rows"][:3]] == [r["nfe"] for r in record["rows"][:3]]
    assert main(["report", str(tmp_path / "r.json"), "-o", str(tmp_path / "page.html")]) == 0
    assert "Passes against drift per token" in (tmp_path / "page.html").read_text()


def test_passes_of_an_image_are_those_of_its_rounds(model):
    """In a batch of two: tokens that were not drafted, one a round, and the prefill's."""
    pipe = ImagePipeline.from_pretrained(str(model))
    texts = [row["prompt"] for row in PROMPTS[:2]]
    out = pipe(texts, seed=[1, 2], batch_size=2, drafter="jacobi:redraw=maximal,window=4", acceptance="rejection")
    alone = [
        pipe(t, seed=s, drafter="jacobi:redraw=maximal,window=4", acceptance="rejection") for t, s in zip(texts, (1, 2))
    ]
    assert [bench_sweep.sidecar(out, b)["passes"] for b in (0, 1)] == [len(o.traces[0].rounds) + 1 for o in alone]


def test_laws_by_hand():
    """Two codes of one half each, grammar left out."""
    rule = bench_sweep.EntropyRecorder()
    rule.bind(Capabilities(vocab=4, codebook=torch.zeros(3, 2)))
    logits = torch.tensor([[[0.0, 0.0, -1e9, -1e9]], [[-1e9, -1e9, -1e9, 0.0]]])
    rule(empty_draft(torch.zeros(2, dtype=torch.long)), Scores(Categorical(logits)), None)
    assert torch.allclose(torch.cat(rule.seen), torch.tensor([[0.6931, 0.5, 1.0]]), atol=1e-3)


@pytest.mark.parametrize(
    "more, words",
    [
        (("--sweep", "nothing"), "invalid choice: 'nothing'"),
        (("--sweep-drafter", "lowres"), "drafter: got 'lowres' for a model that none is included for"),
        (("--sweep-drafter", "lowres:model=painter-lowres"), "got a sibling with another codebook"),
        (("--sweep-drafter", "nobody"), "drafter: got 'nobody'"),
        (
            ("--world", "emoji", "--task", "colors"),
            "--task: got colors, expected tasks of the prompts that the model is taught",
        ),
    ],
)
def test_bad_options_are_a_sentence(model, few, tmp_path, capsys, more, words):
    try:
        code = swept(model, tmp_path, *more)[0]
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and words in capsys.readouterr().err
