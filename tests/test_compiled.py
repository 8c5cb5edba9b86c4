"""Compiled passes equal stock generate, compile nothing after the warm-up, and leave the model as it was."""

import copy
import gc
import random
import warnings
import weakref
from functools import partial

import pytest
import torch

import visspec
from tests import tiny_images
from tests.doubles import Hostile, fast, new_tokens, stock, together
from tests.tiny import FAMILIES, gemma3, llama, llava, model_of, prompt, qwen2_5_vl, shapes
from visspec.models.eagle import layer
from visspec.models.eagle.drafter import EagleDrafter
from visspec.models.runner import compiled

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(compiled, "WORTH", 1)
    yield
    torch._dynamo.reset()


def dressed(model) -> list:
    held = [(name, module, module._forward_hooks, module._forward_pre_hooks) for name, module in model.named_modules()]
    return [(name, sorted(vars(m)), list(hooks), list(before), list(m._modules)) for name, m, hooks, before in held]


def ids_of(length: int, rows: int = 1) -> dict:
    return {"input_ids": torch.randint(4, 60, (rows, length))}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
def test_two_graphs_per_row_count(backend, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", backend)
    model = llama(seed=11, num_hidden_layers=1)
    before = dressed(model)
    quick = visspec.accelerate(model, "ngram", compile=True, adaptive=False)
    passes = quick.target.passes
    for rows, graphs in (("one", 2), ("ragged", 4), ("one", 4), ("several", 4), ("even", 4)):
        inputs = prompt("llama", shapes("llama")[rows])
        result = quick.generate(**inputs, **GREEDY)
        assert torch.equal(result, model.generate(**inputs, **GREEDY))
        assert (passes.graphs, passes.late) == (graphs, 0), rows
    assert passes.ready == {False, True} and not passes.refused
    assert dressed(model) == before
    gone = weakref.ref(passes)
    del quick, passes
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None and dressed(model) == before


PROMPTLY = {  # windows, M-RoPE, of as few layers as show them; and `llama` above, `llava` below, with a drafter
    "gemma3": (partial(gemma3, layers=2), ["ragged"]),
    "qwen2_5_vl": (partial(qwen2_5_vl, num_hidden_layers=1), ["one", "several", "video"]),
}


def check_every_shape(name, model, among):
    quick = visspec.accelerate(model, Hostile(), compile=True, adaptive=False)
    for rows in among:
        inputs, options = prompt(name, shapes(name)[rows]), {"max_new_tokens": 14, "do_sample": False}
        assert torch.equal(quick.generate(**inputs, **options), model.generate(**inputs, **options)), rows
    passes = quick.target.passes
    assert (passes.late, passes.refused) == (0, "")
    assert passes.graphs == 2 * len(passes.ready)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTLY)
def test_no_late_graph(name):
    make, among = PROMPTLY[name]
    check_every_shape(name, make(), among)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"llama"}))
def test_no_late_graph_of_any_family(name, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    check_every_shape(name, model_of(name), shapes(name))


def test_late_compilations_counted(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    functions = compiled.CompiledFunctions("a model")
    double = functions.compile(lambda x: 2 * x)
    with functions.warm_up(False, "doubling"):
        double(torch.ones(3))
    double(torch.ones(3).double())
    assert (functions.graphs, functions.late) == (2, 1)


@pytest.mark.nightly
def test_no_late_graph_inductor(monkeypatch):
    """With generated code, because that has guards of its own."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    model, chance = llama(seed=12, max_position_embeddings=4096), random.Random(0)
    quick = visspec.accelerate(model, Hostile(), compile=True, adaptive=False)
    passes, late = quick.target.passes, []
    for i in range(200):
        rows, length = chance.choice((1, 1, 1, 2, 3)), chance.randrange(2, 400)
        inputs = ids_of(length, rows)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for row in range(1, rows):
            inputs["attention_mask"][row, : chance.randrange(length - 1)] = 0
        asked = {"max_new_tokens": chance.randrange(2, 12), "do_sample": False}
        result = quick.generate(**inputs, **asked)
        if i % 10 == 0:
            assert torch.equal(result, model.generate(**inputs, **asked)), (rows, length)
        if passes.late:
            late.append((i, rows, length))
    assert not late and passes.graphs == 4 and not passes.refused


@pytest.mark.slow
def test_images_with_guidance_in_two_graphs(tmp_path):
    tiny_images.painter(tmp_path, num_hidden_layers=1)
    pipe, quick = (visspec.ImagePipeline.from_pretrained(tmp_path, compile=compile) for compile in (False, True))
    asked = dict(prompt=["a", "a b c"], seed=3, output_type="latent")
    for options in ({"batch_size": 1}, {"batch_size": 2, "guidance_scale": 2.0}):
        plain, result = pipe(**asked, **options), quick(**asked, **options)
        assert all(torch.equal(x, y) for x, y in zip(plain.tokens, result.tokens))
    passes = [target.passes for target in {setup.target for (setup, _) in quick._built.values()}]
    assert [(p.graphs, p.late, p.refused) for p in passes] == [(2, 0, "")]


def test_changed_model_is_compiled_again(monkeypatch):
    made, model, inputs = [], llama(seed=13, num_hidden_layers=1), ids_of(14)
    monkeypatch.setattr(compiled.CompiledFunctions, "compile", lambda _, function: made.append(function) or function)
    quick, layer = visspec.accelerate(model, "ngram", compile=True, adaptive=False), model.model.layers[0].mlp
    for count in (1, 2):
        assert torch.equal(quick.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
        assert len(made) == count and quick.target.passes.ready == {False}
        layer.up_proj = torch.nn.Sequential(layer.up_proj, torch.nn.Tanh())


@pytest.mark.nightly
@pytest.mark.parametrize("moved", [False, True])
def test_moved_or_changed_model_recompiles(moved):
    model = llama(seed=13, num_hidden_layers=1)
    quick = visspec.accelerate(model, "ngram", compile=True, adaptive=False)
    inputs, layer = ids_of(14), model.model.layers[0].mlp
    for graphs in (2, 2 if moved else 4):
        assert torch.equal(quick.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
        assert (quick.target.passes.graphs, quick.target.passes.late) == (graphs, 0)
        if moved:
            quick.to(torch.float64)
        else:
            layer.up_proj = torch.nn.Sequential(layer.up_proj, torch.nn.Tanh())


def test_a_short_request_compiles_nothing(monkeypatch):
    monkeypatch.setattr(compiled, "WORTH", 13)
    quick = fast("llama", "ngram", compile=True)
    inputs = prompt("llama", shapes("llama")["one"])
    assert new_tokens(quick.generate(**inputs, **GREEDY), inputs) == stock("llama", "one", 12)
    assert quick.target.passes.graphs == 0 and not quick.target.passes.refused


def broken(graph, *inputs):
    raise RuntimeError("no compiler here")


def wrong(graph, inputs):
    return lambda *args: tuple(
        out * 1.1 if torch.is_tensor(out) and out.is_floating_point() else out for out in graph(*args)
    )


def check_said_once(monkeypatch, backend, said, model, drafter, inputs, call, whole=True):
    """What is compiled in vain runs as it is, which is said once; the results of three calls."""
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: backend)
    quick = visspec.accelerate(model, drafter, compile=True, adaptive=False)
    if not whole:
        quick.target.passes = None
    hidden = torch._dynamo.config.patch(suppress_errors=True)  # as after an import of outlines
    with hidden, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = [call(quick, inputs, **GREEDY) for _ in range(3)]
    ours = [str(w.message) for w in caught if "compile:" in str(w.message)]
    assert len(ours) == 1 and said in ours[0]
    assert result == [call(visspec.accelerate(model, drafter, adaptive=False), inputs, **GREEDY)] * 3


@pytest.mark.parametrize(("backend", "said"), [(broken, "no compiler here"), (wrong, "differs by")])
def test_compile_failure_warns_once(monkeypatch, backend, said):
    check_said_once(monkeypatch, backend, said, llama(seed=14, num_hidden_layers=1), "ngram", ids_of(9), drafted)


def test_decoder_hooks_disable_compilation():
    model = llama(seed=15)
    quick, inputs, seen = visspec.accelerate(model, "ngram", compile=True, adaptive=False), ids_of(9), []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    with pytest.warns(RuntimeWarning, match=r"compile: .*layers\.0\.mlp"):
        quick.generate(**inputs, **GREEDY)
    assert sum(n < 9 for n in seen) == len(quick.last_state.trace.rounds)
    assert quick.target.passes.graphs == 0


def test_compile_refusals():
    model = llama(seed=16)
    model.model.forward = model.model.forward
    with pytest.warns(RuntimeWarning, match="compile: .*forward of the instance"):
        quick = visspec.accelerate(model, "ngram", compile=True)
    assert quick.generate(**ids_of(5), **GREEDY).shape[1] <= 17
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.warns(RuntimeWarning, match="compile: .*rotary frequencies"):
        visspec.accelerate(llama(seed=17, rope_parameters=rope), "ngram", compile=True)


@pytest.mark.slow
def test_stock_arm_compiles_steps(monkeypatch):
    model, made = llama(seed=20, num_hidden_layers=1), []
    monkeypatch.setattr(compiled, "BACKEND", lambda graph, inputs: made.append(graph) or graph)
    steps, inputs = compiled.stepwise(model, model.get_decoder()), ids_of(9)
    result = steps.generate(**inputs, **GREEDY, cache_implementation="static")
    assert torch.equal(result, model.generate(**inputs, **GREEDY)) and len(made) == 1


def drafted(fast, inputs, **options) -> tuple:
    result = fast.run(**inputs, **options)
    return result.state.tokens, [(r.levels, r.committed) for r in result.state.trace.rounds], result.state.trace.faults


def features(model, **options):
    return EagleDrafter.for_model(model, seed=3, **options)


def check_levels(model, drafter, levels: int) -> None:
    eager = visspec.accelerate(model, drafter, adaptive=False, levels=levels)
    quick = visspec.accelerate(model, copy.copy(drafter), adaptive=False, levels=levels, compile=True)
    chains, quick.target.passes = quick.drafter.passes, None
    chains.call, chains.ready = chains.levels, {False, True}
    for rows in ("one", "ragged"):
        inputs = prompt("llava", shapes("llava")[rows])
        for more in (GREEDY, SAMPLED):
            assert drafted(quick, inputs, **more) == drafted(eager, inputs, **more), rows


SAMPLED = {"max_new_tokens": 15, "do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 3}


OWN = {"own_embedding": True, "kv_heads": 2, "qk_norm": True, "partial_rotary_factor": 0.5}
PUBLISHED = [  # forms of published heads
    {"fusion": "sum", "images": "latents", "image_latents": 2, "norm_input": True},
    {"fusion": "split", "feature_layers": (0, 1, 2), "draft_vocab": 40, **OWN},
    {"fusion": "cross", "feature_layers": (1, -1)},
]


@pytest.mark.parametrize(("options", "levels"), [  # a last block of a whole length, and a shorter one
    ({}, 8), ({"table": None}, 8), ({"image_latents": 0}, 6), *((options, 6) for options in PUBLISHED),
])  # fmt: skip
def test_compiled_levels_equal_eager(options, levels, monkeypatch):
    if "table" in options:  # as for a large vocabulary
        monkeypatch.setattr(layer, "FOLD_LIMIT", 0)
    model = model_of("llava")
    check_levels(model, features(model, **{k: v for k, v in options.items() if k != "table"}), levels)


BATCHES = [("one", 2), ("ragged", 4), ("one", 4), ("several", 4)]  # and the graphs after each


@pytest.mark.slow
@pytest.mark.parametrize(("options", "backend", "levels", "batches"), [
    ({}, "eager", 2, [("ragged", 2)]),
    *(pytest.param(*row, BATCHES, marks=pytest.mark.nightly) for row in (
        ({}, "aot_eager", None), (PUBLISHED[1], "eager", 4), (PUBLISHED[1], "aot_eager", 8),
        (PUBLISHED[2], "aot_eager", 8),
    )),
])  # fmt: skip
def test_compiled_drafter_equals_eager(options, backend, levels, batches, monkeypatch):
    """Greedy and coupled, one row and several; two graphs each, the target's own among them at default levels."""
    monkeypatch.setattr(compiled, "BACKEND", backend)
    if backend == "eager":  # graphs grow with the levels of a call: two calls
        monkeypatch.setattr("visspec.models.eagle.levels.GROUP", levels // 2)
    model = model_of("llava") if options else llava(num_hidden_layers=1)
    drafter = features(model, **options)
    eager = visspec.accelerate(model, drafter, adaptive=False, levels=levels)
    quick = visspec.accelerate(model, copy.copy(drafter), adaptive=False, levels=levels, compile=True)
    chains = quick.drafter.passes
    assert quick.setup.passes == [quick.target.passes, chains] and eager.setup.passes == []
    if levels is not None:
        quick.target.passes = None
    for rows, graphs in batches:
        inputs = prompt("llava", shapes("llava")[rows])
        for more in (GREEDY, SAMPLED):
            assert drafted(quick, inputs, **more) == drafted(eager, inputs, **more)
        for passes in filter(None, (chains, quick.target.passes)):
            assert (passes.graphs, passes.late, passes.refused) == (graphs, 0, "")


def test_multi_token_heads_not_compiled():
    drafter = EagleDrafter.for_model(model_of("llava"), fusion="sum", block=2)
    drafter.compile()
    drafter.record()
    assert drafter.passes is None and drafter.recorder is None


def test_samples_and_trees_not_compiled():
    model = model_of("llava")
    inputs = prompt("llava", shapes("llava")["one"])
    wide = EagleDrafter(features(model).head, model, width=2)
    for drafter, more in ((features(model), {"do_sample": True, "top_k": 5, "seed": 1}), (wide, {"do_sample": False})):
        quick = visspec.accelerate(model, drafter, adaptive=False, compile=True)
        quick.target.passes = None
        drafted(quick, inputs, max_new_tokens=12, **more)
        passes = quick.drafter.passes
        assert passes is None or passes.graphs == 0


def test_drafter_compile_failure_warns_once(monkeypatch):
    model = model_of("llava")
    inputs, message = prompt("llava", shapes("llava")["one"]), "EagleDrafter with drafts that fail"
    monkeypatch.setattr(compiled.CompiledFunctions, "compile", lambda *_: partial(broken, None))  # tracing takes long
    check_said_once(monkeypatch, broken, message, model, features(model), inputs, drafted, whole=False)


@pytest.mark.parametrize("run", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_small_model_is_compiled_too(run):
    model, small = (llama(seed=seed, num_hidden_layers=1) for seed in (21, 22))
    quick = visspec.accelerate(model, small, adaptive=False, compile=True)
    assert quick.setup.passes == [quick.target.passes, quick.drafter.target.passes]
    if not run:
        return
    eager, inputs = visspec.accelerate(model, small, adaptive=False), ids_of(9)
    assert drafted(quick, inputs, **GREEDY) == drafted(eager, inputs, **GREEDY)
    assert [(p.graphs, p.late) for p in quick.setup.passes] == [(2, 0), (2, 0)]


def test_targets_share_graphs(pipe):
    quick = visspec.ImagePipeline(**{**pipe.components, "compile": True})
    targets = [quick.setup(drafter, "exact").target for drafter in ("none", "jacobi")]
    assert targets[0] is not targets[1] and targets[0].passes is targets[1].passes is not None


@pytest.mark.slow
def test_two_threads_compile_once():
    model = llama(seed=19, num_hidden_layers=1)
    quick, inputs = visspec.accelerate(model, "ngram", compile=True, adaptive=False), ids_of(9)
    want, result = model.generate(**inputs, **GREEDY), [None] * 2

    def go(i: int) -> None:
        result[i] = quick.generate(**inputs, **GREEDY)

    together([partial(go, i) for i in range(2)])
    assert all(torch.equal(one, want) for one in result)
    passes = quick.target.passes
    assert passes.graphs - passes.late == 2, "of two threads one warms up"
    assert passes.late <= 1, "torch's guards, checked by two threads at once, may fail for nothing"
