"""Console script ``lgroup``, also ``python -m lgroup``: ``lgroup train …`` and ``lgroup worker …``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments[:1])
    return _train(arguments[1:]) if options.command == "train" else _worker(arguments[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lgroup", description="Distributed learners without Ray.")
    parser.add_argument(
        "command",
        choices=("train", "worker"),
        help="train: train a policy on a Gymnasium environment; worker: host workers on this node. "
        "Each explains its options with --help",
    )
    return parser


def _train(arguments: list[str]) -> int:
    from lgroup.train import main as train

    return train(arguments)


def _worker(arguments: list[str]) -> int:
    from lgroup.worker import main as worker

    return worker(arguments)


if __name__ == "__main__":
    sys.exit(main())
