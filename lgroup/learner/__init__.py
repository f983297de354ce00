"""The learner: hooks, the gradient step over the group, undo, metrics and state."""

from __future__ import annotations

from lgroup.learner.learner import Learner, TorchLearner
from lgroup.learner.metrics import Metrics

__all__ = ["Learner", "Metrics", "TorchLearner"]
