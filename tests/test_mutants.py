"""The mutants themselves: each is another program, and the errors of the past still have their place in the source."""

import ast

from tests.mutants import candidates


def test_mutants_are_other_programs_and_the_choice_is_wide():
    chosen = candidates.chosen(250, seed=0)
    assert {m.path for m in chosen} >= set(candidates.core()) and len({m.key for m in chosen}) == len(chosen) == 250
    moving = {m.path for path in candidates.core() for m in candidates.candidates(path) if m.function.endswith(".join")}
    assert {m.path for m in chosen if m.function.endswith((".join", ".select"))} >= moving
    assert {m.what for m in chosen} > {"number", "comparison", "operator", "condition", "left out", "name", "bound"}
    as_it_is = {path: ast.dump(ast.parse(candidates.text_of(path))) for path in {m.path for m in chosen}}
    assert all(ast.dump(ast.parse(mutant.source())) != as_it_is[mutant.path] for mutant in chosen)


def test_the_errors_of_the_past_are_found_in_the_source():
    """A change of the code they were made in shows here; then the list is mended with it."""
    assert len(candidates.named()) == len(candidates.NAMED) == 19
