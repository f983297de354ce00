from __future__ import annotations

import pickle

import pytest

from lgroup import errors
from lgroup.errors import ConfigError, LGroupError, UpdateDropped, UpdateFailed


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_an_lgroup_error(name: str) -> None:
    assert issubclass(getattr(errors, name), LGroupError)


def test_a_config_error_is_a_value_error_naming_field_value_and_what_is_allowed() -> None:
    error = ConfigError.refused("num_learners", -1, "an integer >= 0")
    assert isinstance(error, ValueError)
    assert str(error) == "num_learners=-1 is not possible; allowed: an integer >= 0"


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(str(ConfigError.refused("env_config", "x" * 10_000, "a dict"))) < 250


def test_an_unknown_name_is_answered_with_close_ones() -> None:
    error = ConfigError.unknown("setting", "num_lerners", ["num_learners", "lr"])
    assert str(error) == "there is no setting 'num_lerners'; did you mean 'num_learners'?"


def test_an_unknown_name_like_nothing_is_answered_with_the_known_ones_if_they_are_few() -> None:
    assert str(ConfigError.unknown("setting", "qqq", ["lr", "gamma"])).endswith("known: gamma, lr")
    assert len(str(ConfigError.unknown("setting", "qqq", map(str, range(1000))))) < 100


def test_a_failed_update_shows_the_learners_traceback_below_its_message() -> None:
    error = UpdateFailed(
        "learner 1: ValueError: bad", cause_type="ValueError", remote_traceback="Traceback ...\nValueError: bad\n"
    )
    assert str(error) == "learner 1: ValueError: bad\n\nTraceback ...\nValueError: bad"
    assert str(UpdateFailed("no more")) == "no more"


def test_errors_of_updates_survive_pickling_with_all_they_know() -> None:
    failed = UpdateFailed("m", reason="nonfinite", cause_type="X", remote_traceback="tb", result=[1])
    dropped = UpdateDropped("d", reason="stale", result=[2])
    failed_copy, dropped_copy = pickle.loads(pickle.dumps((failed, dropped)))
    assert (failed_copy.args, vars(failed_copy)) == (failed.args, vars(failed))
    assert (dropped_copy.args, vars(dropped_copy)) == (dropped.args, vars(dropped))
