"""What a person sees while a run goes on: a live panel on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import sys
from collections import deque
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

from lgroup.train.progress import Snapshot, StopRule

if TYPE_CHECKING:
    from rich.console import RenderableType
    from typing_extensions import Self

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48


class Display(Protocol):
    """Shows snapshots from `__enter__` to `__exit__`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        """The run's newest state."""

    def say(self, sentence: str) -> None:
        """Something happened that a person should read."""


def display_for(stream: IO[str], title: str, rule: StopRule, *, plain: bool) -> Display:
    """The live panel if `stream` is a terminal and `plain` is not asked for, else plain lines."""
    return PlainLines(stream, title) if plain or not stream.isatty() else LivePanel(stream, title, rule)


class PlainLines:
    """One line every `every_s` seconds of the run's own time."""

    def __init__(self, stream: IO[str], title: str, every_s: float = 5.0) -> None:
        self._stream, self._title, self._every_s = stream, title, every_s
        self._next_s = 0.0

    def __enter__(self) -> Self:
        self.say(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.seconds >= self._next_s:
            self._next_s = snapshot.seconds + self._every_s
            self.say(line_of(snapshot))

    def say(self, sentence: str) -> None:
        print(sentence, file=self._stream, flush=True)


class LivePanel:
    """A panel that is redrawn in place, with a bar for how far the run is and a curve of the mean return."""

    def __init__(self, stream: IO[str], title: str, rule: StopRule) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title, self._rule = title, rule
        self._curve: deque[tuple[int, float]] = deque()
        self._live = Live(
            self._panel(None),
            console=Console(file=stream),
            refresh_per_second=8,
            redirect_stdout=stream is sys.stdout,
            transient=True,  # the summary comes in its place
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.episodes and (not self._curve or snapshot.env_steps > self._curve[-1][0]):
            self._curve.append((snapshot.env_steps, snapshot.episode_return_mean))
        self._live.update(self._panel(snapshot))

    def say(self, sentence: str) -> None:
        self._live.console.print(sentence, markup=False, highlight=False)

    def _panel(self, snapshot: Snapshot | None) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        if snapshot is None:
            return Panel(Text("starting …"), title=self._title, title_align="left", border_style="cyan", width=78)
        parts = [self._bar(snapshot), self._numbers(snapshot)]
        if len(self._curve) > 1:
            parts.append(Text(f" return  {sparkline(self._curve, _CURVE_WIDTH)}", style="green", no_wrap=True))
        return Panel(Group(*parts), title=self._title, title_align="left", border_style="cyan", width=78)

    def _bar(self, snapshot: Snapshot) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        row = Table.grid(padding=(0, 1))
        total = self._rule.env_steps
        of = f" of {total:,}" if total else ""
        bar = ProgressBar(total=total or 1, completed=snapshot.env_steps if total else 0, width=30)
        row.add_row(clock(snapshot.seconds), bar, f"{snapshot.env_steps:,}{of} env steps")
        return row

    def _numbers(self, snapshot: Snapshot) -> RenderableType:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(style="dim", justify="right")
            table.add_column(justify="right", min_width=9)
        goal = self._rule.episode_return
        table.add_row(
            "return", _number(snapshot.episode_return_mean, 1), "goal", "–" if goal is None else f"{goal:g}",
            "episodes", f"{snapshot.episodes:,}",
        )  # fmt: skip
        table.add_row(
            "env steps/s", f"{snapshot.env_steps_per_s:,.0f}", "updates/s", f"{snapshot.updates_per_s:,.1f}",
            "updates", f"{snapshot.updates:,}",
        )  # fmt: skip
        table.add_row(
            "in flight", str(snapshot.in_flight), "dropped", str(snapshot.dropped),
            "failed", str(snapshot.failed),
        )  # fmt: skip
        table.add_row(
            "staleness", _number(snapshot.staleness_mean, 1), "at most", str(snapshot.staleness_max),
            "weights version", f"{snapshot.weights_version:,}",
        )  # fmt: skip
        return table


def line_of(snapshot: Snapshot) -> str:
    """A snapshot as one line."""
    return (
        f"{clock(snapshot.seconds)}  {snapshot.env_steps:>9,} env steps ({snapshot.env_steps_per_s:,.0f}/s)  "
        f"return {_number(snapshot.episode_return_mean, 1)}  {snapshot.updates:,} updates "
        f"({snapshot.updates_per_s:,.1f}/s)  in flight {snapshot.in_flight}  dropped {snapshot.dropped}  "
        f"staleness {_number(snapshot.staleness_mean, 1)}"
    )


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60:d}:{int(seconds) % 60:02d}"


def sparkline(curve: Any, width: int) -> str:
    """Points ``(x, y)`` in order of x as `width` blocks of eight heights, followed by the lowest and the highest y."""
    points = list(curve)
    first, last = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in points:
        columns[min(width - 1, int((x - first) / max(1, last - first) * width))].append(y)
    means: list[float] = []
    for column in columns:
        means.append(sum(column) / len(column) if column else means[-1])
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means) + f"  {low:.0f} to {high:.0f}"


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"
