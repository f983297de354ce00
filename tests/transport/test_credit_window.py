"""A window never holds more than it allows, except one item that is larger than the window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lgroup.transport import CreditWindow


@given(
    max_count=st.integers(1, 5),
    max_bytes=st.integers(1, 100),
    steps=st.lists(st.one_of(st.integers(0, 150), st.just("release")), max_size=60),
)
def test_count_and_bytes_stay_inside_of_the_window(max_count: int, max_bytes: int, steps: list[int | str]) -> None:
    window = CreditWindow(max_count, max_bytes)
    held: list[int] = []
    for step in steps:
        if isinstance(step, str):
            if held:
                window.release(held.pop(0))
        elif window.try_reserve(step):
            held.append(step)
        else:
            assert held
            assert len(held) == max_count or sum(held) + step > max_bytes
        assert window.in_use == (len(held), sum(held))
        assert len(held) <= max_count
        assert sum(held) <= max_bytes or len(held) == 1


def test_an_item_larger_than_the_window_waits_until_it_is_empty() -> None:
    window = CreditWindow(4, 100)
    assert window.try_reserve(1)
    assert not window.try_reserve(1000)
    window.release(1)
    assert window.try_reserve(1000)
    assert not window.try_reserve(0)
    window.release(1000)
    assert window.in_use == (0, 0)


def test_what_was_not_reserved_cannot_be_released() -> None:
    window = CreditWindow(4, 100)
    with pytest.raises(ValueError, match="release of 5 bytes"):
        window.release(5)
    window.try_reserve(10)
    for nbytes in (9, 11):
        with pytest.raises(ValueError, match="release"):
            window.release(nbytes)
    assert window.in_use == (1, 10)


@pytest.mark.parametrize(("max_count", "max_bytes"), [(0, 1), (1, 0), (-1, 5)])
def test_a_window_without_room_is_refused(max_count: int, max_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CreditWindow(max_count, max_bytes)


def test_sizes_are_not_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        CreditWindow(1, 1).try_reserve(-1)
