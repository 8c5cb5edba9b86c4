"""Rules on simulated distributions: what is simulated, what rules make of it, and the command."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.doubles import one_sentence
from visspec.api.simulation import Simulation, nats, overlap
from visspec.cli import bench_rules
from visspec.cli.main import main
from visspec.eval.report.page import build

SMALL = {"codes": 256, "rows": 64, "tokens": 96}


@pytest.mark.parametrize("entropy, distance", [(0.5, 0.2), (3.0, 0.5), (5.0, 0.05)])
def test_distributions_have_their_entropy_and_distance(entropy, distance):
    found = Simulation(256, entropy, distance, 8, 64)
    assert nats(found.target) == pytest.approx(entropy, abs=0.01)
    assert 1 - float(overlap(found.target, found.drafter).mean()) == pytest.approx(distance, abs=0.01)
    assert found.target.exp().sum(-1).sub(1).abs().max() < 1e-4
    near = torch.cdist(found.codebook, found.codebook).topk(2, largest=False).indices[:, 1]
    other = torch.arange(256).roll(7)
    far = [(found.target - found.target[..., index]).square().mean() for index in (near, other)]
    assert far[0] < far[1] / 1.5  # near codes have near probabilities


def test_rules_keep_to_the_bound_and_relaxed_ones_pass_it():
    options = bench_rules.Options(entropy=[4.0], structure=["4", "3-3-3"], **SMALL)
    options.rule = ["exact", "rejection", "block", "lantern:k=100,delta=0.4", "grouped:group=8", "typical"]
    rows = {(row["rule"], row["structure"]): row for row in bench_rules.measure(options)}
    assert len(rows) == 11 and ("block", "3-3-3") not in rows
    rejection, exact, block = (rows[rule, "4"] for rule in ("rejection", "exact", "block"))
    assert rejection["tau"] == pytest.approx(rejection["bound"], rel=0.03)  # what it can reach, it reaches
    assert exact["tau"] < block["bound"] * 1.02 and rejection["tau"] - 0.05 < block["tau"]
    assert {rows[rule, "4"]["drift"] for rule in ("exact", "rejection", "block")} == {0.0}
    for rule in options.rule[3:]:
        assert rows[rule, "4"]["tau"] > rejection["bound"] and rows[rule, "4"]["drift"] > 0.05
        assert rows[rule, "4"]["displacement"] > 0 == rejection["displacement"]


@pytest.mark.parametrize("case", ["exact/4", "rejection/4", "block/4", "rejection/3-3-3"])
def test_exact_rules_draw_positions_from_the_target_and_apart(case):
    simulation = Simulation(8, 1.5, 0.3, 4096, 12)
    state = bench_rules.setup_of(simulation, *case.split("/")).decode(simulation.request(12, 1))
    rest_BTK = torch.nn.functional.one_hot(torch.tensor(state.tokens), 8) - simulation.target.exp()
    for products in (rest_BTK, *(rest_BTK[:, t:] * rest_BTK[:, :-t] for t in (1, 2, 3))):
        mean, error = products.mean((0, 1)), products.std((0, 1)) / products[..., 0].numel() ** 0.5
        assert (mean.abs() < 4.5 * error).all()


@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_trees_have_more_accepted_than_chains(rule):
    options, simulation = bench_rules.Options(**SMALL), Simulation(256, 4.0, 0.3, 64, 96)
    chain, tree = (bench_rules.row_of(simulation, rule, drafts, options)["tau"] for drafts in ("3", "3-3-3"))
    assert tree > 1.1 * chain


def test_the_command_writes_a_record_and_the_report_draws_it(tmp_path, capsys):
    few = ["--codes", "64", "--rows", "4", "--tokens", "12", "--entropy", "1", "2", "--structure", "2", "2-2"]
    record = tmp_path / "rules.json"
    main(["bench", "rules", *few, "--rule", "exact", "block", "lantern:k=8,delta=0.2", "--json", str(record)])
    rows = json.loads(record.read_text())["rows"]
    fields = {"entropy", "codes", "rule", "structure", "tau", "bound", "drift", "displacement"}
    assert len(rows) == 10 and all(fields <= {*row} for row in rows)
    assert all((row["bound"] is None) == (row["structure"] == "2-2") for row in rows)
    page = build([record], tmp_path / "page.html").read_text()
    assert page.count("drafts of 2, distance 0.3: tokens a pass") == 1
    assert re.search(r"1 exact, 2 block, 3 lantern:k=8,delta=0.2,\s*4 exact, at most", page)


def test_refusals():
    cases = {
        "entropy: got 9.0 nats, expected more than 0 and less than log 64": lambda: Simulation(64, 9.0, 0.3, 2, 4),
        "distance: got 0.999, expected at most": lambda: Simulation(64, 4.0, 0.999, 2, 4),
        "tree: got 'oak'": lambda: bench_rules.setup_of(Simulation(64, 2.0, 0.3, 2, 4), "exact", "oak"),
    }
    for why, call in cases.items():
        with one_sentence(why):
            call()
