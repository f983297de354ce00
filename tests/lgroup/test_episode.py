from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lgroup.data import SingleAgentEpisode, concat_columns, episodes_to_batch, shard_episodes

few = settings(max_examples=40, deadline=None)


def played(steps: int, *, first_id: int = 0, **kwargs: object) -> SingleAgentEpisode:
    """Observation ``i`` is ``[i, i]``, action ``i``, reward ``i / 10``, extra output ``-i``; row ids count on."""
    end = {key: kwargs.pop(key) for key in ("terminated", "truncated") if key in kwargs}
    episode = SingleAgentEpisode(**kwargs)
    episode.add_env_reset(np.array([0, 0], np.float32), {"i": 0})
    for i in range(steps):
        episode.add_env_step(
            np.array([i + 1, i + 1], np.float32),
            i,
            i / 10,
            {"i": i + 1},
            extra_model_outputs={"action_logp": -float(i), "id": first_id + i},
            **(end if i == steps - 1 else {}),
        )
    return episode


def first(observations: object) -> list[float]:
    return [float(observation[0]) for observation in observations]


def same(left: object, right: object) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, np.ndarray)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def test_an_episode_counts_its_steps():
    episode = played(3, id_="e", terminated=True)
    assert (len(episode), episode.t, episode.t_started, episode.env_steps(), episode.agent_steps()) == (3, 3, 0, 3, 3)
    assert first(episode.get_observations()) == [0, 1, 2, 3]
    assert episode.get_actions() == [0, 1, 2]
    assert episode.get_infos(-1) == {"i": 3}
    assert episode.get_return() == pytest.approx(0.3)
    assert episode.is_done
    assert episode.is_terminated
    assert not episode.is_truncated
    assert repr(episode) == "SingleAgentEpisode(e, t=0 to 3, terminated, return=0.3)"


def test_an_episode_is_reset_once_then_stepped_until_it_is_done():
    episode = SingleAgentEpisode()
    assert not episode.is_reset
    assert bool(episode)
    with pytest.raises(ValueError, match="takes no step: it is not reset"):
        episode.add_env_step(0, 0, 0.0)
    episode.add_env_reset(0)
    with pytest.raises(ValueError, match="was reset already"):
        episode.add_env_reset(0)
    episode.add_env_step(1, 0, 0.0, truncated=True)
    with pytest.raises(ValueError, match="takes no step: it is done"):
        episode.add_env_step(2, 0, 0.0)


def test_ids_are_unique_unless_given():
    assert SingleAgentEpisode().id_ != SingleAgentEpisode().id_
    assert SingleAgentEpisode("mine").id_ == "mine"


@pytest.mark.parametrize("as_numpy", [False, True])
def test_getters_take_ints_slices_and_lists(as_numpy):
    episode = played(5)
    if as_numpy:
        assert episode.to_numpy() is episode
        assert episode.is_numpy
    assert episode.get_observations(0)[0] == 0
    assert episode.get_observations(-1)[0] == 5
    assert first(episode.get_observations(slice(1, 3))) == [1, 2]
    assert first(episode.get_observations(slice(None, None, -2))) == [5, 3, 1]
    assert first(episode.get_observations([4, -1, 0])) == [4, 5, 0]
    assert list(episode.get_actions(slice(-2, None))) == [3, 4]
    assert list(episode.get_actions(slice(3, 99))) == [3, 4]
    assert list(episode.get_actions(slice(4, 2))) == []
    assert list(episode.get_extra_model_outputs("action_logp", [0, 2])) == [0, -2]
    assert sorted(episode.get_extra_model_outputs()) == ["action_logp", "id"]
    assert list(episode.get_extra_model_outputs(indices=slice(0, 2))["id"]) == [0, 1]
    with pytest.raises(IndexError, match="there is no item 5: they go from 0 to 4"):
        episode.get_actions(5)
    with pytest.raises(IndexError, match="there is no item -1: they go from 0 to 4"):
        episode.get_actions([-6])
    with pytest.raises(KeyError):
        episode.get_extra_model_outputs("other")


@pytest.mark.parametrize("as_numpy", [False, True])
def test_negative_indices_reach_into_the_lookback(as_numpy):
    episode = played(5).cut(len_lookback_buffer=3)
    episode.add_env_step(np.array([6, 6], np.float32), 5, 0.5, extra_model_outputs={"action_logp": -5.0, "id": 5})
    if as_numpy:
        episode.to_numpy()
    assert (len(episode), episode.t_started, episode.t, episode.len_lookback_buffer) == (1, 5, 6, 3)
    assert first(episode.get_observations()) == [5, 6]
    assert list(episode.get_actions()) == [5]
    assert list(episode.get_actions(slice(-3, None))) == [3, 4, 5]
    assert episode.get_actions(-2) == 4
    assert episode.get_actions(-1, neg_index_as_lookback=True) == 4
    assert list(episode.get_actions(slice(-2, 1), neg_index_as_lookback=True)) == [3, 4, 5]
    assert list(episode.get_actions(slice(-2, 0), neg_index_as_lookback=True)) == [3, 4]
    assert list(episode.get_rewards([-1, 0], neg_index_as_lookback=True)) == pytest.approx([0.4, 0.5])
    assert list(episode.get_actions(slice(-5, 1), neg_index_as_lookback=True, fill=-9)) == [-9, -9, 2, 3, 4, 5]
    assert list(episode.get_actions([-4, 0, 1], neg_index_as_lookback=True, fill=-9)) == [-9, 5, -9]
    assert first(episode.get_observations(slice(0, 4), fill=7)) == [5, 6, 7, 7]
    assert episode.get_observations(9, fill=7).tolist() == [7, 7]


def test_stacking_keeps_dtypes_but_makes_python_floats_float32():
    episode = played(3).to_numpy()
    assert episode.get_observations().dtype == np.float32
    assert episode.get_actions().dtype == np.int64
    assert episode.get_rewards().dtype == np.float32
    assert episode.get_extra_model_outputs("action_logp").dtype == np.float32
    precise = SingleAgentEpisode(observations=np.zeros((2, 1)), actions=[0], rewards=[0.0], len_lookback_buffer=0)
    assert precise.to_numpy().get_observations([0, 1]).dtype == np.float64


def test_nested_observations_are_stacked_leaf_by_leaf():
    episode = SingleAgentEpisode()
    episode.add_env_reset({"image": np.zeros((2, 2), np.uint8), "pos": {"x": 0.0}})
    for i in range(3):
        episode.add_env_step({"image": np.full((2, 2), i + 1, np.uint8), "pos": {"x": i + 1.0}}, {"turn": i}, 1.0)
    batch = episodes_to_batch([episode], next_obs=True)["default_policy"]
    assert batch["obs"]["image"].shape == (3, 2, 2)
    assert batch["obs"]["pos"]["x"].tolist() == [0, 1, 2]
    assert batch["new_obs"]["pos"]["x"].tolist() == [1, 2, 3]
    assert batch["actions"]["turn"].tolist() == [0, 1, 2]
    episode.to_numpy()
    assert episode.get_observations(-1)["pos"]["x"] == 3
    assert episode.get_observations([0, 9], fill=5)["image"].max() == 5
    assert same(episodes_to_batch([episode], next_obs=True)["default_policy"], batch)


@few
@given(steps=st.integers(0, 9), cuts=st.lists(st.integers(0, 3), max_size=3), lookback=st.integers(0, 4))
def test_cut_chunks_joined_again_are_the_whole_episode(steps, cuts, lookback):
    whole = played(steps)
    chunk = SingleAgentEpisode(whole.id_)
    chunk.add_env_reset(whole.get_observations(0), whole.get_infos(0))
    chunks = [chunk]
    for i in range(steps):
        if len(chunk) in cuts:
            chunk = chunk.cut(len_lookback_buffer=lookback)
            assert chunk.len_lookback_buffer == min(lookback, i)
            chunks.append(chunk)
        chunk.add_env_step(
            whole.get_observations(i + 1),
            whole.get_actions(i),
            whole.get_rewards(i),
            whole.get_infos(i + 1),
            extra_model_outputs={key: whole.get_extra_model_outputs(key, i) for key in ("action_logp", "id")},
        )
    assert sum(map(len, chunks)) == steps
    assert [c.t_started for c in chunks[1:]] == [c.t for c in chunks[:-1]]
    parts = [episodes_to_batch([c]).get("default_policy") for c in chunks]
    if steps:
        expected = episodes_to_batch([whole])["default_policy"]
        assert same(concat_columns([part for part in parts if part]), expected)
    for number, c in enumerate(chunks):
        if number % 2:
            c.to_numpy()
    for c in chunks[1:]:
        chunks[0].concat_episode(c)
    assert same(chunks[0].to_tree(with_infos=True), whole.to_tree(with_infos=True))


def test_a_cut_of_stacked_data_grows_in_lists_and_keeps_no_big_array_alive():
    episode = played(5).to_numpy()
    following = episode.cut(len_lookback_buffer=1)
    assert not following.is_numpy
    assert following.get_observations(0).base is None
    following.add_env_step(np.array([6, 6], np.float32), 5, 0.5, extra_model_outputs={"action_logp": 0.0, "id": 5})
    assert len(following) == 1


def test_stacked_episodes_can_grow():
    episode = played(2).to_numpy()
    episode.add_env_step(np.array([3, 3], np.float32), 2, 0.2, extra_model_outputs={"action_logp": -2.0, "id": 2})
    assert same(episode.to_tree(), {**played(3).to_tree(), "id_": episode.id_})


def test_only_an_open_episode_is_cut():
    with pytest.raises(ValueError, match="cannot be cut: it is done"):
        played(2, truncated=True).cut()
    with pytest.raises(ValueError, match="cannot be cut: it is not reset"):
        SingleAgentEpisode().cut()


def test_only_the_following_chunk_is_joined():
    episode = played(2, id_="e")
    with pytest.raises(ValueError, match="episode other from t=0 does not continue episode e"):
        episode.concat_episode(played(2, id_="other"))
    with pytest.raises(ValueError, match="does not continue episode e, which is open at t=2"):
        episode.concat_episode(played(2, id_="e"))
    following = episode.cut()
    following.add_env_step(np.array([3, 3], np.float32), 2, 0.2)
    with pytest.raises(ValueError, match=r"outputs \['action_logp', 'id'\]; the chunk from t=2 has \[\]"):
        episode.concat_episode(following)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_slices_are_episodes(as_numpy):
    episode = played(6, truncated=True)
    if as_numpy:
        episode.to_numpy()
    middle = episode[2:4]
    assert (len(middle), middle.t_started, middle.t, middle.is_done) == (2, 2, 4, False)
    assert first(middle.get_observations()) == [2, 3, 4]
    assert list(middle.get_actions()) == [2, 3]
    end = episode.slice(slice(-2, None), len_lookback_buffer=3)
    assert (len(end), end.is_truncated, end.len_lookback_buffer, end.t) == (2, True, 3, 6)
    assert list(end.get_actions(slice(-5, None))) == [1, 2, 3, 4, 5]
    assert len(episode[4:2]) == 0
    assert episode[1:].slice(slice(1, None), len_lookback_buffer=9).len_lookback_buffer == 1
    with pytest.raises(ValueError, match="step 1, not 2"):
        episode[::2]
    with pytest.raises(TypeError, match="indexed by a slice, not by 3"):
        episode[3]


def test_given_data_are_history_unless_said_otherwise():
    data = {"observations": [0, 1, 2], "actions": [0, 1], "rewards": [0.5, 0.5]}
    history = SingleAgentEpisode(**data)
    assert (len(history), history.len_lookback_buffer, history.get_observations()) == (0, 2, [2])
    episode = SingleAgentEpisode(**data, len_lookback_buffer=0, t_started=4, terminated=True)
    assert (len(episode), episode.t, episode.get_return()) == (2, 6, 1.0)
    assert SingleAgentEpisode(observations=[7]).get_observations() == [7]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"observations": [0], "actions": [0], "rewards": [0.0]}, "has 1 observations; with 1 rewards it needs 2"),
        ({"observations": [0, 1], "actions": [], "rewards": [0.0]}, "has 0 actions; with 1 rewards it needs 1"),
        ({"rewards": [0.0]}, "has 0 observations"),
        ({"observations": [0], "infos": []}, "has 0 infos"),
        (
            {"observations": [0, 1], "actions": [0], "rewards": [0.0], "extra_model_outputs": {"v": []}},
            "has 0 of extra model output 'v', 1 rewards",
        ),
    ],
)
def test_data_that_do_not_fit_together_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        SingleAgentEpisode("e", **data, len_lookback_buffer=0)


def test_every_step_has_the_same_extra_outputs():
    episode = played(1, id_="e")
    with pytest.raises(ValueError, match=r"outputs \['action_logp', 'id'\]; this step has \[\]"):
        episode.add_env_step(np.zeros(2), 0, 0.0)


@pytest.mark.parametrize("lookback", [0, 2])
def test_a_tree_makes_the_same_episode(lookback):
    episode = played(4, id_="e", agent_id="a", module_id="m").cut(len_lookback_buffer=lookback)
    episode.add_env_step(np.array([5, 5]), 4, 0.4, extra_model_outputs={"action_logp": -4.0, "id": 4}, truncated=True)
    episode.custom_data["x"] = object()
    tree = episode.to_tree()
    assert tree["infos"] is tree["custom_data"] is None
    again = SingleAgentEpisode.from_tree(tree)
    assert same(again.to_tree(), tree)
    assert (again.t, again.is_truncated, again.module_id, again.agent_id) == (5, True, "m", "a")
    assert same(episodes_to_batch([again]), episodes_to_batch([episode]))
    assert len(again.get_infos()) == 2


def test_a_state_keeps_lists_infos_and_custom_data():
    episode = played(3, id_="e")
    episode.custom_data["x"] = 1
    state = pickle.loads(pickle.dumps(episode.get_state()))
    again = SingleAgentEpisode.from_state(state)
    assert not again.is_numpy
    assert again.get_infos(-1) == {"i": 3}
    assert again.custom_data == {"x": 1}
    again.add_env_step(np.zeros(2), 0, 0.0, extra_model_outputs={"action_logp": 0.0, "id": 3})
    assert (len(episode), len(again)) == (3, 4)
    assert pickle.loads(pickle.dumps(episode)).t == 3


def test_a_batch_of_episodes_has_a_row_per_step():
    episodes = [
        played(2, first_id=0, terminated=True),
        played(0, first_id=2),
        played(3, first_id=2, module_id="other", truncated=True),
        played(1, first_id=5),
    ]
    batch = episodes_to_batch(episodes)
    assert list(batch) == ["default_policy", "other"]
    rows = batch["default_policy"]
    assert rows["id"].tolist() == [0, 1, 5]
    assert rows["obs"][:, 0].tolist() == [0, 1, 0]
    assert rows["terminateds"].tolist() == [False, True, False]
    assert not rows["truncateds"].any()
    assert rows["eps_id"].tolist() == [0, 0, 3]
    assert rows["t"].tolist() == [0, 1, 0]
    assert rows["rewards"].dtype == np.float32
    assert rows["eps_id"].dtype == rows["t"].dtype == np.int64
    assert batch["other"]["truncateds"].tolist() == [False, False, True]
    assert "new_obs" not in rows
    assert episodes_to_batch([]) == {}


def test_chunks_of_one_episode_share_its_number():
    episode = played(2)
    following = episode.cut(len_lookback_buffer=2)
    following.add_env_step(np.array([3, 3], np.float32), 2, 0.2, extra_model_outputs={"action_logp": -2.0, "id": 2})
    rows = episodes_to_batch([episode, following])["default_policy"]
    assert rows["eps_id"].tolist() == [0, 0, 0]
    assert rows["t"].tolist() == rows["id"].tolist() == rows["actions"].tolist() == [0, 1, 2]


def test_episodes_that_differ_make_no_batch():
    plain = SingleAgentEpisode()
    plain.add_env_reset(np.zeros(2))
    plain.add_env_step(np.zeros(2), 0, 0.0)
    with pytest.raises(ValueError, match="only some have 'action_logp', 'id'"):
        episodes_to_batch([played(1), plain])
    clash = SingleAgentEpisode()
    clash.add_env_reset(0)
    clash.add_env_step(0, 0, 0.0, extra_model_outputs={"rewards": 1.0})
    with pytest.raises(ValueError, match="extra model output 'rewards' has the name of a column"):
        episodes_to_batch([clash])


@few
@given(lengths=st.lists(st.integers(0, 20), max_size=12), num_shards=st.integers(1, 4))
def test_shards_hold_each_episode_once_and_are_about_even(lengths, num_shards):
    episodes = [SingleAgentEpisode(str(i)) for i in range(len(lengths))]
    for episode, steps in zip(episodes, lengths, strict=True):
        episode.add_env_reset(0)
        for _ in range(steps):
            episode.add_env_step(0, 0, 0.0)
    shards = shard_episodes(episodes, num_shards)
    assert len(shards) == num_shards
    assert sorted(int(e.id_) for shard in shards for e in shard) == list(range(len(lengths)))
    assert all([int(e.id_) for e in shard] == sorted(int(e.id_) for e in shard) for shard in shards)
    steps = [sum(map(len, shard)) for shard in shards]
    assert max(steps) - min(steps) <= max(lengths, default=0)
    assert shards == shard_episodes(episodes, num_shards)


def test_no_shards_are_refused():
    with pytest.raises(ValueError, match="num_shards is 0; it must be 1 or more"):
        shard_episodes([], 0)
