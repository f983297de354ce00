"""A run's summary: one screen of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lgroup.train.display import clock, sparkline
from lgroup.train.progress import RETURN_WINDOW, Progress, Snapshot


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    title: str
    reason: str
    progress: Progress
    snapshots: Sequence[Snapshot]
    stats: Mapping[str, Any]
    out: Path
    files: Sequence[str]


def summary_of(outcome: Outcome) -> str:
    """The summary, with the ledger: what became of every update and env step that was submitted."""
    last = outcome.snapshots[-1]
    lines = [f"{outcome.title}: {outcome.reason}.", ""]
    lines += _rows([("return", _returns(outcome.progress)), *_numbers(last)])
    curve = [(s.env_steps, s.episode_return_mean) for s in outcome.snapshots if s.episodes]
    if len(curve) > 1:
        lines += _rows([("curve", sparkline(curve, 48))])
    lines += ["", *_ledger(outcome.stats), ""]
    lines += _rows([("written", f"{outcome.out}/"), *(("", name) for name in outcome.files)])
    return "\n".join(lines) + "\n"


def _returns(progress: Progress) -> str:
    if not progress.episodes:
        return "no episode ended"
    if math.isnan(progress.first_return_mean):
        return f"{progress.return_mean:.1f}, mean of {progress.episodes} episodes"
    return (
        f"{progress.first_return_mean:.1f} in the first {RETURN_WINDOW} episodes, "
        f"{progress.return_mean:.1f} in the last (best {progress.best_return_mean:.1f})"
    )


def _numbers(last: Snapshot) -> list[tuple[str, str]]:
    per_second = f"{last.env_steps / last.seconds:,.0f}/s" if last.seconds else "–"
    updates_per_second = f"{last.updates / last.seconds:,.1f}/s" if last.seconds else "–"
    rows = [
        ("time", clock(last.seconds)),
        ("env steps", f"{last.env_steps:,} ({per_second}) in {last.episodes:,} finished episodes"),
        ("updates", f"{last.updates:,} ({updates_per_second}), weights version {last.weights_version:,}"),
    ]
    if math.isfinite(last.staleness_mean):
        rows.append(("staleness", f"{last.staleness_mean:.1f} versions at the end, {last.staleness_max} at most"))
    return rows


def _ledger(stats: Mapping[str, Any]) -> list[str]:
    """submitted = in flight + applied + dropped + failed, of updates and of env steps."""
    heads = ("ledger", "submitted", "in flight", "applied", "dropped", "failed")
    table: list[tuple[str, ...]] = [heads]
    for name, key in (("updates", "updates"), ("env steps", "env_steps")):
        entry = stats[key]
        counts = (entry["submitted"], entry["in_flight"], entry["applied"])
        table.append((name, *(f"{n:,}" for n in counts), _by_reason(entry["dropped"]), _by_reason(entry["failed"])))
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]


def _by_reason(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)
    return f"{total:,} ({reasons})" if total else "0"


def _rows(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name:<10}  {text}".rstrip() for name, text in pairs]
