"""A loss knows no parts: in however many a step is dealt, it learns the same to rounding in fp64, by every method."""

# T tokens of a text

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, trim_mask
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.divisors import Divisor
from eagle.drafters.parts.text_dropout import TextDropout
from eagle.recipe import TrainSection
from eagle.training.plan import Dealer, Plan
from tests.registry import LEVEL_HEADS, TRAINED
from tests.unrolled_heads import moved

VOCAB, WIDTH = 37, 16
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=8, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
)  # fmt: skip
# length and what is supervised: long and short texts, gaps, one token alone, and one at a text's end
TEXTS = [
    (61, [(9, 30), (33, 60)]), (5, [(2, 5)]), (24, [(20, 22)]), (9, [(2, 3), (4, 5), (6, 9)]), (40, [(39, 40)]),
    (17, [(3, 17)]), (30, [(12, 13)]), (13, [(0, 12)]),
]  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "eagle1": {"noise": 0.1},
    "hass": {"steps": 2},
    "eagle3": {"steps": 3},
    "peagle": {"blocks": 1, "depths": 4},
    "dflash": {"blocks": 1, "slots": 4, "anchors": 6},
    "dspark": {"blocks": 1, "slots": 4, "anchors": 6, "rank": 4},
    "spire": {"blocks": 1, "stride": 2, "steps": 3},
    "draft_model": {"layers": 1},
    "falcon": {"dropout": 0.2},
    "hydra": {"levels": 3},
    "medusa": {"levels": 3},
    "mlp_speculator": {"levels": 3},
    "blockwise": {"levels": 3, "inner_dim": 8},
}
WINDOW = {"sinks": 1, "recent": 4}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle1", {"fc_bias": False, "window": WINDOW, "noise_as_published": True}),
    ("hass", {"top": 0.5, "top_k": 3, "window": WINDOW}),
    ("eagle3", {"draft_vocab": 20, "fc_norm": True, "norm_output": True, "window": WINDOW}),
    ("eagle3", {"loss": "hybrid", "train_lm_head": False}),
    ("peagle", {"draft_vocab": 20, "blocks": 2, "loss": "acceptance"}),
    ("dflash", {"causal": True, "sample_from_anchor": True, "decay": None, "anchors": 512}),
    ("dflash", {"loss": "tokens", "d_pace": True}),
    ("dflash", {"loss": "tokens", "d_pace": True, "divisor": "reached"}),
    *(("dspark", {"markov": markov, "gru_size": 4}) for markov in ("none", "gated", "rnn", "domino")),
    ("dspark", {"confidence": False, "sample_from_anchor": False}),
    *(("draft_model", {"divergence": divergence}) for divergence in ("tokens", "jsd")),
    *(("early_exit_adapter", {"adapter": adapter}) for adapter in ("norm", "linear")),
    ("mtp", {"hidden_first": True, "loss": "tokens", "decay": 1.0}),
    ("falcon", {"k": 3, "levels": 6, "glance_from": 0.9, "glance_to": 0.9}),
    ("medusa", {"weights": "falling", "loss": "tokens", "lm_head": "target"}),
    ("hydra", {"prefix": True, "layers": 2, "dropout": 0.3, "regression": 0.2}),
    ("mlp_speculator", {"tie_weights": True, "scale_input": True}),
    ("blockwise", {"drawn": True, "divisor": "levels"}),
    ("spire", {"window": None, "cross_entropy": 1.0}),
    *((name, {"divisor": divisor}) for name in (*LEVEL_HEADS, "dflash", "dspark") for divisor in get_args(Divisor)),
    *(("peagle", {"divisor": divisor}) for divisor in ("slots", "reached", "levels")),
]  # fmt: skip
CASES = [*((name, {}) for name in TRAINED), *VARIANTS]
DEALT = [
    (1, 2),
    (1, 4),
    (2, 1),
    (3, 1),
    (3, 2),
    (9, 1),
]  # processes and parts of each; of nine some are empty
STEP = 5


@dataclass
class MadeTexts:
    """Texts and the states of a target that was never there; `sampled`, answers are shorter than was known."""

    taps: tuple[int, ...]
    sampled: bool = False
    identity: dict[str, Any] = field(default_factory=dict)
    together: bool = False

    def __len__(self) -> int:
        return len(TEXTS)

    def mask(self, index: int) -> Tensor:
        """[T], the loss mask of a text."""
        length, spans = TEXTS[index]
        places = torch.arange(length)
        return torch.stack([(places >= start) & (places < end) for start, end in spans]).any(0)

    def supervised_tokens(self, index: int) -> Tensor:
        """The supervised tokens of a text."""
        return self._draw(index).tokens[self.mask(index)]

    def read(self, indices: Any) -> list[Example]:
        """The examples at these indices."""
        return [self._draw(index) for index in indices]

    def _draw(self, index: int) -> Example:
        drawn, mask = torch.Generator().manual_seed(index), self.mask(index)
        tokens = torch.randint(VOCAB, (len(mask),), generator=drawn)
        features = torch.randn(
            len(mask), len(self.taps), WIDTH, generator=drawn, dtype=torch.float64
        )
        if self.sampled and int(mask.sum()) > 2:
            mask[: int(mask.nonzero()[0]) + 1 + index % 3] = False
        return Example(tokens, mask, features)


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    """What heads make without a dtype, such as the weights of slots, is in fp64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def new_frozen() -> TargetHead:
    """An embedding and an LM head."""
    torch.manual_seed(1)
    output = nn.Linear(WIDTH, VOCAB, bias=False)
    nn.init.normal_(output.weight, std=0.3)
    return TargetHead(
        nn.Embedding(VOCAB, WIDTH).requires_grad_(False), output.requires_grad_(False)
    )


def new_head(name: str, settings: dict[str, Any], frozen: TargetHead) -> Any:
    """A head that trains, its weights away from where they start."""
    asked, method = (
        settings_of({"kind": name, **SMALL.get(name, {}), **settings}, "test"),
        DRAFTERS[name],
    )
    taps = MadeTexts(())
    torch.manual_seed(2)
    supervised = [taps.supervised_tokens(index) for index in range(len(TEXTS))]
    return moved(method.for_target(asked, CONFIG, frozen, supervised).double()).train()


def new_plan(accumulation: int) -> Plan:
    """One step is all texts; several epochs."""
    settings = TrainSection(
        out="nowhere", batch_size=len(TEXTS), validation=0, epochs=9, accumulation=accumulation
    )
    masks = [trim_mask(MadeTexts(()).mask(index)) for index in range(len(TEXTS))]
    return Plan([int(mask.sum()) for mask in masks], settings)


class _AllCounted(Exception):
    """Raised where a process would wait for the others' counts."""


def learn(
    head: Any, frozen: TargetHead, processes: int, accumulation: int, sampled: bool = False
) -> dict[str, Tensor]:
    """What a step's losses and gradients add up to, dealt as the training loop deals it."""
    taps = tuple(sorted({*head.taps, *head.teacher_taps}))
    plan, features = new_plan(accumulation), MadeTexts(taps, sampled)
    dealers = [Dealer(head, features, plan, rank, processes) for rank in range(processes)]

    @torch.no_grad()
    def count(batch: Batch) -> Tensor:
        divisor: Tensor = head(batch, frozen, count=True)["divisor"]
        return divisor

    def deal(dealer: Dealer, add_up: Any) -> Any:
        parts = plan.parts(STEP, dealer.count)[dealer.rank :: processes]
        return dealer.deal(STEP, iter([dealer.load(texts, STEP) for texts in parts]), count, add_up)

    counted: list[Tensor] = []

    def note(counts: Tensor) -> Tensor:
        counted.append(counts)
        raise _AllCounted

    if dealers[0].counts_batches:
        for dealer in dealers:
            with pytest.raises(_AllCounted):
                next(deal(dealer, note))
    head.zero_grad()
    sums: dict[str, Tensor] = {}
    for dealer in dealers:
        for _, batch, share in deal(dealer, lambda counts: torch.stack(counted).sum(0)):
            torch.manual_seed(STEP)
            losses = head(batch, frozen)
            (losses["total"] * share).backward()
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0) + loss.detach() * share
    return {
        **sums,
        **{name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None},
    }


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The greatest difference, relative to the norm of each loss and gradient."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-6)) for name in one
    )


def difference(
    name: str, settings: dict[str, Any], dealt: list[tuple[int, int]], sampled: bool = False
) -> float:
    """Of a dealt step from a whole one, the greatest."""
    frozen = new_frozen()
    head = new_head(name, settings, frozen)
    whole = learn(head, frozen, 1, 1, sampled)
    assert whole["total"] > 0 and any(
        name not in ("total",) and value.any() for name, value in whole.items()
    )
    return max(apart(whole, learn(head, frozen, *counts, sampled)) for counts in dealt)


@pytest.mark.quick("*-{}")
@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: str(value))
def test_a_step_is_the_same_in_any_parts(name: str, settings: dict[str, Any]) -> None:
    """Every loss that is logged and every gradient, over processes and accumulated parts, with texts unevenly dealt."""
    assert difference(name, settings, DEALT) < 1e-10


@pytest.mark.parametrize(
    ("name", "settings"), [("draft_model", {}), ("dflash", {}), ("medusa", {"divisor": "levels"})]
)
def test_answers_that_are_sampled_within_the_step_count_as_they_are(
    name: str, settings: dict[str, Any]
) -> None:
    """Their lengths are known once all parts are read; by the lengths that the data has, a step would be another."""
    assert difference(name, settings, DEALT, sampled=True) < 1e-10


def own_divisors(patch: pytest.MonkeyPatch) -> None:
    """Each part divides by its own sums and is weighed by its slots."""
    patch.setattr(Dealer, "_divisors_of", lambda dealer, number: None)


def own_counts(patch: pytest.MonkeyPatch) -> None:
    """Nothing is counted before the forward."""
    honest = Dealer.__init__

    def begin(dealer: Dealer, *given: Any) -> None:
        honest(dealer, *given)
        dealer.counts_batches = False
        dealer.divisors_of = lambda number: None  # type: ignore[assignment]

    patch.setattr(Dealer, "__init__", begin)


def mean_over_parts(patch: pytest.MonkeyPatch) -> None:
    """Parts count alike, however much of them is supervised."""
    patch.setattr(Plan, "weights", lambda plan, number, parts: [1 / len(parts)] * len(parts))


def draws_by_place(patch: pytest.MonkeyPatch) -> None:
    """What is drawn follows from a text's place in its part."""
    patch.setattr(Plan, "seeds", lambda plan, number, texts: list(range(len(texts))))


def dropout_by_part(patch: pytest.MonkeyPatch) -> None:
    """One generator drops from all texts."""
    patch.setattr(
        TextDropout, "__call__", lambda drop, rows: nn.functional.dropout(rows, drop.share)
    )


FAULTS: list[tuple[Any, str, dict[str, Any]]] = [
    (own_divisors, "dflash", {}),
    (own_divisors, "dspark", {}),
    (own_divisors, "peagle", {"divisor": "reached"}),
    (own_divisors, "medusa", {"divisor": "levels"}),
    (own_counts, "dflash", {"loss": "tokens", "d_pace": True}),
    (mean_over_parts, "eagle1", {}),
    (draws_by_place, "eagle1", {}),
    (draws_by_place, "dflash", {}),
    (draws_by_place, "peagle", {}),
    (draws_by_place, "spire", {}),
    (draws_by_place, "falcon", {}),
    (dropout_by_part, "falcon", {}),
    (dropout_by_part, "hydra", {"dropout": 0.3}),
]


@pytest.mark.parametrize(
    ("fault", "name", "settings"), FAULTS, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_a_step_that_knows_its_parts_is_seen(
    fault: Any, name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: other divisors, weights, draws."""
    fault(monkeypatch)
    assert difference(name, settings, [(3, 1)]) > 1e-4


def test_lengths_of_the_data_are_seen_where_answers_are_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: parts are weighed by what their answers were before."""
    own_counts(monkeypatch)
    assert difference("draft_model", {}, [(3, 1)], sampled=True) > 1e-4
