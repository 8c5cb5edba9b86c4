"""Fused kernels, one file each: formula, `reference` in torch, Triton kernel, launcher, test cases.

Import it as `visspec.kernels`, not as top-level `kernels`: a Hugging Face package has that name, and if the repository
root is on `sys.path`, transformers imports this folder instead. Run python with `-P`.

Every public function supports every device through one `torch.library` operator: torch on a CPU, Triton on CUDA. A file
is imported when one of its names is first used. No function has the name of its file, because importing a submodule
would hide the function.
"""

from importlib import import_module

_HOME = {
    "guided_warp": "warp",
    "accept_tree": "accept",
    "accept_chain": "chain",
    "neighbour_mass": "neighbours",
    "grouped_mass": "groups",
    "codebook_neighbours": "codebook",
    "commit_kv": "commit",
    "draft_topk": "growth",
    "ancestors": "growth",
    "tree_attention": "attention",
    "tree_attention_forward": "attention",
    "draft_losses": "losses",
}

FILES = sorted(set(_HOME.values()))
__all__ = ["FILES", *sorted(_HOME)]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return __all__
