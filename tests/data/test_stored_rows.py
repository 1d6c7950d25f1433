"""Only what training reads is kept: states that are not kept change no loss, and the sizes are those on the disk."""

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
    TapRoles,
    TextSizes,
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
MASKS = {  # supervised spans of texts of 30 tokens: long and short, early and late
    "two answers": [(5, 14), (20, 26)],
    "from the start": [(0, 3), (9, 10)],
    "to the end": [(17, 30)],
    "single tokens": [(4, 5), (6, 7), (12, 13)],
    "first token": [(0, 1)],
}
SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 40},
    "dspark": {"markov": "rnn"},
    "mtp": {"start": "last_block"},
}


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Texts with all masks."""
    generator, made = torch.Generator().manual_seed(2), []
    for spans in MASKS.values():
        mask = torch.zeros(30, dtype=torch.bool)
        for start, end in spans:
            mask[start:end] = True
        made.append(Example(torch.randint(5, VOCAB_SIZE, (30,), generator=generator), mask))
    return made


def make_head(name: str, target: Target) -> Any:
    """A new head of a method with the settings by which its test differs, the same every time."""
    torch.manual_seed(0)
    about = HEADS[name] | SMALL.get(name, {})
    settings, method = (
        settings_of(about | ({"draft_vocab": 40} if name == "eagle3" else {}), "test"),
        DRAFTERS[about["kind"]],
    )
    weights = {"weights": target.tensor} if method.reads.weights else {}
    texts = [torch.arange(5, 90)]
    return method.for_target(settings, target.config, target.head, texts, **weights)


def read_batch(
    target: Target, examples: Sequence[Example], head: Any, gate: str, *, whole: bool
) -> Batch:
    """All texts, with every state of the taps or with those alone that a store keeps."""
    fields = tap_identity(roles_of(head.settings, target.config))
    taps = {"taps": fields["taps"]} if whole else fields
    live = LiveFeatures(target, examples, {**taps, "dtype": "float32"})
    texts = [
        replace(text, loss_mask=gate_mask(text.loss_mask, gate))
        for text in live.read(range(len(live)))
    ]
    return replace(collate(texts, live.taps, [7, 8, 9, 10, 11]), progress=0.5)


def losses_of(head: Any, batch: Batch, target: Target) -> list[Tensor]:
    """The losses of a step, their gradients, and the sums of validation."""
    torch.manual_seed(3)
    losses = head.train()(batch, target.head)
    head.zero_grad(set_to_none=True)
    losses["total"].backward()
    grads = [weight.grad for weight in head.parameters() if weight.grad is not None]
    counts = [head(batch, target.head, count=True)["divisor"]] if head.counts_by_forward else []
    sums = head.eval().validate(batch, target.head, TREES)
    return [*losses.values(), *grads, *counts, *sums.values()]


@pytest.mark.quick("falcon", "own", "hydra", "blockwise")
@pytest.mark.parametrize("name", HEADS)
def test_states_that_are_not_kept_change_nothing(
    name: str, target: Target, examples: list[Example]
) -> None:
    """NaN in their place: losses, gradients and validation of every method stay bit for bit."""
    head = make_head(name, target)
    for gate in ("predicted", "read"):
        whole, kept = (
            read_batch(target, examples, head, gate, whole=whole) for whole in (True, False)
        )
        for got, expected in zip(
            losses_of(head, kept, target), losses_of(head, whole, target), strict=True
        ):
            assert expected.isfinite().all() and torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "slots"),
    [("eagle3", "taught"), ("dspark", "taught"), ("medusa", "taught"), ("eagle1", "read")],
)
def test_a_slot_too_few_is_seen(
    name: str, slots: str, target: Target, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail: a layout that forgets slots at the end of an answer makes losses of NaN."""
    keep = stored_rows.slots_of
    cut = {"taught": 2, "read": 3}[slots]  # with `gate: read` the last two are read
    monkeypatch.setattr(
        stored_rows,
        "slots_of",
        lambda mask, kind: keep(mask, kind)[: -cut if kind == slots else None],
    )
    head = make_head(name, target)
    batch = read_batch(target, examples, head, "read", whole=False)
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
    eagle1, eagle3 = TapRoles((-1,), (-1,)), TapRoles((2, 4), (-1,))
    assert [(part.prefix, part.taps, part.slots) for part in parts_of(tap_identity(eagle3))] == [
        ("", (2, 4), "read"),
        ("taught_", (-1,), "taught"),
    ]
    both = TapRoles.join([eagle1, eagle3])
    assert [(part.taps, part.slots) for part in parts_of(tap_identity(both))] == [
        ((2, 4, -1), "read")
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_holds_the_bytes_that_are_forecast(
    dtype: str, target: Target, examples: list[Example], tmp_path: Path
) -> None:
    """And gives back, bit for bit, what is computed while training; the rest is NaN."""
    fields = {**tap_identity(TapRoles((1, 2), (-1,))), "dtype": dtype}
    store = FeatureStore.create(tmp_path, examples, fields, plan_shards([30] * 5, 60, 60), width=32)
    list(extract(target, store, sorted(store.absent)))
    stored, live = FeatureStore(tmp_path), LiveFeatures(target, examples, fields)
    for got, expected in zip(stored.read([3, 0, 4, 1, 2]), live.read([3, 0, 4, 1, 2]), strict=True):
        assert got.features.dtype == expected.features.dtype
        assert torch.equal(got.features.nan_to_num(9.0), expected.features.nan_to_num(9.0))
        kept, taught = slots_of(got.loss_mask, "read"), slots_of(got.loss_mask, "taught")
        assert got.features.isfinite().all(-1).sum(0).tolist() == [
            len(kept),
            len(kept),
            len(taught),
        ]
        assert got.features[taught, 2].isfinite().all()
    sizes = TextSizes.of((example.loss_mask, 0) for example in examples)
    forecast = mean_bytes(parts_of(fields), dtype, 32, sizes) * 150
    headers = sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in tmp_path.glob("shard-*.safetensors")
    )
    size = sum(path.stat().st_size for path in tmp_path.glob("shard-*.safetensors"))
    assert size - headers == stored.total_bytes == pytest.approx(forecast)


def test_float6_is_as_close_as_float8() -> None:
    """Also beside numbers far larger; zeros stay zeros, and nothing finite becomes infinite or NaN."""
    features = (
        torch.randn(50, 3, 128, generator=torch.Generator().manual_seed(0))
        * 10.0 ** torch.arange(-3, 0)[:, None]
    )
    features[1:, 0, 5] *= 500
    features[0] = 0
    packed = {dtype: pack_features(features, dtype) for dtype in ("float8", "float6")}
    errors = {
        dtype: (unpack_features(*tensors).float() - features)[1:].norm(dim=-1)
        / features[1:].norm(dim=-1)
        for dtype, tensors in packed.items()
    }
    assert errors["float6"][:, 1:].mean() < 1.05 * errors["float8"][:, 1:].mean() < 0.03
    assert errors["float6"].max() < 0.05
    assert not unpack_features(*packed["float6"])[0].any()
    sizes = {
        dtype: sum(tensor.nbytes for tensor in tensors) / 150 for dtype, tensors in packed.items()
    }
    assert sizes == {"float8": 128 + 4, "float6": 96 + 4 + 4}
    steps = torch.tensor(
        [0, 0.125, 0.25, 1, 1.125, 1.875, 2, 2.25, 3.75, 4, 4.5, 7.5]
    )  # numbers of E2M3
    exact = torch.cat([steps, -steps, torch.zeros(8)])
    assert torch.equal(unpack_features(*pack_features(exact, "float6")).float(), exact)


def test_what_cannot_be_packed_is_refused(
    target: Target, examples: list[Example], tmp_path: Path
) -> None:
    """A width without blocks, before anything is written."""
    fields = {**tap_identity(TapRoles((1,), (-1,))), "dtype": "float6"}
    with pytest.raises(
        ValueError, match=r"float6.* states have 40: expected a multiple of 32\. Set .*float8"
    ):
        FeatureStore.create(tmp_path, examples, fields, [[[0]]], width=40)
    assert not list(tmp_path.iterdir())


def test_the_page_shows_the_bytes_of_each_method() -> None:
    """Its table of docs/data.md, at a width of 4,096 and 65% supervised tokens."""
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32)
    rows = {
        "EAGLE-1, HASS, Falcon, MTP": ("eagle1", "hass", "falcon", "mtp"),
        "EAGLE-3, P-EAGLE": ("eagle3", "peagle"),
        "DFlash, DSpark": ("dflash", "dspark"),
        "SPiRe": ("spire",),
        "Medusa, Hydra, a draft model": ("medusa", "hydra", "draft_model"),
    }
    page = (ROOT / "docs/data.md").read_text()
    for row, kinds in rows.items():
        for kind in kinds:
            parts = parts_of(tap_identity(roles_of(settings_of({"kind": kind}, "test"), config)))
            sizes = [
                token_bytes(parts, dtype, 4096, 0.65) for dtype in ("bfloat16", "float8", "float6")
            ]
            assert f"| {row} | {' | '.join(f'{size:,.0f}' for size in sizes)} |" in page, kind


def test_eagle3_fits_in_twelve_kilobytes() -> None:
    """At a width of 4,096, where 60 to 70% of the tokens are supervised."""
    parts = parts_of(tap_identity(TapRoles((2, 16, 29), (-1,))))
    assert [round(token_bytes(parts, dtype, 4096, 0.65)) for dtype in DTYPES] == [
        59_802,
        29_901,
        14_965,
        11_695,
    ]
    assert token_bytes(parts, "float6", 4096, 0.70) < 12_000
    assert token_bytes(parts_of({"taps": [2, 16, 29, -1]}), "float8", 4096, 0.65) == 16_400
