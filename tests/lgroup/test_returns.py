"""GAE and V-trace against hand-computed values and against slow loops written from the papers' sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lgroup.algorithms.returns import discounted_sums, gae, standardise, vtrace

F = np.float32


def rollout(rng: np.random.Generator, rows: int, steps: int, end_probability: float = 0.2) -> dict[str, Any]:
    """Random columns with episodes that end anywhere, laid out as Gymnasium's next-step autoreset does."""
    mask = np.ones((rows, steps), bool)
    terminateds = np.zeros((rows, steps), bool)
    truncateds = np.zeros((rows, steps), bool)
    for row in range(rows):
        for t in range(steps):
            mask[row, t] = t < steps - 1 and not (t and (terminateds[row, t - 1] or truncateds[row, t - 1]))
            if mask[row, t] and rng.random() < end_probability:
                (terminateds if rng.random() < 0.5 else truncateds)[row, t] = True
    return {
        "rewards": rng.normal(size=(rows, steps)).astype(F),
        "values": rng.normal(size=(rows, steps)).astype(F),
        "terminateds": terminateds,
        "truncateds": truncateds,
        "loss_mask": mask,
    }


def next_value(c: dict[str, Any], row: int, t: int, values: np.ndarray) -> float:
    return 0.0 if c["terminateds"][row, t] else float(values[row, t + 1])


def segment_end(c: dict[str, Any], row: int, t: int) -> int:
    """The first time step after t's stretch of one episode."""
    while c["loss_mask"][row, t]:
        t += 1
    return t


def slow_gae(c: dict[str, Any], gamma: float, lambda_: float) -> np.ndarray:
    """Equation 16: the sum over l of (gamma lambda)^l delta_{t+l}, each delta written out."""
    out = np.zeros_like(c["rewards"])
    for row, t in zip(*np.nonzero(c["loss_mask"]), strict=True):
        for k in range(t, segment_end(c, row, t)):
            delta = c["rewards"][row, k] + gamma * next_value(c, row, k, c["values"]) - c["values"][row, k]
            out[row, t] += (gamma * lambda_) ** (k - t) * delta
    return out


def slow_vtrace(
    c: dict[str, Any], rhos: np.ndarray, gamma: float, rho_bar: float, pg_rho_bar: float
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1: V_s plus the sum over t of gamma^(t-s), the product of c before t, and the clipped TD error at t."""
    targets = c["values"].astype(float).copy()
    for row, s in zip(*np.nonzero(c["loss_mask"]), strict=True):
        for t in range(s, segment_end(c, row, s)):
            product = math.prod(min(1.0, float(rhos[row, i])) for i in range(s, t))
            td = c["rewards"][row, t] + gamma * next_value(c, row, t, c["values"]) - c["values"][row, t]
            targets[row, s] += gamma ** (t - s) * product * min(rho_bar, float(rhos[row, t])) * td
    advantages = np.zeros_like(targets)
    for row, s in zip(*np.nonzero(c["loss_mask"]), strict=True):
        td = c["rewards"][row, s] + gamma * next_value(c, row, s, targets) - c["values"][row, s]
        advantages[row, s] = min(pg_rho_bar, float(rhos[row, s])) * td
    return targets * c["loss_mask"], advantages


def columns(**changes: Any) -> dict[str, Any]:
    """One row: two steps, then the observation to bootstrap from."""
    base: dict[str, Any] = {
        "rewards": np.array([[1.0, 2.0, 0.0]], F),
        "values": np.array([[10.0, 20.0, 30.0]], F),
        "terminateds": np.zeros((1, 3), bool),
        "truncateds": np.zeros((1, 3), bool),
        "loss_mask": np.array([[True, True, False]]),
    }
    return {**base, **changes}


def test_gae_by_hand_bootstraps_from_the_observation_after_the_fragment() -> None:
    out = gae(**columns(), gamma=0.5, lambda_=0.5)
    delta0, delta1 = 1 + 0.5 * 20 - 10, 2 + 0.5 * 30 - 20
    np.testing.assert_allclose(out.advantages, [[delta0 + 0.25 * delta1, delta1, 0]])
    np.testing.assert_allclose(out.value_targets, [[10 + delta0 + 0.25 * delta1, 20 + delta1, 0]])


def test_gae_takes_zero_after_termination_and_the_final_observations_value_after_truncation() -> None:
    last = np.array([[False, True, False]])
    terminated = gae(**columns(terminateds=last), gamma=0.5, lambda_=0.5)
    truncated = gae(**columns(truncateds=last), gamma=0.5, lambda_=0.5)
    assert terminated.advantages[0, 1] == 2 - 20
    assert truncated.advantages[0, 1] == 2 + 0.5 * 30 - 20


def test_gae_never_looks_across_an_episodes_end() -> None:
    c = columns(
        rewards=np.array([[1, 9, 5, 0]], F),
        values=np.array([[1, 2, 3, 4]], F),
        terminateds=np.array([[True, False, False, False]]),
        truncateds=np.zeros((1, 4), bool),
        loss_mask=np.array([[True, False, True, False]]),
    )
    before = gae(**c, gamma=0.9, lambda_=1.0).advantages
    c["rewards"][0, 2] = 1000
    after = gae(**c, gamma=0.9, lambda_=1.0).advantages
    assert before[0, 0] == after[0, 0] == 0.0
    assert before[0, 1] == after[0, 1] == 0.0


def test_lambda_one_gives_the_discounted_return_and_lambda_zero_the_td_error() -> None:
    c = columns(terminateds=np.array([[False, True, False]]))
    assert gae(**c, gamma=0.5, lambda_=1.0).value_targets[0, 0] == pytest.approx(1 + 0.5 * 2)
    assert gae(**c, gamma=0.5, lambda_=0.0).value_targets[0, 0] == pytest.approx(1 + 0.5 * 20)


def test_vtrace_by_hand_with_one_clipped_ratio() -> None:
    rhos = np.array([[0.5, 4.0, 1.0]], F)
    out = vtrace(np.zeros((1, 3), F), np.log(rhos), **columns(), gamma=0.5)
    delta1 = 1.0 * (2 + 0.5 * 30 - 20)
    v1 = 20 + delta1
    v0 = 10 + 0.5 * (1 + 0.5 * 20 - 10) + 0.5 * 0.5 * delta1
    np.testing.assert_allclose(out.value_targets, [[v0, v1, 0]], rtol=1e-6)
    np.testing.assert_allclose(out.advantages, [[0.5 * (1 + 0.5 * v1 - 10), 1.0 * (2 + 0.5 * 30 - 20), 0]], rtol=1e-6)


def test_on_policy_vtrace_is_the_n_step_return() -> None:
    """Section 4.1: with equal policies, v_s is the n-step Bellman target, which is GAE's value target at lambda 1."""
    c = rollout(np.random.default_rng(0), rows=8, steps=20)
    logp = np.random.default_rng(1).normal(size=c["rewards"].shape).astype(F)
    got = vtrace(logp, logp, **c, gamma=0.97)
    want = gae(**c, gamma=0.97, lambda_=1.0)
    np.testing.assert_allclose(got.value_targets, want.value_targets, rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), steps=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_fast_and_slow_agree_on_any_rollout(seed: int, rows: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    c = rollout(rng, rows, steps)
    fast = gae(**c, gamma=0.93, lambda_=0.8)
    np.testing.assert_allclose(fast.advantages, slow_gae(c, 0.93, 0.8), rtol=1e-4, atol=1e-4)

    logp = rng.normal(size=(2, rows, steps)).astype(F)
    got = vtrace(logp[0], logp[1], **c, gamma=0.93, clip_rho_threshold=1.5, clip_pg_rho_threshold=0.7)
    targets, advantages = slow_vtrace(c, np.exp(logp[1] - logp[0]), 0.93, 1.5, 0.7)
    np.testing.assert_allclose(got.value_targets, targets, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got.advantages, advantages, rtol=1e-3, atol=1e-3)


def test_what_stands_in_masked_time_steps_changes_nothing() -> None:
    c = rollout(np.random.default_rng(3), rows=4, steps=15)
    logp = np.random.default_rng(4).normal(size=(2, 4, 15)).astype(F)
    dirty = {**c, "rewards": np.where(c["loss_mask"], c["rewards"], 1e6).astype(F)}
    dirty_logp = np.where(c["loss_mask"], logp, 80.0).astype(F)
    for clean, other in (
        (gae(**c, gamma=0.9, lambda_=0.9), gae(**dirty, gamma=0.9, lambda_=0.9)),
        (vtrace(*logp, **c, gamma=0.9), vtrace(*dirty_logp, **dirty, gamma=0.9)),
    ):
        np.testing.assert_array_equal(clean.advantages, other.advantages)
        np.testing.assert_array_equal(clean.value_targets, other.value_targets)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"values: expected shape \(1, 3\) as loss_mask has, got \(1, 2\)"):
        gae(**columns(values=np.zeros((1, 2), F)), gamma=1.0, lambda_=1.0)
    with pytest.raises(ValueError, match="two axes"):
        gae(**columns(loss_mask=np.ones(3, bool)), gamma=1.0, lambda_=1.0)


def test_a_last_step_without_a_value_to_bootstrap_from_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_mask\[:, -1\] must be False"):
        gae(**columns(loss_mask=np.ones((1, 3), bool)), gamma=1.0, lambda_=1.0)


def test_discounted_sums_by_hand() -> None:
    out = discounted_sums(np.array([[1.0, 2.0, 3.0]], F), np.array([[0.5, 0.0, 9.0]], F))
    np.testing.assert_allclose(out, [[2.0, 2.0, 3.0]])


def test_standardised_advantages_have_mean_zero_and_deviation_one() -> None:
    out = standardise(np.array([[1.0, 2.0], [3.0, 10.0]], F))
    assert out.mean() == pytest.approx(0, abs=1e-6)
    assert out.std() == pytest.approx(1, rel=1e-5)
    assert standardise(np.full(5, 3.0, F)).tolist() == [0.0] * 5
    assert standardise(np.empty(0, F)).shape == (0,)
