"""`visspec bench prompts`: its rows, on the smallest layout behind short prompts."""

import json

import pytest

from visspec.cli import bench_prompts
from visspec.cli.main import main
from visspec.eval.bench.oracle import Oracle, erring_every

FIELDS = {
    "nodes", "prompt", "heads", "layers", "over_stock_pass", "attention_over_stock_query", "loop_over_transformers",
    "speedup", "identical", "compared",
}  # fmt: skip


def test_it_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    small = bench_prompts.HeadLayout(4, 2, 8, 1, 32)
    monkeypatch.setitem(bench_prompts.LAYOUTS, "8/2x32", small)
    file = tmp_path / "prompts.json"
    options = "--heads 8/2x32 --prompts 40 300 --nodes 1 8 24 --max-new-tokens 13 --repeats 1".split()
    options += ["--drafters", "ngram", "feature", "small_model"]
    assert main(["bench", "prompts", *options, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    rows = record["rows"]
    assert record["bench"] == "prompts" and record["provenance"]["attention"] == "sdpa"
    assert [(r["prompt"], r["nodes"]) for r in rows] == [(p, n) for p in (40, 300) for n in (1, 8, 24)]
    assert all(r.keys() == FIELDS and r["heads"] == "4/2x8" and r["over_stock_pass"] > 0 for r in rows)
    assert [(r["identical"], r["compared"]) for r in rows] == [(1, 1), (1, 1), (None, 0)] * 2
    shares = [(r["drafter"], r["prompt"]) for r in record["drafters"]]
    assert shares == [(name, n) for name in ("ngram", "feature", "small_model") for n in (40, 300)]
    for row in record["drafters"]:
        assert 0 < row["share"] == row["draft_prefill_s"] / (row["prefill_s"] + row["draft_prefill_s"]) < 1
    out = capsys.readouterr().out
    assert "oracle drafter, tau 4" in out and "time to the first token" in out


def test_a_drafter_that_fails_has_no_share(monkeypatch):
    monkeypatch.setattr(bench_prompts.NGram, "start", lambda *args: 1 / 0)
    model = bench_prompts.HeadLayout(4, 2, 8, 1, 32).model("cpu")
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="drafter: got a failure of NGram"):
        bench_prompts.first_token(model, "4/2x8", [9], ["ngram"], 1)


def test_its_oracle_commits_tau_tokens_a_pass():
    layout = bench_prompts.HeadLayout(4, 2, 8, 1, 32)
    target = bench_prompts.PrimedTarget(layout.model("cpu"))
    prompt = bench_prompts.PromptRun(layout, target, 20, 21)
    oracle = Oracle(erring_every(prompt.answer, 4, bench_prompts.VOCABULARY))
    guarded = bench_prompts.SafeDrafter(oracle, target.capabilities, target.device, False)
    length_policy = bench_prompts.FixedLength(7)
    state = bench_prompts.decode(target, guarded, bench_prompts.Exact(), prompt.request(), length_policy)
    assert [max(r.committed) for r in state.trace.rounds] == [4] * 5 and state.trace.faults == 0
    assert state.tokens == prompt.answer.tolist()


def test_unknown_layouts_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "prompts", "--heads", "7/2x32"])
    assert "8/2x32" in capsys.readouterr().err


def test_every_layout_is_a_model():
    for name, layout in bench_prompts.LAYOUTS.items():
        config = layout.config()
        heads = f"{config.num_attention_heads}/{config.num_key_value_heads}x{config.head_dim}"
        assert name == heads and config.num_hidden_layers == layout.layers
