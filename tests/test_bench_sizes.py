"""`visspec bench sizes`: tiny layers in place of each model's, on a CPU."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from visspec.cli import bench_sizes
from visspec.cli.main import main
from visspec.models.attention import pass_inputs
from visspec.models.runner import compiled

OPTIONS = "--sizes tiny --prompt 12 --max-new-tokens 72 --repeats 1 --dtype float32 --levels 5".split()
COMMON = {
    "bench", "guarantee", "drafter", "acceptance", "n_prompts", "max_new_tokens", "temperature", "seed", "identical",
    "compared", "provenance", "rows", "failures",
}  # fmt: skip
ROW = {
    "size", "layers", "arm", "batch_size", "tau", "expected_tau", "given_acceptance", "speedup", "speedup_ci95",
    "speedup_decode_only", "decode_over_transformers_static", "decode_over_plain", "identical", "compared", "law_error",
    "attention", "failures", "ms_per_token",
}  # fmt: skip
DRAFTED = {"ideal_speedup", "verify_over_plain", "draft_over_plain", "host_over_plain"}
ARMS = ["transformers_generate", "transformers_static", "plain", "oracle 0.6", "oracle 1", "policy 0.6", "policy 1"]


def tiny(batch=2, compile=False):
    model = bench_sizes.random_decoder("tiny", "cpu", torch.float32, 120)
    return bench_sizes.SizeCase(model, batch, 12, 40, 5, compile)


def test_it_writes_what_it_measured(tmp_path, capsys):
    file = tmp_path / "sizes.json"
    argv = [*OPTIONS, "--batch", "3", "1", "--acceptance", "0.6", "1"]
    assert main(["bench", "sizes", *argv, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    rows = record["rows"]
    assert record.keys() >= COMMON and record["bench"] == "sizes" and record["random_weights"]
    assert record["provenance"]["dtype"] == "float32" and record["identical"] == record["compared"] == 4 * 7
    assert [(r["size"], r["batch_size"]) for r in rows[::7]] == [("tiny", 3), ("tiny", 1)]
    assert [r["arm"] for r in rows] == ARMS * 2
    for row in rows:
        assert row.keys() >= ROW and not row["failures"] and row["law_error"] < 1e-4 and row["layers"] == 2
        assert row["identical"] == row["compared"] == row["batch_size"] and row["speedup"] > 0
        assert row["ms_per_token"] is None
        assert row["attention"] == "a mask over stored keys (no CUDA device)"
        drafted, paced = row["arm"].startswith(("oracle", "policy")), row["arm"].startswith("policy")
        assert (0 < row.get("length_share", 0) < 1.2) == paced
        assert (row["tau"] is not None) == drafted == (row.keys() >= DRAFTED)
        if drafted:
            cost = row["verify_over_plain"] + row["draft_over_plain"] + row["host_over_plain"]
            assert row["ideal_speedup"] == pytest.approx(row["tau"] / cost)
    result = [row for row in rows if row["arm"] == "oracle 0.6"]
    assert all(abs(row["expected_tau"] - 2.38) < 0.01 for row in result)
    rounds = sum(row["compared"] * 71 / row["tau"] for row in result)  # 71: the first token is the prefill's
    assert abs(sum(row["compared"] * 71 for row in result) / rounds - 2.38) < 0.35
    surely = [row["tau"] for row in rows if row["arm"] == "oracle 1"]
    assert surely == [pytest.approx(71 / 12)] * 2  # six a pass, the last one shorter
    out = capsys.readouterr().out
    assert "random weights" in out and "ms a token" not in out  # ratios on a CPU


def test_a_gpu_gets_times(monkeypatch):
    """Also those of compiled passes, and of a pass over the time that reading the weights takes."""
    monkeypatch.setattr(bench_sizes, "READ", 1 << 20)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    case = tiny(batch=1, compile=True)
    case.cuda = True
    rows = [{"size": "tiny", "layers": 2} | row for row in case.rows([0.8], 1)]
    ours = ["plain", "plain, compiled", "oracle 0.8", "policy 0.8", "oracle 0.8, compiled", "policy 0.8, compiled"]
    assert [row["arm"] for row in rows] == [*ARMS[:2], *ours]
    assert all(row["ms_per_token"] > 0 and row["identical"] == 1 for row in rows)
    assert [row["arm"] for row in rows if row.get("over_bytes", 0) > 0 and row["ms_per_pass"] > 0] == ours[:2]
    view = bench_sizes.view({"rows": rows, "prompt": 12, "max_new_tokens": 40})
    assert view.columns[-1].header == "ms a token"
    torch._dynamo.reset()


def test_sizes_are_those_of_the_models():
    result = {}
    for name, config in [*bench_sizes.SIZES.items()][:-1]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        result[name] = sum(p.numel() for p in model.parameters()) / 1e9
    published = {"llava-1.6-7b": 6.74, "qwen2.5-vl-7b": 7.62, "janus-pro-7b": 6.21, "llamagen-xl": 0.77}
    assert result == pytest.approx(published, abs=0.02)


def test_compares_distributions(monkeypatch):
    """The next id mostly follows whatever a node attends to; its law does not."""
    assert tiny().passes()["law_error"] < 1e-4
    case = tiny()
    blind = lambda self, tree, length: self.additive(torch.ones(1, tree.size, length + tree.size, dtype=bool), 7)  # noqa: E731
    monkeypatch.setattr(pass_inputs.Masks, "_shared_mask", blind)
    assert case.passes()["law_error"] > 1e-2


def test_misfits_are_named(monkeypatch):
    ours = bench_sizes.CaptionArm.__call__

    def full(self, prompt):
        if len(prompt[1]["input_ids"]) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ours(self, prompt)

    monkeypatch.setattr(bench_sizes.CaptionArm, "__call__", full)
    sizes = {"sizes": ["tiny"], "batch": [3, 1], "max_new_tokens": 6, "prompt": 8, "dtype": "float32"}
    record = bench_sizes.bench_sizes(bench_sizes.Options(**sizes, acceptance=[0.5], repeats=1))
    assert [row["batch_size"] for row in record["rows"]] == [1] * 5
    (failure,) = record["failures"]
    assert failure.startswith("tiny, batch 3: prompt 0: OutOfMemoryError: CUDA")
    assert failure in bench_sizes.view(record).caption
