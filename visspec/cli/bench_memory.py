"""`visspec bench memory`: peak memory of plain and accelerated captioning, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from typing import Any

from visspec.provenance import provenance

ARMS = ("transformers_generate", "plain", "ours")


def bench_memory(images: int = 4, drafter: str = "vispec", max_new_tokens: int = 128, batch_size: int = 1) -> dict:
    """Peak resident memory of each arm on the same rendered scenes, in MB.

    `peak_over_plain` compares whole processes, drafter weights included; `working_over_plain` what decoding added to a
    process that had loaded model and drafter.
    """
    found = {arm: _in_a_process(arm, images, drafter, max_new_tokens, batch_size) for arm in ARMS}
    plain = found["transformers_generate"]
    return {
        "bench": "memory",
        "arms": found,
        "peak_over_plain": found["ours"]["peak_mb"] / plain["peak_mb"],
        "working_over_plain": found["ours"]["working_mb"] / max(plain["working_mb"], 1e-9),
        "provenance": provenance(images=images, max_new_tokens=max_new_tokens, batch_size=batch_size),
    }


def _in_a_process(*arguments: Any) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(send, *arguments))
    child.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        raise RuntimeError("the measuring process died; its message is above") from None
    finally:
        child.join()


def _measure(send, arm: str, images: int, drafter: str, max_new_tokens: int, batch_size: int) -> None:
    from visspec.api import loading as targets
    from visspec.api.accelerate import accelerate
    from visspec.api.captions import PROMPT, prepare
    from visspec.eval.world.render import to_image
    from visspec.eval.world.scene import HELD_OUT_SEED, scene_from_seed

    model, processor = targets.load()
    generate = model.generate
    if arm != "transformers_generate":
        generate = accelerate(model, None if arm == "plain" else drafter).generate
    scenes = [to_image(scene_from_seed(HELD_OUT_SEED + i)) for i in range(images)]
    before = _peak_mb()
    for start in range(0, images, batch_size):
        inputs = prepare(processor, scenes[start : start + batch_size], PROMPT, model)
        generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    send.send({"loaded_mb": before, "peak_mb": _peak_mb(), "working_mb": _peak_mb() - before})
    send.close()


def _peak_mb() -> float:
    """Peak resident memory of this process so far. Linux counts in kilobytes, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
