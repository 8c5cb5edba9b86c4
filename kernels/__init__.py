"""Fused kernels, one file each: formula, `reference` in torch, Triton kernel, launcher, a timing case.

Import it as `visspec.kernels`, not as top-level `kernels`: a Hugging Face package has that name, and if the repository
root is on `sys.path`, transformers imports this folder instead. Run python with `-P`.

Every public function supports every device through one `torch.library` operator: torch on a CPU, Triton on CUDA. A file
is imported when one of its names is first used. No function has the name of its file, because importing a submodule
would hide the function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _HOME, for tools that read the source
    from visspec.kernels.accept import accept_tree as accept_tree
    from visspec.kernels.attention import tree_attention as tree_attention
    from visspec.kernels.commit import commit_kv as commit_kv
    from visspec.kernels.groups import grouped_mass as grouped_mass
    from visspec.kernels.growth import ancestors as ancestors
    from visspec.kernels.neighbours import neighbour_mass as neighbour_mass
    from visspec.kernels.warp import guided_warp as guided_warp
    from visspec.kernels.warp import guided_warp_unchecked as guided_warp_unchecked

_HOME = {
    "guided_warp": "warp",
    "guided_warp_unchecked": "warp",
    "accept_tree": "accept",
    "neighbour_mass": "neighbours",
    "grouped_mass": "groups",
    "commit_kv": "commit",
    "ancestors": "growth",
    "tree_attention": "attention",
}

FILES = sorted(set(_HOME.values()))
__all__ = ["FILES", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = attribute = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return attribute


def __dir__() -> list[str]:
    return __all__
