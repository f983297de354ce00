"""Taking an update back.

Invariant: between `begin` and `forget` the learner can be put back to where it was at `begin`, bit for bit.

Parameters and optimizer state are copied while the first sum over the group runs, where the copy costs nothing, unless
a hook that runs earlier could write to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lgroup.learner.state_tree import Tree, TreeCopy, early_tree, late_tree, restore

if TYPE_CHECKING:
    from lgroup.learner.learner import Learner


class Undo:
    """The way back for one learner. Its memory is kept from update to update."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._early_copy, self._late_copy = TreeCopy(), TreeCopy()
        self._early: Tree | None = None
        self._late: Tree | None = None
        self._objects: dict[str, Any] = {}

    def begin(self, *, everything: bool) -> None:
        """Copy buffers, settings and attributes; with `everything` also parameters and optimizer state."""
        self._early = self._early_copy.take(early_tree(self._learner))
        self._late = None
        self._objects = dict(vars(self._learner))
        if everything:
            self.copy_parameters()

    def copy_parameters(self) -> None:
        """Copy parameters and optimizer state, if that has not been done since `begin`."""
        if self._late is None and self._early is not None:
            self._late = self._late_copy.take(late_tree(self._learner))

    def roll_back(self) -> None:
        """Put the learner back to where it was at `begin`. Without one, nothing happens."""
        if self._early is not None:
            # The objects themselves come back, not only what was in them, where a hook put others in their place.
            vars(self._learner).update((name, self._objects[name]) for name in self._early["attributes"])
        for tree in (self._late, self._early):
            if tree is not None:
                restore(self._learner, tree)
        self.forget()

    def forget(self) -> None:
        """The update stands."""
        self._early = self._late = None
        self._objects = {}
