"""Mutants of the core: one small error each, put into the source of a module.

Candidates are made from the syntax tree by a dozen operators; `NAMED` are the errors that tests once let live.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = [f"visspec/{name}.py" for name in ("sampling", "tree", "cache")]
CORE += [f"visspec/{name}/[!_]*.py" for name in ("distributions", "loop", "accept", "api")]
CORE += ["models/*/[!_]*.py"]
NETWORKS = (
    "network",
    "head",
    "model",
    "layout",
    "config",
    "image_compression",
    "multiscale",
    "bsq",
    "vqgan",
)  # not the core
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "argmax": "argmin", "amax": "amin", "zeros": "ones"}
PEELED = {"clamp", "clamp_", "clone", "expand", "softmax", "flip"}  # methods left out: x.clamp(min=0) -> x
PLACING = {"dtype", "device", "non_blocking", "pin_memory", "stacklevel", "maxsize"}  # keywords that decide no value
AXES = {  # their plain integers are dimensions: another one ends in an error at once
    "gather", "scatter", "scatter_", "scatter_add_", "scatter_reduce", "index_add_", "index_fill", "transpose", "sum",
    "flatten", "prod", "any", "all", "cumsum", "cumprod", "view", "expand", "unsqueeze", "unbind", "max", "min", "size",
}  # fmt: skip
GPU_ONLY = {"cuda_graph"}


NAMED = [  # name, file, what it replaces, by what
    ("residual where no draft stands", "models/jacobi/drafter.py",
     "torch.where(stands_BW[..., None], residual(p_BWV, q_BWV), p_BWV)", "residual(p_BWV, q_BWV)"),
    ("q of unjudged entries is p", "models/jacobi/drafter.py",
     "torch.where(judged_BW[..., None], p_BWV, q_BWV)", "p_BWV"),
    ("noise that never advances", "models/jacobi/drafter.py",
     "old.noise.advance([width] * len(outcome.tokens))", "pass"),
    ("draws with the acceptance coin", "visspec/sampling.py",
     "self.window(level + 1, level)[:, 0, -1]", "self.window(level + 1, level)[:, 0, 0]"),
    ("a node too deep", "visspec/loop/safe_drafter.py",
     "state.room(row) - 1 for row", "state.room(row) for row"),
    ("the last slot is lost", "visspec/cache.py",
     "new[:, :, : old.shape[2]] = old", "new[:, :, : old.shape[2] - 1] = old[:, :, :-1]"),
    ("kept laws untrimmed", "visspec/loop/output.py", "path[:count]", "path"),
    ("drift of another row", "visspec/loop/decode.py", "to_device(state.rows, amount_B.device)",
     "to_device(list(range(len(state.rows))), amount_B.device)"),
    ("bonus and corrected exchanged", "visspec/loop/decode.py",
     '"corrected" if had_rejection[b] else "bonus"', '"bonus" if had_rejection[b] else "corrected"'),
    ("drift a round, not a token", "visspec/loop/stats.py",
     "else drift / max(tokens, 1)", "else drift / max(len(trace.rounds), 1)"),
    ("displacement under the node's own law", "kernels/accept.py",
     "over = law if rest is None else rest", "over = law_at(n)"),
    ("a noise floor twice too large", "eval/metrics/fid.py", "floor * half / 2 * (", "floor * half * ("),
    ("reached counts as accepted", "visspec/loop/draft_length.py",
     "self.accepted[d] + accepted / rows", "self.accepted[d] + (accepted + sum(at_end)) / rows"),
    ("drafting is free", "visspec/loop/draft_length.py", 'latest["draft"] + latest["observe"]', "0.0"),
    ("a tree by the noise of another position", "visspec/sampling.py",
     "logits_BWV + self.window(level + 1, level)", "logits_BWV + self.window(1)"),
    ("a token too many is kept", "models/decoder/small_model.py",
     "self.drafted) for path", "self.drafted + 1) for path"),
    ("positions one early", "models/decoder/small_model.py", "self.own.position + 1", "self.own.position"),
    ("joined rows with keys of others", "models/eagle/layer.py",
     "other.kv[:, :longest][take]", "other.kv[:, :longest][: len(take)]"),
    ("laws of rows that left", "models/randar/ahead.py", "state.memory[keep]", "state.memory[: len(keep)]"),
]  # fmt: skip


@functools.cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


@dataclass(frozen=True)
class Mutant:
    path: str
    function: str  # qualified name; "" for code of the module itself
    what: str  # the operator, or the name of an error of the past
    start: int  # characters of the source that are replaced
    end: int
    after: str

    def text(self) -> str:
        return text_of(self.path)

    def source(self) -> str:
        text = self.text()
        return text[: self.start] + self.after + text[self.end :]

    @property
    def module(self) -> str:
        name = self.path.removesuffix(".py").replace("/", ".")
        return name if name.startswith("visspec.") else f"visspec.{name}"

    @property
    def key(self) -> str:
        """What it is, without numbers of lines."""
        text = self.text()
        low, high = text.rfind("\n", 0, self.start) + 1, text.find("\n", self.end)
        line = f"{text[low : self.start]}[{text[self.start : self.end]} -> {self.after}]{text[self.end : high]}"
        return f"{self.path} {self.function}, {self.what}: {' '.join(line.split())}"


# --- candidates -----------------------------------------------------------------------------------------------------


@functools.cache
def candidates(path: str) -> list[Mutant]:
    """All mutants of a file that the operators make."""
    text, starts = text_of(path), [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for function, what, place, new in _walk(ast.parse(text), "", {}):
        ends = (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)
        start, end = (starts[line - 1] + _characters(text, starts, line, column) for line, column in ends)
        after = ast.unparse(new)
        if isinstance(new, ast.expr) and not isinstance(new, (ast.Name, ast.Constant)):
            after = f"({after})"
        mutant = Mutant(path, function, what, start, end, after)
        found.setdefault(mutant.key, mutant)
    return list(found.values())


def _characters(text: str, starts: list[int], line: int, column: int) -> int:
    """A column counted in bytes, as `ast` gives it, in characters."""
    return len(text[starts[line - 1] : starts[line]].encode()[:column].decode())


def _walk(node: ast.AST, function: str, names: dict[str, int]) -> Iterator[tuple[str, str, ast.AST, ast.AST]]:
    """(function, operator, node, what stands there instead). Left alone: annotations, decorators, error texts, and what
    are settings: defaults of arguments, numbers of a module.
    """
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".strip(".")
        if node.name in GPU_ONLY:
            return
        if isinstance(node, ast.FunctionDef):
            bound = [
                (n.lineno, n.id) for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            names = {a.arg: a.lineno for a in (*node.args.args, *node.args.kwonlyargs)}
            names |= {name: line for line, name in sorted(bound, reverse=True)}
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return
    fixed = [] if function else [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in AXES:
        fixed += node.args
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        fixed.append(node.slice)
    for what, place, new in _changed(node, names):
        yield function, what, place, new
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            idle = isinstance(child, ast.keyword) and child.arg in PLACING | {"dim", "indent"}
            if isinstance(child, ast.AST) and not idle and not any(child is n and _number(n) for n in fixed):
                yield from _walk(child, function, names)


def _number(node: ast.AST) -> bool:
    return isinstance(getattr(node, "operand", node), ast.Constant)


def _changed(node: ast.AST, names: dict[str, int]) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """(operator, node, what stands there instead) for what can be changed at a node itself."""
    yield from _operators(node)
    match node:
        case ast.Constant(value=bool() as value):
            yield "flag", node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "number", node, ast.Constant(value + 1)
            if value > 0:
                yield "number", node, ast.Constant(value - 1)
        case ast.Slice(lower=lower, upper=upper):
            bounds = [(bound, op) for bound, op in ((lower, ast.Add()), (upper, ast.Sub())) if bound is not None]
            yield from (("bound", b, ast.BinOp(b, op, ast.Constant(1))) for b, op in bounds if not _number(b))
        case ast.Name(id=name, ctx=ast.Load()) if shape := re.search(r"_[A-Z0-9][A-Za-z0-9]*$", name):
            known = [(at, n) for n, at in names.items() if n.endswith(shape[0]) and n != name and at < node.lineno]
            if known:
                yield "name", node, ast.Name(max(known)[1])  # of one shape, the newest
        case ast.Call():
            yield from _called(node)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Break() | ast.Continue():
            yield "left out", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "left out", node, ast.Pass()


def _operators(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield "comparison", node, _with(node, ops=[SWAPS[type(op)]()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            yield "operator", node, _with(node, op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "not", node, operand
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)


def _called(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    name = method or getattr(node.func, "id", "")
    if name in CALLS:
        yield "call", node, _with(node, func=_with(node.func, **{"attr" if method else "id": CALLS[name]}))
    if method == "where" and len(node.args) == 3:
        yield "where", node, _with(node, args=[node.args[0], node.args[2], node.args[1]])
    if method in PEELED:
        yield "without", node, node.func.value
    for keyword in node.keywords:
        if keyword.arg not in PLACING:
            yield "keyword", node, _with(node, keywords=[k for k in node.keywords if k is not keyword])


def _with(node: ast.AST, **changes) -> ast.AST:
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new


def chosen(count: int, seed: int) -> list[Mutant]:
    """So many mutants: the errors of the past, then the same share of the candidates of every file, and of those in its
    `join` and `select`; at least one of each where there are so many.
    """
    groups = defaultdict(list)
    for path in core():
        for mutant in candidates(path):
            groups[path, mutant.function.endswith((".join", ".select"))].append(mutant)
    drawn = []
    for found in groups.values():
        found.sort(key=lambda m: hashlib.sha1(f"{seed} {m.key}".encode()).digest())
        drawn += [(i / len(found), m) for i, m in enumerate(found)]
    return (named() + [m for _, m in sorted(drawn, key=lambda x: x[0])])[:count]


def core() -> list[str]:
    found = [path for pattern in CORE for path in sorted(ROOT.glob(pattern)) if path.stem not in NETWORKS]
    return [str(path.relative_to(ROOT)) for path in found]


def named() -> list[Mutant]:
    """NAMED as mutants. Raises ValueError where the source does not hold what is to be replaced, once."""
    found = []
    for name, path, before, after in NAMED:
        text = text_of(path)
        if text.count(before) != 1:
            raise ValueError(f"{name}: got {text.count(before)} places in {path}, expected 1 of {before!r}")
        start = text.index(before)
        line, scopes = text[:start].count("\n") + 1, (ast.FunctionDef, ast.ClassDef)
        inside = [n for n in ast.walk(ast.parse(text)) if isinstance(n, scopes) and n.lineno <= line <= n.end_lineno]
        function = ".".join(n.name for n in inside)  # walked from the outside in
        found.append(Mutant(path, function, name, start, start + len(before), after))
    return found
