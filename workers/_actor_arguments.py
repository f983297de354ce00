"""The arguments of an actor group's methods: one for all actors, or one for each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Kwargs = Mapping[str, Any]


def single(given: Any) -> bool:
    """Whether one value stands for all actors."""
    return not isinstance(given, list | tuple)


def one_per_actor(what: str, given: Any, num_actors: int) -> list[Any]:
    """``given`` for each actor, or each its own if it is a list. Raises ``ValueError`` for a list of another length."""
    if single(given):
        return [given] * num_actors
    if len(given) != num_actors:
        raise ValueError(f"{what} is a list of {len(given)} for {num_actors} actors; one for each is needed")
    return list(given)


def kwargs_per_actor(kwargs: Kwargs | Sequence[Kwargs] | None, num_actors: int) -> list[Kwargs]:
    """The keyword arguments of each actor. Raises ``ValueError`` if their number is wrong."""
    return one_per_actor("kwargs", kwargs if kwargs is not None else {}, num_actors)


def refuse_refs(return_obj_refs: bool) -> None:
    """Raise ``ValueError`` if references are asked for."""
    if return_obj_refs:
        raise ValueError(
            "return_obj_refs=True needs references to data in other processes, which this version does not have; "
            "leave it out and the values are returned"
        )


def check_numbers(num_actors: int, in_flight: int, num_threads: int | Literal["auto"]) -> None:
    """Raise ``ValueError`` for a number that is not possible."""
    for name, value, least in (
        ("num_actors", num_actors, 0),
        ("max_requests_in_flight_per_actor", in_flight, 1),
        ("num_threads", 1 if num_threads == "auto" else num_threads, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: allowed are whole numbers from {least}")
