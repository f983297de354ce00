from __future__ import annotations

import ast
from pathlib import Path

import lgroup.data

IMPURE = {
    "asyncio",
    "datetime",
    "multiprocessing",
    "os",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "zmq",
}


def test_data_and_plans_import_no_socket_process_or_clock():
    sources = sorted(Path(lgroup.data.__file__).parent.glob("*.py"))
    assert len(sources) > 4
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in IMPURE, f"{source.name} imports {name}"
                assert not name.startswith(("lgroup.transport", "lgroup.workers")), f"{source.name} imports {name}"
