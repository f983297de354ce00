"""``python -m lgroup.train``: train a policy on a Gymnasium environment. Needs the extra ``lgroup[train]``."""

from lgroup.train.cli import main

__all__ = ["main"]
