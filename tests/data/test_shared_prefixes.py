"""Examples of one conversation that begin alike: their states are computed once and kept once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import torch
from families import FAMILIES, VOCAB_SIZE, build
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data_prep.read_once import open_cache
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle import Target
from eagle.core.examples import Example, collate
from eagle.data import features as features_module
from eagle.data.features import can_read_on, compute_rows, extract, forecast, read_on, roles_of
from eagle.data.identity import tap_identity
from eagle.data.shards import RowPlaces, StoredPlan, plan_shards
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import TapRoles, TextSizes, parts_of, slots_of
from eagle.disk import sha256
from eagle.recipe import Recipe
from tests.data.test_stored_rows import losses_of, make_head

TAPS = (0, 1, 3, -1)
ROLES = TapRoles((1, 2), (-1,))
THINKS = (  # as Qwen3's: thoughts are printed of the last answer alone
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def conversations(seed: int, turns: Sequence[int] = (3, 1, 4, 2)) -> list[Example]:
    """Examples as a template that drops earlier thoughts makes them: history, question, thought and answer."""
    drawn = torch.Generator().manual_seed(seed)

    def words(least: int, most: int) -> torch.Tensor:
        count = int(torch.randint(least, most, (), generator=drawn))
        return torch.randint(5, VOCAB_SIZE, (count,), generator=drawn)

    examples: list[Example] = []
    for count in turns:
        history, before = words(2, 5), 0
        for turn in range(count):
            prompt, thought, answer = torch.cat([history, words(1, 6)]), words(1, 5), words(2, 6)
            tokens = torch.cat([prompt, thought, answer])
            shared = 0 if turn == 0 else common(examples[-1].tokens, tokens)
            assert shared >= before
            examples.append(
                Example(tokens, torch.arange(len(tokens)) >= len(prompt), shared=shared)
            )
            history, before = torch.cat([prompt, answer]), len(prompt)
    return examples


def common(one: torch.Tensor, other: torch.Tensor) -> int:
    """The tokens that two texts share from their beginning, one by one."""
    return sum(
        1
        for _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(one.tolist(), other.tolist(), strict=False)
        )
    )


def alone(target: Target, text: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
    """[T, L, D], what the untouched model says of a text by itself."""
    with torch.no_grad():
        states = target.model(
            input_ids=text[None], use_cache=False, output_hidden_states=True
        ).hidden_states
    return torch.stack([states[tap][0] for tap in taps], dim=1)


@pytest.mark.quick("phi3", "gpt_neox", "mpt", "falcon-alibi")
@pytest.mark.parametrize("name", [*FAMILIES, "jamba", "bloom", "mpt", "falcon-alibi"])
def test_states_are_those_of_each_text_alone(name: str) -> None:
    """Up to rounding; where reading on would save nothing, texts are read whole."""
    target, examples = Target(build(name)), conversations(1)
    shared = [example.shared for example in examples]
    if can_read_on(target):
        got = read_on(target, [example.tokens.tolist() for example in examples], shared, TAPS)
        for example, states in zip(examples, got, strict=True):
            expected = alone(target, example.tokens, TAPS)
            assert (states - expected).abs().max() <= 2e-5 * expected.abs().max()
    parts = parts_of({"taps": TAPS, "inputs": (0, 1)})
    texts, masks = (
        [example.tokens for example in examples],
        [example.loss_mask for example in examples],
    )
    packed = compute_rows(target, texts, masks, parts, "float32", shared)
    for part, (rows,) in zip(parts, packed, strict=True):
        kept = []
        for example in examples:
            slots = slots_of(example.loss_mask, part.slots)
            slots = slots[example.shared :] if part.slots == "read" else slots
            kept.append(alone(target, example.tokens, part.taps)[slots])
        assert (rows - torch.cat(kept)).abs().max() <= 2e-5 * torch.cat(kept).abs().max()


@pytest.mark.slow
def test_which_targets_read_on() -> None:
    """Those whose layers keep keys and values alone."""
    assert can_read_on(Target(build("llama"))) and can_read_on(Target(build("gemma2")))
    assert not can_read_on(Target(build("mamba"))) and not can_read_on(Target(build("jamba")))


def test_a_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards are of no more tokens than are new, but for the last of each prompt and padding beside it."""
    target, examples, read = Target(build("llama")), conversations(2), []
    can_read_on(target)  # which tries the target first
    base = target.reader.base

    def count(_: object, __: object, kwargs: dict[str, torch.Tensor]) -> None:
        read.append(kwargs["input_ids"].numel())

    for group in groups_of(examples):
        read.clear()
        with base.register_forward_pre_hook(count, with_kwargs=True):
            read_on(
                target,
                [text.tokens.tolist() for text in group],
                [text.shared for text in group],
                TAPS,
            )
        assert sum(read) == sum(len(text.tokens) - text.shared for text in group)


def groups_of(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """The examples of each conversation."""
    firsts = [place for place, example in enumerate(examples) if not example.shared] + [
        len(examples)
    ]
    return (list(examples[start:end]) for start, end in pairwise(firsts))


def stored(
    folder: Path,
    target: Target,
    examples: Sequence[Example],
    dtype: str = "float32",
    roles: TapRoles = ROLES,
) -> FeatureStore:
    """A complete store of these examples in shards of some conversations."""
    sizes = TextSizes.of((example.loss_mask, example.shared) for example in examples)
    plan = plan_shards(sizes.tokens.tolist(), 64, 120, sizes.shared.tolist())
    fields = {**tap_identity(roles), "dtype": dtype}
    store = FeatureStore.create(folder, examples, fields, plan, sizes, width=32)
    list(extract(target, store, sorted(store.absent)))
    return FeatureStore(folder)


def whole(examples: Sequence[Example]) -> list[Example]:
    """The examples as if nothing were known of what they share."""
    return [replace(example, shared=0) for example in examples]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8", "float6"])
def test_a_shared_store_reads_like_one_that_shares_nothing(
    dtype: str, target: Target, tmp_path: Path
) -> None:
    """At fewer bytes; where features are computed in the same way, bit for bit."""
    examples = conversations(3)
    plain = stored(tmp_path / "plain", target, whole(examples), dtype)
    small = stored(tmp_path / "small", target, examples, dtype)
    new = sum(len(slots_of(example.loss_mask, "read")) - example.shared for example in examples)
    assert len(small.plan) > 1
    assert sum(small.places["read"].totals) == new < 0.75 * sum(plain.places["read"].totals)
    assert small.places["taught"].totals and small.total_bytes < plain.total_bytes
    order = [5, 0, 9, 2, 1, 3, 4, 6, 8, 7]
    error = {"float32": 1e-5, "bfloat16": 0.02, "float8": 0.15, "float6": 0.15}[dtype]
    for got, expected in zip(small.read(order), plain.read(order), strict=True):
        assert torch.equal(got.tokens, expected.tokens) and torch.equal(
            got.loss_mask, expected.loss_mask
        )
        assert torch.equal(got.features.isnan(), expected.features.isnan())
        torch.testing.assert_close(
            got.features.nan_to_num(), expected.features.nan_to_num(), rtol=error, atol=error
        )


def test_the_layout_changes_no_bit(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of states that do not depend on the batch: what the untouched model says of each text by itself."""
    monkeypatch.setattr(features_module, "can_read_on", lambda _: False)
    monkeypatch.setattr(
        target,
        "features",
        lambda tokens, taps, dtype: torch.stack([mark_states(row, taps) for row in tokens]),
    )
    examples = conversations(4)
    plain, small = (
        stored(tmp_path / name, target, of)
        for name, of in (("a", whole(examples)), ("b", examples))
    )
    for got, expected in zip(small.read(range(10)), plain.read(range(10)), strict=True):
        assert torch.equal(got.features.nan_to_num(-1), expected.features.nan_to_num(-1))
    headers = sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in small.folder.glob("shard-*.safetensors")
    )
    size = sum(path.stat().st_size for path in small.folder.glob("shard-*.safetensors"))
    assert size - headers == small.total_bytes
    # the check can fail: one shared token too many is another text's state
    wrong = [replace(text, shared=text.shared + 1 if text.shared else 0) for text in examples]
    wrong_store = stored(tmp_path / "c", target, wrong)
    pairs = zip(wrong_store.read(range(10)), plain.read(range(10)), strict=True)
    assert any(
        not torch.equal(got.features.nan_to_num(-1), expected.features.nan_to_num(-1))
        for got, expected in pairs
    )


def mark_states(text: torch.Tensor, taps: Sequence[int]) -> torch.Tensor:
    """[T, L, 32], numbers that name the tokens up to each slot."""
    sums = (text.double() * torch.arange(1, len(text) + 1) ** 2).cumsum(0)
    return (sums[:, None, None] + torch.tensor([*taps])[:, None] + torch.arange(32) / 64).float()


@pytest.mark.quick("eagle1")
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "dflash", "spire", "mtp"])
def test_heads_learn_the_same(name: str, target: Target, tmp_path: Path) -> None:
    """Losses, gradients and validation on both stores, up to the rounding of the states."""
    head, examples = make_head(name, target), conversations(7)
    roles, batches = roles_of(head.settings, target.config), []
    for folder, texts in (("plain", whole(examples)), ("small", examples)):
        store = stored(tmp_path / folder, target, texts, roles=roles)
        batches.append(replace(collate(store.read(range(10)), store.taps, range(10)), progress=0.5))
    for got, expected in zip(*(losses_of(head, batch, target) for batch in batches), strict=True):
        assert expected.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_places_of_rows(texts: list[tuple[int, int]]) -> None:
    """Against a search for the text that first had a slot."""
    counts = [new for new, _ in texts]
    shared = [0]
    for (count, wanted), before in zip(texts[1:], counts, strict=False):
        shared.append(min(wanted, count, before))
    plan = StoredPlan(**StoredPlan.tensors_of([[list(range(len(texts)))]]))
    places = RowPlaces(plan, torch.tensor(counts), torch.tensor(shared))

    def owner(number: int, slot: int) -> tuple[int, int]:
        return owner(number - 1, slot) if slot < shared[number] else (number, slot)

    rows = [
        (number, slot)
        for number, count in enumerate(counts)
        for slot in range(shared[number], count)
    ]
    assert places.totals == [len(rows)]
    for number, count in enumerate(counts):
        read = [row for start, stop in places[number] for row in rows[start:stop]]
        assert read == [owner(number, slot) for slot in range(count)]


@pytest.mark.slow
def test_conversations_stay_in_one_batch(target: Target) -> None:
    """Whatever the limits, and every example is planned once; a forecast tells what is shared."""
    examples = conversations(5, (3, 1, 4, 2, 5, 1, 2))
    sizes = TextSizes.of((example.loss_mask, example.shared) for example in examples)
    for limits in ((1, 1), (40, 100), (1000, 1), (10**6, 10**6)):
        plan = plan_shards(sizes.tokens.tolist(), *limits, sizes.shared.tolist())
        numbers = [number for shard in plan for batch in shard for number in batch]
        assert sorted(numbers) == list(range(len(examples)))
        for shard in plan:
            for batch in shard:
                assert all(number - 1 in batch for number in batch if examples[number].shared)
    line = forecast(target, examples, sizes, plan, parts_of(tap_identity(ROLES)), "bfloat16")
    assert (
        f"tokens ({int(sizes.shared.sum())} of them shared with another example of their conversation)"
        in line
    )


def test_a_template_that_rewrites_history_is_seen(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Through the cache of tokens; other conversations and other templates share nothing."""
    turns = [
        {"role": "user", "content": "Who painted it?"},
        {
            "role": "assistant",
            "content": "Vermeer.",
            "reasoning_content": "The light comes from the left.",
        },
        {"role": "user", "content": "When was that?"},
        {"role": "assistant", "content": "In 1665.", "reasoning_content": "Between 1660 and 1670."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "In The Hague."},
    ]
    lines = [
        json.dumps({"id": str(number), "messages": turns[: 2 * count]})
        for number, count in enumerate((1, 3, 2))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "thinks.jinja").write_text(THINKS)
    (tmp_path / "plain.jinja").write_text(THINKS.replace(" and loop.last", ""))
    base = [
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tmp_path / 'data.jsonl'}",
        "data.limit=null",
    ]
    recipe = Recipe.load(
        "recipes/tiny/eagle1.yaml", [*base, f"data.template={tmp_path / 'thinks.jinja'}"]
    )
    cached, (plain, _) = open_cache(recipe), tokenize_data(recipe, load_tokenizer(recipe))
    assert len(cached) == len(plain) == 6
    for examples in (cached, plain):
        assert [example.shared for example in examples] == [
            0,
            0,
            common(examples[1].tokens, examples[2].tokens),
            common(examples[2].tokens, examples[3].tokens),
            0,
            common(examples[4].tokens, examples[5].tokens),
        ]
        assert examples[3].shared > examples[2].shared > 5
    recipe = Recipe.load(
        "recipes/tiny/eagle1.yaml", [*base, f"data.template={tmp_path / 'plain.jinja'}"]
    )
    assert [example.shared for example in open_cache(recipe)] == [0, 0, 0]


def test_stores_of_the_second_version_are_read(target: Target, tmp_path: Path) -> None:
    """Which have no entry for what is shared: their features stay, bit for bit."""
    store = stored(tmp_path, target, whole(conversations(6)))
    assert store.index["version"] == 3
    expected = store.read(range(10))
    tensors = load_file(tmp_path / "examples.safetensors")
    assert not tensors.pop("shared").any()
    save_file(tensors, tmp_path / "examples.safetensors")
    digest = sha256(tmp_path / "examples.safetensors")
    index = {**store.index, "version": 2, "examples": {**store.index["examples"], "sha256": digest}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    older = FeatureStore(tmp_path, partial=True)
    older.serve_all_but({})  # shards name the index that they were written for
    for got, text in zip(older.read(range(10)), expected, strict=True):
        assert torch.equal(got.tokens, text.tokens) and torch.equal(got.loss_mask, text.loss_mask)
        assert torch.equal(got.features.nan_to_num(-1), text.features.nan_to_num(-1))
