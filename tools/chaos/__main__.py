"""Trains under random faults: python -m tools.chaos --faults 1000 --learners 3 --seed 1

Exit status 0: nothing wrong; 1: mistakes were found; 3: nothing happened for too long (all stacks are printed then).
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from tools.chaos.faults import KINDS
from tools.chaos.run import Options, Outcome, run

SUBJECTS = {"ledger": "ledger errors", "digests": "differing digests", "orphans": "orphans", "leaks": "leaks"}


def main(arguments: list[str] | None = None) -> int:
    """Run, print the table, write the JSON."""
    given = _parser().parse_args(arguments)
    if not given.verbose:
        logging.getLogger("lgroup.group").setLevel(logging.ERROR)
    options = Options(
        faults=given.faults,
        learners=given.learners,
        seed=given.seed,
        kinds=given.kinds,
        min_learners=given.min_learners,
        rate=given.rate,
        hang_limit_s=given.hang_limit,
        slow_share=given.slow_share,
    )
    outcome = run(options)
    print(table(outcome))
    print(last_line(outcome))
    if given.json:
        given.json.write_text(json.dumps(as_dict(options, outcome), indent=2) + "\n")
    return int(any(outcome.errors.values()))


def table(outcome: Outcome) -> str:
    """One line per kind of fault, and what became of the updates."""
    lines = [f"{'fault':<20}{'count':>7}{'median s':>10}{'worst s':>10}"]
    for kind, count in sorted(outcome.count.items()):
        times = outcome.recovery_s.get(kind, [0.0])
        lines.append(f"{kind:<20}{count:>7}{statistics.median(times):>10.3f}{max(times):>10.3f}")
    lines.append(f"updates {outcome.updates}, restarts {outcome.num_restarts}, {outcome.seconds:.0f} s")
    return "\n".join([*lines, *(text for found in outcome.errors.values() for text in found[:20])])


def last_line(outcome: Outcome) -> str:
    """The verdict."""
    return ", ".join(f"{words} {outcome.num_errors(subject)}" for subject, words in SUBJECTS.items()) + ", hangs 0"


def as_dict(options: Options, outcome: Outcome) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "options": {**vars(options), "kinds": list(options.kinds)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "faults": dict(outcome.count),
        "recovery_s": {
            kind: {"median": statistics.median(times), "worst": max(times)}
            for kind, times in outcome.recovery_s.items()
        },
        "updates": outcome.updates,
        "restarts": outcome.num_restarts,
        "seconds": outcome.seconds,
        "errors": {subject: outcome.errors.get(subject, []) for subject in SUBJECTS},
    }


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    return kinds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="how many faults (default: %(default)s)")
    parser.add_argument("--learners", type=int, default=3, help="how many learners (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="chooses faults, victims, moments and data")
    parser.add_argument("--rate", type=float, default=0.0, help="faults per second at most; 0: no limit")
    parser.add_argument("--kinds", type=_kinds, default=list(KINDS), metavar="A,B", help=", ".join(KINDS))
    parser.add_argument("--min-learners", type=int, default=1, help="the group's min_learners")
    parser.add_argument("--slow-share", type=float, default=0.02, help="share of faults that take seconds each")
    parser.add_argument("--hang-limit", type=float, default=90.0, metavar="S", help="seconds without an event: a hang")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument("--verbose", action="store_true", help="print each post-mortem")
    return parser


if __name__ == "__main__":
    sys.exit(main())
