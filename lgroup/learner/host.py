"""What runs a learner, in a worker process or in the coordinator's own.

Invariant: after every answer the learner is at its `position`: it holds every entry of the group's log up to there and
nothing of any later one. An entry that cannot be finished is taken back, and from then on everything sent in this
generation is answered `void`, until the coordinator has the rank join the next one.
"""

from __future__ import annotations

import hashlib
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lgroup.data.episode import SingleAgentEpisode
from lgroup.data.plan import RankPlan
from lgroup.learner import state_tree
from lgroup.learner.collective import Collective, CollectiveLost, SingleRank
from lgroup.learner.learner import Learner
from lgroup.learner.seeding import mixed, seed_everything
from lgroup.learner.state_transfer import adopt_state
from lgroup.learner.undo import Undo
from lgroup.learner.update import Cut, NonfiniteGradient, Update

Reply = dict[str, Any]
#: Opens the process group of a generation: (generation, rank, world_size).
OpenGroup = Callable[[int, int, int], Collective]


def describe(error: BaseException) -> dict[str, str]:
    """An exception as text, to travel."""
    try:
        message = str(error)
    except Exception as nested:  # the exception is someone else's, and so is its __str__
        message = f"(its __str__ raised {type(nested).__name__})"
    return {
        "type": type(error).__name__,
        "message": message,
        "traceback": "".join(traceback.format_exception(error)),
    }


class LearnerHost:
    """One learner, its place in the group, and the way back from a failed entry."""

    def __init__(
        self,
        learner_class: Callable[..., Learner],
        config: Any,
        module_spec: Any,
        seed: int,
        open_group: OpenGroup | None = None,
    ) -> None:
        self._seed = seed
        self._open_group = open_group
        seed_everything(mixed(seed))
        self.learner = learner_class(config=config, module_spec=module_spec)
        self.learner.build()
        self._undo = Undo(self.learner)
        self._generation = 0
        self._left = True
        self._is_torn = False

    # Membership

    def join(
        self,
        generation: int,
        rank: int,
        world_size: int,
        lead: int,
        behind: Sequence[int],
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        """Enter the process group of `generation`; ranks that are `behind` adopt rank `lead`'s state.

        With a `snapshot`, which is for the lead, this learner goes back to that first.

        Raises:
            CollectiveLost: if the group does not form, or a peer leaves meanwhile.
            TypeError: if the lead's state holds something that no message can carry.
        """
        self._leave()
        adopts = snapshot is not None or rank in behind
        if self._is_torn and not adopts:
            raise SystemExit("the learner could not take over a state, and nobody knows what it holds")
        self.learner._lgroup_collective = collective = self._opened(generation, rank, world_size)
        try:
            if snapshot is not None:
                state_tree.restore(self.learner, dict(snapshot))
            if behind:
                adopt_state(self.learner, collective, lead=lead, behind=behind)
        except BaseException as error:
            collective.close()  # peers may be waiting for what this rank will not send
            # A lost collective comes before the first byte is written; anything else may have come in the middle.
            self._is_torn = self._is_torn or (adopts and not isinstance(error, CollectiveLost))
            raise
        self._is_torn = False
        self._generation = generation
        self._left = False

    def _opened(self, generation: int, rank: int, world_size: int) -> Collective:
        if world_size == 1 or self._open_group is None:
            return SingleRank()
        return self._open_group(generation, rank, world_size)

    def _leave(self) -> None:
        self.learner._lgroup_collective.close()
        self._left = True

    def _is_void(self, generation: int) -> bool:
        return self._left or generation != self._generation or self.learner._lgroup_collective.lost

    # Entries of the log

    def update(self, generation: int, request: Mapping[str, Any]) -> Reply:
        """Train on this rank's part of an update.

        `request` has ``seq``, ``timesteps``, ``kwargs``, ``return_state``, and either ``plan`` and ``columns`` or
        ``episodes`` and ``cut``; see `lgroup._requests`.
        """
        if self._is_void(generation):
            return {"outcome": "void"}
        return self._attempt(lambda: self._train(request))

    def change(self, generation: int, pickled_call: bytes) -> Reply:
        """Call ``function(learner, **kwargs)``, which may change the learner; `pickled_call` is the two of them."""
        if self._is_void(generation):
            return {"outcome": "void"}
        return self._attempt(lambda: self._call(*pickle.loads(pickled_call)))

    def set_state(self, generation: int, state: Mapping[str, Any]) -> Reply:
        """Copy a state, or parts of one, into the learner."""
        if self._is_void(generation):
            return {"outcome": "void"}
        return self._attempt(lambda: self._call(_set_state, {"state": state}))

    def read(self, generation: int, name: str, kwargs: Mapping[str, Any]) -> Reply:
        """Ask for something that changes nothing: ``get_state``, ``snapshot``, ``digests`` or ``module_ids``."""
        if self._is_void(generation):
            return {"outcome": "void"}
        owner = self if name in ("digests", "module_ids", "snapshot") else self.learner
        try:
            value = getattr(owner, name)(**kwargs)
        except Exception as error:
            return {"outcome": "read_raised", "error": describe(error)}
        return {"outcome": "applied", "value": value}

    def _attempt(self, act: Callable[[], Reply]) -> Reply:
        """Do it, or take it back."""
        try:
            reply = act()
            self._undo.forget()
            return reply
        except NonfiniteGradient as error:
            # Every rank sees the same sum and comes here: nobody leaves.
            self._take_back()
            return {"outcome": "nonfinite", "parameter": error.parameter}
        except BaseException as error:
            lost = isinstance(error, CollectiveLost) or self.learner._lgroup_collective.lost
            # First of all: peers may be waiting in a collective that this rank will not enter.
            self._leave()
            self._take_back()
            if not isinstance(error, Exception):
                raise  # such as KeyboardInterrupt, in the coordinator's own process
            return {"outcome": "lost" if lost else "raised", "error": describe(error)}

    def _take_back(self) -> None:
        """Put the learner back. If that fails, say of a ``load_state_dict`` that raises, nobody knows what it holds."""
        try:
            self._undo.roll_back()
        except Exception as error:
            if self._open_group is None:
                raise
            why = describe(error)["traceback"]
            raise SystemExit(f"the learner could not be put back after a failure: {why}") from error

    def _train(self, request: Mapping[str, Any]) -> Reply:
        learner = self.learner
        seed_everything(mixed(self._seed, request["seq"], learner.rank))
        update = Update(learner, self._undo, request["timesteps"], request["kwargs"])
        update.begin()
        if "episodes" in request:
            episodes = [SingleAgentEpisode.from_tree(tree) for tree in request["episodes"]]
            columns = dict(learner.build_batch(episodes))
            plan = update.plan_own_data(columns, Cut(**request["cut"]))
        else:
            columns = request["columns"]
            plan = RankPlan.from_wire(request["plan"])
        trained = update.run(plan, columns)
        reply: Reply = {"outcome": "applied" if trained else "noop", "metrics": learner.metrics.take()}
        if request["return_state"]:
            reply["state"] = learner.module.get_state()
        return reply

    def _call(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Reply:
        self._undo.begin(everything=True)
        self.learner.metrics.begin()
        return {"outcome": "applied", "value": function(self.learner, **kwargs)}

    # Looking in

    def module_ids(self) -> list[str]:
        """The modules that the learner has."""
        return list(self.learner.module.keys())

    def snapshot(self) -> state_tree.Tree:
        """A copy of the learner's whole state, for `join`."""
        return dict(state_tree.copy_tree(state_tree.live_tree(self.learner)))

    def digests(self) -> dict[str, str]:
        """A digest of every leaf of the learner's state by its path: equal digests mean equal bits."""
        found: dict[str, str] = {}
        _digest(state_tree.live_tree(self.learner), "", found)
        return found


def _set_state(learner: Learner, state: Mapping[str, Any]) -> None:
    learner.set_state(state)  # a subclass's own, if it has one


def _digest(tree: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(tree, torch.Tensor):
        contents = tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[path] = hashlib.blake2b(contents, digest_size=16).hexdigest()
    elif isinstance(tree, np.ndarray):
        found[path] = hashlib.blake2b(np.ascontiguousarray(tree).tobytes(), digest_size=16).hexdigest()
    elif isinstance(tree, dict):
        for key, value in tree.items():
            _digest(value, f"{path}/{key}", found)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            _digest(value, f"{path}/{index}", found)
    else:
        text = repr(sorted(map(repr, tree)) if isinstance(tree, set) else tree)
        found[path] = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
