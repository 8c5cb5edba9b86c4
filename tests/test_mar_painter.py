"""The MAR painter: its folder, its classes, its drafter, and several tokens in a pass."""

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from tests.doubles import one_sentence
from tests.tiny_images import included_folder
from visspec import ImagePipeline, registry
from visspec.cli import bench_image
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.images import LabelledMARImages
from visspec.models.mar.model import MARImageConfig, MARImageModel
from visspec.models.mar.parallel import ParallelMAR

SMALL = {  # an autoencoder
    "block_out_channels": (8, 8, 8, 8), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 1, "latent_channels": 8, "norm_num_groups": 4,
    "mid_block_add_attention": False, "sample_size": 32, "scaling_factor": 1.0,
}  # fmt: skip
TINY = {"width": 16, "depth": 1, "heads": 2, "head_width": 16, "head_depth": 1, "buffer": 2, "denoising_steps": 4}
PROMPTS = ["a photo of a pig", "a photo of a penguin on a cloudy blue ground"]


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
        with one_sentence(r"^prompt: got .*expected"):
            pipe(text)


def test_a_drafter_drafts_and_its_head_is_counted(pipe, written):
    drafter = SmallMAR.from_pretrained(written / "drafter", pipe.model, wait=4)
    out = pipe(PROMPTS, seed=[1, 2], drafter=drafter, output_type="latent")
    stats, trace = out.stats[0], out.traces[0]
    drafted = sum(r.levels for r in trace.rounds)
    assert stats.faults == 0 and drafted > 0 and trace.calls["draft_head"] == 4 * drafted
    assert trace.calls["head"] > 0 and stats.guarantee == "exact for the declared target"


@pytest.mark.parametrize("sizes,message", [
    ({"denoising_steps": 3}, "got 3 denoising steps, expected 4"),
    ({"size": 4}, "got 16 tokens of 4 numbers and 156 classes, expected the target's 16 of 8 and 156"),
])  # fmt: skip
def test_a_drafter_of_another_kind_is_refused_before_work_starts(pipe, sizes, message):
    other = SmallMAR(LabelledMARImages(fresh(**sizes)))
    with one_sentence(f"^drafter: {message}"):
        pipe(PROMPTS[0], drafter=other)


def test_presets_have_the_drafter_of_the_painter(pipe):
    assert registry.preset("coupled", "vectors").drafter == "mar"
    with one_sentence(r"^drafter: got 'mar', which has to be trained, expected the folder"):
        pipe(PROMPTS[0], preset="coupled")
    known = ImagePipeline.from_pretrained("painter-mar")
    assert known.setup(**registry.preset("coupled", "vectors").method).name == "painter-mar-drafter"


# --- several tokens in a pass -----------------------------------------------------------------------------------------


def test_as_many_passes_as_tokens_are_plain_decoding(pipe):
    plain = pipe(PROMPTS, seed=[1, 2], acceptance="coupled:window=1")
    seen, order = [], ParallelMAR(16)
    watch = {"callback_on_step_end": lambda pipe, step, *rest: seen.append(step) or {}}
    out = pipe(PROMPTS, seed=[1, 2], acceptance="coupled:window=1", order=order, **watch)
    assert len(seen) == 16
    for one, two in zip(plain.tokens, out.tokens):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    assert out.traces[0].calls == plain.traces[0].calls
    assert all((a == b).all() for a, b in zip(out.passes, plain.passes))


def test_fewer_passes_in_the_bench(pipe):
    ways = {"four": "none/coupled:window=1/parallel:iterations=4"}
    others = {"two steps": pipe.with_parts({"denoising_steps": 2})}
    record = bench_image.bench(pipe, PROMPTS[:1], ways, {"temperature": 1.0}, warmup=1, others=others)
    rows = {row["name"]: row for row in record["rows"]}
    assert record["stock"] is None and not record["failures"]
    four = rows["four"]
    assert four["trunk_passes"] == 4 / 16 and four["head_calls"] == 4 * 4 / 16 and four["guarantee"] == "approximate"
    assert rows["plain"]["head_calls"] == 4 and rows["two steps"]["head_calls"] == 2


def test_what_can_not_be_drawn_in_fewer_passes_is_refused(pipe):
    with pytest.raises(ValueError, match="iterations: got 0"):
        ParallelMAR(0)
    with pytest.raises(ValueError, match=r"iterations: got 17, expected 1\.\.16"):
        pipe(PROMPTS[0], order=ParallelMAR(17))
    drafter = SmallMAR(LabelledMARImages(fresh()))
    with pytest.raises(ValueError, match="drafter: got one beside the order parallel"):
        pipe(PROMPTS[0], order=ParallelMAR(4), drafter=drafter)
