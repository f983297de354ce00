"""The command line of ``python -m lgroup.train``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lgroup.errors import ConfigError, LGroupError

EXIT_ERROR = 1
EXIT_USAGE = 2

_NEEDED = {"gymnasium": "gymnasium", "rich": "rich", "tensorboard": "tensorboard", "matplotlib": "matplotlib"}

_DESCRIPTION = """\
Train a policy on a Gymnasium environment. Env runner processes step the environment, learner processes train one
network together, and its weights flow back to the env runners.

The run ends at the goal or at a limit, whichever comes first. It then leaves in its output folder: weights.pt (load it
with torch.load), curve.png, progress.csv, a tensorboard folder, and summary.txt."""

_EPILOG = """\
Ctrl-C ends a run after the round under way, and saves what was learned; a second Ctrl-C ends it at once.

exit codes: 0 the run ended by itself; 1 it failed; 2 an option is wrong, or something is not installed;
130 it was ended by Ctrl-C, 143 by SIGTERM."""


def parse(argv: Sequence[str] | None) -> Any:
    """The options of a command line as a `RunOptions`. Exits with code 2 and a message if they are wrong."""
    from lgroup.train.options import RunOptions

    given = vars(_parser().parse_args(argv))
    if given["out"] is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        given["out"] = Path("runs") / f"{given['env'].replace('/', '-').replace(':', '-')}-{given['algo']}-{stamp}"
    return RunOptions(**given)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own); returns the exit code that ``--help`` explains."""
    arguments = _parser().parse_args(argv)  # before anything heavy is imported: --help is at once there
    del arguments
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return _fail(f"{' and '.join(missing)} not installed; install them with: pip install 'lgroup[train]'")
    from lgroup.train.loop import run

    try:
        return run(parse(argv))
    except ConfigError as error:
        return _fail(str(error))
    except LGroupError as error:
        return _fail(str(error), EXIT_ERROR)


def _fail(sentence: str, code: int = EXIT_USAGE) -> int:
    print(f"lgroup.train: error: {sentence}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lgroup.train",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser.add_argument_group("what to train"))
    _add_processes(parser.add_argument_group("processes"))
    _add_end(parser.add_argument_group("when to end"))
    _add_training(parser.add_argument_group("training (defaults depend on the algorithm)"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_what(group: Any) -> None:
    group.add_argument("--env", required=True, metavar="NAME", help="a Gymnasium environment, such as CartPole-v1")
    group.add_argument(
        "--env-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help="its keyword arguments, such as '{\"g\": 9.8}'",
    )
    group.add_argument(
        "--algo",
        choices=("ppo", "impala", "bc"),
        default="impala",
        help="ppo: sample, then train, in turns; impala: sample and train at the same time, corrected by V-trace; "
        "bc: imitate the actions in --data, while env runners measure how good the imitation is (default: impala)",
    )
    group.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="for bc: an .npz file with the arrays obs and actions, one row per step, as --save-data writes it",
    )
    group.add_argument(
        "--seed",
        type=_whole(0),
        metavar="K",
        help="fixes random numbers; asynchronous runs still differ in timing (default: another one each time)",
    )


def _add_processes(group: Any) -> None:
    group.add_argument(
        "--num-learners",
        type=_whole(0),
        default=2,
        metavar="N",
        help="learner processes that average their gradients; 0: train in this process (default: 2)",
    )
    group.add_argument(
        "--num-env-runners", type=_whole(1), default=2, metavar="M", help="processes that sample (default: 2)"
    )
    group.add_argument(
        "--num-envs-per-env-runner",
        type=_whole(1),
        metavar="E",
        help="environments that each of them steps at once (default: 16)",
    )


def _add_end(group: Any) -> None:
    group.add_argument(
        "--stop-return",
        type=float,
        metavar="R",
        help="end when the mean return of the last 100 episodes reaches R (default: what Gymnasium's registry calls "
        "solved, 475 for CartPole-v1; without such an entry no goal)",
    )
    group.add_argument(
        "--stop-env-steps",
        type=_whole(1),
        metavar="S",
        help="end after S env steps; for bc, after S trained rows (default: 500,000 for ppo, else 1,000,000)",
    )
    group.add_argument(
        "--stop-seconds", type=_positive, metavar="T", help="end after T seconds of training (default: no limit)"
    )


def _add_training(group: Any) -> None:
    group.add_argument("--lr", type=_positive, metavar="X", help="learning rate")
    group.add_argument("--gamma", type=_positive, metavar="X", help="discount of rewards (default: 0.99)")
    group.add_argument(
        "--reward-scale",
        type=_positive,
        metavar="X",
        help="for impala: factor of rewards in the losses; discounted returns should come to about 10 (default: 0.1)",
    )
    group.add_argument(
        "--hidden", type=_sizes, metavar="A,B", help="units of the network's hidden layers (default: 64,64)"
    )
    group.add_argument(
        "--train-batch-size",
        type=_whole(1),
        metavar="B",
        help="env steps (for bc: rows) of one update of all learners (default: 4096 for ppo, 320 impala, 512 bc)",
    )
    group.add_argument(
        "--rollout-fragment-length",
        type=_whole(1),
        metavar="L",
        help="steps of each environment in one rollout (default: 20 for impala; for ppo so many that one rollout of "
        "every env runner makes a batch)",
    )
    group.add_argument(
        "--minibatch-size",
        type=_whole(1),
        metavar="B",
        help="for ppo: rows of one optimizer step of all learners together (default: 512)",
    )
    group.add_argument("--num-epochs", type=_whole(1), metavar="E", help="for ppo: passes over each batch (default: 8)")


def _add_output(group: Any) -> None:
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: runs/<env>-<algo>-<date and time>)"
    )
    group.add_argument(
        "--save-data",
        type=_whole(0),
        default=0,
        metavar="S",
        help="at the end sample S env steps with the final policy and write them to data.npz, for bc (default: 0)",
    )
    group.add_argument(
        "--plain", action="store_true", help="print lines instead of the live panel (always so if not on a terminal)"
    )


def _whole(at_least: int) -> Any:
    def convert(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {at_least}")
        return value

    return convert


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    convert = _whole(1)
    return tuple(convert(part) for part in text.split(","))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
