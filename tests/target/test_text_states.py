"""States beside keys and values: what is held of a text, how many bytes that takes, and from where reading goes on."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from eagle import Sampling, Target, generate
from eagle.core.verify import Choose
from eagle.drafters.none import NoDrafter
from eagle.target.trees import text_states
from eagle.target.trees.mixers import Mixers
from tests.families import build, own_answer, random_tokens

PROMPT = random_tokens(20, seed=5)


def own_bytes(target: Target) -> int:
    """Bytes of the states that the untouched model's own cache keeps of one text."""
    cache = target.model(input_ids=torch.tensor([[3, 4, 5, 6, 7]]), use_cache=True).past_key_values
    held = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return sum(
        tensor.nbytes
        for layer in held
        for kind in (layer.conv_states, layer.recurrent_states)
        for tensor in kind.values()
    )


def test_bytes_of_a_cache_count_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the text and its prompt, at every so many tokens, for each text."""
    target = Target(build("qwen3_next"))
    column = build_column(target)
    states = own_bytes(target)
    assert target.cache_bytes(100) == 100 * column + 2 * states
    assert target.cache_bytes(100, texts=4) == 100 * column + 4 * 2 * states
    monkeypatch.setattr(text_states, "SNAPSHOT_TOKENS", 40)
    assert target.cache_bytes(100) == 100 * column + 4 * states


def build_column(target: Target) -> int:
    """Bytes of one token's keys and values, by the config."""
    config = target.config
    layers = config.layer_types.count("full_attention")
    return layers * 2 * config.num_key_value_heads * config.head_dim * 4


def test_the_limit_of_a_cache_counts_the_states() -> None:
    """States that take as much as some columns leave room for fewer texts."""
    target = Target(build("qwen3_next"))
    target.describe()
    columns = -(-2 * own_bytes(target) // build_column(target))
    state = target.open(max_tokens=2 * (30 + columns))
    state.admit(0, PROMPT, room=10)
    assert state.fits(30)
    assert not state.fits(31)
    with pytest.raises(ValueError, match=f"take up to {2 * (30 + columns) + 1} tokens"):
        state.check_room(2 * 30 + columns + 1)


def test_reading_goes_on_where_states_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that shares a part with an earlier text is read from the last snapshot within that part."""
    monkeypatch.setattr(text_states, "SNAPSHOT_TOKENS", 8)
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", 5)
    model = build("qwen3_next")
    target = Target(copy.deepcopy(model))
    first, second = PROMPT, PROMPT[:17] + random_tokens(6, seed=6)
    for prompt, held in ((first, 0), (second, 15)):
        state = target.open()
        state.clear()
        state.admit(0, prompt)
        assert state.length(0) == held
        target.close(state)
        answer = generate(target, NoDrafter(), prompt, max_new_tokens=8, stop=[]).tokens
        assert answer == own_answer(model, prompt, 8)


def test_a_longer_text_than_is_held_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails where states of a longer text are taken for those of a shorter one."""
    model = build("qwen3_next")
    target = Target(copy.deepcopy(model))
    target.open().begin(PROMPT, Choose(Sampling()))
    monkeypatch.setattr(text_states.TextStates, "reusable", lambda self, slot, length: length)
    monkeypatch.setattr(text_states.TextStates, "cut", late_cut)
    generate(target, NoDrafter(), PROMPT, max_new_tokens=8, stop=[])
    prompt = PROMPT[:17] + random_tokens(6, seed=6)
    assert generate(target, NoDrafter(), prompt, max_new_tokens=8, stop=[]).tokens != own_answer(
        model, prompt, 8
    )


def late_cut(self: text_states.TextStates, slot: int, length: int) -> None:
    """The states of a longer text stand for those of a shorter one."""
    held = self.slots[slot]
    held.by_length = {length: [*held.by_length.values()][-1]} if length and held.by_length else {}
    held.reading = None


def test_states_are_read_under_the_targets_lock() -> None:
    """A view of layers waits for another thread's forward before modules report to its reading."""
    target = Target(build("qwen3_next"))
    view = target.view()
    cache = view.new_cache()
    cache.set_write_offset([0])
    hidden, positions = view.embed(torch.tensor([PROMPT])), torch.arange(len(PROMPT))[None]
    expected = view.read(hidden, positions, None, view.new_cache())
    free: list[bool] = []

    def try_lock() -> None:
        free.append(target.lock.acquire(blocking=False))
        if free[-1]:
            target.lock.release()

    opened = cache.reading

    def reading(*args: Any) -> Any:
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return opened(*args)

    cache.reading = reading
    assert torch.equal(view.read(hidden, positions, None, cache), expected)
    assert free == [False]


def test_states_that_are_not_held_are_an_error_in_words() -> None:
    """Reading on behind a length without states names those that are held."""
    states = Target(build("qwen3_next")).reader.new_cache().states or text_states.TextStates()
    with pytest.raises(RuntimeError, match=r"slot 0 holds states behind \[\] tokens, not behind 3"):
        states.open([0], [3], [1], None, 1, mixers=Mixers(), commits=False)
