"""What must hold after each fault: pure functions over what was seen. Each returns the mistakes found, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def ledger_errors(stats: Mapping[str, Any]) -> list[str]:
    """Whether every update and every env step is accounted for."""
    found = []
    for unit in ("updates", "env_steps"):
        account = stats[unit]
        settled = account["applied"] + sum(account["dropped"].values()) + sum(account["failed"].values())
        if account["submitted"] != account["in_flight"] + settled:
            found.append(f"the ledger of {unit} does not add up: {account}")
    return found


def result_errors(results: Sequence[Any], stats: Mapping[str, Any], num_submitted: int) -> list[str]:
    """Whether each submitted update has one result, in agreement with the ledger, and versions never decrease.

    Args:
        results: `UpdateResult` objects, in the order of submission.
        stats: The group's, when nothing is in flight.
        num_submitted: How many updates were submitted.
    """
    found = []
    seqs = [result.seq for result in results]
    if seqs != list(range(1, num_submitted + 1)):
        found.append(f"results do not match submissions: {num_submitted} submitted, numbers {seqs[-5:]}")
    versions = [result.weights_version for result in results]
    if versions != sorted(versions):
        found.append("a weights version decreased")
    rolled_back = stats["updates"]["failed"].get("rolled_back", 0)
    applied = [result for result in results if result.status == "applied"]
    if stats["updates"]["applied"] + rolled_back != len(applied):
        found.append(f"{len(applied)} results are applied, the ledger has {stats['updates']}")
    lost = stats["env_steps"]["failed"].get("rolled_back", 0)
    if stats["env_steps"]["applied"] + lost != sum(result.env_steps for result in applied):
        found.append(f"env steps of results and ledger differ: {stats['env_steps']}")
    reasons = Counter(result.reason for result in results if result.status == "failed")
    ledger = {reason: n for reason, n in stats["updates"]["failed"].items() if n and reason != "rolled_back"}
    if dict(reasons) != ledger:
        found.append(f"failed results {dict(reasons)}, ledger {ledger}")
    return found


def process_errors(expected: Collection[int], seen: Mapping[int, str]) -> list[str]:
    """Whether the processes of the run, with their states, are exactly those that should be there."""
    strangers = {pid: state for pid, state in seen.items() if pid not in expected or state == "zombie"}
    missing = [pid for pid in expected if pid not in seen]
    found = [f"processes that should not be there: {strangers}"] if strangers else []
    return [*found, *([f"processes that are missing: {missing}"] if missing else [])]


def descriptor_errors(before: int, now: int, slack: int) -> list[str]:
    """Whether the number of open descriptors is what it was, up to `slack`."""
    return [f"{now} descriptors are open, {before} were"] if now > before + slack else []


def leftover_errors(before: Collection[str], now: Collection[str]) -> list[str]:
    """Whether files appeared that nobody will remove."""
    new = sorted(set(now) - set(before))
    return [f"files left behind: {new}"] if new else []
