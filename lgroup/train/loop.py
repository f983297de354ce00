"""One run from its start to its summary."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lgroup.algorithms import reward_threshold_of, spaces_of
from lgroup.errors import ConfigError, LGroupError
from lgroup.train.display import Display, display_for
from lgroup.train.interrupt import Interrupt
from lgroup.train.logs import RunLog
from lgroup.train.options import RECIPES, RunOptions, config_for
from lgroup.train.plot import save_curve
from lgroup.train.progress import Progress, Snapshot, StopRule
from lgroup.train.rounds import BCRounds, IMPALARounds, PPORounds, Rounds, load_data
from lgroup.train.session import Session, plain
from lgroup.train.summary import Outcome, summary_of

_LOG_EVERY_S = 0.5
_SHOW_EVERY_S = 0.2


def run(options: RunOptions) -> int:
    """Trains as `options` say, prints the summary, and returns the exit code.

    Raises:
        ConfigError: an option is wrong. Nothing was started then.
        LGroupError: the run failed. What was learned until then is saved.
    """
    spaces = spaces_of(options.env, options.env_config)
    config = config_for(options, spaces)
    rule = stop_rule(options)
    data = _data(options, spaces)
    _make_folder(options)
    title = title_of(options)
    progress = Progress()
    with display_for(sys.stdout, title, rule, plain=options.plain) as display:
        interrupt = Interrupt(lambda: display.say("ending after this round; once more ends it at once"))
        with interrupt, RunLog(options.out) as log:
            session = Session(config, progress, with_values=options.algo == "ppo", counts_samples=options.algo != "bc")
            with session:
                trainer = _Trainer(session, rule, display, log, interrupt)
                reason = trainer.train(_rounds(session, options, data))
                files = _save(session, options)
                outcome = Outcome(title, reason, progress, trainer.snapshots, trainer.stats(), options.out, files)
    _finish(outcome, rule)
    if trainer.error is not None:
        raise trainer.error
    return interrupt.exit_code or 0


def stop_rule(options: RunOptions) -> StopRule:
    """When the run ends: as asked for, else as the environment's registry and the algorithm's recipe say."""
    goal = options.stop_return if options.stop_return is not None else reward_threshold_of(options.env)
    return StopRule(goal, options.stop_env_steps or RECIPES[options.algo].stop_env_steps, options.stop_seconds)


def title_of(options: RunOptions) -> str:
    """What is trained, with what, in one line."""
    learners = f"{options.num_learners} learners" if options.num_learners != 1 else "1 learner"
    runners = f"{options.num_env_runners} env runners" if options.num_env_runners != 1 else "1 env runner"
    return f"{options.algo} on {options.env} · {learners} · {runners}"


class _Trainer:
    """Goes round after round until the rule, a signal or an error says so; shows and logs meanwhile."""

    def __init__(self, session: Session, rule: StopRule, display: Display, log: RunLog, interrupt: Interrupt) -> None:
        self._session, self._rule, self._display = session, rule, display
        self._log, self._interrupt = log, interrupt
        self._started = time.monotonic()
        self._next_show_s = self._next_log_s = 0.0
        self.snapshots: list[Snapshot] = []
        self.error: LGroupError | None = None

    def train(self, rounds: Rounds) -> str:
        """Returns why it ended, in words."""
        try:
            reason = self._until_the_end(rounds)
        except KeyboardInterrupt:
            reason = "interrupted at once"
        except LGroupError as error:
            self.error, reason = error, f"failed: {str(error).splitlines()[0]}"
        self._record(self._snapshot())
        return reason

    def stats(self) -> dict[str, Any]:
        """The group's statistics, with the ledger."""
        stats: dict[str, Any] = self._session.group.get_stats()
        return stats

    def _until_the_end(self, rounds: Rounds) -> str:
        while True:
            rounds.round()
            snapshot = self._snapshot()
            if snapshot.seconds >= self._next_show_s:
                self._next_show_s = snapshot.seconds + _SHOW_EVERY_S
                self._display.show(snapshot)
            if snapshot.seconds >= self._next_log_s:
                self._next_log_s = snapshot.seconds + _LOG_EVERY_S
                self._record(snapshot)
            reason = "interrupted" if self._interrupt.signal_number else self._rule.reason(snapshot)
            if reason is not None:
                rounds.finish()
                return reason

    def _snapshot(self) -> Snapshot:
        return self._session.progress.snapshot(time.monotonic() - self._started, self.stats())

    def _record(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self._log.write(snapshot)
        self._display.show(snapshot)


def _rounds(session: Session, options: RunOptions, data: dict[str, Any] | None) -> Rounds:
    if data is not None:
        return BCRounds(session, data)
    return PPORounds(session) if options.algo == "ppo" else IMPALARounds(session)


def _data(options: RunOptions, spaces: tuple[Any, Any]) -> dict[str, Any] | None:
    if options.algo != "bc":
        if options.data is not None:
            raise ConfigError(f"--data goes with --algo bc only, not with --algo {options.algo}")
        return None
    if options.data is None:
        raise ConfigError(
            "--algo bc needs --data FILE.npz with the actions to imitate; "
            "a run of ppo or impala with --save-data 20000 writes one"
        )
    return load_data(options.data, spaces)


def _make_folder(options: RunOptions) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out} cannot be made: {error.strerror}") from error
    if (options.out / "weights.pt").exists():
        raise ConfigError(f"--out {options.out} holds an earlier run's weights.pt; give another folder")


def _save(session: Session, options: RunOptions) -> list[str]:
    """Writes weights, and data if asked for; returns the names of the files."""
    torch.save(plain(session.group.get_weights(wait=False)), options.out / "weights.pt")
    files = ["weights.pt"]
    if options.save_data:
        np.savez_compressed(options.out / "data.npz", **session.collect(options.save_data))  # type: ignore[arg-type]
        files.append("data.npz")
    return files


def _finish(outcome: Outcome, rule: StopRule) -> None:
    save_curve(outcome.out / "curve.png", outcome.snapshots, outcome.title, rule.episode_return)
    files = [*outcome.files, "curve.png", "progress.csv", "tensorboard/", "summary.txt"]
    text = summary_of(replace(outcome, files=files))
    (outcome.out / "summary.txt").write_text(text, encoding="utf-8")
    print(text, end="")
