"""Making Gymnasium environments from a name or a callable, with errors that say what to do.

Gymnasium is an extra (``pip install lgroup[rl]``): nothing here imports it before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lgroup.errors import ConfigError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

EnvFactory = Callable[..., "gymnasium.Env[Any, Any]"]


def make_vector_env(env: str | EnvFactory | None, env_config: Mapping[str, Any] | None, num_envs: int) -> VectorEnv:
    """`num_envs` environments in step, each resetting itself in the step after its episode's end.

    Args:
        env: A registered name (``"CartPole-v1"``, ``"my_package:MyEnv-v0"``), or a callable that takes `env_config` and
            returns an environment. Of a name whose environment has a vectorised implementation, that one is used.
        env_config: Keyword arguments of a named environment; the argument of a callable.
        num_envs: How many.

    Raises:
        ConfigError: Gymnasium or something the environment needs is not installed, no environment has that name, or it
            cannot be stepped in this way.
    """
    if env is None:
        raise ConfigError("env is not set; give a registered name or a callable with environment(env=...)")
    gym = _gymnasium()
    settings = dict(env_config or {})
    if not isinstance(env, str):
        return _flat(gym.vector.SyncVectorEnv([lambda: env(dict(settings)) for _ in range(num_envs)]))
    try:
        vector_env = gym.make_vec(env, num_envs=num_envs, **settings)
    except gym.error.UnregisteredEnv as error:
        raise ConfigError(f"there is no environment {env!r}: {_sentence(error)}") from error
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigError(f"environment {env!r} needs something that is not installed: {_sentence(error)}") from error
    except gym.error.Error as error:
        raise ConfigError(f"environment {env!r} cannot be made: {_sentence(error)}") from error
    except TypeError as error:
        raise ConfigError(f"environment {env!r} does not take env_config={settings}: {_sentence(error)}") from error
    return _flat(_checked(vector_env, env))


def spaces_of(env: str | EnvFactory | None, env_config: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Observation and action space of one environment, as `make_vector_env`'s sub-environments have them.

    Raises:
        ConfigError: as `make_vector_env`.
    """
    vector_env = make_vector_env(env, env_config, num_envs=1)
    try:
        return vector_env.single_observation_space, vector_env.single_action_space
    finally:
        vector_env.close()


def reward_threshold_of(env: str | EnvFactory) -> float | None:
    """The mean return at which Gymnasium's registry calls the environment solved, if it says so."""
    if not isinstance(env, str):
        return None
    gym = _gymnasium()
    try:
        threshold = gym.spec(env).reward_threshold
    except gym.error.Error:
        return None
    return None if threshold is None else float(threshold)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError("environments need gymnasium, which is not installed: pip install 'lgroup[rl]'") from error
    return gymnasium


def _checked(vector_env: VectorEnv, name: str) -> VectorEnv:
    mode = vector_env.metadata.get("autoreset_mode")
    if mode is not None and getattr(mode, "name", str(mode)) != "NEXT_STEP":
        vector_env.close()
        raise ConfigError(f"environment {name!r} has autoreset_mode={mode}; only AutoresetMode.NEXT_STEP is possible")
    return vector_env


def _flat(vector_env: VectorEnv) -> VectorEnv:
    """Dict and Tuple observations as one vector, so that an observation is always one array."""
    gym = _gymnasium()
    if isinstance(vector_env.single_observation_space, gym.spaces.Dict | gym.spaces.Tuple):
        flattened: VectorEnv = gym.wrappers.vector.FlattenObservation(vector_env)
        return flattened
    return vector_env


def _sentence(error: BaseException) -> str:
    """The first line of the message, without markup."""
    return str(error).strip().split("\n")[0].replace("`", "'")
