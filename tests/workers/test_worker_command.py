from __future__ import annotations

import pytest

from lgroup.__main__ import main
from lgroup.worker import main as worker


@pytest.mark.parametrize("run", [worker, lambda argv: main(["worker", *argv])], ids=["module", "console script"])
@pytest.mark.parametrize(
    "arguments", [["--coordinator", "tcp://10.0.0.1:5", "--key-file", "k"], ["--connection-file", "c"]]
)
def test_joining_another_node_is_refused_in_one_sentence(
    run: object, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2  # type: ignore[operator]
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "workers on the coordinator's node only" in error


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        worker(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--coordinator", "--key-file", "--connection-file", "--zygote-fd"))


def test_the_console_script_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2 and "train" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
