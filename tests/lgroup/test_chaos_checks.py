"""What tools/chaos would notice: each check finds its mistake, and nothing where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tools.chaos import checks


def account(applied: int, failed: dict[str, int], submitted: int, in_flight: int = 0) -> dict[str, Any]:
    return {"submitted": submitted, "in_flight": in_flight, "applied": applied, "dropped": {}, "failed": failed}


def result(seq: int, status: str = "applied", reason: str | None = None, version: int = 0) -> Any:
    return SimpleNamespace(seq=seq, status=status, reason=reason, env_steps=5, weights_version=version)


GOOD = {"updates": account(2, {"poison": 1}, 3), "env_steps": account(10, {"poison": 5}, 15)}
RESULTS = [result(1, version=1), result(2, "failed", "poison", 1), result(3, version=2)]


def test_a_ledger_that_adds_up_is_fine_and_one_that_does_not_is_named() -> None:
    assert checks.ledger_errors(GOOD) == []
    bad = {**GOOD, "env_steps": account(9, {"poison": 5}, 15)}
    (error,) = checks.ledger_errors(bad)
    assert "env_steps" in error


def test_results_must_come_once_each_and_agree_with_the_ledger() -> None:
    assert checks.result_errors(RESULTS, GOOD, 3) == []
    assert "do not match" in checks.result_errors(RESULTS[:2], GOOD, 3)[0]
    assert checks.result_errors([*RESULTS[:2], result(3, version=0)], GOOD, 3) == ["a weights version decreased"]
    wrong = [RESULTS[0], result(2, "failed", "worker_died", 1), RESULTS[2]]
    assert "failed results" in checks.result_errors(wrong, GOOD, 3)[0]


def test_an_update_that_was_rolled_back_counts_as_applied_for_its_caller() -> None:
    stats = {
        "updates": account(1, {"poison": 1, "rolled_back": 1}, 3),
        "env_steps": account(5, {"poison": 5, "rolled_back": 5}, 15),
    }
    assert checks.result_errors(RESULTS, stats, 3) == []


def test_strange_missing_and_undead_processes_are_found() -> None:
    assert checks.process_errors([1, 2], {1: "sleeping", 2: "running"}) == []
    assert "3" in checks.process_errors([1], {1: "sleeping", 3: "sleeping"})[0]
    assert "zombie" in checks.process_errors([1], {1: "zombie"})[0]
    assert "missing" in checks.process_errors([1, 2], {1: "sleeping"})[0]


def test_descriptors_and_files_that_appeared_are_found() -> None:
    assert checks.descriptor_errors(10, 12, slack=2) == []
    assert checks.descriptor_errors(10, 13, slack=2) != []
    assert checks.leftover_errors({"a"}, {"a"}) == []
    assert "b" in checks.leftover_errors({"a"}, {"a", "b"})[0]
