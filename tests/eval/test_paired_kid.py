"""The distance over pairs: what it is by its formula, how often chance passes its floor, and what it sees."""

import itertools

import pytest
import torch

from visspec.eval.metrics import fid, kid


def pairs(n, shift=0.0, seed=0, dim=6):
    """Features of two draws a prompt, of prompts that differ far more than draws; the second is shifted."""
    generator = torch.Generator().manual_seed(seed)
    prompt, first, second = (torch.randn(n, dim, generator=generator) for _ in range(3))
    return 2 * prompt + 0.3 * first, 2 * prompt + 0.3 * second + shift


def test_it_is_the_mean_over_other_pairs():
    first, second = (x.double() for x in pairs(5, 0.2))
    k = lambda a, b: (float(a @ b) / 6 + 1) ** 3  # noqa: E731
    of_two = [
        k(first[i], first[j]) + k(second[i], second[j]) - k(first[i], second[j]) - k(second[i], first[j])
        for i, j in itertools.permutations(range(5), 2)
    ]
    assert kid.paired(first, second).value == pytest.approx(sum(of_two) / 20)
    assert kid.paired(first, first) == (0.0, 0.0)


def test_the_floor_is_passed_by_chance_in_one_of_twenty():
    found = [kid.paired(*pairs(24, seed=s)) for s in range(400)]
    assert 0.02 <= sum(one.value > one.floor for one in found) / 400 <= 0.08


def test_it_sees_what_a_distance_of_sets_does_not():
    first, second = pairs(48, 0.2)
    found = kid.paired(first, second)
    assert found.value > 2 * found.floor
    noise = [fid.from_features(pairs(48, seed=s)[0], pairs(48, seed=s + 50)[0]) for s in range(20)]
    assert fid.from_features(first, second) < min(noise)
