"""The learning curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lgroup.train.progress import RETURN_WINDOW, Snapshot


def save_curve(path: Path, snapshots: Sequence[Snapshot], title: str, goal: float | None) -> None:
    """Draws the mean return over env steps, and over the time below it, into a PNG file."""
    from matplotlib.figure import Figure

    points = [s for s in snapshots if s.episodes > 0]
    figure = Figure(figsize=(8.0, 6.4), dpi=120, layout="constrained")
    figure.suptitle(title)
    for axes, xs, label in zip(
        figure.subplots(2, 1),
        ([s.env_steps for s in points], [s.seconds for s in points]),
        ("env steps", "seconds"),
        strict=True,
    ):
        axes.plot(xs, [s.episode_return_mean for s in points], linewidth=1.8, color="#1f6f8b")
        if goal is not None:
            axes.axhline(goal, color="#999999", linestyle="--", linewidth=1.0)
            axes.annotate(f"goal {goal:g}", (1.0, goal), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        axes.set_xlabel(label)
        axes.set_ylabel(f"mean return\n(last {RETURN_WINDOW} episodes)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(alpha=0.3)
        axes.margins(x=0.02, y=0.12)
    figure.savefig(path)
