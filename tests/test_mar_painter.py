"""Pictures of vectors through `ImagePipeline`, by tiny MAR painters: presets, batches, drafters and refusals."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from tests.doubles import ProductRows, raises_line
from tests.tiny_images import included_folder
from visspec import ImagePipeline, registry
from visspec.cli import bench_image
from visspec.distributions import Denoising, DenoisingSteps
from visspec.io import included
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.layout import MARImageConfig, MARImageModel
from visspec.models.mar.parallel import ParallelMAR
from visspec.models.mar.target import MARImages

SMALL = {  # an autoencoder
    "block_out_channels": (8, 8, 8, 8), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 1, "latent_channels": 8, "norm_num_groups": 4,
    "mid_block_add_attention": False, "sample_size": 32, "scaling_factor": 1.0,
}  # fmt: skip
TINY = {"width": 16, "depth": 1, "heads": 2, "head_width": 16, "head_depth": 1, "buffer": 2, "denoising_steps": 4}
PROMPTS = ["a photo of a pig", "a photo of a llama on a smooth grey ground", "a photo of an octopus"]
VECTOR_RULES = [name for name, entry in registry.table("rule").items() if entry.load().traits.distribution is Denoising]


def fresh(autoencoder=None, seed=0, **sizes):
    torch.manual_seed(seed)
    labels = MARImageConfig.from_pretrained(included_folder("painter-mar")).labels
    network = TINY | {"size": 8, "tokens": 16, "classes": len(labels)} | sizes
    steps = network.pop("denoising_steps")
    model = MARImageModel(MARImageConfig(network, labels, "velocity", steps, autoencoder)).eval()
    for parameter in model.mar.head.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.generation_config = GenerationConfig(guidance_scale=2.0)
    return model


@pytest.fixture(scope="module")
def pipe():
    return ImagePipeline(fresh(SMALL), None)


@pytest.fixture(scope="module")
def written(pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mar")
    pipe.model.save_pretrained(folder / "painter")
    fresh(seed=1).save_pretrained(folder / "drafter")
    return folder


def test_prompts_are_names_of_classes(pipe):
    labels = pipe.model.config.labels
    pig = labels.index(PROMPTS[0])
    out = pipe([PROMPTS[0], str(pig)], seed=[3, 3])
    torch.testing.assert_close(out.tokens[0], out.tokens[1], atol=1e-4, rtol=1e-4)
    assert out.images[0].size == (32, 32)
    assert pipe.family.default_guidance == 2.0 and len(labels) == 156
    for text in ("a photo of a dog", "156", ""):
        with raises_line(r"^prompt: got .*expected"):
            pipe(text)


def test_drafter_head_calls(pipe, written):
    drafter = SmallMAR.from_pretrained(written / "drafter", pipe.model)
    out = pipe(PROMPTS[:2], seed=[1, 2], drafter=drafter, output_type="latent")
    stats, trace = out.stats[0], out.traces[0]
    drafted = sum(r.levels for r in trace.rounds)
    assert stats.faults == 0 and drafted > 0 and trace.calls["draft_head"] == 4 * drafted
    assert trace.calls["head"] > 0 and stats.guarantee == "exact for the declared target"


@pytest.mark.parametrize("invariant, drafted", [(True, False), (True, True), (False, True)])
def test_batch_changes_no_bit(written, drafted, invariant):
    """With `batch_invariant`, in bfloat16. Without it pictures share passes; rounding depends on the processor."""
    pipe = ImagePipeline.from_pretrained(written / "painter", dtype="bfloat16", batch_invariant=invariant)
    drafter = SmallMAR.from_pretrained(written / "drafter", pipe.model) if drafted else None
    options = {"drafter": drafter, "output_type": "latent"}
    with ProductRows() as one:
        alone = [pipe(text, seed=seed, **options).tokens[0] for seed, text in enumerate(PROMPTS[:2])]
    with ProductRows() as several:
        together = pipe(PROMPTS[:2], seed=[0, 1], **options).tokens
    assert (max(several.rows) == max(one.rows)) == invariant
    assert not invariant or all(map(torch.equal, together, alone))


def test_presets_use_painter_drafter():
    assert registry.preset("coupled", "vectors").drafter == "mar"
    known = ImagePipeline.from_pretrained("painter-mar")
    assert known.setup(**registry.preset("coupled", "vectors").method).name == "painter-mar-drafter"


# --- several tokens in a pass -----------------------------------------------------------------------------------------


def test_fewer_passes_in_the_bench(pipe):
    ways = {"four": "none/coupled:window=1/parallel:iterations=4"}
    others = {"two steps": pipe.with_parts({"denoising_steps": 2})}
    record = bench_image.bench(pipe, PROMPTS[:1], ways, {"temperature": 1.0}, warmup=1, others=others)
    rows = {row["name"]: row for row in record["rows"]}
    assert record["stock"] is None and not record["failures"]
    four = rows["four"]
    assert four["trunk_passes"] == 4 / 16 and four["head_calls"] == 4 * 4 / 16 and four["guarantee"] == "approximate"
    assert rows["plain"]["head_calls"] == 4 and rows["two steps"]["head_calls"] == 2


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter():
    return small(seed=1)["drafter"]


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
    own = SmallMAR(MARImages(pipe.model))
    out = drawn(pipe, PROMPTS[:2], drafter=own, acceptance="coupled:window=1")
    assert out.stats[0].tau > 3.9 and out.stats[0].faults == 0
    assert drawn(pipe, PROMPTS[:2], drafter=own, acceptance="surrogate").stats[0].tau > 3.9


@pytest.mark.parametrize("name", registry.presets("vectors"))
def test_a_preset_draws(pipe, drafter, name):
    preset = registry.preset(name, "vectors")
    drafts = "none" if preset.drafter == "none" else drafter
    out = drawn(pipe, PROMPTS[:2], drafter=drafts, acceptance=preset.acceptance)
    assert all(bool(tokens.isfinite().all()) for tokens in out.tokens)
    stats = out.stats[0]
    assert (stats.guarantee == "approximate") == (pipe.last_state.drift is not None)
    assert stats.drift_per_token is not None


def test_callbacks_see_vectors(pipe):
    seen = []

    def watch(pipeline, round, tokens, given):
        seen.append(given["latents"])
        return given

    names = ["latents", "tokens"]
    drawn(pipe, PROMPTS[:1], callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names)
    assert seen[0].shape == (1, 4, 4, 8) and bool(seen[0].isnan().any()) and bool(seen[-1].isfinite().all())


def small(**sizes):
    return {"drafter": SmallMAR(MARImages(fresh(**sizes)))}


REFUSED = [
    (lambda: {"temperature": 0.0}, "temperature: got 0"), (lambda: {"top_k": 5}, "top_k: got 5"),
    (lambda: {"temperature": 1e-30}, "temperature: got 1e-30, expected at least 1e-06"),
    (lambda: {"top_p": 0.5}, r"top_p: got 0\.5"), (lambda: {"height": 64}, "height, width: got 64"),
    (lambda: {"acceptance": "exact"}, "acceptance: Exact judges Categorical"),
    (lambda: {"drafter": "jacobi"}, "drafter: Jacobi drafts for Categorical"),
    (lambda: {"order": "islands"}, "order: got RejectedRegions for Categorical"),
    (lambda: {"acceptance": "coupled:window=0"}, "window: got 0"),
    (lambda: {"acceptance": "surrogate:tries=0"}, "tries: got 0"),
    (lambda: {"order": ParallelMAR(0)}, "iterations: got 0"),
    (lambda: {"order": ParallelMAR(17)}, r"iterations: got 17, expected 1\.\.16"),
    (lambda: {"order": ParallelMAR(4), **small()}, "drafter: got one with the order parallel"),
    (lambda: small(denoising_steps=3), "drafter: got 3 denoising steps, expected 4"),
    (lambda: small(size=4),
     "drafter: got 16 tokens of 4 numbers and 156 classes, expected 16 of 8 and 156"),
    (lambda: {"preset": "coupled"}, "drafter: 'mar' must be trained first. Pass the folder"),
]  # fmt: skip


@pytest.mark.parametrize("options,message", REFUSED)
def test_refused_before_work(pipe, options, message, monkeypatch):
    monkeypatch.setattr(pipe.model.mar, "forward", None)
    with raises_line(f"^{message}"):
        drawn(pipe, **options())


def test_a_nearly_cold_chain_is_finite(pipe):
    """The least temperature that is taken: couplings divide by squares of its deviations."""
    out = drawn(pipe, PROMPTS[:1], temperature=1e-6, acceptance="coupled:window=4")
    assert bool(out.tokens[0].isfinite().all())


def test_last_step_without_noise_refused(pipe):
    own = pipe.family.steps
    quiet = DenoisingSteps(own.keep, own.move, own.low, own.low, noisy=False)
    silent = ImagePipeline(pipe.model, None)
    silent.family.steps = quiet
    with pytest.raises(ValueError, match=r"^acceptance: coupled needs noise in the target.s last step"):
        drawn(silent, PROMPTS[:1])


def test_a_drafter_that_fails_is_left_out(pipe):
    """NaN from the small head: drafting goes on without these nodes, counted, and the picture is drawn."""
    broken = fresh(seed=1)
    torch.nn.init.constant_(broken.mar.head.final_layer.linear.bias, float("nan"))
    with pytest.warns(RuntimeWarning, match="invalid"):
        out = drawn(pipe, PROMPTS[:1], drafter=SmallMAR(MARImages(broken)))
    assert out.stats[0].faults > 0 and bool(out.tokens[0].isfinite().all())


def test_a_target_that_fails_says_so():
    model = fresh(SMALL)
    torch.nn.init.constant_(model.mar.head.final_layer.linear.bias, float("nan"))
    with pytest.raises(ValueError, match=r"^model: The head returned a vector that is not finite"):
        drawn(ImagePipeline(model, None), PROMPTS[:1])


def test_wrong_schedules():
    ones = torch.ones(3)
    for message, parts in (("move", (ones, ones[:2], ones)), ("low", (ones, ones, ones - torch.inf))):
        with pytest.raises(ValueError, match=f"^{message}: got shape"):
            DenoisingSteps(*parts, ones)


def test_fewer_denoising_steps(pipe):
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
