"""Pictures of vectors through `ImagePipeline`: presets, batches, drafters, and what is refused."""

import numpy as np
import pytest
import torch

from tests.test_mar_painter import SMALL, fresh
from visspec import ImagePipeline, registry
from visspec.cli import bench_image
from visspec.distributions import Denoising, DenoisingSteps
from visspec.io import included
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.images import LabelledMARImages

PROMPTS = ["a photo of a pig", "a photo of a llama on a smooth grey ground", "a photo of an octopus"]
VECTOR_RULES = [name for name, entry in registry.table("rule").items() if entry.load().traits.distribution is Denoising]


@pytest.fixture(scope="module")
def pipe():
    return ImagePipeline(fresh(SMALL), None)


@pytest.fixture(scope="module")
def drafter():
    return SmallMAR(LabelledMARImages(fresh(seed=1)))


def drawn(pipe, prompts=PROMPTS, seed=0, **options):
    return pipe(prompts, seed=[seed + i for i in range(len(prompts))], output_type="latent", **options)


def test_defaults_and_shapes(pipe):
    out = pipe(PROMPTS[:2], seed=3)
    assert (pipe.drafter, pipe.acceptance) == ("none", "coupled") and out.images[0].size == (32, 32)
    assert out.tokens[0].shape == (16, 8) and out.maps[0].shape == out.passes[0].shape == (4, 4)
    assert out.stats[0].guarantee == "exact for the declared target"
    latent = pipe(PROMPTS[0], seed=3, output_type="latent").images[0]
    assert latent.shape == (4, 4, 8)
    torch.testing.assert_close(latent[0, :4], out.tokens[0][:4], atol=1e-4, rtol=1e-4)
    assert np.array(out.images[0]).std() > 0


@pytest.mark.parametrize("rule", VECTOR_RULES)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_does_not_depend_on_its_batch(pipe, drafter, rule, drafts):
    """Rounding differs with the batch, and a uniform number may turn on it: the first vectors are compared."""
    options = {"acceptance": rule, "drafter": drafter if drafts else "none"}
    together = drawn(pipe, **options)
    assert not drafts or all(map(torch.equal, together.tokens, drawn(pipe, **options).tokens))
    for row in (2,) if drafts else (0, 2):
        alone = drawn(pipe, PROMPTS[row : row + 1], seed=row, **options).tokens[0]
        same = torch.isclose(alone, together.tokens[row], atol=1e-3, rtol=1e-3).all(dim=1)
        first = np.argsort(together.passes[row], axis=None, kind="stable")[:4]
        assert bool(same[first].all())


def test_its_own_drafts_are_kept(pipe):
    """A drafter that is the target itself: every vector is accepted."""
    own = SmallMAR(LabelledMARImages(pipe.model))
    out = drawn(pipe, PROMPTS[:2], drafter=own, acceptance="coupled:window=1")
    assert out.stats[0].tau > 3.9 and out.stats[0].faults == 0
    assert drawn(pipe, PROMPTS[:2], drafter=own, acceptance="surrogate").stats[0].tau > 3.9


def test_calls_are_counted(pipe, drafter):
    out = drawn(pipe, PROMPTS[:1], acceptance="coupled:window=1")
    assert out.traces[0].calls == {"head": 16 * 4}
    out = drawn(pipe, PROMPTS[:1], acceptance="coupled:window=4")
    assert 16 <= out.traces[0].calls["head"] < 16 * 4
    out = drawn(pipe, PROMPTS[:1], drafter=drafter)
    chains, rest = divmod(out.traces[0].calls["draft_head"], 4)
    assert chains > 0 and rest == 0 and out.traces[0].calls["head"] > 0


@pytest.mark.parametrize("name", registry.presets("vectors"))
def test_a_preset_draws(pipe, drafter, name):
    preset = registry.preset(name, "vectors")
    drafts = "none" if preset.drafter == "none" else drafter
    out = drawn(pipe, PROMPTS[:2], drafter=drafts, acceptance=preset.acceptance)
    assert all(bool(tokens.isfinite().all()) for tokens in out.tokens)
    stats = out.stats[0]
    assert (stats.guarantee == "approximate") == ("drift" in pipe.last_state.meters)
    assert stats.drift_per_token is not None


def test_callbacks_see_vectors(pipe):
    seen = []

    def watch(pipeline, round, tokens, given):
        seen.append(given["latents"])
        return given

    names = ["latents", "tokens"]
    drawn(pipe, PROMPTS[:1], callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names)
    assert seen[0].shape == (1, 4, 4, 8) and bool(seen[0].isnan().any()) and bool(seen[-1].isfinite().all())


@pytest.mark.parametrize("options,message", [
    ({"temperature": 0.0}, "temperature: got 0"),
    ({"temperature": 1e-30}, "temperature: got 1e-30, expected at least 1e-06"),
    ({"top_k": 5}, "top_k: got 5"),
    ({"top_p": 0.5}, r"top_p: got 0\.5"),
    ({"acceptance": "exact"}, "acceptance: Exact judges Categorical"),
    ({"drafter": "jacobi"}, "drafter: Jacobi drafts for Categorical"),
    ({"drafter": "ngram"}, "drafter: ContextDrafter drafts for Categorical"),
    ({"order": "islands"}, "order: got RejectedRegions"),
    ({"acceptance": "coupled:window=0"}, "window: got 0"),
    ({"acceptance": "surrogate:tries=0"}, "tries: got 0"),
    ({"height": 64}, "height, width: got 64"),
])  # fmt: skip
def test_what_can_not_be_is_refused_before_work_starts(pipe, options, message, monkeypatch):
    monkeypatch.setattr(pipe.model.mar, "forward", None)
    with pytest.raises(ValueError, match=f"^{message}"):
        drawn(pipe, **options)


def test_a_nearly_cold_chain_is_finite(pipe):
    """The least temperature that is taken: couplings divide by squares of its deviations."""
    out = drawn(pipe, PROMPTS[:1], temperature=1e-6, acceptance="coupled:window=4")
    assert bool(out.tokens[0].isfinite().all())


def test_a_target_without_noise_in_its_last_step_is_refused(pipe):
    own = pipe.family.steps
    quiet = DenoisingSteps(own.keep, own.move, own.low, own.low, noisy=False)
    rule = registry.rule("coupled")
    with pytest.raises(ValueError, match="without noise in its last step"):
        rule.bind(type("Capabilities", (), {"steps": quiet})())
    silent = ImagePipeline(pipe.model, None)
    silent.family.steps = quiet
    with pytest.raises(ValueError, match=r"^acceptance: got coupled for a target without noise in its last step"):
        drawn(silent, PROMPTS[:1])


def test_a_drafter_that_fails_is_left_out(pipe):
    """NaN from the small head: drafting goes on without these nodes, counted, and the picture is drawn."""
    broken = fresh(seed=1)
    torch.nn.init.constant_(broken.mar.head.final_layer.linear.bias, float("nan"))
    with pytest.warns(RuntimeWarning, match="invalid"):
        out = drawn(pipe, PROMPTS[:1], drafter=SmallMAR(LabelledMARImages(broken)))
    assert out.stats[0].faults > 0 and bool(out.tokens[0].isfinite().all())


def test_a_target_that_fails_says_so():
    model = fresh(SMALL)
    torch.nn.init.constant_(model.mar.head.final_layer.linear.bias, float("nan"))
    with pytest.raises(ValueError, match=r"^model: got a vector that is not finite"):
        drawn(ImagePipeline(model, None), PROMPTS[:1])


def test_schedules_that_do_not_fit_are_refused():
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"^move: got shape"):
        DenoisingSteps(ones, torch.ones(2), ones, ones)
    with pytest.raises(ValueError, match=r"^low: got shape"):
        DenoisingSteps(ones, ones, ones.log() - float("inf"), ones)


def test_a_head_of_fewer_steps_is_another_pipeline(pipe):
    fewer = pipe.with_parts({"denoising_steps": 2})
    out = drawn(fewer, PROMPTS[:1], acceptance="coupled:window=1")
    assert out.traces[0].calls == {"head": 16 * 2} and len(pipe.family.steps) == 4
    for count in (1, 1001):
        with pytest.raises(ValueError, match=rf"^steps: got {count}, expected 2\.\.1000"):
            ImagePipeline(pipe.model, None, parts={"denoising_steps": count})


def test_prompts_of_some_tasks():
    rows = bench_image.spread(included.scenes().prompts(), 10, ["colors", "single_object"])
    assert len(rows) == 10 and {row["tag"] for row in rows} == {"colors", "single_object"}
    assert bench_image.parse_method("coupled", "vectors")[1] == str(registry.presets("vectors")["coupled"])
