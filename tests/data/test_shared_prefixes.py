"""Examples of one conversation that begin alike: their states are computed once and kept once."""

# T tokens, L taps, H hidden

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.read_once import open_cache
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle import Target
from eagle.core.examples import Example
from eagle.data import features as features_module
from eagle.data.features import (
    can_reuse_prefixes,
    compute_rows,
    extract,
    forecast,
    read_reusing_prefixes,
)
from eagle.data.identity import tap_identity
from eagle.data.shards import RowPlaces, StoredPlan, plan_shards
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import SequenceSizes, TapRoles, parts_of, slots_of
from eagle.disk import sha256
from eagle.recipe import Recipe
from tests.chats import changed
from tests.data.test_extract import hidden_of
from tests.families import FAMILIES, VOCAB_SIZE, build

TAPS = (0, 1, 3, -1)
ROLES = TapRoles((1, 2), (-1,))
ORDER = [5, 0, 9, 2, 1, 3, 4, 6, 8, 7]
THINKS = (  # as Qwen3's: thoughts are printed of the last answer alone
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def common_length(one: Tensor, other: Tensor) -> int:
    """Return how many tokens two sequences share from their beginning, one by one."""
    pairs = zip(one.tolist(), other.tolist(), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def make_conversation(generator: torch.Generator, num_turns: int) -> list[Example]:
    """Return a conversation's examples from a template that drops earlier thoughts.

    Each holds history, question, thought and answer.
    """

    def words(low: int, high: int) -> Tensor:
        count = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(
            5,
            VOCAB_SIZE,
            (count,),
            generator=generator,
        )

    # a later example repeats the history without the thought of its last answer
    examples: list[Example] = []
    history = words(2, 5)
    for _ in range(num_turns):
        prompt = torch.cat([history, words(1, 6)])
        thought = words(1, 5)
        answer = words(2, 6)
        tokens = torch.cat([prompt, thought, answer])
        # only what the example before it computed can be shared
        shared = common_length(examples[-1].tokens, tokens) if examples else 0
        mask = torch.arange(len(tokens)) >= len(prompt)
        examples.append(Example(tokens, mask, shared=shared))
        history = torch.cat([prompt, answer])
    return examples


def make_examples(seed: int, turns: Sequence[int] = (3, 1, 4, 2)) -> list[Example]:
    """Return the examples of conversations of so many turns."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for num_turns in turns:
        examples += make_conversation(generator, num_turns)
    return examples


def share_nothing(examples: Sequence[Example]) -> list[Example]:
    """Return the examples as if nothing were known of what they share."""
    return [replace(example, shared=0) for example in examples]


def make_store(
    folder: Path,
    target: Target,
    examples: Sequence[Example],
    dtype: str = "float32",
    roles: TapRoles = ROLES,
) -> FeatureStore:
    """Return a complete store of these examples, in shards of some conversations."""
    sizes = SequenceSizes.of((example.loss_mask, example.shared) for example in examples)
    plan = plan_shards(
        sizes.tokens.tolist(),
        64,
        120,
        sizes.shared.tolist(),
    )
    fields = {**tap_identity(roles), "dtype": dtype}
    store = FeatureStore.create(
        folder,
        examples,
        fields,
        plan,
        sizes,
        width=32,
    )
    list(extract(target, store, sorted(store.absent)))
    return FeatureStore(folder)


@pytest.mark.quick("phi3", "gpt_neox", "mpt", "falcon-alibi")
@pytest.mark.parametrize(
    "name",
    [
        *FAMILIES,
        "jamba",
        "bloom",
        "mpt",
        "falcon-alibi",
    ],
)
def test_states_are_those_of_each_sequence_alone(name: str) -> None:
    """They equal them up to rounding; where reading on would save nothing, sequences are read whole."""
    target = Target(build(name))
    examples = make_examples(1)
    shared = [example.shared for example in examples]
    sequences = [example.tokens for example in examples]
    expected = [
        hidden_of(
            target,
            tokens,
            TAPS,
        )
        for tokens in sequences
    ]
    # the kept slots of packed rows are checked for every family
    if can_reuse_prefixes(target):
        lists = [tokens.tolist() for tokens in sequences]
        for states, alone in zip(
            read_reusing_prefixes(target, lists, shared, TAPS),
            expected,
            strict=True,
        ):
            assert (states - alone).abs().max() <= 2e-5 * alone.abs().max()
    parts = parts_of({"taps": TAPS, "inputs": (0, 1)})
    masks = [example.loss_mask for example in examples]
    packed = compute_rows(
        target,
        sequences,
        masks,
        parts,
        "float32",
        shared,
    )
    for part, (rows,) in zip(parts, packed, strict=True):
        columns = [TAPS.index(tap) for tap in part.taps]
        kept = []
        for example, alone in zip(examples, expected, strict=True):
            slots = slots_of(example.loss_mask, part.slots)
            # the shared slots are those of the example before
            if part.slots == "read":
                slots = slots[example.shared :]
            kept.append(alone[slots][:, columns])
        assert (rows - torch.cat(kept)).abs().max() <= 2e-5 * torch.cat(kept).abs().max()


def test_a_prefix_is_read_once() -> None:
    """The forwards over a conversation are of its new tokens only."""
    target = Target(build("llama"))
    # which tries the target first
    assert can_reuse_prefixes(target)
    num_read: list[int] = []

    def count_tokens(
        _: object,
        __: object,
        kwargs: dict[str, Tensor],
    ) -> None:
        num_read.append(kwargs["input_ids"].numel())

    target.reader.base.register_forward_pre_hook(count_tokens, with_kwargs=True)
    for num_turns in (3, 1, 4, 2):
        examples = make_examples(num_turns, (num_turns,))
        num_read.clear()
        lists = [example.tokens.tolist() for example in examples]
        read_reusing_prefixes(
            target,
            lists,
            [example.shared for example in examples],
            TAPS,
        )
        num_new = sum(len(example.tokens) - example.shared for example in examples)
        assert sum(num_read) == num_new


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        ("float32", 1e-5),
        ("bfloat16", 0.02),
        ("float8", 0.15),
        ("float6", 0.15),
    ],
)
def test_a_shared_store_reads_like_one_that_shares_nothing(
    dtype: str,
    error: float,
    target: Target,
    tmp_path: Path,
) -> None:
    """It has fewer bytes, in the same order."""
    examples = make_examples(3)
    plain = make_store(
        tmp_path / "plain",
        target,
        share_nothing(examples),
        dtype,
    )
    small = make_store(tmp_path / "small", target, examples, dtype)
    num_new = sum(len(slots_of(each.loss_mask, "read")) - each.shared for each in examples)
    # several shards, else no conversation could be torn
    assert len(small.plan) > 1
    assert sum(small.places["read"].totals) == num_new < 0.75 * sum(plain.places["read"].totals)
    assert small.total_bytes < plain.total_bytes
    for got, expected in zip(
        small.read(ORDER),
        plain.read(ORDER),
        strict=True,
    ):
        assert torch.equal(got.tokens, expected.tokens)
        assert torch.equal(got.loss_mask, expected.loss_mask)
        torch.testing.assert_close(
            got.features, expected.features, rtol=error, atol=error, equal_nan=True
        )


def name_slots(
    tokens: Tensor,
    taps: Sequence[int],
    _: object = None,
) -> Tensor:
    """Return numbers that name the tokens up to each slot, in place of hidden states, [N, T, L, 32]."""
    sums = (tokens.double() * torch.arange(1, tokens.shape[1] + 1) ** 2).cumsum(1)
    named = sums[..., None, None] + torch.tensor([*taps])[:, None] + torch.arange(32) / 64
    return named.float()


def test_the_layout_changes_no_bit(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States that do not depend on the batch come back bit for bit; one shared token too many is seen."""
    # sequences are read whole, so only the layout differs
    monkeypatch.setattr(features_module, "can_reuse_prefixes", lambda _: False)
    monkeypatch.setattr(target, "features", name_slots)
    examples = make_examples(4)
    faulty = [replace(each, shared=each.shared + bool(each.shared)) for each in examples]
    read = []
    for name, made in (("a", share_nothing(examples)), ("b", examples), ("c", faulty)):
        store = make_store(tmp_path / name, target, made)
        features = [example.features.nan_to_num(-1) for example in store.read(range(10))]
        read.append(torch.cat(features))
    plain, small, wrong = read
    assert torch.equal(small, plain)
    assert not torch.equal(wrong, plain)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6)),
        min_size=1,
        max_size=12,
    )
)
def test_places_of_rows(sizes: list[tuple[int, int]]) -> None:
    """They are those of a search for the sequence that first had a slot."""
    counts = [count for count, _ in sizes]
    shared = [0]
    # no sequence shares more than the one before it has
    for number in range(1, len(sizes)):
        shared.append(
            min(
                sizes[number][1],
                counts[number],
                counts[number - 1],
            )
        )
    plan = StoredPlan(**StoredPlan.tensors_of([[list(range(len(sizes)))]]))
    places = RowPlaces(
        plan,
        torch.tensor(counts),
        torch.tensor(shared),
    )
    rows = []
    for number, count in enumerate(counts):
        rows += [(number, slot) for slot in range(shared[number], count)]
    assert places.totals == [len(rows)]

    # the search goes back as long as the slot is a shared one
    def find_owner(number: int, slot: int) -> tuple[int, int]:
        while slot < shared[number]:
            number -= 1
        return number, slot

    for number, count in enumerate(counts):
        read = []
        for start, stop in places[number]:
            read += rows[start:stop]
        assert read == [find_owner(number, slot) for slot in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        (1, 1),
        (40, 100),
        (1000, 1),
        (10**6, 10**6),
    ],
)
def test_conversations_stay_in_one_batch(limits: tuple[int, int], target: Target) -> None:
    """Every example is planned once; a forecast says what is shared."""
    examples = make_examples(5, (3, 1, 4, 2, 5, 1, 2))
    sizes = SequenceSizes.of((example.loss_mask, example.shared) for example in examples)
    plan = plan_shards(
        sizes.tokens.tolist(),
        *limits,
        sizes.shared.tolist(),
    )
    planned = []
    for shard in plan:
        for batch in shard:
            planned += batch
            assert all(number - 1 in batch for number in batch if examples[number].shared)
    assert sorted(planned) == list(range(len(examples)))
    line = forecast(
        target,
        examples,
        sizes,
        plan,
        parts_of(tap_identity(ROLES)),
        "bfloat16",
    )
    assert f"({int(sizes.shared.sum())} of them shared with another example" in line


def test_a_template_that_rewrites_history_is_seen(tiny_target_dir: Path, tmp_path: Path) -> None:
    """What is shared is kept in the cache of tokens; other conversations and templates share nothing."""
    messages = []
    for number in range(3):
        messages.append({"role": "user", "content": f"Who painted number {number}?"})
        answer = {
            "role": "assistant",
            "content": "Vermeer.",
            "reasoning_content": "The light.",
        }
        messages.append(answer)
    lines = [json.dumps({"messages": messages[: 2 * count]}) for count in (1, 3, 2)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "thinks.jinja").write_text(THINKS)
    # this template prints thoughts everywhere, so history never changes
    (tmp_path / "plain.jinja").write_text(THINKS.replace(" and loop.last", ""))
    overrides = [
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tmp_path / 'data.jsonl'}",
        f"data.template={tmp_path / 'thinks.jinja'}",
        "data.limit=null",
    ]
    recipe = Recipe.load("recipes/tiny/eagle1.yaml", overrides)
    for examples in (open_cache(recipe), tokenize_data(recipe, load_tokenizer(recipe))[0]):
        expected = []
        for number in range(6):
            # the first example of each conversation shares nothing
            if number in (0, 1, 4):
                expected.append(0)
            else:
                length = common_length(examples[number - 1].tokens, examples[number].tokens)
                expected.append(length)
        assert [example.shared for example in examples] == expected
        assert expected[3] > expected[2] > 5
    plain = changed(recipe, template=str(tmp_path / "plain.jinja"))
    assert [example.shared for example in open_cache(plain)] == [0, 0, 0]


def test_stores_of_the_second_version_are_read(target: Target, tmp_path: Path) -> None:
    """They have no entry for what is shared: their features stay, bit for bit."""
    store = make_store(
        tmp_path,
        target,
        share_nothing(make_examples(6)),
    )
    assert store.index["version"] == 3
    expected = store.read(range(10))
    path = tmp_path / "examples.safetensors"
    tensors = load_file(path)
    # the second version had no entry for what is shared
    del tensors["shared"]
    save_file(tensors, path)
    numbers = {**store.index["examples"], "sha256": sha256(path)}
    index = {**store.index, "version": 2, "examples": numbers}
    (tmp_path / "index.json").write_text(json.dumps(index))
    older = FeatureStore(tmp_path, partial=True)
    # shards name the index that they were written for, which is another now
    older.serve_all_but({})
    for got, example in zip(
        older.read(range(10)),
        expected,
        strict=True,
    ):
        assert torch.equal(got.tokens, example.tokens)
        assert torch.equal(got.features.nan_to_num(-1), example.features.nan_to_num(-1))
