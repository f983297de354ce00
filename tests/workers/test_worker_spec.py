from __future__ import annotations

import json

import pytest

from lgroup.workers.environment import MALLOC_DEFAULTS, THREAD_NAMES, worker_environment, zygote_environment
from lgroup.workers.output import KEPT_LINES, MAX_LINE_BYTES, Lines
from lgroup.workers.seeds import worker_seed
from lgroup.workers.spec import TRANSITIONS, WorkerSpec, WorkerState, exit_of


def test_a_launchers_variables_reach_neither_zygote_nor_worker() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y", "HOME": "/h"}
    assert zygote_environment(environment) == {"HOME": "/h"} | MALLOC_DEFAULTS | dict.fromkeys(THREAD_NAMES, "1")
    assert worker_environment(environment, num_threads=2, extra={"MASTER_PORT": "1", "A": "b"}) == {
        "HOME": "/h",
        "A": "b",
    } | dict.fromkeys(THREAD_NAMES, "2")


def test_seeds_differ_between_actors_and_incarnations_and_repeat() -> None:
    seeds = {
        (seed, actor, life): worker_seed(seed, actor, life)
        for seed in range(3)
        for actor in range(5)
        for life in range(5)
    }
    assert len(set(seeds.values())) == len(seeds)
    assert all(worker_seed(*key) == value and 0 <= value < 2**63 for key, value in seeds.items())


def test_nothing_leaves_exited_and_nothing_returns_to_starting() -> None:
    assert TRANSITIONS[WorkerState.EXITED] == frozenset()
    assert not any(WorkerState.STARTING in after for after in TRANSITIONS.values())
    assert set(TRANSITIONS) == set(WorkerState)


@pytest.mark.parametrize(
    ("status", "expected", "words"),
    [
        (0, False, "exited with status 0"),
        (3, False, "exited with status 3"),
        (-9, False, "killed by SIGKILL; if nobody killed it"),
        (-9, True, "killed by SIGKILL"),
        (-11, False, "killed by SIGSEGV"),
        (-99, False, "killed by signal 99"),
        (None, False, "exit status is unknown"),
    ],
)
def test_an_exit_says_how_it_came(status: int | None, expected: bool, words: str) -> None:
    ended = exit_of("learner 0", 7, status, expected=expected, last_lines=("one", "two"))
    assert words in ended.text
    assert "learner 0 (pid 7)" in ended.text and ended.text.endswith("  one\n  two")


HINT = "the cgroup's out-of-memory killer ended 1 process"


@pytest.mark.parametrize(
    ("status", "expected", "memory_hint", "own"),
    [
        (0, False, None, True),
        (3, False, None, True),
        (3, True, None, True),
        (0, True, None, False),
        (-11, False, None, True),
        (-6, True, None, True),  # the coordinator's kill came a moment later
        (-9, False, None, False),
        (-9, False, HINT, True),
        (-9, True, HINT, False),
        (-15, False, None, False),
        (None, False, None, False),
    ],
)
def test_a_worker_ends_by_its_own_doing_unless_somebody_ended_it(
    status: int | None, expected: bool, memory_hint: str | None, own: bool
) -> None:
    assert exit_of("learner 0", 7, status, expected=expected, memory_hint=memory_hint).own is own


def test_an_exit_says_why_the_coordinator_killed_it_only_if_that_is_what_ended_it() -> None:
    killed = exit_of("learner 0", 7, -9, expected=True, reason="silent for 10.0 s")
    assert killed.how == "killed by lgroup: silent for 10.0 s"
    assert killed.text == "learner 0 (pid 7) on node local killed by lgroup: silent for 10.0 s"
    assert exit_of("a", 7, None, expected=True, reason="why").how == "killed by lgroup: why"
    assert exit_of("a", 7, -11, expected=True, reason="why").how == "killed by SIGSEGV"
    assert exit_of("a", 7, 2, expected=True, reason="why").how == "exited with status 2"


def test_evidence_of_a_want_of_memory_takes_the_place_of_the_guess() -> None:
    ended = exit_of("learner 0", 7, -9, expected=False, memory_hint=HINT, node="far")
    assert ended.text == f"learner 0 (pid 7) on node far killed by SIGKILL; {HINT}"


def test_an_exit_is_plain_values_with_the_last_fifty_lines() -> None:
    lines = tuple(str(number) for number in range(60))
    ended = exit_of("learner 0", 7, -9, expected=True, last_lines=lines, reason="why", memory_hint=HINT, node="far")
    assert json.loads(json.dumps(ended.as_dict())) == {
        "worker": "learner 0",
        "node": "far",
        "pid": 7,
        "exit_code": None,
        "signal": "SIGKILL",
        "memory_hint": HINT,
        "expected": True,
        "reason": "why",
        "last_lines": list(lines[-50:]),
    }


@pytest.mark.parametrize("setting", [{"num_threads": 0}, {"start_timeout_s": 0.0}])
def test_an_impossible_worker_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        WorkerSpec(name="a", actor_class=dict, **setting)  # type: ignore[arg-type]


def test_output_is_cut_into_lines_wherever_the_pipe_cuts_it() -> None:
    lines = Lines()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\r\n\xff\n") == ["two", "\\xff"]
    assert lines.feed(b"rest") == [] and lines.finish() == ["rest"] and lines.finish() == []


def test_output_without_line_ends_comes_in_pieces_and_only_the_last_lines_are_kept() -> None:
    lines = Lines()
    assert [len(line) for line in lines.feed(b"x" * (2 * MAX_LINE_BYTES + 1))] == [MAX_LINE_BYTES, MAX_LINE_BYTES]
    lines.feed(b"".join(b"%d\n" % number for number in range(100)))
    assert list(lines.last) == [str(number) for number in range(100 - KEPT_LINES, 100)]


def test_workers_keep_freed_memory_unless_the_user_says_otherwise() -> None:
    name = "MALLOC_TRIM_THRESHOLD_"
    assert zygote_environment({})[name] == MALLOC_DEFAULTS[name]
    assert zygote_environment({name: "0"})[name] == "0"
