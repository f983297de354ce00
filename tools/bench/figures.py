"""What the benchmark says: figures with goals, as a table and as JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number beside its goal; smaller is better for all of them."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.value <= self.goal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


def ratio_figure(name: str, ours: Sequence[Sequence[float]], bare: Sequence[Sequence[float]], goal: float) -> Figure:
    """The ratio of two medians, from samples in seconds, one sequence per round.

    `detail` has both medians in ms and the quartiles of the ratios of single rounds, which tell how far to trust it.
    """
    our_median, bare_median = (statistics.median(_flat(rounds)) for rounds in (ours, bare))
    rounds = [statistics.median(one) / statistics.median(other) for one, other in zip(ours, bare, strict=True)]
    low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else (rounds[0],) * 3
    detail = {
        "lgroup_ms": our_median * 1e3,
        "bare_ms": bare_median * 1e3,
        "round_ratio_quartiles": [low, high],
        "samples": sum(map(len, ours)),
    }
    return Figure(name, our_median / bare_median, "x", goal, detail)


def _flat(rounds: Iterable[Sequence[float]]) -> list[float]:
    return [sample for samples in rounds for sample in samples]


HEADINGS = ("figure", "measured", "goal", "", "detail")


def rows_of(figures: Sequence[Figure]) -> list[tuple[str, str, str, str, str]]:
    """The cells of the table, without headings."""
    verdicts = {True: "ok", False: "MISSED", None: ""}
    return [
        (
            figure.name,
            f"{_short(figure.value)} {figure.unit}",
            "" if figure.goal is None else f"<= {_short(figure.goal)} {figure.unit}",
            verdicts[figure.met],
            ", ".join(f"{key} {_words(value)}" for key, value in figure.detail.items()),
        )
        for figure in figures
    ]


def table(figures: Sequence[Figure]) -> str:
    """A plain table, as Markdown, so that it can be pasted into docs/benchmarks.md."""
    rows = [HEADINGS, *rows_of(figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, list):
        return " to ".join(map(_words, value))
    return str(value)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
