"""Measures lgroup against a bare training loop in one run, and prints medians, ratios and goals.

Leave the machine alone meanwhile: figures taken beside other work mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.bench import calls, recovery, resources, updates
from tools.bench.figures import Figure, table

MEASUREMENTS: dict[str, Callable[[int], list[Figure]]] = {
    "sync": updates.sync,
    "async": updates.asynchronous,
    "calls": calls.calls,
    "start": resources.start,
    "memory": resources.memory,
    "idle": resources.idle,
    "recovery": recovery.recovery,
}


def main() -> int:
    options = _parser().parse_args()
    figures = []
    for name in options.only or MEASUREMENTS:
        print(f"measuring: {name} ...", file=sys.stderr, flush=True)
        measured = MEASUREMENTS[name](options.repeat)
        for figure in measured:
            print(f"    {figure.name}: {figure.value:.3g} {figure.unit}", file=sys.stderr, flush=True)
        figures += measured
    print(table(figures))
    if options.json:
        record = {"machine": machine(), "figures": [figure.as_dict() for figure in figures]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1_min": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, help="measure these only (default: all)")
    parser.add_argument("--repeat", type=int, default=20, help="rounds of blocks in turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
