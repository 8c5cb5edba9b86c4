"""`visspec bench grammar`: the same valid answers from every arm."""

import json

import pytest

from tests.test_cli import refused
from visspec.cli import bench_grammar
from visspec.cli.main import main


def test_answers_are_those_of_transformers_and_valid(tmp_path, capsys):
    pytest.importorskip("xgrammar")
    record, few = tmp_path / "g.json", ["--prompts", "1", "--passes", "1", "--drafters", "none", "ngram"]
    assert main(["bench", "grammar", "--packages", "xgrammar", *few, "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [(row["package"], row["drafter"]) for row in rows] == [("xgrammar", "none"), ("xgrammar", "ngram")]
    assert all(row["identical"] == row["compared"] == row["valid"] == 1 for row in rows)
    assert all(row["over_plain_constrained"] > 0 and row["over_unforced"] > 0 for row in rows)


def test_what_is_no_package_is_named(capsys):
    assert "--packages: got lark, expected xgrammar, llguidance, outlines" in refused(
        capsys, "bench", "grammar", "--packages", "lark"
    )


def test_valid_is_of_the_schema():
    thing = {"size": "small", "colour": "red", "shape": "star"}
    whole = {"count": 1, "ground": "grey", "first": thing, "last": thing}
    assert bench_grammar.is_valid(json.dumps(whole))
    assert not bench_grammar.is_valid(json.dumps(whole | {"count": 9})) and not bench_grammar.is_valid("{")
