from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lgroup.workers.store_table import DROPPED, OK, REFUSED, TIMED_OUT, Answer, StoreTable

A, B = b"w1", b"w2"


def test_a_key_that_is_set_is_answered_at_once() -> None:
    table = StoreTable()
    assert table.ask(0, A, 1, ["set", "p", 5.0, ["k"], [b"v"]]) == [Answer(A, 1, OK, None)]
    assert table.ask(0, B, 2, ["get", "p", 5.0, ["k"]]) == [Answer(B, 2, OK, [b"v"])]


def test_a_key_that_is_not_set_is_answered_when_it_is() -> None:
    table = StoreTable()
    assert table.ask(0, A, 1, ["get", "p", 5.0, ["a", "b"]]) == []
    assert table.ask(0, B, 2, ["set", "p", 5.0, ["a"], [b"1"]]) == [Answer(B, 2, OK, None)]
    assert table.ask(0, B, 3, ["set", "p", 5.0, ["b"], [b"2"]]) == [
        Answer(B, 3, OK, None),
        Answer(A, 1, OK, [b"1", b"2"]),
    ]


def test_prefixes_do_not_see_each_other() -> None:
    table = StoreTable()
    table.ask(0, A, 1, ["set", "p", 5.0, ["k"], [b"v"]])
    assert table.ask(0, B, 2, ["check", "q", 5.0, ["k"]]) == [Answer(B, 2, OK, False)]


def test_a_deadline_is_answered_with_what_is_missing() -> None:
    table = StoreTable()
    table.ask(10.0, A, 1, ["wait", "p", 5.0, ["k"]])
    assert table.expire(14.9) == []
    assert table.expire(15.0) == [Answer(A, 1, TIMED_OUT, ["k"])]
    assert table.expire(16.0) == []


def test_dropping_a_prefix_ends_its_keys_and_its_waits() -> None:
    table = StoreTable()
    table.ask(0, A, 1, ["set", "p", 5.0, ["k"], [b"v"]])
    table.ask(0, A, 2, ["get", "p", 5.0, ["other"]])
    assert table.drop("p") == [Answer(A, 2, DROPPED, ["other"])]
    assert table.num_keys("p") == 0 and table.num_waiting == 0


def test_a_worker_that_is_gone_gets_no_answer() -> None:
    table = StoreTable()
    table.ask(0, A, 1, ["get", "p", 5.0, ["k"]])
    table.forget(A)
    assert table.ask(0, B, 2, ["set", "p", 5.0, ["k"], [b"v"]]) == [Answer(B, 2, OK, None)]


def test_counters_and_comparisons_work_as_in_torchs_own_stores() -> None:
    table = StoreTable()

    def ask(*question: object) -> object:
        (answer,) = table.ask(0, A, 1, question)
        assert answer.status == OK
        return answer.value

    assert ask("add", "p", 1, "n", 3) == 3
    assert ask("add", "p", 1, "n", 4) == 7
    assert ask("get", "p", 1, ["n"]) == [b"7"]
    assert ask("append", "p", 1, "n", b"8") is None
    assert ask("get", "p", 1, ["n"]) == [b"78"]
    assert ask("compare_set", "p", 1, "c", b"x", b"y") == b"x"  # absent, and something was expected
    assert ask("compare_set", "p", 1, "c", b"", b"y") == b"y"
    assert ask("compare_set", "p", 1, "c", b"no", b"z") == b"y"
    assert ask("compare_set", "p", 1, "c", b"y", b"z") == b"z"
    assert ask("num_keys", "p", 1) == 2
    assert ask("delete", "p", 1, "c") is True
    assert ask("delete", "p", 1, "c") is False
    assert ask("list_keys", "p", 1) == ["n"]


def test_a_question_that_makes_no_sense_is_refused() -> None:
    table = StoreTable()
    for question in (
        [],
        ["fly", "p", 1],
        ["add", "p", 1],
        ["set", "p", 1, ["a", "b"], [b"1"]],
        ["get", "p", "x", ["k"]],
    ):
        (answer,) = table.ask(0, A, 1, question)
        assert answer.status == REFUSED


class StoreMachine(RuleBasedStateMachine):
    """Every question gets exactly one answer, whatever comes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = StoreTable()
        self.now = 0.0
        self.asked: set[int] = set()
        self.answered: list[int] = []
        self.forgotten: set[int] = set()
        self.asker_of: dict[int, bytes] = {}

    def take(self, answers: list[Answer]) -> None:
        self.answered += [answer.request_id for answer in answers]

    def ask(self, asker: bytes, question: list[object]) -> None:
        request_id = len(self.asked)
        self.asked.add(request_id)
        self.asker_of[request_id] = asker
        self.take(self.table.ask(self.now, asker, request_id, question))

    @rule(
        asker=st.sampled_from([A, B]),
        prefix=st.sampled_from("pq"),
        keys=st.lists(st.sampled_from("xyz"), min_size=1, max_size=2, unique=True),
        timeout_s=st.integers(1, 5),
    )
    def get(self, asker: bytes, prefix: str, keys: list[str], timeout_s: int) -> None:
        self.ask(asker, ["get", prefix, timeout_s, keys])

    @rule(asker=st.sampled_from([A, B]), prefix=st.sampled_from("pq"), key=st.sampled_from("xyz"))
    def set(self, asker: bytes, prefix: str, key: str) -> None:
        self.ask(asker, ["set", prefix, 1, [key], [b"v"]])

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.take(self.table.expire(self.now))

    @rule(prefix=st.sampled_from("pq"))
    def drop(self, prefix: str) -> None:
        self.take(self.table.drop(prefix))

    @rule(asker=st.sampled_from([A, B]))
    def forget(self, asker: bytes) -> None:
        self.table.forget(asker)
        self.forgotten |= {number for number in self.asked if self.asker_of[number] == asker}

    @invariant()
    def each_question_is_answered_once_or_waits(self) -> None:
        assert len(self.answered) == len(set(self.answered))
        open_questions = self.asked - set(self.answered)
        assert self.table.num_waiting <= len(open_questions)
        assert open_questions - self.forgotten <= open_questions
        assert self.table.num_waiting >= len(open_questions - self.forgotten)


TestStoreMachine = StoreMachine.TestCase
