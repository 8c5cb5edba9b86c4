"""The bench measures what it says: the eager forms decide as the operators do, and every row is complete."""

import json
from functools import partial

import pytest
import torch

from visspec.eval.bench import clock, kernels_jobs
from visspec.eval.bench import kernels as bench
from visspec.eval.bench import kernels_loops as loops
from visspec.eval.report import kernels as report_kernels
from visspec.kernels import accept_tree

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_loops_it_compares_with_decide_alike():
    case = loops.verification_case(torch.device("cpu"), nodes_per_level=(4, 6, 5), V=400, K=60, draws=40)
    for i in range(40):
        path, _, following, _ = accept_tree(
            case["tokens"], case["parent"], case["p"], None, case["uniforms"][i], case["draw"][i],
            neighbours=case["neighbours"], delta=0.1,
        )  # fmt: skip
        wanted = (path[path >= 0].tolist(), int(following))
        common = (case["p"][0], case["neighbours"], 0.1, case["uniforms"][i, 0], case["draw"][i, 0])
        assert loops.loop_over_children(case["tokens"][0], case["parent"][0], *common) == wanted
        table = (common[0], case["neighbours"].numpy(), *common[2:])
        for copied in (True, False):
            assert loops.loop_over_paths(case["tokens"][0], case["paths"], *table, copied=copied) == wanted


def test_a_round_is_guidance_warp_and_acceptance():
    ours, eager = kernels_jobs._round_job(CPU, (4, 6, 5), 2000).build()
    reached = set()
    for i in range(20):
        path, _, following, _ = ours(i)
        assert (path[path >= 0].tolist(), int(following)) == eager(i)
        reached.add(tuple(path[0].tolist()))
    assert len(reached) > 1


@pytest.mark.parametrize("prefix", [40])
def test_attention_is_compared_with_the_same_attention(prefix):
    rows = kernels_jobs._attention_jobs(CPU, prefix, H=4, G=2, N=6, F=16)
    assert len({row.against for row in rows}) == 3
    for row in rows:
        ours, eager = row.build()
        torch.testing.assert_close(ours(0), eager(0))


def test_rows_of_a_gpu_are_named_without_one():
    shapes = {(job.kernel, job.shape) for job in kernels_jobs.jobs(CUDA, quick=False)}
    assert {
        ("verification round", "59x16384 k=1000"),
        ("verification round", "64x32768 k=1000"),
        ("tree_attention", "64 nodes, prefix 4096, 32/8 heads"),
        ("commit_kv", "64 x 4x8x1024x128"),
    } <= shapes
    small = {(job.kernel, job.shape) for job in kernels_jobs.jobs(CUDA, quick=True)}
    assert small == {(job.kernel, job.shape) for job in kernels_jobs.jobs(CPU, quick=False)} != shapes


def job_of(name="add", broken=False, **changes):
    def build():
        if broken:
            raise RuntimeError("no such kernel\nand a trace")
        x = torch.ones(100)
        return lambda i: x + 1, lambda i: x.add(1).add(0)

    return kernels_jobs.KernelJob(name, "100", "float32", build, 800, "two additions", **changes)


@pytest.fixture
def two_rows(monkeypatch):
    """A run of one kernel that works, with all figures that a row can have, and one that does not."""
    monkeypatch.setattr(bench, "jobs", lambda *_, **__: [job_of(), job_of("div", broken=True)])
    monkeypatch.setattr(bench, "count_dispatches", lambda case: (12, 0))


def test_a_kernel_that_fails_is_listed_and_costs_no_other_row(two_rows, tmp_path, capsys):
    result = bench.run("cpu", tmp_path / "kernels.json", quick=True)
    assert json.loads((tmp_path / "kernels.json").read_text()) == result
    assert result["failures"] == ["div 100: RuntimeError: no such kernel\nand a trace"]
    good, bad, *unmeasured = result["rows"]
    assert set(good) == {*bench.MEASURED, "kernel", "shape", "dtype", "device", "bytes", "eager", "repeats"}
    assert set(bad) == {*good, "failure"} and all(set(row) == set(good) for row in unmeasured)
    assert good["repeats"] == 8 and good["timed"] == good["eager_timed"] == "processor time, best of 3"
    low, high = good["time_us_quartiles"]
    assert low <= good["time_us"] <= high
    assert good["host_us"] is good["share_of_reading_14_gb"] is result["ms_to_read_14_gb_at_copy_bandwidth"] is None
    assert bad["repeats"] == 0 and bad["time_us"] == "not measured"
    assert [row["device"] for row in unmeasured] == ["cuda", "cuda"]
    where = result["provenance"]
    assert where["device"] == "cpu" and where["date"] and where["git"] and "driver" not in where
    said = capsys.readouterr().out
    assert "failed: RuntimeError: no such kernel" in said
    page = report_kernels.Table(result, "kernels.json")
    assert [row["failure"][:12] for row in page.rows] == ["", "RuntimeError", "", ""]
    assert page.rows[0]["quartiles"] == (low, high)


def test_a_gpu_is_asked_for_before_work_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: found cuda on a machine without CUDA, expected cpu"):
        bench.run("cuda")


@pytest.mark.slow
def test_run_writes_a_complete_table(tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "BEST_OF", 1)
    monkeypatch.setattr(clock.ProcessorClock, "fewest", 2)
    monkeypatch.setattr(loops, "rule_and_loop", partial(loops.rule_and_loop, V=2048))
    monkeypatch.setattr(kernels_jobs, "VOCABULARY", 2048)
    result = bench.run("cpu", tmp_path / "kernels.json", quick=True)
    assert json.loads((tmp_path / "kernels.json").read_text()) == result
    assert result["host_syncs_per_round"] == 0 and result["dispatched_ops_per_verification"] <= 60
    measured = [row for row in result["rows"] if row["device"] == "cpu"]
    assert result["failures"] == [] and len({row["kernel"] for row in measured}) == 14
    assert all(row["time_us"] > 0 for row in measured)
    assert all(row["time_us"] == "not measured" for row in result["rows"] if row["device"] == "cuda")
