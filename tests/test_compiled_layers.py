"""Layers are compiled and then recorded: the same tokens, one graph for all layers, and the model as it was."""

import copy
import warnings

import pytest
import torch
import transformers as tf
from torch._dynamo.backends.common import aot_autograd

import visspec
from tests import image_cases as images
from tests.doubles import Hostile, Oracle, TreeOracle, fast, new_tokens, stock
from tests.replays import recording, tensors
from tests.test_compiled import broken, dressed, wrong
from tests.test_compiled import features as feature_drafter
from tests.tiny import llama, model_of, prompt, qwen2, shapes
from visspec import replay
from visspec.models.attention import draft_attention, pass_inputs
from visspec.models.decoder import probe
from visspec.models.image_codes.target import ImageAR
from visspec.models.jacobi.drafter import Jacobi
from visspec.models.runner import buffer_pool, compiled
from visspec.models.runner.views import join_weights

NEW = 12
aten = torch.ops.aten


def called_again(call):
    """In place of `replay.cuda_graph`: replays run the call itself, compiled code included, into the same outputs."""
    output = call()

    def again() -> None:
        for old, new in zip(tensors(output), tensors(call())):
            old.copy_(new)

    return output, again


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(buffer_pool, "MIN_NEW_TOKENS", 1)
    monkeypatch.setattr(buffer_pool, "FIRST", 64)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    recording(monkeypatch)
    monkeypatch.setattr(replay.Recordings, "_graph", lambda self, call: called_again(call))
    yield
    torch._dynamo.reset()


def greedy(model, name, shape):
    inputs = prompt(name, shapes(name)[shape])
    return new_tokens(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), inputs)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name, shape, layers", [
    ("llama", "one", 1), ("llama", "ragged", 1),
    ("gemma3", "ragged", None),  # windows: which mask a layer uses follows from its number
    ("qwen2_5_vl", "video", 1), ("llava", "ragged", 1),
])  # fmt: skip
def test_tokens(name, shape, layers):
    """Layers of a class share their graphs, one for each recording."""
    model, want = model_of(name), stock(name, shape, NEW)
    before = dressed(model)
    quick = fast(name, TreeOracle(want, wrong=0.3), compile=True)
    assert greedy(quick, name, shape) == want
    recorder = quick.target.recorder
    assert recorder.compiled and quick.target.passes is None and recorder.graphs > 0
    if layers:
        assert recorder.layers.graphs <= recorder.graphs * layers and recorder.layers.late == 0
    assert greedy(quick, name, shape) == want
    assert dressed(model) == before


@pytest.mark.filterwarnings("error")
def test_tree_attention(monkeypatch):
    """As on a GPU in 16 bits, without a mask."""
    monkeypatch.setattr(draft_attention, "of_device", lambda device, dtype: (pass_inputs.TREE, ""))
    monkeypatch.setattr(probe, "_answers", {})
    quick = fast("llama", Oracle(stock("llama", "ragged", NEW)), compile=True)
    assert greedy(quick, "llama", "ragged") == stock("llama", "ragged", NEW)
    assert quick.target.recorder.compiled and quick.target.masks.backend.name == pass_inputs.TREE


@pytest.mark.filterwarnings("error")
def test_features():
    """A drafter that reads hidden states gets those of compiled layers."""
    model, inputs = model_of("llava"), prompt("llava", shapes("llava")["ragged"])
    drafter = feature_drafter(model)
    results = []
    for compile in (False, True):
        quick = visspec.accelerate(model, copy.copy(drafter), adaptive=False, compile=compile)
        results.append(quick.run(**inputs, max_new_tokens=NEW, do_sample=False).state)
        assert quick.target.recorder.compiled == compile and quick.drafter.recorder is not None
    assert results[0].tokens == results[1].tokens
    assert [r.committed for r in results[0].trace.rounds] == [r.committed for r in results[1].trace.rounds]


@pytest.mark.filterwarnings("error")
def test_layer_numbers():
    """What a layer computes from its number is compiled for each layer."""
    config = tf.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=64, scale_attn_by_inverse_layer_idx=True)
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(config).eval()
    inputs = {"input_ids": torch.arange(5, 17)[None], "max_new_tokens": NEW, "do_sample": False}
    inputs |= {"output_logits": True, "return_dict_in_generate": True}
    quick = visspec.accelerate(model, "ngram", compile=True, graphs=True, adaptive=False)
    want, got = model.generate(**inputs), quick.generate(**inputs)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    assert quick.target.recorder.compiled and quick.target.recorder.layers.graphs > 3


def test_image_codes(monkeypatch):
    case, used = images.made("janus"), []

    def made(family):
        target = ImageAR(family)
        target.record(None, compile=True)
        used.append(target.recorder)
        return target

    plain = images.draw(case, [0, 1], Jacobi(5), temperature=1.0)[0]
    monkeypatch.setattr(images, "ImageAR", made)
    monkeypatch.setattr(case.family, "recorder", None)
    assert images.draw(case, [0, 1], Jacobi(5), "exact", 1.0)[0] == plain
    assert used[0].compiled and used[0].graphs > 0


@pytest.mark.parametrize("backend, said", [(broken, "no compiler here"), (wrong, "differs by")])
def test_failure_warns_once(monkeypatch, backend, said):
    """Passes are then recorded without compiled layers."""
    monkeypatch.setattr(compiled, "BACKEND", backend)
    quick = fast("llama", Hostile(), compile=True)
    with pytest.warns(RuntimeWarning, match=f"compile: got LlamaForCausalLM with passes that .*{said}") as caught:
        assert greedy(quick, "llama", "one") == stock("llama", "one", NEW)
        assert greedy(quick, "llama", "ragged") == stock("llama", "ragged", NEW)
    recorder = quick.target.recorder
    assert len(caught) == 1 and not recorder.compiled and recorder.graphs > 0 and not recorder.refused


def test_layers_with_their_own_forward():
    model = llama(seed=16)
    model.model.layers[0].forward = model.model.layers[0].forward
    quick = visspec.accelerate(model, None, compile=True)
    inputs = prompt("llama", shapes("llama")["one"])
    with pytest.warns(RuntimeWarning, match="compile: got LlamaForCausalLM with a forward of the instance's own"):
        result = quick.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(result, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))
    assert quick.target.recorder.graphs > 0


def test_changed_model_is_compiled_again():
    model = llama(seed=13)
    quick = visspec.accelerate(model, "ngram", compile=True, adaptive=False)
    inputs, layer = prompt("llama", shapes("llama")["one"]), model.model.layers[0].mlp
    for _ in range(2):
        result = quick.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(result, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))
        assert quick.target.recorder.compiled
        layer.up_proj = torch.nn.Sequential(layer.up_proj, torch.nn.Tanh())


def test_options():
    """Compiled and recorded are independent: without recordings, passes are compiled whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for graphs, recorded in ((None, True), (True, True), (False, False)):
            target = visspec.accelerate(llama(seed=9), None, compile=True, graphs=graphs).target
            assert (target.recorder is not None) == recorded and (target.passes is None) == recorded


@pytest.mark.slow
def test_rounding_of_16_bits(monkeypatch):
    """Generated code rounds as the stock modules do: a pass has the same bits."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    model, inputs = llama(seed=14).bfloat16(), prompt("llama", shapes("llama")["one"])
    eager, quick = (visspec.accelerate(model, None, compile=c, adaptive=False) for c in (False, True))
    asked = {**inputs, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
    want, got = (each.generate(**asked, do_sample=False).logits for each in (eager, quick))
    assert quick.target.recorder.compiled and len(want) == NEW
    assert all(torch.equal(a, b) for a, b in zip(want, got))


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, qwen2])  # qwen2 has biases
def test_joined_products(make, monkeypatch, tmp_path):
    """One product for q, k and v and one for gate and up, and the same tokens. The model is saved as before."""
    products = []

    def count(graph, inputs):
        products.append(sum(node.target in (aten.mm.default, aten.addmm.default) for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", aot_autograd(fw_compiler=count))
    model, inputs = make(seed=13), prompt("llama", shapes("llama")["one"])
    want, state = model.generate(**inputs, max_new_tokens=NEW, do_sample=False), copy.deepcopy(model.state_dict())
    for expected in (7, 4):
        products.clear()
        quick = visspec.accelerate(model, None, compile=True)
        assert torch.equal(quick.generate(**inputs, max_new_tokens=NEW, do_sample=False), want)
        assert quick.target.recorder.compiled and set(products) == {expected}
        join_weights(model.model)
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(state[name], x) for name, x in loaded.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype, joined, monkeypatch):
    """Generated code in real CUDA graphs, for rows of different length."""
    monkeypatch.undo()
    model = llama(seed=9).to("cuda", dtype)
    inputs = {name: x.cuda() for name, x in prompt("llama", shapes("llama")["ragged"]).items()}
    asked = {**inputs, "max_new_tokens": 40, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want = visspec.accelerate(model, "ngram", adaptive=False).generate(**asked)
    if joined:
        join_weights(model.model)
    quick = visspec.accelerate(model, "ngram", adaptive=False, compile=True)
    for _ in range(2):
        got = quick.generate(**asked)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    recorder = quick.target.recorder
    assert recorder.compiled and recorder.graphs > 0 and not recorder.refused
