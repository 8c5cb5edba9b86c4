"""Many threads on one pipeline and one accelerated model: every call gives what it gives alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import visspec
from tests import tiny_images
from tests.doubles import THREADS, Grower, stock, together
from tests.tiny import llama, llava, model_of, prompt, shapes
from visspec.accept.graphed_rule import GraphedRule
from visspec.accept.lantern import Lantern, LanternPlus
from visspec.api.images.pipeline import ImagePipeline
from visspec.models.decoder import probe
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.eagle.image_drafter import ImageFeatureDrafter

TEXTS = ["a", "b c", "d e f"]


def methods() -> list[tuple]:
    """Drafters and rules for one pipeline, among them objects that all calls share."""
    learned = ImageFeatureDrafter.for_model(tiny_images.janus(), seed=3)
    grown = ImageFeatureDrafter.for_model(tiny_images.janus(), seed=4)
    grown = ImageFeatureDrafter(grown.head, tiny_images.janus(), tree="dynamic", width=2, nodes=6)
    return [
        (None, "exact"), ("jacobi:window=4", "exact"), (learned, "exact"),
        ("jacobi:redraw=maximal,window=4", "lantern:k=4,delta=0.2"), (grown, "lantern_plus:k=3,lam=2.0"),
        ("jacobi:redraw=independent,start=random,window=4", "grouped:group=4"),
        ("jacobi:redraw=maximal,window=4", "rejection"),
    ]  # fmt: skip


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_eight_threads_on_one_pipeline(times, hurried):
    alone, shared = tiny_images.pipeline(), tiny_images.pipeline()
    shared_by_all = {"batch_size": 2, "output_type": "latent"}
    options = [
        {"prompt": TEXTS[: 1 + i % 3], "seed": i, "drafter": drafter, "acceptance": rule, **shared_by_all}
        | {"temperature": (1.0, 0.7)[i % 2]}
        for i, (drafter, rule) in enumerate(methods() * min(times, 3))
    ]
    expected = [alone(**o) for o in options]

    def job(o, want):
        def call():
            out = shared(**o)
            assert out.prompts == want.prompts and out.seeds == want.seeds
            assert all(torch.equal(a, b) for a, b in zip(out.tokens, want.tokens, strict=True)), o
            assert [s.guarantee for s in out.stats] == [s.guarantee for s in want.stats]
            assert sum(s.faults for s in out.stats) == 0

        return call

    together([job(o, want) for o, want in zip(options, expected)] * times)


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["ngram", "features", "tree", "small"])
def test_eight_threads(kind, times, hurried):
    model = llava()
    drafter = {
        "ngram": lambda: "ngram",
        "features": lambda: EagleDrafter.for_model(model, image_latents=1),
        "tree": lambda: Grower(stock("llava", "ragged"), 0.3),
        "small": lambda: model_of("llava"),
    }[kind]()
    fast, asked, expected = visspec.accelerate(model, drafter), [], []
    for i in range(8):
        name = ("one", "ragged")[i % 2] if kind != "tree" else "ragged"
        inputs = prompt("llava", shapes("llava")[name])
        more = {"do_sample": True, "seed": i, "temperature": 0.8} if i % 4 > 1 else {"do_sample": False}
        asked.append({**inputs, **more, "max_new_tokens": 10})
        expected.append(visspec.accelerate(model, None).run(**asked[-1]))

    def job(options, want):
        def call():
            result = fast.run(**options)
            assert torch.equal(result.output, want.output)
            assert result.state.tokens == want.state.tokens and result.stats.tokens == want.stats.tokens
            assert result.stats.faults == 0

        return call

    together([job(o, want) for o, want in zip(asked, expected)] * times)


@pytest.mark.parametrize("spelled", ["interrupt", "_interrupt"])
def test_a_callback_ends_its_own_call(spelled, hurried):
    """Of eight calls under way at once, those whose callbacks ask for it."""
    pipe, starting = tiny_images.pipeline(), threading.Barrier(THREADS)
    result: list[int] = [-1] * THREADS

    def job(i):
        def callback(pipeline, step, done, extra):
            if step == 1:
                starting.wait(60)
            if step == 3:
                setattr(pipeline, spelled, i % 2 == 1)
                assert getattr(pipeline, spelled) == (i % 2 == 1)

        def call():
            out = pipe(TEXTS[0], seed=i, callback_on_step_end=callback, output_type="latent", drafter=None)
            result[i] = len(out.images)

        return call

    together([job(i) for i in range(THREADS)])
    assert result == [1, 0] * (THREADS // 2) and not pipe.interrupt


def test_another_thread_ends_all_calls():
    """Also those of streams; the next call begins anew."""
    pipe, under_way, told = tiny_images.pipeline(drafter=None), threading.Semaphore(0), threading.Event()
    result = []

    def callback(pipeline, step, done, extra):
        if step == 1:
            under_way.release()
            assert told.wait(60)

    def call():
        result.append(len(pipe(TEXTS[0], seed=0, callback_on_step_end=callback, output_type="latent").images))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert under_way.acquire(timeout=60)
    pipe.interrupt = True
    told.set()
    for thread in threads:
        thread.join()
    assert result == [0, 0, 0]
    parts = []
    for part in pipe.stream(TEXTS, seed=0, batch_size=1, output_type="latent"):
        parts.append(part)
        pipe.interrupt = len(parts) == 2  # by whom a stream's batches are taken
    assert [len(part.images) for part in parts] == [1, 1]
    assert len(pipe(TEXTS[0], seed=0, output_type="latent").images) == 1


def test_weights_stay_until_last_call(monkeypatch):
    """Offloading: one call's end must not take the weights away from another."""
    pipe, moves = tiny_images.pipeline(drafter=None), []
    monkeypatch.setattr(pipe, "_move", lambda where: moves.append(str(where)))
    pipe.enable_model_cpu_offload("cpu")
    streams = [pipe.stream(TEXTS[:2], seed=0, batch_size=1, output_type="latent") for _ in range(2)]
    for stream in streams:
        next(stream)
    streams[0].close()
    assert moves == ["cpu", "cpu"] and len(next(streams[1]).images) == 1
    streams[1].close()
    assert moves == ["cpu"] * 3
    assert pipe(TEXTS[0], seed=0, output_type="latent").images and moves == ["cpu"] * 5


@pytest.mark.parametrize(
    "rule",
    [Lantern(k=3, delta=0.3), LanternPlus(k=3, lam=3.0), GraphedRule(Lantern(k=3, delta=0.3))],
    ids=lambda rule: type(rule).__name__,
)
def test_a_rule_serves_two_targets(rule):
    """Tables of one target's codebook do not reach another's calls."""
    other = copy.deepcopy(tiny_images.janus())
    with torch.no_grad():
        weight = other.model.vqmodel.quantize.embedding.weight
        weight.copy_(weight.flip(0) ** 3)
    first, second = tiny_images.pipeline(), ImagePipeline(other, tiny_images.Words())
    asked = {"prompt": TEXTS, "seed": 1, "drafter": "jacobi:redraw=maximal,window=4", "output_type": "latent"}
    expected = [p(**asked, acceptance=copy.deepcopy(rule)).stats[0].drift_per_token for p in (first, second)]
    assert expected[0] != expected[1]
    again = [p(**asked, acceptance=rule).stats[0].drift_per_token for p in (first, second, first)]
    assert again == [*expected, expected[0]]


@pytest.mark.parametrize("learned", [False, True], ids=["ngram", "features"])
def test_probe_beside_other_threads(learned, hurried):
    """What is asked of a model when it is wrapped leaves alone what goes on in it."""
    model, inputs = llama(), prompt("llama", ["19", "12", "3"])
    fast = visspec.accelerate(model, EagleDrafter.for_model(model) if learned else "ngram")
    options = {**inputs, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**options)
    weights = {name: id(p) for name, p in model.named_parameters()}

    def call():
        result = fast.run(**options)
        assert torch.equal(result.output, expected) and result.stats.faults == 0

    def ask():
        probe._answers.clear()
        visspec.accelerate(model, None)

    together([call, call, ask, call] * 8)
    assert {name: id(p) for name, p in model.named_parameters()} == weights
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
