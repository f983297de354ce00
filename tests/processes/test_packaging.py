"""What a user installs: wheel and sdist, built from a copy of this tree and tried beside a project of a user."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"transport": ROOT / "transport", "workers": ROOT / "workers"}
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

USER_PROGRAM = """
import lgroup, lgroup.transport, lgroup.workers, transport, workers
import lgroup.transport.errors, lgroup.workers.errors
assert lgroup.workers.errors.ActorError is lgroup.ActorError
assert not hasattr(transport, "errors") and not hasattr(workers, "errors")
for module in (lgroup, lgroup.transport, lgroup.workers, transport, workers):
    print(module.__file__)
"""

USER_TRAINING = """
import numpy as np, torch, lgroup, workers

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, batch):
        return self.layer(batch["obs"])

class Imitation(lgroup.Learner):
    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        assert workers.MINE == "the user's"
        return torch.nn.functional.cross_entropy(fwd_out, batch["actions"])

config = (
    lgroup.LearnerGroupConfig()
    .learners(num_learners=2)
    .training(learner_class=Imitation)
    .rl_module(rl_module_spec=lgroup.RLModuleSpec(module_class=Net))
)
with lgroup.LearnerGroup(config=config) as group:
    print(group.update(batch={"obs": np.zeros((8, 4), np.float32), "actions": np.zeros(8, np.int64)}).status)
"""


def python(*arguments: str, cwd: Path, path: str = "") -> str:
    """The standard output of a Python program that must succeed; `path` is its PYTHONPATH."""
    command = ["env", f"PYTHONPATH={path}", sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, what: str, target: Path) -> Path:
    """Build a `wheel` or `sdist` with the setuptools of this environment: needs no network."""
    target.mkdir(exist_ok=True)
    return target / python("-c", BUILD, f"build_{what}", str(target), cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git holds here, links as links, so that building leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("source") / "lgroup"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build(source, "wheel", source.parent / "wheel")


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    return build(source, "sdist", source.parent / "sdist")


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A directory in which the wheel is installed."""
    target = wheel.parent.parent / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    python("-m", "pip", "install", *options, str(wheel), cwd=wheel.parent)
    return target


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project with packages of its own that are called as our folders are."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('MINE = "the user\'s"\n')
    return tmp_path


def modules_in_the_tree() -> set[str]:
    """Every module and marker that must be installed, as the wheel names it."""
    ours = {
        path for path in (ROOT / "lgroup").rglob("*.py") if path.relative_to(ROOT / "lgroup").parts[0] not in PACKAGES
    }
    names = {str(path.relative_to(ROOT)) for path in ours}
    for name, folder in PACKAGES.items():
        names |= {f"lgroup/{name}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
    return names | {"lgroup/py.typed"}


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    assert files_of(wheel) == modules_in_the_tree()


def test_the_wheel_holds_files_and_no_links(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        links = [entry.filename for entry in archive.infolist() if (entry.external_attr >> 16) & 0o170000 == 0o120000]
    assert not links
    assert not [path for path in site.rglob("*") if path.is_symlink()]
    assert (site / "lgroup" / "transport" / "errors.py").read_text() == (ROOT / "transport" / "errors.py").read_text()


def test_a_wheel_built_from_the_sdist_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert files_of(build(unpacked, "wheel", tmp_path / "wheel")) == files_of(wheel)


def test_the_sdist_brings_tests_docs_and_pins(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/conftest.py"} <= names


def test_lgroup_and_a_users_own_folders_live_side_by_side(site: Path, project: Path) -> None:
    (project / "main.py").write_text(USER_PROGRAM)
    files = python("main.py", cwd=project, path=str(site)).split()
    assert [Path(file).parent for file in files] == [
        site / "lgroup",
        site / "lgroup" / "transport",
        site / "lgroup" / "workers",
        project / "transport",
        project / "workers",
    ]


def test_learners_of_a_user_with_such_folders_train(site: Path, project: Path) -> None:
    """The worker processes import lgroup's packages and the user's, each by its own name."""
    (project / "main.py").write_text(USER_TRAINING)
    assert python("main.py", cwd=project, path=str(site)).split() == ["applied"]


def test_setup_cfg_lists_every_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    there = {str(Path(name).parent).replace("/", ".") for name in modules_in_the_tree() if name.endswith("__init__.py")}
    assert set(setup["options"]["packages"].split()) == there


def test_every_requirement_is_pinned() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    names = {line.split(">")[0].split("=")[0].lower() for text in wanted for line in text.split()}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert names | {"pip", "setuptools"} <= set(pins)
    assert pins["torch"] == "2.13.0"
