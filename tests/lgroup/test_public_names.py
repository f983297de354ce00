"""The public names: each is there, once, documented, and comes from a module of ours."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import lgroup
import lgroup.algorithms
import lgroup.transport
import lgroup.workers

PUBLIC = [lgroup, lgroup.algorithms, lgroup.transport, lgroup.workers]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_is_there_and_listed_once(module: ModuleType) -> None:
    assert len(module.__all__) == len(set(module.__all__))
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_class_and_function_is_documented(module: ModuleType) -> None:
    found = [(name, getattr(module, name)) for name in module.__all__]
    bare = [name for name, what in found if (inspect.isclass(what) or inspect.isfunction(what)) and not what.__doc__]
    assert not bare


def test_every_error_of_ours_is_an_lgroup_error() -> None:
    errors = [
        what
        for name in lgroup.__all__
        if inspect.isclass(what := getattr(lgroup, name)) and issubclass(what, Exception)
    ]
    assert errors
    assert all(issubclass(error, lgroup.LGroupError) for error in errors)


def test_every_module_imports_by_itself_and_has_a_docstring() -> None:
    names = [
        info.name for info in pkgutil.walk_packages(lgroup.__path__, "lgroup.") if not info.name.endswith("__main__")
    ]
    bare = [name for name in names if not importlib.import_module(name).__doc__]
    assert not bare
