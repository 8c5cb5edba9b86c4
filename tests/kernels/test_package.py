"""The package: lazy, usable without Triton, never a top-level name; its kernels compile for a GPU that is not here."""

import subprocess
import sys

import pytest

from visspec import kernels


def in_a_fresh_process(code):
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_the_package_imports_no_kernel():
    code = "import sys, visspec.kernels; print([m for m in sys.modules if m.startswith(('visspec.kernels.', 'torch'))])"
    assert in_a_fresh_process(code).strip() == "[]"


def test_the_operators_work_without_triton():
    out = in_a_fresh_process(
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from visspec import kernels\n"
        "for name in kernels.__all__: getattr(kernels, name)\n"
        "print(kernels.guided_warp(torch.zeros(1, 4)).tolist(), 'kernels' in sys.modules)"
    )
    assert out.strip() == "[[0.25, 0.25, 0.25, 0.25]] False"


def test_no_function_hides_behind_its_file():
    from importlib import import_module

    for name in kernels.FILES:
        import_module(f"visspec.kernels.{name}")
    functions = [name for name in kernels.__all__ if name != "FILES"]
    assert all(callable(getattr(kernels, name)) for name in functions) and not set(functions) & set(kernels.FILES)
    with pytest.raises(AttributeError, match="no_such_kernel"):
        _ = kernels.no_such_kernel


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from visspec.kernels import accept, commit, groups, growth, losses, neighbours, warp

def build(fn, types, **constants):
    types = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(types) for name in fn.arg_names}
    values = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    triton.compile(ASTSource(fn, signature, values), target=GPUTarget("cuda", 90, 32))

tree = "*i64 *i64 *fp32 *fp32 *fp32 *fp32 *fp32 *i64 *fp32 *i64 *i64 *i64 *fp32 i32 i32 i32 i32 i32 fp32 fp32"
blocks = dict(TINY=1e-30, BLOCK_N=64, BLOCK_V=1024, BLOCK_K=128)
build(accept._accept_tree_kernel, tree, DRAWN=False, MASS=False, NEAR=True, LAM=True, **blocks)
build(accept._accept_tree_kernel, tree, DRAWN=True, MASS=True, NEAR=False, LAM=False, **blocks)
build(warp._guided_warp_kernel, "*bf16 *bf16 *fp32 i32 fp32 fp32 i32 fp32",
      GUIDED=True, GREEDY=False, TOP_K=True, TOP_P=True, BLOCK_V=1024)
build(neighbours._neighbour_mass_kernel, "*fp32 *i64 *i32 *i64 *fp32 i32 i32 fp32 fp32",
      ROW=True, LAM=True, BLOCK_K=128)
build(groups._window_kernel, "*fp32 *fp32 *i64 *fp32 *fp32 *fp32 i32 i32 i32 fp32 fp32",
      GAP=True, NEAR=True, BLOCK_V=1024, BLOCK_F=8)
build(commit._commit_kernel, "*i64 *bf16 *i64 *i64 *i64 i32 i32 i64 i64 i64", BLOCK_F=128)
build(growth._best_children_kernel, "*fp32 *fp32 *i8 *i64 *fp32 i32 i32", KEEP=10, VALID=True, BLOCK_V=1024)
build(losses._losses_kernel, "*bf16 *bf16 *fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32", BLOCK_V=1024)
print("compiled")
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_without_one(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
