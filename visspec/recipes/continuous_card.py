"""The last stage of the continuous painter's recipe."""

import argparse


def finish(options: argparse.Namespace) -> None:
    """Write the folders."""
    raise NotImplementedError
