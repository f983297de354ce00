"""Train on CartPole-v1 with several seeds and draw their learning curves into one picture.

    python tools/learning_curves.py --algo ppo --goal 475 --limit 500000
    python tools/learning_curves.py --algo impala --goal 450 --limit 1000000

Each run is the training command; its defaults are two learners and two env runners. Writes docs/<algo>-cartpole.png and
prints a table, with the env step at which the mean return of the last 100 episodes first reached the goal.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Curve = list[tuple[int, float, float]]  # env steps, seconds, mean return


def main() -> int:
    """Returns 1 if a seed missed the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("ppo", "impala"), required=True)
    parser.add_argument("--goal", type=float, required=True, help="mean return over 100 episodes")
    parser.add_argument("--limit", type=int, required=True, help="env steps")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder for the picture")
    options = parser.parse_args()

    seeds = [int(seed) for seed in options.seeds.split(",")]
    curves = {seed: curve_of(options.algo, options.goal, options.limit, seed) for seed in seeds}
    picture = options.docs / f"{options.algo}-cartpole.png"
    draw(picture, curves, f"{options.algo} on CartPole-v1, 2 learners, 2 env runners", options.goal)
    print(f"\n| seed | env steps to a mean return of {options.goal:g} | seconds |\n|---|---|---|")
    missed = 0
    for seed, curve in curves.items():
        steps, seconds, best = curve[-1][0], curve[-1][1], max(point[2] for point in curve)
        missed += best < options.goal
        print(
            f"| {seed} | {steps:,} | {seconds:.0f} |" if best >= options.goal else f"| {seed} | missed: {best:.1f} | |"
        )
    print(f"\n{picture}")
    return int(missed > 0)


def curve_of(algo: str, goal: float, limit: int, seed: int) -> Curve:
    """One run's points."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "lgroup.train", "--env", "CartPole-v1", "--algo", algo, "--seed", str(seed)]
        command += ["--stop-return", str(goal), "--stop-env-steps", str(limit), "--out", str(out), "--plain"]
        print("$", *command[1:], flush=True)
        subprocess.run(command, cwd=ROOT, check=True)
        with (out / "progress.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["episode_return_mean"]]
    return [(int(row["env_steps"]), float(row["seconds"]), float(row["episode_return_mean"])) for row in rows]


def draw(path: Path, curves: dict[int, Curve], title: str, goal: float) -> None:
    """All curves over env steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    for seed, curve in curves.items():
        axes.plot([point[0] for point in curve], [point[2] for point in curve], label=f"seed {seed}")
    axes.axhline(goal, color="#999999", linestyle="--", linewidth=1.0, label=f"goal {goal:g}")
    axes.set_title(title)
    axes.set_xlabel("env steps")
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
