"""The table of levels, as a test; what may not be called; and how often a round makes host and device wait."""

import ast
import functools
import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

import visspec
from tests.doubles import Double, Oracle, fast, stock
from tests.replays import Waits, recording
from tests.tiny import prompt, shapes
from visspec import tree as trees
from visspec.models.runner import buffer_pool
from visspec.types import Draft

ROOT = Path(visspec.__file__).parent.parent
TOPS = ("visspec", "models", "kernels", "eval")
LEVELS = (  # a module may import lower levels and its own package
    {"distributions", "kernels"},
    {"types"},
    {"cache", "io", "replay"},
    {"tree", "entries", "presets"},
    {"sampling", "grammar", "registry"},
    {"accept"},
    {"loop"},
    {"train"},
    {"models", "eval"},
    {"api"},
    {"toys"},
    {"cli"},
)
MODEL_LEVELS = (  # the same within `models/`: what kinds share, then the families, which never import each other
    {"layers", "folders", "published_tensors"},
    {"attention"},
    {"runner"},
    {"drafting"},
    {"decoder"},
    {"image_codes", "codecs", "jacobi"},
    {"vectors", "scales"},
)
DERIVED = {"randar": "llamagen"}  # a family that is another one with something more
MODEL_TABLES = ("published",)  # which family a loaded model or a folder is of
LIBRARIES = {"transformers", "diffusers", "torchvision", "PIL", "rich", "tqdm", "accelerate", "tokenizers"}
MAY_USE = {room: LIBRARIES for room in ("models", "eval", "api", "cli", "toys")} | {"io": {"PIL"}}
TOP_LEVEL = len(LEVELS)  # the package itself


def sources():
    for top in TOPS:
        for file in sorted((ROOT / top).rglob("*.py")):
            if not (file.parent / "__init__.py").is_file():
                continue  # a script, no module
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield file, [p for p in (parts[1:] if top == "visspec" else parts) if p != "__init__"]


def imports(node):
    if isinstance(node, ast.Import):
        return [alias.name.split(".") for alias in node.names]
    assert node.level == 0, "imports are absolute"
    return [[*node.module.split("."), alias.name] for alias in node.names]


@functools.cache
def facts_of(file):
    """Dotted paths that a file imports, its classes, attributes asked for by name, and calls of LOADING."""
    paths, classes, questions, loads = [], [], [], []
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            paths += imports(node)
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.Call):
            questions += asked(node)
            loads += loading(node)
    return SimpleNamespace(paths=paths, classes=classes, asked=questions, loads=loads)


def imports_of(file):
    return facts_of(file).paths


def level(package):
    return next((n for n, names in enumerate(LEVELS) if package in names), TOP_LEVEL)


def complaint(mine, path):
    """Why a module of package `mine` may not import this dotted path, or None."""
    if path[0] in ("models", "kernels", "eval"):
        return "is imported as visspec." + path[0]
    if path[0] != "visspec":
        core = level(mine) < TOP_LEVEL and path[0] in LIBRARIES - MAY_USE.get(mine, set())
        return "is not for this level" if core else None
    other = path[1] if len(path) > 1 else ""
    if other in (mine, "__version__") or level(mine) == TOP_LEVEL:
        return None
    return None if level(other) < level(mine) else "is not below"


def test_levels():
    result = []
    for file, parts in sources():
        for path in imports_of(file):
            why = complaint(parts[0] if parts else "", path)
            if why and parts:
                result.append(f"{file.relative_to(ROOT)}: {'.'.join(path)} {why}")
    assert not result, "\n".join(result)


def model_level(room):
    """Of a file or folder in `models/`: families are above what they share, tables above families."""
    if room in MODEL_TABLES:
        return len(MODEL_LEVELS) + 1 + MODEL_TABLES.index(room)
    return next((n for n, names in enumerate(MODEL_LEVELS) if room in names), len(MODEL_LEVELS))


def families_apart(room, path):
    """Why a file of `models/room` may not import this dotted path, or None."""
    if path[:2] != ["visspec", "models"] or path[2] in (room, DERIVED.get(room)):
        return None
    return None if model_level(path[2]) < model_level(room) else "is not below"


def test_families_do_not_import_each_other():
    result = []
    for file, parts in sources():
        if parts[:1] == ["models"] and len(parts) > 1:
            for path in imports_of(file):
                if why := families_apart(parts[1], path):
                    result.append(f"{file.relative_to(ROOT)}: {'.'.join(path)} {why}")
    assert not result, "\n".join(result)


@pytest.mark.parametrize("room,path", [
    ("mar", "visspec.models.var.network.VAR"), ("scales", "visspec.models.var.network.VAR"),
    ("attention", "visspec.models.decoder.target.HFDecoder"), ("llamagen", "visspec.models.randar.layout.X"),
])  # fmt: skip
def test_control_table_of_families(room, path):
    assert families_apart(room, path.split("."))


@pytest.mark.parametrize("mine,path", [
    ("loop", "transformers.GenerationConfig"), ("sampling", "visspec.loop.decode.decode"),
    ("train", "visspec.models.x"), ("api", "visspec.cli.main"),
    ("models", "visspec.eval.metrics.fid"), ("kernels", "visspec.types"), ("api", "models.targets"),
    ("eval", "visspec.api.text.accelerate"), ("io", "transformers.AutoModel"),
])  # fmt: skip
def test_the_table_forbids_something(mine, path):
    assert complaint(mine, path.split("."))


def dotted(node):
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


ROLES = {"drafter", "rule", "target", "accept", "acceptance", "order", "safe_drafter", "setup", "graphed_rule", "spec"}


def asked(call):
    """(function, what of) of a call of `getattr` or `hasattr`."""
    name = dotted(call.func)
    if name in ("getattr", "hasattr"):
        yield name, ast.unparse(call.args[0]).split(".")[-1].split("(")[0]


def test_declared_traits():
    """Nothing above `models/` asks for an attribute that one may have: traits say it, base classes do nothing."""
    result = []
    for file, parts in sources():
        if parts and parts[0] in ("models", "kernels"):
            continue
        core = bool(parts) and parts[0] in ("loop", "accept", "tree", "sampling", "grammar", "distributions")
        for name, whose in facts_of(file).asked:
            if whose in ROLES or (core and whose not in ("value", "self")):
                result.append(f"{file.relative_to(ROOT)}: {name} of {whose}")
    assert not result, "\n".join(result)


@pytest.mark.parametrize("line", ["getattr(self.rule, 'x', 0)", "hasattr(drafter, 'y')", "getattr(setup.target, 'z')"])
def test_such_questions_are_seen(line):
    assert [whose in ROLES for _, whose in asked(ast.parse(line).body[0].value)] == [True]


LOADING = {"weights_only", "allow_pickle", "trust_remote_code"}


def loading(call):
    """(function, options of LOADING, source) of a call that loads or runs what may be code."""
    name, options = dotted(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg in LOADING}
    if name in ("eval", "exec", "compile", "torch.load") or options:
        yield name, options, ast.unparse(call)


def test_nothing_loads_code_from_data():
    """No pickle, eval or exec anywhere; torch.load only where published weights are converted, and only weights."""
    result = []
    for file, parts in sources():
        where = file.relative_to(ROOT)
        pickles = ("pickle", "dill", "cloudpickle", "marshal", "shelve")
        result += [f"{where}: {path}" for path in imports_of(file) if path[0] in pickles]
        for name, options, call in facts_of(file).loads:
            own = parts == ["io", "convert_checkpoint"] and name == "torch.load"
            own = own and options.get("weights_only") == "True"
            unsafe = name in ("eval", "exec", "compile", "torch.load") and not own
            if unsafe or options.get("allow_pickle") == "True" or options.get("trust_remote_code") == "True":
                result.append(f"{where}: {call}")
    assert not result, "\n".join(result)


LAST = {"last_state", "last_stats", "last_output"}


def latest_read(tree):
    """Where an attribute that holds the newest call's result is read: it may be another caller's by then."""
    attributes = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return [n for n in attributes if n.attr in LAST and isinstance(n.ctx, ast.Load)]


def test_results_travel_as_values():
    result = []
    for file, _ in sources():
        if any(name in (text := file.read_text()) for name in LAST):
            result += [f"{file.relative_to(ROOT)}:{node.lineno}" for node in latest_read(ast.parse(text))]
    assert not result, result
    assert latest_read(ast.parse("x = fast.last_stats")) and not latest_read(ast.parse("fast.last_stats = x"))


HOST_READS = {  # the one synchronisation of a round, processors, after a head's pass
    "visspec/accept/denoise.py": ["run"],
    "visspec/loop/decode.py": ["apply_verdict"],
    "visspec/sampling.py": ["process", "_reachable_nodes"],
}


CORE = ("loop/decode", "tree", "cache", "sampling")


def callers(files, called):
    """{file: its functions}, once for each call whose dotted name is `called`."""
    result = {}
    for file in (*files, *(ROOT / "visspec" / "accept").glob("*.py")):
        for function in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)):
            if names := [function.name for _, name in calls(function) if called(name)]:
                result.setdefault(str(file.relative_to(ROOT)), []).extend(names)
    return result


def test_host_reads_are_where_they_should_be():
    reads = ("item", "tolist", "cpu", "numpy", "nonzero")
    result = callers([ROOT / "visspec" / f"{n}.py" for n in CORE], lambda name: name.split(".")[-1] in reads)
    assert result == HOST_READS


HOST_COPIES = {  # what a round tells the device goes through `cache.to_device`
    "visspec/cache.py": ["to_device", "to_device"],
    "visspec/tree.py": ["static", "static"],  # of each shape once, as the next two
    "models/drafting/static_tree.py": ["plan"],
    "models/eagle/head.py": ["turns_at", "turns_at"],  # of each length once
    "models/eagle/sequence.py": [*["plan"] * 2, *["extend"] * 2, "compress"],  # of prompts, in training
    "models/decoder/small_model.py": ["_is_content"],
    "models/decoder/probe.py": ["_tokens"],
    "models/lowres/drafter.py": ["small"],
    "visspec/loop/out_of_order.py": ["__init__"],
    "visspec/loop/decode.py": ["values", "ids"],  # `TokenBuffer`, for results, processors and stop functions
}


def test_host_copies_per_round():
    """A copy from pageable memory waits for the device, and no count of reads shows it."""
    files = [ROOT / "visspec" / f"{n}.py" for n in (*CORE, "loop/safe_drafter", "grammar", "loop/out_of_order")]
    for folder in "attention runner drafting decoder lookup eagle block jacobi distilled lowres".split():
        files += sorted((ROOT / "models" / folder).glob("*.py"))
    copies = ("torch.tensor", "torch.as_tensor", "torch.from_numpy", "torch.asarray")
    assert callers(files, copies.__contains__) == HOST_COPIES


def test_no_top_level_imports():
    """Of ours all is visspec.<name>, and transformers finds no `kernels` of ours."""
    for name in ("api.text.accelerate", "models.decoder.target", "kernels", "io.images"):
        importlib.import_module(f"visspec.{name}")
    tf.utils.is_kernels_available()
    files = {n: getattr(m, "__file__", None) for n, m in list(sys.modules.items()) if n.split(".")[0] in TOPS[1:]}
    assert not [n for n, file in files.items() if Path(file or "x").is_relative_to(ROOT / n.split(".")[0])]


# --- synchronisations -------------------------------------------------------------------------------------------------


class Fixed(Double):
    """The same branching draft in every round, without a look at the host."""

    def propose(self, state, depth):
        tree = trees.static((-1, 0, 0, 1, 1, 3)[: 3 if depth < 3 else 6])
        tokens = torch.arange(tree.size).expand(len(state.rows), -1) + 5
        return Draft(torch.cat([state.pending[:, None], tokens[:, 1:]], 1), tree)


class Chain(Double):
    """The first ids, as a chain."""

    def propose(self, state, depth):
        return trees.chain_draft(state.pending, torch.arange(5, 5 + depth).expand(len(state.rows), -1))


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def counted(read, found):
    def wrapped(*args, **kwargs):
        found.append(read.__name__)
        return read(*args, **kwargs)

    return wrapped


def waits_per_round(name, drafter, shape, monkeypatch, warm=False, **options):
    """What the host waits for between one verification and the next. warm: of a second request."""
    model, marks = fast(name, drafter), []
    if warm:
        model.generate(**prompt(name, shapes(name)[shape]), max_new_tokens=16, **options)
    verify = model.target.verify
    with Waits() as mode:
        monkeypatch.setattr(model.target, "verify", lambda *a: (marks.append(len(mode.found)), verify(*a))[1])
        for read in READS:
            monkeypatch.setattr(torch.Tensor, read, counted(getattr(torch.Tensor, read), mode.found))
        model.generate(**prompt(name, shapes(name)[shape]), max_new_tokens=16, **options)
    monkeypatch.undo()
    assert len(marks) >= 3
    return [mode.found[a:b] for a, b in itertools.pairwise(marks)]


@pytest.mark.parametrize("name, kind", [
    *(("llava", kind) for kind in ("none", "ngram", "chain", "tree", "oracle")),
    *itertools.product(("qwen2_5_vl", "gemma3"), ("none", "tree")),
])  # fmt: skip
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 5}], ids=["greedy", "sampled"])
def test_one_synchronisation_a_round(name, kind, options, monkeypatch):
    for shape in ("one", "ragged"):
        oracle = Oracle(stock(name, shape))
        drafter = {"none": None, "ngram": "ngram", "chain": Chain(), "tree": Fixed(), "oracle": oracle}[kind]
        for result in waits_per_round(name, drafter, shape, monkeypatch, **options):
            assert result == ["tolist"], result


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 5}], ids=["greedy", "sampled"])
def test_one_synchronisation_per_round(options, monkeypatch):
    for shape, drafter in itertools.product(("one", "ragged"), (Chain, Fixed)):
        with monkeypatch.context() as patch:
            patch.setattr(buffer_pool, "MIN_NEW_TOKENS", 1)
            made = recording(patch)
            for result in waits_per_round("qwen2_5_vl", drafter(), shape, patch, warm=True, **options):
                assert result == ["tolist"], result
            assert made.count and made.replays


def test_synchronisations_are_counted(monkeypatch):
    class Curious(Chain):
        def propose(self, state, depth):
            assert int(state.pending[0]) >= 0 and state.pending[state.pending > 0].shape
            return super().propose(state, depth)

    result = waits_per_round("llama", Curious(), "one", monkeypatch, do_sample=False)
    assert all({"__int__", "tolist", "index"} <= set(f) for f in result[:-1]), result[0]
