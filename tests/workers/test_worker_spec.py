from __future__ import annotations

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
