"""Types of arguments that several commands take."""

import argparse


def positive(text: str) -> int:
    """An argparse type. Raises ArgumentTypeError, which names the argument and exits with 2."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 1")
    return value


def temperature(text: str) -> float:
    """An argparse type, as `positive`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 (greedy) or more")
    return value
