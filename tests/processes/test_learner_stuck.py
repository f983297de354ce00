"""Learners that answer nothing: stopped, stuck, or merely busy; and a coordinator that pauses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Deadline
from dying_learners import arm, batch_of, config_of, pid_of, train_until

import lgroup

HERE = Path(__file__).parent


def whole(group: lgroup.LearnerGroup) -> None:
    train_until(group, lambda result: len(result) == len(group), Deadline())
    group.check_sync()


def test_a_stopped_learner_is_killed_at_the_heartbeat_limit_and_replaced() -> None:
    with lgroup.LearnerGroup(config=config_of(2, heartbeat_timeout_s=0.6)) as group:
        group.update(batch=batch_of())
        os.kill(pid_of(group, 1), signal.SIGSTOP)
        assert group.update(batch=batch_of(1)).status == "applied"
        (incident,) = group.post_mortems()
        assert "its process is stopped" in incident["first"]["text"]
        whole(group)


def test_a_c_call_that_holds_the_gil_and_computes_nothing_is_stuck_and_its_stacks_are_written_down(
    tmp_path: Path,
) -> None:
    with lgroup.LearnerGroup(config=config_of(2, tmp_path, heartbeat_timeout_s=1)) as group:
        arm(tmp_path, "loss", 1, "deadlock")
        assert group.update(batch=batch_of()).status == "applied"
        (incident,) = group.post_mortems()
        first = incident["first"]
        assert first["rank"] == 1 and "uses no CPU time" in first["text"]
        assert "in die" in "".join(first["stacks"]["learner 1"])
        assert "_wait" in "".join(first["stacks"]["learner 0"]), "who waits for it is seen, too"
        whole(group)


def test_the_same_call_within_the_limit_costs_nothing_but_time(tmp_path: Path) -> None:
    with lgroup.LearnerGroup(config=config_of(2, tmp_path, heartbeat_timeout_s=6)) as group:
        arm(tmp_path, "loss", 1, "gil2")
        assert len(group.update(batch=batch_of())) == 2
        assert group.get_stats()["num_restarts"] == 0 and group.post_mortems() == []


def test_a_learner_that_waits_for_ever_is_killed_at_the_deadline_and_not_those_that_wait_for_it(
    tmp_path: Path,
) -> None:
    with lgroup.LearnerGroup(config=config_of(3, tmp_path, update_timeout_s=2, heartbeat_timeout_s=1)) as group:
        victim = pid_of(group, 2)
        arm(tmp_path, "loss", 2, "sleep")
        assert group.update(batch=batch_of()).status == "applied"
        (incident,) = group.post_mortems()
        assert incident["first"]["pid"] == victim and incident["others"] == []
        assert "update_timeout_s=2" in incident["first"]["text"]
        assert "die" in "".join(incident["first"]["stacks"]["learner 2"])
        whole(group)


PAUSED = """
import json, os, sys
from dying_learners import batch_of, config_of
import lgroup
with lgroup.LearnerGroup(config=config_of(2, heartbeat_timeout_s=1, update_timeout_s=2)) as group:
    group.update(batch=batch_of())
    future = group.submit(batch=batch_of(1))
    print("ready", flush=True)
    sys.stdin.readline()  # stopped meanwhile
    future.result(20)
    for number in range(20):
        group.update(batch=batch_of(number))
    stats = group.get_stats()
    print(json.dumps([stats["num_restarts"], stats["updates"]["applied"]]), flush=True)
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def stop_for(process: subprocess.Popen[str], seconds: float) -> None:
    """SIGSTOP and, after the time that is the load of the case, SIGCONT."""
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)
    os.kill(process.pid, signal.SIGCONT)


def test_a_coordinator_that_was_stopped_for_longer_than_any_limit_kills_nobody() -> None:
    """Case C22 (vllm#55510), last part."""
    with start(PAUSED) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stop_for(process, 4.0)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == [0, 22]
        assert process.wait(20) == 0


KILLED = """
import sys
from dying_learners import arm, batch_of, config_of, pid_of
from pathlib import Path
import lgroup
where, folder = sys.argv[1], Path(sys.argv[2])
with lgroup.LearnerGroup(config=config_of(2, folder)) as group:
    if where == "sum":
        arm(folder, "loss", 1, "sleep")
        group.submit(batch=batch_of())
    elif where == "restart":
        import os, signal
        arm(folder, "constructor", 0, "sleep")
        os.kill(pid_of(group, 0), signal.SIGKILL)
    if where == "grandchild":
        group.foreach_learner(lambda learner: __import__("subprocess").Popen(["sleep", "1000"]) and None)
    print(*[row["pid"] for row in group.get_stats()["learners"]], group.cluster.zygote_pid, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("where", ["idle", "sum", "restart", "grandchild"])
def test_nothing_is_left_of_a_killed_coordinator_whatever_its_learners_did(
    tmp_path: Path, wait_gone: Callable[..., None], where: str
) -> None:
    """Case C22 (vllm#55510); its kill during the start is in test_cluster_ends.py. Leftovers fail every test here."""
    program: Any = KILLED
    process = subprocess.Popen(
        [sys.executable, "-c", program, where, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
        wait_gone(pids, 3.0)
