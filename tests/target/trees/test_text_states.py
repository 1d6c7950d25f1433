"""States beside keys and values: what is held of a sequence, how many bytes that takes, and where reading goes on."""

from __future__ import annotations

import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from eagle import Target
from eagle.drafters.none import NoDrafter
from eagle.target.cache import TreeCache
from eagle.target.trees import sequence_states
from eagle.target.trees.mixers import WRITERS, Mixers, find_mixers
from tests.every_type import build as build_type
from tests.families import build, own_answer, random_tokens
from tests.target.decoded import decode

PROMPT = random_tokens(20, seed=5)
# shares 17 tokens with the first
SECOND = PROMPT[:17] + random_tokens(6, seed=6)


@pytest.fixture
def target() -> Target:
    """Return a hybrid, on a model of its own."""
    return Target(build("qwen3_next"))


def count_state_bytes(target: Target) -> int:
    """Return the bytes of the states that the untouched model's own cache keeps of one sequence."""
    cache = target.model(input_ids=torch.tensor([[3, 4, 5, 6, 7]]), use_cache=True).past_key_values
    count = 0

    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            tensors = [*layer.conv_states.values(), *layer.recurrent_states.values()]
            count += sum(tensor.nbytes for tensor in tensors)

    return count


def count_column_bytes(target: Target) -> int:
    """Return the bytes of one token's keys and values in fp32, by the config."""
    config = target.config
    layers = config.layer_types.count("full_attention")
    return layers * 2 * config.num_key_value_heads * config.head_dim * 4


def test_bytes_of_a_cache_count_the_states(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the sequence and its prompt, and at every so many tokens, for each sequence."""
    columns = 100 * count_column_bytes(target)
    states = count_state_bytes(target)

    assert target.cache_bytes(100) == columns + 2 * states
    assert target.cache_bytes(100, sequences=4) == columns + 4 * 2 * states

    # 100 tokens then have two more snapshots
    monkeypatch.setattr(sequence_states, "SNAPSHOT_TOKENS", 40)

    assert target.cache_bytes(100) == columns + 4 * states


def test_bytes_of_a_cache_that_is_a_state_grow_with_it() -> None:
    """A model that is read as a whole keeps keys and values in its own cache, held twice."""
    target = Target(build_type("roformer"))
    config = target.config
    column = config.num_hidden_layers * 2 * config.hidden_size * 4
    assert target.cache_bytes(100) == 2 * 100 * column


def test_the_limit_of_a_cache_counts_the_states(target: Target) -> None:
    """States that take as much as some columns leave room for fewer sequences."""
    target.describe()
    # the states of one sequence, counted in columns and rounded up
    columns = -(-2 * count_state_bytes(target) // count_column_bytes(target))
    state = target.open(max_tokens=2 * (30 + columns))
    state.admit(0, PROMPT, room=10)

    assert state.fits(30)
    assert not state.fits(31)
    with pytest.raises(ValueError, match=f"take up to {2 * (30 + columns) + 1} tokens"):
        state.check_room(2 * 30 + columns + 1)


def test_reading_goes_on_where_states_are_held(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that shares a part with an earlier sequence is read from the last snapshot within that part."""
    monkeypatch.setattr(sequence_states, "SNAPSHOT_TOKENS", 8)
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", 5)
    model = copy.deepcopy(target.model)

    for prompt, held in ((PROMPT, 0), (SECOND, 15)):
        state = target.open()
        state.clear()
        state.admit(0, prompt)
        assert state.length(0) == held
        target.close(state)
        assert decode(target, NoDrafter(), prompt, 8) == own_answer(model, prompt, 8)


def test_states_of_a_longer_sequence_are_seen(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: states of a longer sequence are taken for those of a shorter one."""

    def cut_late(self: sequence_states.SequenceStates, slot: int, length: int) -> None:
        held = self.entries[slot]
        states = [*held.by_length.values()]
        # the newest state, under another length
        held.by_length = {length: states[-1]} if length and states else {}
        held.reading = None

    model = copy.deepcopy(target.model)
    monkeypatch.setattr(
        sequence_states.SequenceStates, "reusable", lambda self, slot, length: length
    )
    monkeypatch.setattr(sequence_states.SequenceStates, "cut", cut_late)
    decode(target, NoDrafter(), PROMPT, 8)

    assert decode(target, NoDrafter(), SECOND, 8) != own_answer(model, SECOND, 8)


def test_states_are_read_under_the_targets_lock(target: Target) -> None:
    """A view of layers waits for another thread's forward before modules report to its reading."""
    view = target.view()
    cache = view.new_cache()
    cache.set_write_offset([0])
    hidden = view.embed(torch.tensor([PROMPT]))
    positions = torch.arange(len(PROMPT))[None]
    expected = view.read(hidden, positions, None, view.new_cache())
    was_free: list[bool] = []

    def try_lock() -> None:
        was_free.append(target.lock.acquire(blocking=False))
        if was_free[-1]:
            target.lock.release()

    begin_reading = cache.reading

    def read_beside_a_thread(*args: Any) -> Any:
        # another thread, since the lock lets its own thread in again
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        return begin_reading(*args)

    cache.reading = read_beside_a_thread

    assert torch.equal(view.read(hidden, positions, None, cache), expected)
    assert was_free == [False]


def test_states_that_are_not_held_are_an_error_in_words() -> None:
    """Reading on after a length without states names those that are held."""
    states = sequence_states.SequenceStates()
    with pytest.raises(
        RuntimeError, match=r"cache row 0 holds states behind \[\] tokens, not behind 3"
    ):
        states.open([0], [3], [1], None, 1, mixers=Mixers(), commits=False)


def test_a_slot_that_was_never_written_can_be_swapped() -> None:
    """Buffers grow to it, as a sequence may leave before the last one's prompt is read."""
    cache = TreeCache(1)
    layer: Any = cache.layers[0]
    cache.reserve(1, 4)
    values = torch.arange(8.0).view(1, 1, 4, 2)
    # the buffers have one slot so far
    layer.update(values, values)
    cache.length = 4
    cache.reserve(3, 4)
    cache.swap(0, 2)

    assert cache.lengths == [0, 0, 4]
    assert torch.equal(layer.key_buffer.tensor[2:, :, :4], values)


def test_states_of_a_module_within_another_are_its_own() -> None:
    """The inner one hands them to the outer one, which runs from all of them."""

    class Inner(nn.Module):
        def forward(self, cache: Any) -> None:
            cache.update_recurrent_state(None, 3, state_idx=1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, cache: Any) -> None:
            cache.update_conv_state(None, 3)
            self.inner(cache)

    model = nn.Sequential(Outer())
    writers = dict.fromkeys(WRITERS, lambda *args, **kwargs: None)
    (mixer,) = find_mixers(model, SimpleNamespace(**writers), model)
    assert (mixer.name, mixer.layer, mixer.state_ids) == ("0", 3, {0, 1})
