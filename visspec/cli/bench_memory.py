"""`visspec bench memory`: peak memory of plain and accelerated captioning, each in a process of its own."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from visspec.cli.arguments import JsonOption, ModelOptions, Positive, load
from visspec.io.files import write_json
from visspec.io.options import option

ARMS = ("transformers_generate", "plain", "ours")
MOST = 128  # new tokens


@dataclass(kw_only=True)
class Options(JsonOption):
    images: Positive = option(default=8)
    batch_size: Positive = option(default=1)
    drafter: str | None = option("name with options, or folder (default: the model's own)", None)


def run(arguments: Options) -> None:
    record = bench_memory(arguments)
    for name, row in record["arms"].items():
        print(f"{name}: peak {row['peak_mb']:.1f} MB, of which decoding {row['working_mb']:.1f} MB")
    print(f"peak over transformers' generate: {record['peak_over_plain']:.3f}")
    write_json(arguments.json, record)


def bench_memory(arguments: Options) -> dict[str, Any]:
    """Peak resident memory of each arm on the same rendered scenes, in MB.

    `peak_over_plain` compares whole processes, drafter weights included; `working_over_plain` what decoding added to a
    process that had loaded model and drafter.
    """
    from visspec.io.provenance import provenance

    found = {arm: _in_a_process(arm, arguments) for arm in ARMS}
    plain, images, batch_size = found["transformers_generate"], arguments.images, arguments.batch_size
    over = {"peak_over_plain": found["ours"]["peak_mb"] / plain["peak_mb"]}
    over["working_over_plain"] = found["ours"]["working_mb"] / max(plain["working_mb"], 1e-9)
    where = provenance(images=images, max_new_tokens=MOST, batch_size=batch_size)
    return {"bench": "memory", "arms": found, **over, "provenance": where}


def _in_a_process(arm: str, arguments: Options) -> dict[str, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, arm, arguments).result()
        except BrokenProcessPool:
            raise RuntimeError("the measuring process died; its message is above") from None


def _measure(arm: str, arguments: Options) -> dict[str, float]:
    from visspec.api.accelerate import accelerate
    from visspec.api.captions import PROMPT, prepare
    from visspec.cli.bench import groups_of
    from visspec.eval.bench.clock import peak_mb
    from visspec.io import included

    model, processor, drafter = load(ModelOptions(drafter=arguments.drafter))
    generate = model.generate
    if arm != "transformers_generate":
        generate = accelerate(model, None if arm == "plain" else drafter).generate
    scenes = included.scenes(None, processor).images(arguments.images)
    before = peak_mb()
    for group in groups_of(scenes, arguments.batch_size):
        inputs = prepare(processor, group, PROMPT, model)
        generate(**inputs, max_new_tokens=MOST, do_sample=False)
    return {"loaded_mb": before, "peak_mb": peak_mb(), "working_mb": peak_mb() - before}
