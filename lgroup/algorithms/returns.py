"""Advantages and value targets from rollouts: GAE and V-trace. Pure numpy, no gradient.

Every function takes one layout, that of ``EnvRunner.sample`` (Gymnasium's next-step autoreset)::

    time          0     1     2     3     4     5     6
    obs           o0    o1    o2*   s0    s1    s2    s3      o2* ended an episode, s0 began the next one
    rewards       r0    r1    -     q0    q1    q2    -
    terminateds   .     x     .     .     .     .     .
    loss_mask     1     1     0     1     1     1     0

A time step whose ``loss_mask`` is False holds only an observation: the last one of an episode, or the one after the
fragment. So the value of "what came next" is always ``values[t + 1]``: zero where the episode terminated, and the
value of the final observation where it was merely truncated (by a time limit or by the end of the fragment).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Returns:
    """What a policy-gradient loss needs of each time step, float32 ``[B, T]``, zero where ``loss_mask`` is False."""

    advantages: Array
    value_targets: Array


def gae(
    rewards: Array,
    values: Array,
    terminateds: Array,
    truncateds: Array,
    loss_mask: Array,
    *,
    gamma: float,
    lambda_: float,
) -> Returns:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16).

    All arrays are ``[B, T]`` in the layout of this module; ``value_targets`` are advantages + values (lambda-returns).

    Raises:
        ValueError: shapes differ, or the last time step of a row is not masked out.
    """
    _check(loss_mask, rewards=rewards, values=values, terminateds=terminateds, truncateds=truncateds)
    valid = loss_mask.astype(np.float32)
    deltas = valid * (rewards + gamma * _next(values) * ~_bool(terminateds) - values)
    advantages = discounted_sums(deltas, valid * gamma * lambda_ * _continues(terminateds, truncateds))
    return Returns(advantages, advantages + valid * values)


def vtrace(
    behaviour_logp: Array,
    target_logp: Array,
    rewards: Array,
    values: Array,
    terminateds: Array,
    truncateds: Array,
    loss_mask: Array,
    *,
    gamma: float,
    clip_rho_threshold: float = 1.0,
    clip_pg_rho_threshold: float = 1.0,
    lambda_: float = 1.0,
) -> Returns:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, arXiv:1802.01561, section 4).

    ``value_targets`` are ``v_s`` of equation 1, its traces ``c_i = lambda * min(1, rho_i)`` as in remark 2;
    ``advantages`` are those of section 4.2, ``rho_s * (r_s + gamma * v_{s+1} - V(x_s))``, rho clipped at
    `clip_pg_rho_threshold`. All arrays are ``[B, T]`` in the layout of this module; `behaviour_logp` is the
    log-probability of the action under the policy that took it, `target_logp` under the one that learns.

    Raises:
        ValueError: shapes differ, or the last time step of a row is not masked out.
    """
    _check(
        loss_mask,
        behaviour_logp=behaviour_logp,
        target_logp=target_logp,
        rewards=rewards,
        values=values,
        terminateds=terminateds,
        truncateds=truncateds,
    )
    valid = loss_mask.astype(np.float32)
    rhos = np.exp(valid * (target_logp - behaviour_logp))
    discounts = gamma * ~_bool(terminateds)
    deltas = valid * np.minimum(rhos, clip_rho_threshold) * (rewards + discounts * _next(values) - values)
    traces = valid * gamma * lambda_ * np.minimum(rhos, 1.0) * _continues(terminateds, truncateds)
    targets = discounted_sums(deltas, traces) + values
    clipped = valid * np.minimum(rhos, clip_pg_rho_threshold)
    advantages = clipped * (rewards + discounts * _next(targets) - values)
    return Returns(advantages.astype(np.float32), valid * targets)


def discounted_sums(terms: Array, discounts: Array) -> Array:
    """``out[:, t] = terms[:, t] + discounts[:, t] * out[:, t + 1]``, zero beyond the end; float32 ``[B, T]``."""
    by_time = np.ascontiguousarray(terms.T, dtype=np.float32)
    factors = np.ascontiguousarray(discounts.T, dtype=np.float32)
    for t in range(len(by_time) - 2, -1, -1):
        by_time[t] += factors[t] * by_time[t + 1]
    return by_time.T


def standardise(
    advantages: Array, *, mean: float | None = None, deviation: float | None = None, epsilon: float = 1e-4
) -> Array:
    """Advantages less their mean over their standard deviation (at least `epsilon`), float32.

    `mean` and `deviation` are those of the whole batch, where `advantages` are only a part of it.
    """
    if advantages.size == 0:
        return advantages.astype(np.float32)
    centre = float(advantages.mean(dtype=np.float64)) if mean is None else mean
    scale = float(advantages.std(dtype=np.float64)) if deviation is None else deviation
    return ((advantages - np.float32(centre)) / np.float32(max(epsilon, scale))).astype(np.float32)


def _next(values: Array) -> Array:
    """``values[:, t + 1]`` at t; zero at the last time step, which is masked out anyway."""
    shifted = np.zeros_like(values)
    shifted[:, :-1] = values[:, 1:]
    return shifted


def _continues(terminateds: Array, truncateds: Array) -> Array:
    return ~(_bool(terminateds) | _bool(truncateds))


def _bool(flags: Array) -> Array:
    return flags.astype(np.bool_, copy=False)


def _check(loss_mask: Array, **columns: Array) -> None:
    if loss_mask.ndim != 2:
        raise ValueError(f"loss_mask: expected two axes [B, T], got shape {loss_mask.shape}")
    for name, column in columns.items():
        if column.shape != loss_mask.shape:
            raise ValueError(f"{name}: expected shape {loss_mask.shape} as loss_mask has, got {column.shape}")
    if loss_mask.shape[1] and loss_mask[:, -1].any():
        raise ValueError(
            "loss_mask[:, -1] must be False: the last time step of a row holds only the observation to bootstrap from"
        )
