"""MAR and NextStep-1 in the image pipeline, and NextStep-1's nodes and images against its published sampler."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.doubles import generators, raises_line
from tests.layouts import NEXTSTEP, TINY_KL, filled, kl_names, nextstep_folder, nextstep_names
from tests.test_mar_target import PLAN, network, ruled
from visspec import ImagePipeline
from visspec import tree as trees
from visspec.loop.decode import decode
from visspec.loop.draft_length import FixedLength
from visspec.models.mar import layout as layouts_mar
from visspec.models.mar.drafter import SmallMAR
from visspec.models.mar.target import MARImages
from visspec.models.nextstep import layout as layouts_nextstep
from visspec.models.nextstep.flow import flow_schedule, flow_schedule_v11
from visspec.models.nextstep.target import NextStepImages, NextStepTarget
from visspec.types import Draft, Request, Sampling

STEPS = 6


class Words:
    bos_token = None

    def __call__(self, texts, padding=False, padding_side="right", return_tensors="pt"):
        rows = [[ord(c) % 30 for c in text] for text in ([texts] if isinstance(texts, str) else texts)]
        width = max(map(len, rows))
        blank = [[0] * (width - len(row)) for row in rows]
        pairs = [(n, row) if padding_side == "left" else (row, n) for n, row in zip(blank, rows)]
        ids = torch.tensor([a + b for a, b in pairs], dtype=torch.long).view(len(rows), width)
        real = torch.tensor([[int(part is not n) for part in pair for _ in part] for pair, n in zip(pairs, blank)])
        return {"input_ids": ids, "attention_mask": real}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("families")
    nextstep_folder(path / "nextstep", filled(nextstep_names(), 0.1))
    nextstep_folder(path / "vae", filled(kl_names(*TINY_KL[:-1], (), quantised=False), 0.1),
                    scaling_factor=0.5, shift_factor=0.1)  # fmt: skip
    save_file(filled(kl_names(*TINY_KL), 0.1), path / "kl16.safetensors")
    return path


@pytest.fixture(params=[False, True])
def images(folder, request):
    model = layouts_nextstep.load_nextstep(folder / "nextstep", normalised=request.param)
    return NextStepImages(model, Words(), layouts_nextstep.load_nextstep_vae(folder / "vae"), flow_schedule(STEPS))


def asked(images, texts, guidance, layout):
    prompt = images.prompt(texts, guidance != 1.0, layout)
    assert torch.equal(images.decoder.embed_tokens(prompt.tokens), prompt.embeds)
    given = generators(len(texts))
    sampling = Sampling(1.0, guidance=guidance)
    return Request(prompt, prompt.ids, layout.positions, sampling, generators=given, grid=layout.grid)


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_nextstep_published_sampler(images, guidance):
    """Token after token, each by the authors' formulas, with the same normal numbers."""
    layout, texts = images.layout(4 * 2, 6 * 2), ["a cat", "tea"]
    target = NextStepTarget(images)
    rule = ruled(target)
    state = decode(target, None, rule, asked(images, texts, guidance, layout), FixedLength(1))
    noise = rule.make_noise(generators(2), 0).numbers(layout.positions)
    start, normal = (part.unflatten(0, (2, layout.positions)) for part in (noise.start, noise.steps))
    model, qwen = images.model, images.decoder
    grid = [i / (STEPS - 1) * 0.96 for i in range(STEPS)]
    for row, text in enumerate(texts):
        values = torch.zeros(0, 16)
        for index in range(layout.positions):
            conditions = []
            for words in (text, "")[: 2 if guidance != 1.0 else 1]:
                ids = [ord(c) % 30 for c in f"{words}<|image_area|>2*3"] + [NEXTSTEP["boi"]]
                embeds = torch.cat([qwen.embed_tokens(torch.tensor([ids])), model.embed(values)[None]], dim=1)
                hidden = qwen(inputs_embeds=embeds).last_hidden_state[:, -1]
                conditions.append(model.image_out_projector(hidden))
            x = start[row, index][None]

            def velocity(x, t, conditions=conditions):
                message = [model.head(x, torch.tensor([t]), condition) for condition in conditions]
                return message[0] if guidance == 1.0 else message[1] + guidance * (message[0] - message[1])

            for i, (t, after) in enumerate(pairwise(grid)):
                v, dt = velocity(x, t), after - t
                score = (t * v - x) / ((1 - t) ** 2 + t * (1 - t))
                x = x + (v + (1 - t) * score) * dt
                x = x + math.sqrt(2 * (1 - t) * dt) * normal[row, index, i]
            x = x + 0.04 * velocity(x, grid[-1]) + 0.00625 * normal[row, index, STEPS - 1]  # the declared noise
            values = torch.cat([values, x])
        torch.testing.assert_close(state.output.values(row), values, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_nextstep_law_of_nodes(images):
    layout, target = images.layout(8, 12), NextStepTarget(images)
    draft = torch.randn(2, 4, 16)
    (one, _), (many, _) = (target.prefill(asked(images, ["a cat", "tea"], 2.0, layout)) for _ in range(2))
    for state in (one, many):
        state.position = state.position + 1
    together = target.verify(many, Draft(draft, trees.chain(3, "cpu"))).distribution
    x, step = torch.randn(2, 3, 16), torch.tensor([0, 2, STEPS - 1]).expand(2, -1)
    for node in range(4):
        alone = target.verify(one, Draft(draft[:, node : node + 1], trees.chain(0, "cpu"))).distribution
        one.cache.slots.commit([[0]] * 4)
        one.position = one.position + 1
        result = together.kernel(x, step, torch.tensor([node, 4 + node]))
        for a, b in zip(result, alone.kernel(x, step)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_nextstep_in_the_pipeline(folder):
    model = layouts_nextstep.load_nextstep(folder / "nextstep", normalised=True)
    parts = {"autoencoder": layouts_nextstep.load_nextstep_vae(folder / "vae"), "plan": flow_schedule_v11(STEPS)}
    pipe = ImagePipeline(model, Words(), parts=parts)
    out = pipe(["a cat", "tea"], height=8, width=12, seed=[1, 2], output_type="np")
    assert [image.shape for image in out.images] == [(8, 12, 3)] * 2
    alone = pipe("tea", height=8, width=12, seed=2, output_type="np").images[0]
    np.testing.assert_allclose(alone, out.images[1], atol=2e-3)
    other = pipe("tea", negative_prompt="dog", height=8, width=12, seed=2, output_type="np").images[0]
    assert np.abs(alone - other).max() > 1e-3
    for change, words in (({"height": 7}, "expected multiples of 4"), ({"temperature": 0.0}, "expected a positive"),
                          ({"top_k": 5}, "top_k: got 5, expected 0")):  # fmt: skip
        with raises_line(words):
            pipe("tea", **{"height": 8, "width": 12} | change)


def test_nextstep_batch_changes_no_bit(folder):
    model = layouts_nextstep.load_nextstep(folder / "nextstep", normalised=True).to(torch.bfloat16)
    parts = {"autoencoder": layouts_nextstep.load_nextstep_vae(folder / "vae"), "plan": flow_schedule_v11(STEPS)}
    pipe = ImagePipeline(model, Words(), parts=parts, batch_invariant=True)
    options = {"height": 8, "width": 12, "output_type": "latent"}
    out = pipe(["a cat", "tea"], seed=[1, 2], **options)
    assert torch.equal(pipe("tea", seed=2, **options).tokens[0], out.tokens[1])


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_mar_in_the_pipeline(folder, guidance):
    parts = {"autoencoder": layouts_mar.load_mar_vae(folder / "kl16.safetensors"), "plan": PLAN}
    pipe = ImagePipeline(network(0), None, parts=parts)
    out = pipe(["1", "3"], seed=[1, 2], guidance_scale=guidance, output_type="np")
    assert [image.shape for image in out.images] == [(6, 6, 3)] * 2
    alone = pipe("3", seed=2, guidance_scale=guidance, output_type="np").images[0]
    np.testing.assert_allclose(alone, out.images[1], atol=2e-3)
    drafting = ImagePipeline(network(0), None, SmallMAR(MARImages(network(0, 0.081), plan=PLAN)), parts=parts, levels=3)
    out = drafting(["1", "3", "0"], seed=[1, 2, 3], guidance_scale=guidance, output_type="latent")
    assert [image.shape for image in out.images] == [(3, 3, 4)] * 3
    order = [torch.randperm(9, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    for row, drawn in enumerate(order):  # the first token drawn is of the first pass, wherever it stands
        passes = torch.from_numpy(out.passes[row]).flatten()[drawn]
        assert passes[0] == 0 and bool((passes.diff() >= 0).all()) and len(out.passes[row]) == 3
    assert sum(t.faults for t in out.traces) == 0
    assert max(count for t in out.traces for r in t.rounds for count in r.committed) > 1


def test_mar_refuses_what_it_can_not_draw(folder):
    pipe = ImagePipeline(network(0), None, parts={"plan": PLAN})
    for change, words in (
        ({"prompt": "a cat"}, "prompt: got 'a cat', expected a class number 0..4"),
        ({"negative_prompt": "2", "guidance_scale": 2.0}, "mar does not support it"),
        ({"output_type": "np"}, "no autoencoder was given"),
    ):
        with raises_line(words):
            pipe(**{"prompt": "1", "seed": 0, "output_type": "latent"} | change)
    vae = layouts_mar.load_mar_vae(folder / "kl16.safetensors")
    with pytest.raises(ValueError, match="autoencoder: got 4 channels, which do not fit tokens of size 6"):
        MARImages(type(network(0))(replace(network(0).config, size=6)), autoencoder=vae)
