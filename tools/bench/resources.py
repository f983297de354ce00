"""Start-up time, memory and idle CPU of whole groups."""

from __future__ import annotations

import statistics

from tools.bench.figures import Figure
from tools.bench.probe import ask
from tools.bench.work import LEARNERS

START_GOALS_S = {"warm": 0.2, "cold": 2.5}
MEMORY_GOAL_MB = 560.0
FURTHER_LEARNER_GOAL_MB = 40.0
IDLE_GOAL_PERCENT = 1.0


def start(repeat: int) -> list[Figure]:
    """Medians over several fresh coordinators, each with one cold start and then a warm one."""
    answers = [ask("start") for _ in range(max(1, repeat // 4))]
    medians = {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}
    return [
        Figure(
            f"{kind} start of {LEARNERS} learners",
            medians[f"{kind}_s"],
            "s",
            goal_s,
            {"then first update s": medians[f"{kind}_first_update_s"]},
        )
        for kind, goal_s in START_GOALS_S.items()
    ]


def memory(repeat: int) -> list[Figure]:
    """PSS summed over every process, and what a further learner adds to the sum."""
    answer = ask("memory")
    few, many = answer[str(LEARNERS)], answer[str(LEARNERS + 2)]
    further_mb = (sum(many.values()) - sum(few.values())) / 2
    return [
        Figure(f"memory of a group of {LEARNERS} (PSS)", sum(few.values()), "MB", MEMORY_GOAL_MB, few),
        Figure("memory of each further learner", further_mb, "MB", FURTHER_LEARNER_GOAL_MB),
    ]


def idle(repeat: int) -> list[Figure]:
    """CPU of all processes together, in percent of one core."""
    answer = {name: share * 100 for name, share in ask("idle").items()}
    return [Figure("idle CPU of the whole group", sum(answer.values()), "%", IDLE_GOAL_PERCENT, answer)]
