"""The way of training data from a call of `update` to the group's door."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lgroup._driver import GroupDriver
from lgroup._group_events import Entry
from lgroup._requests import Cut, TrainRequest, UpdateOptions, modules_of, training_entry
from lgroup.columns import ALL_MODULES, NUM_ENV_STEPS_TRAINED
from lgroup.data.training_data import TrainingData
from lgroup.errors import ConfigError
from lgroup.learner.learner import Learner
from lgroup.update_result import UpdateFuture, UpdateResult

if TYPE_CHECKING:
    from lgroup.config import LearnerGroupConfig

OnFull = Literal["drop", "block"]

_KINDS_OF_DATA = ("batch", "batches", "batch_refs", "episodes", "episodes_refs", "data_iterators")


class Submissions:
    """Turns the arguments of an update into an entry, and brings entries to the door."""

    def __init__(self, driver: GroupDriver, config: LearnerGroupConfig, seed: int, module_ids: Collection[str]) -> None:
        self._driver = driver
        self._config = config
        self._seed = seed
        self._module_ids = frozenset(module_ids)
        assert config.learner_class is not None  # the config was validated
        self._learner_class: type[Learner] = config.learner_class

    def prepare(
        self,
        *,
        raises: bool,
        training_data: TrainingData | None = None,
        timesteps: Mapping[str, Any] | None = None,
        return_state: bool = False,
        num_epochs: int | None = None,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool | None = None,
        weights_version: int | None = None,
        **rest: Any,
    ) -> Entry:
        """The entry for an update's arguments, with a private copy of the data."""
        given = {kind: rest.pop(kind) for kind in _KINDS_OF_DATA if kind in rest}
        if training_data is not None and any(value is not None for value in given.values()):
            raise ValueError("an update trains on training_data or on other data, not on both")
        data = training_data or TrainingData(**given)
        data.validate()
        self._check_hook_keywords(rest)
        config = self._config
        shuffle = config.shuffle_batch_per_epoch if shuffle_batch_per_epoch is None else shuffle_batch_per_epoch
        options = UpdateOptions(
            cut=Cut(num_epochs or config.num_epochs, minibatch_size or config.total_minibatch_size, shuffle),
            seed=self._seed,
            timesteps=timesteps or {},
            kwargs=rest,
            return_state=return_state,
            raises=raises,
            raises_nonfinite=config.on_nonfinite == "raise",
            sampled_version=weights_version,
        )
        return training_entry(data, options, learners_build=self._learner_class.build_batch is not Learner.build_batch)

    def _check_hook_keywords(self, keywords: Mapping[str, Any]) -> None:
        """Refuse keywords that no hook takes, before they fail on the learners."""
        if not keywords:
            return
        for hook in (self._learner_class.before_gradient_based_update, self._learner_class.after_gradient_based_update):
            parameters = inspect.signature(hook).parameters.values()
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            unknown = set(keywords) - {parameter.name for parameter in parameters}
            if unknown and not takes_all:
                raise TypeError(
                    f"update() got {sorted(unknown)[0]!r}, which is neither an argument of its own nor one of "
                    f"{self._learner_class.__name__}.{hook.__name__}()"
                )

    def is_decided_at_the_door(self, entry: Entry) -> bool:
        """Whether no learner is needed to say what becomes of an update."""
        return entry.rows == 0 or not modules_of(entry) <= self._module_ids

    def enter(self, entry: Entry, on_full: OnFull, stream: deque[UpdateFuture] | None = None) -> UpdateFuture:
        """Bring an update to the door; if it belongs to a `stream` of results, it gets its place there when decided."""
        request: TrainRequest = entry.payload
        place = None if stream is None else (lambda: stream.append(request.future))
        if entry.rows == 0:
            self._driver.require_open()
            request.future.set_result(self._noop(entry))
            if place is not None:
                place()
            return request.future
        unknown = sorted(modules_of(entry) - self._module_ids)
        if unknown:
            why = f"there is no module {unknown[0]!r}; the learners have {sorted(self._module_ids)}"
            self._driver.drop(entry, "no_such_module", place, why)
        elif on_full == "block":
            self._driver.submit_blocking(entry, place)
        elif on_full == "drop":
            self._driver.submit(entry, on_admission=place)
        else:
            raise ConfigError.refused("on_full", on_full, "'drop' or 'block'")
        return request.future

    def _noop(self, entry: Entry) -> UpdateResult:
        """The result of an update without rows: nothing was submitted, so the ledger does not know of it."""
        nothing: dict[str, Any] = {ALL_MODULES: {NUM_ENV_STEPS_TRAINED: 0}}
        version, generation = self._driver.read(lambda state: (state.entries.weights_version, state.generation))
        return UpdateResult(
            [dict(nothing) for _ in range(max(1, self._config.num_learners))],
            status="noop",
            reason="no rows",
            weights_version=version,
            generation=generation,
            reduced=nothing,
        )
