"""A run's logs: one CSV row and one set of TensorBoard scalars per snapshot."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lgroup.train.progress import Snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

_COLUMNS = (
    "seconds",
    "env_steps",
    "env_steps_per_s",
    "episodes",
    "episode_return_mean",
    "episode_len_mean",
    "updates",
    "updates_per_s",
    "in_flight",
    "dropped",
    "failed",
    "staleness_mean",
    "staleness_max",
    "weights_version",
)


class RunLog:
    """Writes ``progress.csv`` and a ``tensorboard`` folder; every row is on disk when `write` returns."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._file = (folder / "progress.csv").open("w", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerow(_COLUMNS)
        writer: Any = SummaryWriter  # its annotations are not complete
        self._board = writer(log_dir=str(folder / "tensorboard"), flush_secs=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()

    def write(self, snapshot: Snapshot) -> None:
        """Appends one row; numbers that are not known yet stay empty."""
        values = {name: getattr(snapshot, name) for name in _COLUMNS}
        self._rows.writerow([_text(value) for value in values.values()])
        self._file.flush()
        scalars = {f"run/{name}": value for name, value in values.items() if name != "env_steps"}
        scalars |= {f"learner/{name}": value for name, value in snapshot.learner.items()}
        for tag, value in scalars.items():
            if math.isfinite(value):
                self._board.add_scalar(tag, value, snapshot.env_steps)


def _text(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if math.isfinite(value) else ""
