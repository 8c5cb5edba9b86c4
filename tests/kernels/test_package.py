"""The package: lazy, usable without Triton, never a top-level name; its kernels run interpreted where there is no GPU,
and compile for one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRITON = Path(__file__).with_name("test_triton.py")


def in_a_fresh_process(code):
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_loads_no_kernel():
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton.py runs compiled")
def test_triton_interpreted():
    pytest.importorskip("triton")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--import-mode=importlib", str(TRITON)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


COMPILE = """
import re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from visspec.kernels import accept, attention, commit, groups, growth, neighbours, warp

def build(fn, types, divisible="", options=None, **constants):
    types = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(types) for name in fn.arg_names}
    values = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    hints = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible.split()}
    return triton.compile(ASTSource(fn, signature, values, hints), target=GPUTarget("cuda", 90, 32), options=options)

def spilled(built):
    # Bytes a thread keeps outside its registers.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return int(re.search("STACK:([0-9]+)", subprocess.check_output(command, text=True))[1])

tree = ("*i64 *i64 *fp32 *fp32 *fp32 *fp32 *fp32 *i64 *fp32 *i32 *i64 *i64 *i64 *fp32 "
        "i32 i32 i32 i32 i32 i32 fp32 fp32")
blocks = dict(TINY=1e-30, BLOCK_N=64, BLOCK_V=1024, BLOCK_K=1024)
build(accept._accept_tree_kernel, tree, DRAWN=False, MASS=False, NEAR=True, LAM=True, ONCE=True, **blocks)
build(accept._accept_tree_kernel, tree, DRAWN=True, MASS=False, NEAR=True, LAM=False, ONCE=True, **blocks)
build(accept._accept_tree_kernel, tree, DRAWN=True, MASS=True, NEAR=False, LAM=False, ONCE=False, **blocks)
for V, top_p in ((4096, True), (16384, False)):
    built = build(warp._guided_warp_kernel, "*bf16 *bf16 *fp32 i32 fp32 fp32 i32 fp32", "", dict(num_warps=V // 512),
                  GUIDED=True, GREEDY=False, TOP_K=True, TOP_P=top_p, SCORES=True, WHOLE=not top_p, BLOCK_V=V)
    assert spilled(built) == 0, (V, spilled(built))
build(neighbours._neighbour_mass_kernel, "*fp32 *i64 *i32 *i64 *fp32 i32 i32 i32 fp32 fp32",
      ROW=True, LAM=True, BLOCK_K=128)
build(groups._window_kernel, "*fp32 *fp32 *i64 *fp32 *fp32 i32 i32", BLOCK_V=1024)
moved = build(commit._commit_kernel, "*i64 *bf16 *i64 *i64 *i64 i32 i32 i64 i64 i64", "F stride_b stride_h stride_s",
              dict(num_warps=1), ALIGNED=True, BLOCK_D=8, BLOCK_F=128).asm["ptx"]
assert "ld.global.v4" in moved and "st.global.v4" in moved and "global.b16" not in moved
build(growth._ancestors_kernel, "*i64 *i8 i32 i32", BLOCK_N=64)
for name, dtype, sizes in (("bf16", torch.bfloat16, (128, 64, 256)), ("fp32", torch.float32, (256, 128))):
    for F in sizes if "all" in sys.argv else sizes[:1]:
        block_m, block_s = attention.tiles(dtype, F)
        built = build(attention._tree_attention_kernel, f"*{name} " * 3 + "*i64 *i64 *i8 *fp32 *fp32 *fp32 "
                      "i32 i32 i32 i32 fp32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32",
                      "q k v ancestors part high mass F kb kg ks vb vg vs", dict(num_warps=8, num_stages=2),
                      START=True, UPCAST=name == "fp32", BLOCK_M=block_m, BLOCK_S=block_s, BLOCK_F=F)
        assert spilled(built) == 0, (name, F, spilled(built))
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["few", pytest.param("all", marks=pytest.mark.nightly)])
def test_compile_without_gpu(heads, tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, "-P", str(script), heads], capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
