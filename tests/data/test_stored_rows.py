"""A store keeps only what training reads: the other states change no loss, and sizes are those on the disk."""

# T tokens, L taps, H hidden

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle import Target
from eagle.core.examples import Batch, Example, collate, gate_mask
from eagle.data import stored_rows
from eagle.data.features import LiveFeatures, extract, roles_of
from eagle.data.identity import tap_identity
from eagle.data.shards import plan_shards
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import (
    DTYPES,
    SequenceSizes,
    TapRoles,
    mean_bytes,
    pack_features,
    parts_of,
    slots_of,
    token_bytes,
    unpack_features,
)
from eagle.drafters import DRAFTERS, settings_of
from tests.documents import ROOT
from tests.each_head import HEADS
from tests.families import VOCAB_SIZE

TREES = {"chain": ((0,), (0, 0), (0, 0, 0)), "tree": ((0,), (1,), (0, 0))}
# supervised spans of sequences of 30 tokens: two answers, from the start, to the end, single tokens, the first token
MASKS = [
    [(5, 14), (20, 26)],
    [(0, 3), (9, 10)],
    [(17, 30)],
    [(4, 5), (6, 7), (12, 13)],
    [(0, 1)],
]
SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 40},
    "dspark": {"markov": "rnn"},
    "mtp": {"start": "last_block"},
}


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """A sequence with each of the masks."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for spans in MASKS:
        mask = torch.zeros(30, dtype=torch.bool)
        for start, end in spans:
            mask[start:end] = True
        made.append(
            Example(
                torch.randint(
                    5,
                    VOCAB_SIZE,
                    (30,),
                    generator=generator,
                ),
                mask,
            )
        )
    return made


def make_head(name: str, target: Target) -> Any:
    """Return a new head of a method, the same every time."""
    torch.manual_seed(0)
    # the settings in which its states are read in an unusual way
    fields = HEADS[name] | SMALL.get(name, {})
    method = DRAFTERS[fields["kind"]]
    weights = {"weights": target.tensor} if method.reads.weights else {}
    return method.for_target(
        settings_of(fields, "test"),
        target.config,
        target.head,
        [torch.arange(5, 90)],
        **weights,
    )


def losses_of(head: Any, batch: Batch, target: Target) -> list[Tensor]:
    """Return the losses of a step, their gradients, and the sums of validation."""
    torch.manual_seed(3)
    losses = head.train()(batch, target.head)
    head.zero_grad(set_to_none=True)
    losses["total"].backward()
    values = list(losses.values())
    # a state that is read and has no influence on a loss may have one on a gradient
    values += [weight.grad for weight in head.parameters() if weight.grad is not None]
    if head.counts_by_forward:
        values.append(head(batch, target.head, count=True)["divisor"])
    return [
        *values,
        *head.eval()
        .validate(
            batch,
            target.head,
            TREES,
        )
        .values(),
    ]


def read_batch(
    target: Target,
    examples: Sequence[Example],
    head: Any,
    gate: str,
    *,
    keeps_all: bool,
) -> Batch:
    """Return all sequences, with every state of the taps or with those alone that a store keeps."""
    fields = tap_identity(roles_of(head.settings, target.config))
    if keeps_all:
        fields = {"taps": fields["taps"]}
    live = LiveFeatures(
        target,
        examples,
        {**fields, "dtype": "float32"},
    )
    read = live.read(range(len(live)))
    gated = [replace(each, loss_mask=gate_mask(each.loss_mask, gate)) for each in read]
    return replace(
        collate(
            gated,
            live.taps,
            [7, 8, 9, 10, 11],
        ),
        progress=0.5,
    )


@pytest.mark.quick("falcon", "own", "hydra", "blockwise")
@pytest.mark.parametrize("name", HEADS)
def test_states_that_are_not_kept_change_nothing(
    name: str,
    target: Target,
    examples: list[Example],
) -> None:
    """With NaN in their place, losses, gradients and validation of every method stay bit for bit."""
    head = make_head(name, target)
    for gate in ("predicted", "read"):
        whole = read_batch(
            target,
            examples,
            head,
            gate,
            keeps_all=True,
        )
        kept = read_batch(
            target,
            examples,
            head,
            gate,
            keeps_all=False,
        )
        expected = losses_of(head, whole, target)
        assert all(value.isfinite().all() for value in expected)
        for got, value in zip(
            losses_of(head, kept, target),
            expected,
            strict=True,
        ):
            assert torch.equal(got, value)


@pytest.mark.parametrize(
    ("name", "kind", "num_cut"), [("medusa", "taught", 2), ("eagle1", "read", 3)]
)
def test_a_slot_too_few_is_seen(
    name: str,
    kind: str,
    num_cut: int,
    target: Target,
    examples: list[Example],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: a layout that forgets slots at the end of an answer makes losses of NaN."""
    right = stored_rows.slots_of

    def forget_slots(mask: Tensor, kind_of_tap: str) -> Tensor:
        slots = right(mask, kind_of_tap)
        return slots[:-num_cut] if kind_of_tap == kind else slots

    monkeypatch.setattr(stored_rows, "slots_of", forget_slots)
    head = make_head(name, target)
    batch = read_batch(target, examples, head, "read", keeps_all=False)
    assert losses_of(head, batch, target)[0].isnan()


def test_slots_by_hand() -> None:
    """Slots t - 2 and t - 1 serve token t; with `gate: read` token t + 2 is learned in its place."""
    mask = torch.tensor([False, False, False, True, True, False, False, False, False, False])
    assert slots_of(mask, "taught").tolist() == [1, 2, 3, 4, 5]
    assert slots_of(mask, "read").tolist() == list(range(7))
    assert slots_of(mask, "all").tolist() == list(range(10))
    assert not len(slots_of(torch.zeros(9, dtype=torch.bool), "read"))
    assert not len(slots_of(torch.ones(1, dtype=torch.bool), "taught"))


def test_a_tap_that_one_head_drafts_from_is_kept_whole() -> None:
    """A store for several heads holds what each of them needs."""
    eagle1 = TapRoles((-1,), (-1,))
    eagle3 = TapRoles((2, 4), (-1,))

    def describe(roles: TapRoles) -> list[tuple[str, tuple[int, ...], str]]:
        return [(part.prefix, part.taps, part.slots) for part in parts_of(tap_identity(roles))]

    # the last tap of EAGLE-3 only teaches
    assert describe(eagle3) == [("", (2, 4), "read"), ("taught_", (-1,), "taught")]
    assert describe(TapRoles.join([eagle1, eagle3])) == [("", (2, 4, -1), "read")]


def measure_shards(folder: Path) -> int:
    """Return the bytes of all shards without their headers, whose size is their first eight bytes."""
    size = 0
    for path in folder.glob("shard-*.safetensors"):
        data = path.read_bytes()
        size += len(data) - 8 - int.from_bytes(data[:8], "little")
    return size


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_holds_the_bytes_of_the_forecast(
    dtype: str,
    target: Target,
    examples: list[Example],
    tmp_path: Path,
) -> None:
    """It gives back, bit for bit, what is computed in training; the rest is NaN."""
    fields = {**tap_identity(TapRoles((1, 2), (-1,))), "dtype": dtype}
    plan = plan_shards([30] * 5, 60, 60)
    store = FeatureStore.create(
        tmp_path,
        examples,
        fields,
        plan,
        width=32,
    )
    list(extract(target, store, sorted(store.absent)))
    stored = FeatureStore(tmp_path)
    live = LiveFeatures(target, examples, fields)
    order = [3, 0, 4, 1, 2]
    for got, expected in zip(
        stored.read(order),
        live.read(order),
        strict=True,
    ):
        assert torch.equal(got.tokens, expected.tokens)
        assert got.features.dtype == expected.features.dtype
        assert torch.equal(got.features.nan_to_num(9.0), expected.features.nan_to_num(9.0))
        # the rest is NaN: it was not stored
        num_read = len(slots_of(got.loss_mask, "read"))
        taught = slots_of(got.loss_mask, "taught")
        num_finite = got.features.isfinite().all(-1).sum(0).tolist()
        assert num_finite == [num_read, num_read, len(taught)]
        assert got.features[taught, 2].isfinite().all()
    # 150 tokens in all, headers not counted
    sizes = SequenceSizes.of((example.loss_mask, 0) for example in examples)
    expected_size = (
        mean_bytes(
            parts_of(fields),
            dtype,
            32,
            sizes,
        )
        * 150
    )
    assert measure_shards(tmp_path) == stored.total_bytes == pytest.approx(expected_size)


def test_float6_is_as_close_as_float8() -> None:
    """Also beside numbers far larger, zeros stay zeros and nothing finite becomes infinite or NaN."""
    features = torch.randn(
        50,
        3,
        128,
        generator=torch.Generator().manual_seed(0),
    )
    features *= 10.0 ** torch.arange(-3, 0)[:, None]
    # outliers, as residual streams have
    features[1:, 0, 5] *= 500
    features[0] = 0
    errors = {}
    sizes = {}
    for dtype in ("float8", "float6"):
        packed = pack_features(features, dtype)
        unpacked = unpack_features(*packed).float()
        assert not unpacked[0].any()
        error = (unpacked - features).norm(dim=-1) / features.norm(dim=-1)
        errors[dtype] = error[1:]
        sizes[dtype] = sum(tensor.nbytes for tensor in packed) / 150
    assert errors["float6"][:, 1:].mean() < 1.05 * errors["float8"][:, 1:].mean() < 0.03
    assert errors["float6"].max() < 0.05
    # bytes a state: its numbers, a scale, and of float6 an exponent for each block of 32
    assert sizes == {"float8": 128 + 4, "float6": 96 + 4 + 4}


def test_numbers_of_float6_are_exact() -> None:
    """They are those of E2M3, of which some are written out here."""
    steps = torch.tensor([0, 0.125, 0.25, 1, 1.125, 1.875, 2, 2.25, 3.75, 4, 4.5, 7.5])
    exact = torch.cat([steps, -steps, torch.zeros(8)])
    assert torch.equal(unpack_features(*pack_features(exact, "float6")).float(), exact)


def test_a_width_without_blocks_is_refused(examples: list[Example], tmp_path: Path) -> None:
    """It is refused before anything is written."""
    fields = {**tap_identity(TapRoles((1,), (-1,))), "dtype": "float6"}
    with pytest.raises(ValueError, match=r"float6.* states have 40: expected a multiple of 32"):
        FeatureStore.create(
            tmp_path,
            examples,
            fields,
            [[[0]]],
            width=40,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ("EAGLE-1, HASS, Falcon, MTP", "eagle1 hass falcon mtp"),
        ("EAGLE-3, P-EAGLE", "eagle3 peagle"),
        ("DFlash, DSpark", "dflash dspark"),
        ("SPiRe", "spire"),
        ("Medusa, Hydra, a draft model", "medusa hydra draft_model"),
    ],
)
def test_the_page_shows_the_bytes_of_each_method(row: str, kinds: str) -> None:
    """The table of docs/data.md holds, at a width of 4,096 and 65% supervised tokens."""
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32)
    page = (ROOT / "docs/data.md").read_text()
    for kind in kinds.split():
        parts = parts_of(tap_identity(roles_of(settings_of({"kind": kind}, "test"), config)))
        # the page leaves out float32
        dtypes = ("bfloat16", "float8", "float6")
        sizes = [f"{token_bytes(parts, dtype, 4096, 0.65):,.0f}" for dtype in dtypes]
        assert f"| {row} | {' | '.join(sizes)} |" in page
