"""Pictures of vectors through `ImagePipeline`: the plain loop, presets, batches, and what is refused."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tests.doubles import one_sentence
from tests.test_continuous_painter import SMALL, TINY, build, without_words
from tests.tiny_images import painter_processor
from visspec import ImagePipeline
from visspec.api import presets, zoo
from visspec.cli import bench_image, bench_image_table
from visspec.distributions import Denoising, DenoisingSteps
from visspec.distributions.denoising import evaluated_steps
from visspec.io import included
from visspec.models.continuous.drafter import ContinuousDrafter
from visspec.models.continuous.model import ContinuousImageModel, Sampler
from visspec.models.vectors.target import ContinuousAR
from visspec.sampling import Normals
from visspec.types import Request, Sampling

PROMPTS = ["a photo of a pig", "a photo of a llama on a smooth grey ground", "a photo of an octopus"]
VECTOR_RULES = [
    name for name, entry in zoo.ACCEPTANCE.items() if zoo.load(entry.reference).traits.distribution is Denoising
]


def fresh(name, autoencoder=None, **sizes):
    torch.manual_seed(len(name))
    model = build(autoencoder, **sizes).eval()
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    kinds = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "generation_kwargs": {"boi_token_id": 4}}
    model.generation_config = GenerationConfig(max_length=128, do_sample=True, guidance_scale=2.0, **kinds)
    return model


@pytest.fixture(scope="module")
def pipe():
    return ImagePipeline(fresh("painter", SMALL), painter_processor("painter-continuous"))


@pytest.fixture(scope="module")
def small():
    return fresh("drafter", feature=16)


def drafter(small, pipe, **options):
    return ContinuousDrafter(small, pipe.model, **options)


def drawn(pipe, prompts=PROMPTS, seed=0, **options):
    return pipe(prompts, seed=[seed + i for i in range(len(prompts))], output_type="latent", **options)


def test_defaults_and_shapes(pipe):
    out = pipe(PROMPTS[:2], seed=3)
    assert (pipe.drafter, pipe.acceptance) == ("none", "coupled") and out.images[0].size == (64, 64)
    assert out.tokens[0].shape == (64, 8) and out.maps[0].shape == out.passes[0].shape == (8, 8)
    assert out.stats[0].guarantee == "exact for the declared target"
    latent = pipe(PROMPTS[0], seed=3, output_type="latent").images[0]
    assert latent.shape == (8, 8, 8)
    torch.testing.assert_close(latent[0, :4], out.tokens[0][:4], atol=1e-4, rtol=1e-4)
    assert np.array(out.images[0]).std() > 0


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_plain_decoding_is_the_plain_loop_of_the_model(pipe, guidance):
    """The same vectors as the model's own sampler from the same normal numbers."""
    out = drawn(pipe, PROMPTS[:1], seed=5, acceptance="coupled:window=1", guidance_scale=guidance, temperature=0.7)
    batch = pipe.processor(text=PROMPTS[:1], generation_mode="image", padding=True, return_tensors="pt")
    ids, seen = batch["input_ids"], batch["attention_mask"].bool()
    if guidance != 1.0:
        ids, seen = torch.cat([ids, without_words(pipe.processor.tokenizer, ids)]), seen.repeat(2, 1)
    numbers = iter(Normals([torch.Generator().manual_seed(5)], 4, 8).window(64)[0, :, : 5 * 8].unflatten(1, (5, 8)))

    class Given(Sampler):
        def chain(self, hidden, normal):
            return super().chain(hidden, next(numbers)[:, None])

    expected = Given(pipe.model, guidance, 0.7)(ids, seen)
    torch.testing.assert_close(out.tokens[0], expected[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rule", VECTOR_RULES)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_does_not_depend_on_its_batch(pipe, small, rule, drafts):
    """Rounding differs with the batch, and a uniform number may turn on it: the first vectors are compared."""
    options = {"acceptance": rule, "drafter": drafter(small, pipe, levels=2) if drafts else "none"}
    together = drawn(pipe, **options)
    assert not drafts or all(map(torch.equal, together.tokens, drawn(pipe, **options).tokens))
    for row in (0, 2):
        alone = drawn(pipe, PROMPTS[row : row + 1], seed=row, **options).tokens[0]
        same = torch.isclose(alone, together.tokens[row], atol=1e-3, rtol=1e-3).all(dim=1)
        assert bool(same[:4].all())


def test_its_own_drafts_are_kept(pipe):
    """A drafter that is the target itself: every vector is accepted."""

    class Itself(ContinuousDrafter):
        pass

    own = Itself(pipe.model, pipe.model, levels=3, skip=0.0)
    out = drawn(pipe, PROMPTS[:2], drafter=own, acceptance="coupled:window=1")
    assert out.stats[0].tau > 3.9 and out.stats[0].faults == 0
    assert drawn(pipe, PROMPTS[:2], drafter=own, acceptance="surrogate").stats[0].tau > 3.9


def test_a_drafted_vector_is_read_with_the_condition_it_was_drawn_from(pipe, small):
    """The painter's of those that are verified, the drafter's own of the others."""
    drafts, seen = drafter(small, pipe, levels=3, skip=0.9), []
    read = drafts.own.read

    def watched(state, draft, features):
        hidden = read(state, draft, features)
        seen.append((features, hidden))
        return hidden

    drafts.own.read = watched
    drawn(pipe, PROMPTS[:1], drafter=drafts, acceptance="coupled:window=1")
    for (_, before), (features, _) in list(pairwise(seen))[:2]:
        assert torch.equal(features, before[:, -1:])
    assert all(bool((features != 0).any(dim=-1).all()) for features, _ in seen)


def test_calls_are_counted(pipe, small):
    out = drawn(pipe, PROMPTS[:1], acceptance="coupled:window=1")
    assert out.traces[0].calls == {"head": 64 * 4}
    out = drawn(pipe, PROMPTS[:1], acceptance="coupled:window=4")
    assert 64 <= out.traces[0].calls["head"] < 64 * 4
    out = drawn(pipe, PROMPTS[:1], drafter=drafter(small, pipe, levels=2, skip=0.5))
    chains, rest = divmod(out.traces[0].calls["draft_head"], len(evaluated_steps(4, 0.5)))
    assert chains > 0 and rest == 0 and out.traces[0].calls["head"] > 0


@pytest.mark.parametrize("name", presets.VECTORS)
def test_a_preset_draws(pipe, small, name):
    preset = zoo.preset(name, "vectors")
    drafts = "none" if preset.drafter == "none" else drafter(small, pipe, levels=2)
    out = drawn(pipe, PROMPTS[:2], drafter=drafts, acceptance=preset.acceptance)
    assert all(bool(tokens.isfinite().all()) for tokens in out.tokens)
    stats = out.stats[0]
    metered = stats.guarantee == "approximate" and name != "legacy"
    assert metered == ("drift" in pipe.last_state.meters) and (stats.drift_per_token is None) == (name == "legacy")
    assert ("drift per token not measured (vectors are judged" in str(stats)) == (name == "legacy")


def test_callbacks_see_vectors(pipe):
    seen = []

    def watch(pipeline, round, tokens, given):
        seen.append(given["latents"])
        return given

    names = ["latents", "tokens"]
    drawn(pipe, PROMPTS[:1], callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names)
    assert seen[0].shape == (1, 8, 8, 8) and bool(seen[0].isnan().any()) and bool(seen[-1].isfinite().all())


@pytest.mark.parametrize("options,message", [
    ({"temperature": 0.0}, "temperature: got 0"),
    ({"temperature": 1e-30}, "temperature: got 1e-30, expected at least 1e-06"),
    ({"top_k": 5}, "top_k: got 5"),
    ({"top_p": 0.5}, r"top_p: got 0\.5"),
    ({"acceptance": "exact"}, "acceptance: Exact judges Categorical"),
    ({"drafter": "jacobi"}, "drafter: Jacobi drafts for Categorical"),
    ({"drafter": "ngram"}, "drafter: NGram drafts for Categorical"),
    ({"order": "zipar:window=2"}, "order: got ZipAR"),
    ({"acceptance": "coupled:window=0"}, "window: got 0"),
    ({"acceptance": "surrogate:tries=0"}, "tries: got 0"),
    ({"acceptance": "legacy:softness=0"}, "softness: got 0"),
    ({"height": 32}, "height, width: got 32"),
])  # fmt: skip
def test_what_can_not_be_is_refused_before_work_starts(pipe, options, message, monkeypatch):
    monkeypatch.setattr(pipe.model.decoder, "forward", None)
    with pytest.raises(ValueError, match=f"^{message}"):
        drawn(pipe, **options)


@pytest.mark.parametrize("guidance,guided", [(2.0, False), (1.0, True)])
def test_guidance_without_its_rows_is_refused_before_any_pass(pipe, guidance, guided, monkeypatch):
    monkeypatch.setattr(pipe.model.decoder, "forward", None)
    prompt = pipe.family.prompt(PROMPTS[:2], guided)
    request = Request(prompt, prompt.ids, 64, Sampling(1.0, guidance=guidance))
    with one_sentence(rf"^guidance: got {guidance} and . rows of inputs for 2 prompts"):
        ContinuousAR(pipe.family).prefill(request)


def test_a_drafter_of_other_steps_than_the_pipeline_s_is_refused(pipe, small, monkeypatch):
    """The models agree, the pipeline has a schedule of its own."""
    monkeypatch.setattr(pipe.model.decoder, "forward", None)
    fewer = ImagePipeline(pipe.model, pipe.processor, parts={"denoising_steps": 2})
    with pytest.raises(ValueError, match=r"^drafter: got 4 denoising steps, expected 2"):
        drawn(fewer, PROMPTS[:1], drafter=drafter(small, pipe))


def test_a_nearly_cold_chain_is_finite(pipe):
    """The least temperature that is taken: couplings divide by squares of its deviations."""
    out = drawn(pipe, PROMPTS[:1], temperature=1e-6, acceptance="coupled:window=4")
    assert bool(out.tokens[0].isfinite().all())


@pytest.mark.parametrize("sizes,message", [
    ({"denoising_steps": 3}, "denoising_steps 3, expected 4"), ({"feature": 7}, "feature 7, expected 16"),
    ({"feature": 16, "text": TINY["text"] | {"hidden_size": 32}}, "hidden size 32, expected 16"),
])  # fmt: skip
def test_a_drafter_of_another_kind_is_refused(pipe, sizes, message):
    with pytest.raises(ValueError, match=f"^drafter: got {message}"):
        ContinuousDrafter(fresh("drafter", **sizes), pipe.model)


@pytest.mark.parametrize("name,size", [("token", 4), ("grid", 4)])
def test_a_drafter_of_other_vectors_is_refused(pipe, small, name, size):
    config = copy.copy(small.config)
    setattr(config, name, size)
    with pytest.raises(ValueError, match=f"^drafter: got {name} {size}, expected 8 as the target has"):
        ContinuousDrafter(ContinuousImageModel(config), pipe.model)


def test_a_target_without_noise_in_its_last_step_is_refused(pipe):
    own = pipe.family.steps
    quiet = DenoisingSteps(own.keep, own.move, own.low, own.low, noisy=False)
    rule = zoo.acceptance("coupled")
    with pytest.raises(ValueError, match="without noise in its last step"):
        rule.bind(type("Capabilities", (), {"steps": quiet})())
    silent = ImagePipeline(pipe.model, pipe.processor)
    silent.family.steps = quiet
    with pytest.raises(ValueError, match=r"^acceptance: got coupled for a target without noise in its last step"):
        drawn(silent, PROMPTS[:1])


def test_a_drafter_that_fails_is_left_out(pipe, small):
    """NaN from the small head: drafting goes on without these nodes, counted, and the picture is drawn."""
    broken = fresh("drafter", feature=16)
    torch.nn.init.constant_(broken.head.final_layer.linear.bias, float("nan"))
    with pytest.warns(RuntimeWarning, match="invalid"):
        out = drawn(pipe, PROMPTS[:1], drafter=drafter(broken, pipe, levels=2))
    assert out.stats[0].faults > 0 and bool(out.tokens[0].isfinite().all())


def test_a_target_that_fails_says_so(pipe):
    model = fresh("painter", SMALL)
    torch.nn.init.constant_(model.head.final_layer.linear.bias, float("nan"))
    with pytest.raises(ValueError, match=r"^model: got a vector that is not finite"):
        drawn(ImagePipeline(model, pipe.processor), PROMPTS[:1])


def test_schedules_that_do_not_fit_are_refused():
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"^move: got shape"):
        DenoisingSteps(ones, torch.ones(2), ones, ones)
    with pytest.raises(ValueError, match=r"^low: got shape"):
        DenoisingSteps(ones, ones, ones.log() - float("inf"), ones)
    assert isinstance(fresh("painter").schedule().steps, DenoisingSteps) and issubclass(
        ContinuousImageModel, torch.nn.Module
    )


def test_the_stock_loop_is_the_models_own_sampler(pipe):
    """With guidance, of any number of steps, for prompts of unequal length."""
    layout, sampling = pipe.family.layout(), pipe.sampling(2.0, 1.0, None, None)
    torch.manual_seed(4)
    tokens = pipe.family.stock(PROMPTS[:2], sampling, layout)
    prompt = pipe.family.prompt(PROMPTS[:2], True)
    torch.manual_seed(4)
    assert tokens.shape == (2, 64, 8)
    assert torch.equal(tokens, Sampler(pipe.model, 2.0)(prompt.tokens, prompt.attention))
    with pytest.raises(ValueError, match="cache_implementation: got 'static'"):
        pipe.family.stock(PROMPTS[:1], sampling, layout, cache_implementation="static")


def test_a_head_of_fewer_steps_is_another_pipeline(pipe):
    fewer = pipe.with_parts({"denoising_steps": 2})
    out = drawn(fewer, PROMPTS[:1], acceptance="coupled:window=1")
    assert out.traces[0].calls == {"head": 64 * 2} and len(pipe.family.steps) == 4
    for count in (1, 1001):
        with pytest.raises(ValueError, match=rf"^steps: got {count}, expected 2\.\.1000"):
            ImagePipeline(pipe.model, pipe.processor, parts={"denoising_steps": count})


def test_the_bench_of_vectors(pipe):
    """Passes and calls of the head apart; the model's own loop and fewer steps beside the methods."""
    others = {"two steps": pipe.with_parts({"denoising_steps": 2})}
    record = bench_image.bench(
        pipe, PROMPTS[:2], {"denoise": "none/coupled:window=4"}, {"temperature": 1.0}, warmup=1, others=others
    )
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["plain", "denoise", "two steps"] and not record["failures"]
    assert record["stock"]["cache"] == "dynamic"
    assert rows["plain"]["head_calls"] == 4 and rows["two steps"]["head_calls"] == 2
    assert 1 <= rows["denoise"]["head_calls"] < 4 and rows["denoise"]["trunk_passes"] == rows["plain"]["trunk_passes"]
    heads = [column.header for column in bench_image_table.table(record).columns]
    assert heads[2] == "head calls /\ntoken"


def test_prompts_of_some_tasks():
    rows = bench_image.spread(included.scenes().prompts(), 10, ["colors", "single_object"])
    assert len(rows) == 10 and {row["tag"] for row in rows} == {"colors", "single_object"}
    assert bench_image.parse_method("coupled", "vectors")[1] == str(presets.VECTORS["coupled"])
