"""One run from its start to its summary."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lgroup.algorithms import reward_threshold_of, spaces_of
from lgroup.config import LearnerGroupConfig
from lgroup.errors import ConfigError, LGroupError
from lgroup.train.display import Display, display_for
from lgroup.train.interrupt import Interrupt
from lgroup.train.logs import RunLog
from lgroup.train.options import RECIPES, RunOptions, config_for, cores_per_learner
from lgroup.train.plot import save_curve
from lgroup.train.progress import Progress, Snapshot, StopRule
from lgroup.train.rounds import BCRounds, IMPALARounds, PPORounds, Rounds, load_data
from lgroup.train.session import Session, plain
from lgroup.train.summary import Outcome, summary_of

_LOOK_EVERY_S = 0.1
_LOG_EVERY_S = 0.5


def run(options: RunOptions) -> int:
    """Trains as `options` say, prints the summary, and returns the exit code.

    Raises:
        ConfigError: an option is wrong. Nothing was started then.
        LGroupError: the run failed. What was learned until then is saved.
    """
    spaces = spaces_of(options.env, options.env_config)
    config, data = config_for(options, spaces, _num_cores()), _data(options, spaces)
    rule, title = stop_rule(options), title_of(options)
    _make_folder(options)
    with Interrupt() as interrupt:
        try:
            with display_for(sys.stdout, title, rule, plain=options.plain) as display, RunLog(options.out) as log:
                trainer = _Trainer(rule, display, log, interrupt)
                outcome = _trained(options, config, data, trainer)
            _finish(outcome, rule)
        except KeyboardInterrupt:
            print("interrupted before everything was saved", file=sys.stderr)
            return interrupt.exit_code
    if trainer.error is not None:
        raise trainer.error
    return interrupt.exit_code


def _trained(
    options: RunOptions, config: LearnerGroupConfig, data: dict[str, Any] | None, trainer: _Trainer
) -> Outcome:
    """All that needs processes; they are gone when it returns or raises."""
    is_ppo, is_bc = options.algo == "ppo", options.algo == "bc"
    if config.num_learners == 0:
        torch.set_num_threads(cores_per_learner(options, _num_cores()))
    with Session(config, trainer.progress, with_values=is_ppo, counts_samples=not is_bc) as session:
        reason = trainer.train(session, _rounds(session, options, data))
        files = _save(session, options)
        stats = session.group.get_stats()
        return Outcome(title_of(options), reason, trainer.progress, trainer.snapshots, stats, options.out, files)


def stop_rule(options: RunOptions) -> StopRule:
    """When the run ends: as asked for, else as the environment's registry and the algorithm's recipe say."""
    goal = options.stop_return if options.stop_return is not None else reward_threshold_of(options.env)
    return StopRule(goal, options.stop_env_steps or RECIPES[options.algo].stop_env_steps, options.stop_seconds)


def title_of(options: RunOptions) -> str:
    """What is trained, with what, in one line."""
    learners = _counted(options.num_learners, "learner") if options.num_learners else "learning in this process"
    return f"{options.algo} on {options.env} · {learners} · {_counted(options.num_env_runners, 'env runner')}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Trainer:
    """Goes round after round until the rule, a signal or an error says so; shows and logs meanwhile."""

    def __init__(self, rule: StopRule, display: Display, log: RunLog, interrupt: Interrupt) -> None:
        self._rule, self._display, self._log, self._interrupt = rule, display, log, interrupt
        self._next_look_s = self._next_log_s = 0.0
        self.progress = Progress()
        self.snapshots: list[Snapshot] = []
        self.error: LGroupError | None = None

    def train(self, session: Session, rounds: Rounds) -> str:
        """Returns why it ended, in words."""
        started = time.monotonic()
        self._interrupt.be_patient()
        try:
            reason = self._until_the_end(session, rounds, started)
        except KeyboardInterrupt:
            reason = "interrupted at once"
        except LGroupError as error:
            self.error, reason = error, f"failed: {str(error).splitlines()[0]}"
        self._record(self._snapshot(session, started))
        return reason

    def _until_the_end(self, session: Session, rounds: Rounds, started: float) -> str:
        reason: str | None = None
        while reason is None:
            rounds.round()
            if self._interrupt.requested:
                reason = "interrupted"
            elif time.monotonic() - started >= self._next_look_s:
                reason = self._look(self._snapshot(session, started))
        rounds.finish()
        return reason

    def _look(self, snapshot: Snapshot) -> str | None:
        """Shows and now and then logs the snapshot; returns why the run should end, if it should."""
        self._next_look_s = snapshot.seconds + _LOOK_EVERY_S
        if snapshot.seconds >= self._next_log_s:
            self._next_log_s = snapshot.seconds + _LOG_EVERY_S
            self._record(snapshot)
        else:
            self._display.show(snapshot)
        return self._rule.reason(snapshot)

    def _snapshot(self, session: Session, started: float) -> Snapshot:
        return self.progress.snapshot(time.monotonic() - started, session.group.get_stats())

    def _record(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self._log.write(snapshot)
        self._display.show(snapshot)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
