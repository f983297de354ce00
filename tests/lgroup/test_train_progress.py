"""What a run counts, when it ends, and what a person reads of it. No process, no clock."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lgroup.train.display import LivePanel, PlainLines, display_for, line_of, sparkline
from lgroup.train.logs import RunLog
from lgroup.train.plot import save_curve
from lgroup.train.progress import RETURN_WINDOW, Progress, Snapshot, StopRule
from lgroup.train.summary import Outcome, summary_of


def stats(applied: int = 0, in_flight: int = 0, **more: dict[str, int]) -> dict[str, Any]:
    dropped, failed = more.get("dropped", {}), more.get("failed", {})
    submitted = applied + in_flight + sum(dropped.values()) + sum(failed.values())
    entry = {
        "submitted": submitted,
        "in_flight": in_flight,
        "applied": applied,
        "dropped": dropped,
        "failed": failed,
    }
    return {"updates": entry, "env_steps": entry, "weights_version": applied}


def with_episodes(count: int, episode_return: float = 10.0) -> Progress:
    progress = Progress()
    progress.sampled(count * 5, [episode_return] * count, [5] * count)
    return progress


def test_the_mean_return_is_over_the_last_100_episodes() -> None:
    progress = with_episodes(RETURN_WINDOW, 10.0)
    progress.sampled(0, [20.0] * 50, [7] * 50)
    snapshot = progress.snapshot(1.0, stats())
    assert snapshot.episode_return_mean == 15.0
    assert snapshot.episode_len_mean == 6.0
    assert snapshot.episodes == 150
    assert (progress.first_return_mean, progress.best_return_mean) == (10.0, 15.0)


def test_before_the_first_episode_there_is_no_mean() -> None:
    snapshot = Progress().snapshot(0.0, stats())
    assert math.isnan(snapshot.episode_return_mean) and math.isnan(snapshot.staleness_mean)
    assert "return –" in line_of(snapshot)


def test_rates_are_those_of_the_last_seconds() -> None:
    progress = Progress()
    for second in range(1, 21):
        progress.sampled(1000 if second > 10 else 100, (), ())
        snapshot = progress.snapshot(float(second), stats(applied=second * 3))
    assert snapshot.env_steps_per_s == pytest.approx(1000, rel=0.01)
    assert snapshot.updates_per_s == pytest.approx(3.0)


def test_staleness_is_kept_in_mean_and_maximum() -> None:
    progress = Progress()
    for staleness in (1, 2, 6):
        progress.trained({"policy_loss": 0.5, "name": "x"}, staleness)
    snapshot = progress.snapshot(1.0, stats(applied=3))
    assert (snapshot.staleness_mean, snapshot.staleness_max) == (3.0, 6)
    assert snapshot.learner == {"policy_loss": 0.5}


def test_drops_and_failures_are_the_ledgers() -> None:
    snapshot = Progress().snapshot(
        1.0, stats(applied=2, in_flight=1, dropped={"queue_full": 4}, failed={"nonfinite": 1})
    )
    assert (snapshot.updates, snapshot.in_flight, snapshot.dropped, snapshot.failed) == (2, 1, 4, 1)


def test_the_goal_counts_only_with_100_episodes() -> None:
    rule = StopRule(episode_return=10.0, env_steps=None)
    assert rule.reason(with_episodes(RETURN_WINDOW - 1).snapshot(1.0, stats())) is None
    assert rule.reason(with_episodes(RETURN_WINDOW).snapshot(1.0, stats())) == "mean return 10.0 reached the goal of 10"


def test_limits_of_env_steps_and_seconds_end_a_run() -> None:
    snapshot = replace(with_episodes(1).snapshot(90.0, stats()), env_steps=1000)
    assert StopRule(None, 1001, 91.0).reason(snapshot) is None
    assert StopRule(None, 1000).reason(snapshot) == "1,000 env steps reached the limit of 1,000"
    assert StopRule(None, None, 90.0).reason(snapshot) == "90 seconds reached the limit of 90"


def test_plain_lines_come_now_and_then() -> None:
    stream = io.StringIO()
    with display_for(stream, "ppo on X", StopRule(None, 10), plain=False) as display:
        assert isinstance(display, PlainLines)  # no terminal
        for second in range(12):
            display.show(with_episodes(1).snapshot(float(second), stats()))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ppo on X"
    assert [line.split()[0] for line in lines[1:]] == ["0:00", "0:05", "0:10"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal: on others nothing is drawn in place."""

    def isatty(self) -> bool:
        return True


def test_the_panel_shows_what_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with LivePanel(stream, "impala on X · 2 learners", StopRule(475.0, 1000)) as panel:
        for step in (100, 500):
            progress = with_episodes(step)
            progress.trained({}, 3)
            panel.show(progress.snapshot(65.0, stats(applied=7, in_flight=2, dropped={"queue_full": 5})))
    text = stream.getvalue()
    for part in ("impala on X", "1:05", "of 1,000 env steps", "475", "staleness", "in flight", "dropped", "updates/s"):
        assert part in text


def test_a_sparkline_goes_from_low_to_high() -> None:
    assert sparkline([(0, 0.0), (1, 50.0), (2, 100.0)], 3) == "▁▅█  0 to 100"
    assert sparkline([(0, 5.0), (10, 5.0)], 4) == "▁▁▁▁  5 to 5"


def snapshots() -> list[Snapshot]:
    progress, found = Progress(), []
    for second in range(5):
        progress.sampled(50, [float(second)] * 10, [5] * 10)
        progress.trained({"vf_loss": 1.5}, 1)
        found.append(progress.snapshot(float(second), stats(applied=second)))
    return found


def test_logs_hold_one_row_per_snapshot(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write(Progress().snapshot(0.0, stats()))
        for snapshot in snapshots():
            log.write(snapshot)
    with (tmp_path / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["env_steps"] for row in rows] == ["0", "50", "100", "150", "200", "250"]
    assert rows[0]["episode_return_mean"] == "" and rows[-1]["episode_return_mean"] == "2"
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_the_curve_is_a_png(tmp_path: Path) -> None:
    save_curve(tmp_path / "curve.png", snapshots(), "ppo on X", goal=4.0)
    save_curve(tmp_path / "empty.png", [], "nothing ended", goal=None)
    for name in ("curve.png", "empty.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_summary_fits_a_screen_and_has_the_ledger() -> None:
    progress = with_episodes(250, 30.0)
    ledger = stats(applied=40, in_flight=1, dropped={"queue_full": 2, "shutdown": 0}, failed={"nonfinite": 1})
    found = [*snapshots(), progress.snapshot(10.0, ledger)]
    outcome = Outcome("ppo on X", "interrupted", progress, found, ledger, Path("runs/a"), ["weights.pt", "curve.png"])
    text = summary_of(outcome)
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert lines[0] == "ppo on X: interrupted."
    assert "30.0 in the first 100 episodes, 30.0 in the last (best 30.0)" in text
    row = next(line for line in lines if line.startswith("  updates ") and "queue_full" in line)
    assert row.split() == ["updates", "44", "1", "40", "2", "(queue_full", "2)", "1", "(nonfinite", "1)"]


def test_a_run_without_an_episode_says_so() -> None:
    progress = Progress()
    outcome = Outcome("t", "interrupted", progress, [progress.snapshot(0.0, stats())], stats(), Path("o"), [])
    assert "no episode ended" in summary_of(outcome)
