"""The forecast beside a hybrid target's cycles is that of its own trees and states."""

from __future__ import annotations

from bench import hybrid_speed
from bench.hybrid_speed import MEANS, forecast, grown_tree, measure

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}


def test_a_grown_tree_holds_its_parents() -> None:
    """60 nodes on 7 levels, none without the node that it follows."""
    paths = grown_tree(60, 7)
    assert len({*paths}) == 60 and max(map(len, paths)) == 7
    assert all(path[:-1] in paths for path in paths if len(path) > 1)


def test_rows_and_traffic_follow_from_the_tree() -> None:
    """Weights once or at each depth; a state read and written for each path or for each node."""
    found = forecast("float32", **SMALL)
    weights, state = found["weights"], found["state"]
    assert state == 4 * 8 * 4 * 4
    chain, tree = found["drafts"]["chain of 4"], found["drafts"]["tree of 26"]
    assert chain["paths"] == {"rows": 4, "bytes": weights + 2 * state}
    assert chain["levels"] == {"rows": 4, "bytes": 4 * weights + 8 * state}
    leaves = 15  # of the published tree, whose longest paths have five nodes below the root
    assert tree["paths"] == {"rows": leaves * 6, "bytes": weights + 2 * leaves * state}
    assert tree["levels"] == {"rows": 26, "bytes": 6 * weights + 52 * state}


def test_means_agree_and_states_are_as_large_as_forecast() -> None:
    """Every means gives the untouched model's logits."""
    found = measure("float32", 1, **SMALL)
    assert found["states"]["held"] == found["states"]["forecast"]
    assert set(found["difference"]) == {*MEANS} and max(found["difference"].values()) < 1e-4
    assert set(found["read and keep, ms"]) == {*hybrid_speed.shapes()}
