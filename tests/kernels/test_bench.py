"""The bench measures what it says: the eager loops decide as the operator does, and every row is complete."""

import json

import pytest
import torch

from visspec.eval import kernels as bench
from visspec.eval import kernels_loops as loops
from visspec.kernels import accept_tree


def test_the_loops_it_compares_with_decide_alike():
    case = loops.verification_case(torch.device("cpu"), nodes_per_level=(4, 6, 5), V=400, K=60, draws=40)
    for i in range(40):
        path, _, following, _ = accept_tree(
            case["tokens"], case["parent"], case["p"], None, case["coins"][i], case["draw"][i],
            neighbours=case["neighbours"], delta=0.1,
        )  # fmt: skip
        wanted = (path[path >= 0].tolist(), int(following))
        common = (case["p"][0], case["neighbours"], 0.1, case["coins"][i, 0], case["draw"][i, 0])
        assert loops.loop_over_children(case["tokens"][0], case["parent"][0], *common) == wanted
        table = (common[0], case["neighbours"].numpy(), *common[2:])
        for copied in (True, False):
            assert loops.loop_over_paths(case["tokens"][0], case["paths"], *table, copied=copied) == wanted


@pytest.mark.slow
def test_run_writes_a_complete_table(tmp_path):
    result = bench.run("cpu", tmp_path / "kernels.json", quick=True)
    assert json.loads((tmp_path / "kernels.json").read_text()) == result
    assert result["host_syncs_per_round"] == 0 and result["dispatched_ops_per_verification"] <= 60
    measured = [row for row in result["rows"] if row["device"] == "cpu"]
    assert len({row["kernel"] for row in measured}) == 10 and all(row["time_us"] > 0 for row in measured)
    assert all(row["time_us"] == "not measured" for row in result["rows"] if row["device"] == "cuda")
