"""Pictures of vectors whose passes of the head are recorded are those without, with a stand-in that needs no GPU."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.layouts import filled, nextstep_folder, nextstep_names
from tests.replays import Standin, recording
from tests.test_continuous import Together
from tests.test_continuous_families import Words
from tests.test_mar_painter import PROMPTS, drawn, fresh
from visspec import ImagePipeline
from visspec.accept import denoise
from visspec.accept.graphed_passes import MOST, GraphedPasses
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.target import MARImages
from visspec.models.nextstep.flow import flow_schedule_v11
from visspec.models.nextstep.layout import load_nextstep
from visspec.models.vectors import head_distribution
from visspec.models.vectors.diffusion_head import DiffusionHead, schedule
from visspec.models.vectors.head_distribution import HeadDistributions

STEPS, NODES = 20, 3
RULE = "coupled:window=8,merge=6"
ATOL = 1e-4


@pytest.fixture
def standin(monkeypatch) -> Standin:
    return recording(monkeypatch)


def head(learned: bool) -> HeadDistributions:
    torch.manual_seed(0)
    network = DiffusionHead(4, 6, 16, 1, learned)
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.3)
    return HeadDistributions(network, replace(schedule(STEPS, learned), predicts="velocity"))


def chains_of(made, rows, guidance, seed, shift=0.0):
    """Distributions of nodes, whose conditions are moved by `shift`."""
    g = torch.Generator().manual_seed(seed)
    copies = 1 if guidance is None else 2
    condition = torch.randn(copies * rows * NODES, 6, generator=g) + shift
    if guidance == "each":
        guidance = 1 + torch.rand(rows * NODES, generator=g)
    return made(condition, (rows, NODES), guidance, calls=Counter())


def verdict(values, equal):
    """Of each row, the values up to the first that differs from its draft."""
    kept = equal.view(-1, NODES).long().cumprod(dim=1).sum(dim=1).clamp(max=NODES - 1)
    return [row[: n + 1] for row, n in zip(values.view(-1, NODES, 4), kept.tolist())]


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("guidance", [None, 2.0, "each"])
@pytest.mark.parametrize("learned", [False, True])
def test_rounds_are_those_without(learned, guidance, drafts, standin, monkeypatch):
    if guidance == 2.0:
        monkeypatch.setattr(head_distribution, "MOST_ROWS", 0)  # no modulations ahead
    made, graphs, kept = head(learned), GraphedPasses(), []
    for rows, seed in itertools.product((1, 3), range(3)):
        noise = Together(rows, STEPS, 4, (STEPS, 4) if learned else (0, 0), NODES, seed)
        numbers, drafted = noise.numbers(NODES), None
        if drafts:
            path = chains_of(made, rows, guidance, seed, 0.02).sample(numbers.start, numbers.steps)
            there = torch.arange(rows * NODES) % NODES < NODES - 1  # the last node has no draft
            drafted = denoise.DraftTrajectories(path.points, path.mean, path.log_sigma, there)
        results = []
        for recorded in (None, graphs):
            distribution = chains_of(made, rows, guidance, seed)
            values, equal = denoise.run(distribution, numbers, drafted, NODES, 8, 6, recorded)
            results.append((verdict(values, equal), distribution.calls))
        (expected, calls), (result, recorded_calls) = results
        torch.testing.assert_close(result, expected, atol=ATOL, rtol=ATOL)
        assert recorded_calls == calls
        kept += [len(row) for row in result]
    assert (set(kept) > {1}) == drafts
    assert standin.replays > 3 * standin.count > 0 and len(graphs.buffers) == 2


@pytest.fixture(scope="module")
def painter():
    return fresh(denoising_steps=STEPS)


@pytest.fixture(scope="module")
def drafter():
    return SmallMAR(MARImages(fresh(seed=1, denoising_steps=STEPS)))


def pictures(pipe, texts=PROMPTS[:1], seed=0, **options):
    out = drawn(pipe, texts, seed, **{"acceptance": RULE} | options)
    return out.tokens, out.traces[0].calls


def same(result, expected):
    torch.testing.assert_close(result, expected, atol=ATOL, rtol=ATOL)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("guidance, drafts", [(1.0, False), (2.0, False), (2.0, True)])
def test_pictures_of_a_painter(guidance, drafts, painter, drafter, monkeypatch):
    options = {"guidance_scale": guidance, "drafter": drafter if drafts else "none"}
    pipe = ImagePipeline(painter, None)
    expected = [pictures(pipe, texts, **options) for texts in (PROMPTS[:1], PROMPTS)]
    standin = recording(monkeypatch)
    same([pictures(pipe, texts, **options) for texts in (PROMPTS[:1], PROMPTS)], expected)
    buffers = pipe.setup(options["drafter"], RULE).rule.graphs.buffers
    widths = 4
    assert 0 < standin.count <= len(buffers) * widths * (2 if drafts else 1)
    assert len(buffers) == (6 if drafts else 2) and standin.replays > 5 * standin.count
    before = standin.count
    pictures(pipe, seed=9, **options)
    assert drafts or standin.count == before


def test_fixed_deviations(tmp_path, monkeypatch):
    torch.manual_seed(3)
    nextstep_folder(tmp_path, filled(nextstep_names(), 0.1))
    model = load_nextstep(tmp_path, normalised=True)
    pipe = ImagePipeline(model, Words(), parts={"plan": flow_schedule_v11(STEPS)})
    options = {"height": 32, "width": 48, "seed": [1, 2], "output_type": "latent", "acceptance": RULE}
    expected = pipe(["a cat", "tea"], **options).tokens
    standin = recording(monkeypatch)
    same(pipe(["a cat", "tea"], **options).tokens, expected)
    assert standin.count > 0


@pytest.mark.parametrize("options", [{"graphs": False}, {"batch_invariant": True}])
def test_not_recorded_where_forbidden(options, painter, standin):
    pictures(ImagePipeline(painter, None, **options))
    assert not standin.count


@pytest.mark.parametrize("nth", [0, 2])
def test_failure_warns_once(nth, painter, monkeypatch):
    pipe = ImagePipeline(painter, None)
    expected = pictures(pipe)
    standin = recording(monkeypatch, {nth: RuntimeError("no graphs here")})
    with pytest.warns(RuntimeWarning, match="passes run without CUDA graphs: no graphs here") as told:
        same([pictures(pipe), pictures(pipe)], [expected] * 2)
    assert len(told) == 1 and standin.count == nth + 1


def test_weights_that_move(standin):
    """Recordings of the old addresses aren't used again."""
    model = fresh(denoising_steps=STEPS)
    pipe = ImagePipeline(model, None)
    pictures(pipe)
    first, old = standin.count, []
    for weight in model.mar.head.res_blocks.parameters():
        old.append(weight.data)
        weight.data = 0.5 * weight.data
    moved = pictures(pipe)
    assert standin.count > first
    same(moved, pictures(ImagePipeline(model, None, graphs=False)))


def test_least_recently_used_are_dropped(standin):
    made, graphs = head(False), GraphedPasses()
    with torch.inference_mode():
        for number in range(MOST + 2):
            numbers = Together(1, STEPS, 4, positions=NODES).numbers(NODES)
            denoise.run(chains_of(made, 1, 1.0 + number, 0), numbers, None, NODES, 8, 6, graphs)
    scales = [buffers.distribution.guidance for buffers in graphs.buffers.values()]
    assert scales == [3.0 + number for number in range(MOST)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("drafts", [False, True])
def test_on_a_gpu(drafts):
    model, small = (fresh(seed=seed, denoising_steps=STEPS).cuda() for seed in (0, 1))
    options = {"drafter": SmallMAR(MARImages(small)) if drafts else "none"}
    expected, result = (pictures(ImagePipeline(model, None, graphs=graphs), **options) for graphs in (False, None))
    same(result, expected)
