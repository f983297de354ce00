"""The training command's options: what they mean, and what is said when they are wrong. No process is started."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lgroup.algorithms import BCConfig, IMPALAConfig, PPOConfig, spaces_of
from lgroup.errors import ConfigError
from lgroup.train import main
from lgroup.train.cli import parse
from lgroup.train.loop import stop_rule, title_of
from lgroup.train.options import RECIPES, config_for
from lgroup.train.rounds import load_data

CARTPOLE = spaces_of("CartPole-v1")


def config_of(*argv: str) -> Any:
    return config_for(parse(["--env", "CartPole-v1", *argv]), CARTPOLE)


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command says on stderr, having ended with code 2 and nothing on stdout."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lgroup.train: error: ") and err.count("\n") == 1
    return err.removeprefix("lgroup.train: error: ").strip()


def test_every_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "--env NAME", "--env-config JSON", "--algo {ppo,impala,bc}", "--data FILE", "--seed K",
        "--num-learners N", "--num-env-runners M", "--num-envs-per-env-runner E",
        "--stop-return R", "--stop-env-steps S", "--stop-seconds T",
        "--lr X", "--gamma X", "--reward-scale X", "--hidden A,B", "--train-batch-size B",
        "--rollout-fragment-length L", "--minibatch-size B", "--num-epochs E",
        "--out DIR", "--save-data S", "--plain", "Ctrl-C", "130",
    ):  # fmt: skip
        assert option in text, option


def test_the_algorithm_chooses_the_config_and_its_settings() -> None:
    for algo, kind in {"ppo": PPOConfig, "impala": IMPALAConfig, "bc": BCConfig}.items():
        config = config_of("--algo", algo)
        assert type(config) is kind
        for name, value in RECIPES[algo].settings.items():
            assert getattr(config, name) == value


def test_options_come_before_the_recipe() -> None:
    argv = ("--lr", "0.01", "--gamma", "0.5", "--hidden", "32,16", "--num-learners", "3", "--train-batch-size", "1000")
    config = config_of("--algo", "ppo", *argv, "--minibatch-size", "99", "--num-epochs", "4", "--seed", "7")
    assert (config.lr, config.gamma, config.minibatch_size, config.num_epochs) == (0.01, 0.5, 99, 4)
    assert config.model_config["fcnet_hiddens"] == [32, 16]
    assert config.seed == 7
    assert config.num_learners == 3 and config.total_train_batch_size == 1002  # the least multiple of 3


def test_ppos_env_runners_make_the_batch_together() -> None:
    config = config_of("--algo", "ppo", "--num-env-runners", "4", "--num-envs-per-env-runner", "8")
    assert config.get_rollout_fragment_length() * 4 * 8 == 4096


def test_a_run_ends_where_the_registry_calls_the_environment_solved() -> None:
    rule = stop_rule(parse(["--env", "CartPole-v1"]))
    assert (rule.episode_return, rule.env_steps, rule.seconds) == (475.0, 1_000_000, None)
    rule = stop_rule(parse(["--env", "Pendulum-v1", "--algo", "ppo", "--stop-seconds", "9"]))
    assert (rule.episode_return, rule.env_steps, rule.seconds) == (None, 500_000, 9.0)
    assert stop_rule(parse(["--env", "CartPole-v1", "--stop-return", "100"])).episode_return == 100.0


def test_the_output_folder_is_named_after_the_run() -> None:
    assert parse(["--env", "ALE/Pong-v5", "--algo", "ppo"]).out.as_posix().startswith("runs/ALE-Pong-v5-ppo-")
    assert parse(["--env", "X", "--out", "here"]).out == Path("here")


def test_the_title_counts_processes() -> None:
    argv = ["--env", "CartPole-v1", "--num-learners", "1", "--num-env-runners", "3"]
    assert title_of(parse(argv)) == "impala on CartPole-v1 · 1 learner · 3 env runners"
    argv = ["--env", "X", "--algo", "ppo", "--num-learners", "0", "--num-env-runners", "1"]
    assert title_of(parse(argv)) == "ppo on X · learning in this process · 1 env runner"


def test_a_wrong_environment_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no environment 'CartPool-v1'" in error_of(capsys, "--env", "CartPool-v1", "--out", str(tmp_path))
    assert "there is no environment 'CartPole-v7'" in error_of(capsys, "--env", "CartPole-v7", "--out", str(tmp_path))


def test_a_missing_extra_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name in ("rich", "gymnasium") else real(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert error_of(capsys, "--env", "CartPole-v1") == (
        "gymnasium and rich not installed; install them with: pip install 'lgroup[train]'"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--algo", "bc"], "--algo bc needs --data FILE.npz"),
        (["--algo", "ppo", "--data", "x.npz"], "--data goes with --algo bc only"),
        (["--algo", "impala", "--num-epochs", "3"], "--num-epochs goes with --algo ppo only"),
        (["--algo", "bc", "--minibatch-size", "3"], "--minibatch-size goes with --algo ppo only"),
        (["--algo", "ppo", "--reward-scale", "3"], "--reward-scale goes with --algo impala only"),
        (["--gamma", "1.5"], "gamma=1.5 is not possible"),
        (["--env-config", '{"length": 3}'], "does not take env_config={'length': 3}"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], said: str
) -> None:
    assert said in error_of(capsys, "--env", "CartPole-v1", "--out", str(tmp_path / "out"), *argv)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--num-learners", "-1", "'-1' is not a whole number >= 0"),
        ("--num-env-runners", "0", "'0' is not a whole number >= 1"),
        ("--lr", "fast", "'fast' is not a number above 0"),
        ("--hidden", "64,x", "'x' is not a whole number >= 1"),
        ("--env-config", "[1]", "'[1]' is not a JSON object"),
        ("--algo", "dqn", "invalid choice: 'dqn'"),
    ],
)
def test_values_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--env", "CartPole-v1", option, value])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_with_an_earlier_run_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"precious")
    assert "holds an earlier run's weights.pt" in error_of(capsys, "--env", "CartPole-v1", "--out", str(tmp_path))
    assert (tmp_path / "weights.pt").read_bytes() == b"precious"


def test_data_are_read_and_checked_against_the_environment(tmp_path: Path) -> None:
    good = {"obs": np.zeros((3, 4)), "actions": np.array([0, 1, 0])}
    for wrong, said in (
        ({"obs": good["obs"]}, "has no array 'actions', only obs"),
        ({**good, "obs": np.zeros((3, 5))}, r"obs has shape \(3, 5\); the environment needs \(rows, 4\)"),
        ({**good, "actions": np.zeros(2, int)}, "has 3 obs and 2 actions"),
        ({**good, "actions": np.array(["a", "b", "c"], object)}, "cannot be read"),
    ):
        np.savez(tmp_path / "data.npz", **wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=said):
            load_data(tmp_path / "data.npz", CARTPOLE)
    np.savez(tmp_path / "data.npz", **good)  # type: ignore[arg-type]
    assert load_data(tmp_path / "data.npz", CARTPOLE)["obs"].dtype == np.float32
    with pytest.raises(ConfigError, match="cannot be read"):
        load_data(tmp_path / "nowhere.npz", CARTPOLE)


@pytest.mark.parametrize("more", ["", "--algo ppo --seed 1"])
def test_make_train_gives_the_command_all_that_it_needs(more: str) -> None:
    root = Path(__file__).parents[2]
    plan = subprocess.run(["make", "-n", "train", f"ARGS={more}"], cwd=root, capture_output=True, text=True, check=True)
    command = next(line for line in plan.stdout.splitlines() if "-m lgroup.train" in line)
    options = parse(shlex.split(command.partition("-m lgroup.train")[2]))
    assert (options.env, options.num_learners, options.num_env_runners) == ("CartPole-v1", 2, 2)
    assert options.algo == ("ppo" if more else "impala")
