"""Training at the size of a real model: Qwen2.5-VL-7B's shapes and vocabulary, of its layers two."""

import pytest
import torch
import torch.nn.functional as F
import transformers as tf

import visspec
from visspec.api.train_drafter import request_of
from visspec.eval.bench.clock import peak_above
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle import feature_drafting
from visspec.models.eagle.drafter import EagleDrafter
from visspec.train.loop import Trainer
from visspec.train.options import TrainingOptions

IMAGE, START, END, ROWS = 151655, 151652, 151653, 2
TEXT = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 2, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "bos_token_id": 151643, "eos_token_id": 151645,
    "pad_token_id": 151643, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    "fullatt_block_indexes": [1],
}  # fmt: skip


class Product(torch.autograd.Function):
    """A product with the head whose gradient is made in float32, in parts: in bfloat16 it takes minutes on a CPU."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        parts = zip(grad.float().split(4096, dim=-1), ctx.weight.split(4096))
        return sum(part @ rows.float() for part, rows in parts).to(grad.dtype), None


def target():
    ids = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = tf.Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False, **ids)
    return tf.Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()


def inputs():
    ids = torch.tensor([[5, START, *[IMAGE] * 16, END, 7, 8]] * ROWS)
    pixels = torch.randn(ROWS * 64, 3 * 2 * 14 * 14, dtype=torch.bfloat16)
    grid = torch.tensor([[1, 8, 8]] * ROWS)
    types = (ids == IMAGE).long()
    return {"input_ids": ids, "mm_token_type_ids": types, "pixel_values": pixels, "image_grid_thw": grid}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_memory_at_size_of_qwen(tmp_path, monkeypatch):
    """bfloat16 weights of 1.64 G parameters (3.3 GB), a drafter of 152 M trained in float32 (2.4 GB)."""
    monkeypatch.setattr(
        feature_drafting, "head_logits", lambda head, x, dtype: Product.apply(x.to(head.weight.dtype), head.weight)
    )
    monkeypatch.setattr(Trainer, "save", lambda self: None)
    losses = []

    def train():
        torch.manual_seed(0)
        model = target()
        drafter = EagleDrafter.for_model(model, image_latents=1, intermediate=1024)
        reads = HFDecoder(model, drafter.traits.feature_layers, embeddings=True, states=True)
        asked = lambda n: request_of(model, inputs(), temperature=1.0, max_new_tokens=4, seed=n)  # noqa: E731
        plan = TrainingOptions(steps=5, batch=ROWS, rows=ROWS, group=1, reuse=5)
        Trainer(reads, drafter, visspec.Exact(), asked, plan, tmp_path, {}).run(lambda r: losses.append(r["loss"]))

    peak, _ = peak_above(torch.device("cpu"), train)
    print(f"peak {peak / 1e9:.2f} GB above imports, losses {losses}")
    assert len(losses) == 5 and losses[1] < losses[0]  # from the fourth on it is another loss
    assert peak < 6.25e9
