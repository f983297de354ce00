"""Which package may import which: transport <- workers <- lgroup, by public names only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"lgroup.transport": ROOT / "transport", "lgroup.workers": ROOT / "workers", "lgroup": ROOT / "lgroup"}
MAY_IMPORT = {
    "lgroup.transport": {"lgroup.transport"},
    "lgroup.workers": {"lgroup.workers", "lgroup.transport"},
    "lgroup": {"lgroup", "lgroup.workers", "lgroup.transport"},
}


@dataclass(frozen=True)
class Import:
    """One imported dotted name, absolute, and where it stands."""

    package: str
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


def package_of(name: str) -> str:
    """The package of ours that a dotted name belongs to."""
    return next((package for package in FOLDERS if name == package or name.startswith(package + ".")), "")


def imports_of(package: str) -> Iterator[Import]:
    folder = FOLDERS[package]
    for path in sorted(folder.rglob("*.py")):  # rglob does not follow the links lgroup/transport and lgroup/workers
        if folder.name == "lgroup" and path.relative_to(folder).parts[0] in ("transport", "workers"):
            continue
        module = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
        yield from imports_in(path.read_text(), module, package, str(path.relative_to(ROOT)))


def imports_in(source: str, module: str, package: str, file: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(package, file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            start = (
                ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            for alias in node.names:
                yield Import(package, file, node.lineno, f"{start}.{alias.name}")


def ours() -> list[Import]:
    return [found for package in FOLDERS for found in imports_of(package) if package_of(found.name)]


def test_there_are_modules_to_look_at() -> None:
    assert {found.package for found in ours()} == set(FOLDERS)


def test_no_module_imports_the_folders_by_their_own_names() -> None:
    """A user's own workers/ or transport/ must never be what we import."""
    wrong = [
        found
        for package in FOLDERS
        for found in imports_of(package)
        if found.name.split(".")[0] in ("transport", "workers")
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_go_one_way(package: str) -> None:
    wrong = [
        found for found in ours() if found.package == package and package_of(found.name) not in MAY_IMPORT[package]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_private_modules_and_names_stay_inside_their_package() -> None:
    wrong = [
        found
        for found in ours()
        if package_of(found.name) != found.package and any(is_private(part) for part in found.name.split("."))
    ]
    assert not wrong, "\n".join(map(str, wrong))


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize(
    ("line", "module", "expected"),
    [
        ("import transport", "lgroup.workers.a", "transport"),
        ("from transport.wire import encode", "lgroup.a", "transport.wire.encode"),
        ("from .wire import encode", "lgroup.transport.a", "lgroup.transport.wire.encode"),
        ("from ..workers import Worker", "lgroup.transport.a", "lgroup.workers.Worker"),
        ("from . import wire", "lgroup.transport.a", "lgroup.transport.wire"),
        ("def f():\n    import lgroup.workers", "lgroup.a", "lgroup.workers"),
    ],
)
def test_every_form_of_import_is_seen(line: str, module: str, expected: str) -> None:
    assert [found.name for found in imports_in(line, module, "", "")] == [expected]
