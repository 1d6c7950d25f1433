"""A loss knows no chunks: however a step is split over processes and chunks, every method learns the same in fp64."""

# T tokens of a text

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from ranks import MadeFeatures
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

VOCAB = 37
WIDTH = 16
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
)
# length and supervised spans: long and short texts, gaps, one token alone, and one at a text's end
TEXTS = [
    (61, [(9, 30), (33, 60)]),
    (5, [(2, 5)]),
    (24, [(20, 22)]),
    (9, [(2, 3), (4, 5), (6, 9)]),
    (40, [(39, 40)]),
    (17, [(3, 17)]),
    (30, [(12, 13)]),
    (13, [(0, 12)]),
]
# as small as a method allows: a case is two dozen forwards
SMALL: dict[str, dict[str, Any]] = {
    "eagle1": {"noise": 0.1},
    "hass": {"steps": 2},
    "eagle3": {"steps": 3},
    "peagle": {"blocks": 1, "depths": 4},
    "dflash": {"blocks": 1, "slots": 4, "anchors": 6},
    "dflash2": {"blocks": 1, "slots": 4, "anchors": 6, "selector_rank": 4, "selector_top_k": 6},
    # half of the tokens are candidates
    "lilicorr": {
        "blocks": 1,
        "slots": 4,
        "anchors": 6,
        "candidate_topk": 20,
        "hidden_size": 8,
        "num_heads": 2,
        "factor_dim": 6,
    },
    "dspark": {"blocks": 1, "slots": 4, "anchors": 6, "rank": 4},
    "xpress": {"blocks": 1, "slots": 4, "anchors": 6, "rank": 4},
    "spire": {"blocks": 1, "stride": 2, "steps": 3},
    "draft_model": {"layers": 1},
    "falcon": {"dropout": 0.2},
    "hydra": {"levels": 3},
    "medusa": {"levels": 3},
    "mlp_speculator": {"levels": 3},
    "blockwise": {"levels": 3, "inner_dim": 8},
}
WINDOW = {"sinks": 1, "recent": 4}
# switches that change what a loss is divided by, weighted with or drawn from
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle1", {"fc_bias": False, "window": WINDOW, "noise_as_published": True}),
    ("hass", {"top": 0.5, "top_k": 3, "window": WINDOW}),
    ("eagle3", {"draft_vocab": 20, "fc_norm": True, "norm_output": True, "window": WINDOW}),
    ("eagle3", {"loss": "hybrid", "train_lm_head": False}),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}),
    ("peagle", {"draft_vocab": 20, "blocks": 2, "loss": "acceptance"}),
    ("dflash", {"causal": True, "sample_from_anchor": True, "decay": None, "anchors": 512}),
    # weights that follow the head's own probs need a count of all chunks
    ("dflash", {"loss": "tokens", "d_pace": True}),
    ("dflash", {"loss": "tokens", "d_pace": True, "divisor": "reached"}),
    ("dflash2", {"loss": "tokens", "d_pace": True}),
    ("lilicorr", {"d_pace": True, "w_margin": 0.1}),
    ("dspark", {"markov": "rnn"}),
    ("dspark", {"markov": "domino", "gru_size": 4}),
    ("dspark", {"confidence": False, "sample_from_anchor": False}),
    ("xpress", {"sample_from_anchor": True, "rounds": 1, "divisor": "reached"}),
    ("draft_model", {"divergence": "jsd"}),
    ("early_exit_adapter", {"adapter": "linear"}),
    ("mtp", {"hidden_first": True, "loss": "tokens", "decay": 1.0}),
    # what a glance at the answer reads is drawn by the text's seed
    ("falcon", {"k": 3, "levels": 6, "glance_from": 0.9, "glance_to": 0.9}),
    ("medusa", {"weights": "falling", "loss": "tokens", "lm_head": "target"}),
    ("hydra", {"prefix": True, "layers": 2, "dropout": 0.3, "regression": 0.2}),
    ("mlp_speculator", {"tie_weights": True, "scale_input": True}),
    # a level is drawn for each step
    ("blockwise", {"drawn": True, "divisor": "levels"}),
    ("spire", {"window": None, "cross_entropy": 1.0}),
]
for divisor in get_args(Divisor):
    VARIANTS += [(name, {"divisor": divisor}) for name in (*LEVEL_HEADS, "dflash", "dspark")]
VARIANTS += [("peagle", {"divisor": divisor}) for divisor in ("slots", "reached", "levels")]
# processes and accumulated chunks of each; of nine processes some have nothing to read
SPLITS = [(1, 4), (2, 1), (3, 2), (9, 1)]
STEP = 5


@dataclass
class MadeTexts(MadeFeatures):
    """Texts with random states in fp64; of `sampled` ones the answers are shorter than the data says."""

    def __len__(self) -> int:
        return len(TEXTS)

    def mask(self, index: int) -> Tensor:
        """Return [T], the loss mask of a text."""
        length, spans = TEXTS[index]
        mask = torch.zeros(length, dtype=torch.bool)
        # spans may be one token, or the end of a text
        for start, end in spans:
            mask[start:end] = True
        return mask

    def _draw(self, index: int) -> Example:
        generator = torch.Generator().manual_seed(index)
        mask = self.mask(index)
        length = len(mask)
        tokens = torch.randint(VOCAB, (length,), generator=generator)
        features = torch.randn(length, len(self.taps), WIDTH, generator=generator)
        # an answer that was sampled in the step begins later than the data says
        if self.sampled and int(mask.sum()) > 2:
            mask[: int(mask.nonzero()[0]) + 1 + index % 3] = False
        return Example(tokens, mask, features)


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    """What heads make without a dtype, such as the weights of levels, is in fp64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def new_target_head() -> TargetHead:
    """Return a random embedding and LM head."""
    torch.manual_seed(1)
    embedding = nn.Embedding(VOCAB, WIDTH)
    output = nn.Linear(WIDTH, VOCAB, bias=False)
    nn.init.normal_(output.weight, std=0.3)
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def new_head(name: str, settings: dict[str, Any], target_head: TargetHead) -> Any:
    """Return a head that trains, its weights away from where they start."""
    # heads with a draft vocabulary take it from the supervised tokens
    checked = settings_of({"kind": name, **SMALL.get(name, {}), **settings}, "test")
    texts = MadeTexts(())
    torch.manual_seed(2)
    supervised = [texts.supervised_tokens(index) for index in range(len(TEXTS))]
    head = DRAFTERS[name].for_target(checked, CONFIG, target_head, supervised)
    return moved(head.double()).train()


def new_plan(accumulation: int) -> Plan:
    """Return a plan of several epochs whose every step is all texts."""
    settings = TrainSection(
        out="nowhere", batch_size=len(TEXTS), validation=0, epochs=9, accumulation=accumulation
    )
    # the plan counts what a loss can reach, as the training loop does
    masks = [trim_mask(MadeTexts(()).mask(index)) for index in range(len(TEXTS))]
    return Plan([int(mask.sum()) for mask in masks], settings)


class _AllCounted(Exception):
    """Raised where a process would wait for the others' counts."""


def learn(
    head: Any,
    target_head: TargetHead,
    processes: int,
    accumulation: int,
    sampled: bool = False,
) -> dict[str, Tensor]:
    """Return what a step's losses and gradients add up to, split as the training loop splits it.

    Args:
        head: the head, whose gradients are left at its weights.
        target_head: the target's embedding and LM head.
        processes: over how many processes the step is split.
        accumulation: in how many chunks each process reads its share.
        sampled: whether answers are shorter than the data says.
    """
    taps = tuple(sorted({*head.taps, *head.teacher_taps}))
    plan = new_plan(accumulation)
    features = MadeTexts(taps, sampled=sampled)
    dealers = [
        Dealer(head, features, plan, rank=rank, processes=processes) for rank in range(processes)
    ]

    @torch.no_grad()
    def count(batch: Batch) -> Tensor:
        return head(batch, target_head, count=True)["divisor"]

    def deal(dealer: Dealer, add_up: Callable[[Tensor], Tensor]) -> Any:
        chunks = plan.parts(STEP, dealer.part_count)[dealer.rank :: processes]
        batches = iter([dealer.load(texts, STEP) for texts in chunks])
        return dealer.deal(STEP, batches, count, add_up)

    # the processes run one after the other: first each counts, then each learns with the sum of all counts
    counted: list[Tensor] = []

    def note(counts: Tensor) -> Tensor:
        counted.append(counts)
        raise _AllCounted

    if dealers[0].must_count_first:
        for dealer in dealers:
            with pytest.raises(_AllCounted):
                next(deal(dealer, note))
    head.zero_grad()
    sums: dict[str, Tensor] = {}
    for dealer in dealers:
        for _, batch, share in deal(dealer, lambda counts: torch.stack(counted).sum(0)):
            # what a loss draws without a text's seed is the same in every chunk
            torch.manual_seed(STEP)
            losses = head(batch, target_head)
            (losses["total"] * share).backward()
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0) + loss.detach() * share
    for name, weight in head.named_parameters():
        if weight.grad is not None:
            sums[name] = weight.grad.clone()
    return sums


def difference(
    name: str,
    settings: dict[str, Any],
    splits: list[tuple[int, int]],
    sampled: bool = False,
) -> float:
    """Return how far split steps are from a whole one: the worst loss or gradient, relative to its norm.

    Args:
        name: a method.
        settings: settings that differ from its small ones.
        splits: processes and chunks of each split.
        sampled: whether answers are shorter than the data says.
    """
    target_head = new_target_head()
    head = new_head(name, settings, target_head)
    whole = learn(head, target_head, 1, 1, sampled=sampled)
    assert whole["total"] > 0
    # the norm of a loss or gradient may be tiny, but not its error
    errors = []
    for processes, accumulation in splits:
        split = learn(head, target_head, processes, accumulation, sampled=sampled)
        assert split.keys() == whole.keys()
        for key, value in whole.items():
            errors.append(float((split[key] - value).norm() / value.norm().clamp(min=1e-6)))
    return max(errors)


@pytest.mark.quick("*-{}")
@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in TRAINED), *VARIANTS], ids=str
)
def test_a_step_is_the_same_in_any_parts(name: str, settings: dict[str, Any]) -> None:
    """Every loss that is logged and every gradient is the same over processes and accumulated chunks."""
    assert difference(name, settings, SPLITS) < 1e-10


@pytest.mark.parametrize(
    ("name", "settings"), [("draft_model", {}), ("medusa", {"divisor": "levels"})]
)
def test_answers_that_are_sampled_within_the_step_count_as_they_are(
    name: str, settings: dict[str, Any]
) -> None:
    """Their lengths are known once all chunks are read; with the data's lengths the step would be another."""
    assert difference(name, settings, SPLITS, sampled=True) < 1e-10


def own_divisors(patch: pytest.MonkeyPatch) -> None:
    """Each chunk divides by its own sums and is weighed by its positions."""
    patch.setattr(Dealer, "_divisors_of", lambda dealer, step: None)


def own_counts(patch: pytest.MonkeyPatch) -> None:
    """Nothing is counted before the forward."""
    honest = Dealer.__init__

    def begin(dealer: Dealer, *args: Any, **options: Any) -> None:
        honest(dealer, *args, **options)
        dealer.must_count_first = False
        dealer.divisors_of = lambda step: None  # type: ignore[assignment]

    patch.setattr(Dealer, "__init__", begin)


def mean_over_parts(patch: pytest.MonkeyPatch) -> None:
    """Chunks count alike, however much of them is supervised."""
    patch.setattr(Plan, "weights", lambda plan, step, chunks: [1 / len(chunks)] * len(chunks))


def draws_by_place(patch: pytest.MonkeyPatch) -> None:
    """Random numbers follow from a text's index in its chunk."""
    patch.setattr(Plan, "seeds", lambda plan, step, texts: list(range(len(texts))))


def dropout_by_part(patch: pytest.MonkeyPatch) -> None:
    """One generator drops from all texts."""

    def drop_from_all(drop: TextDropout, rows: Tensor) -> Tensor:
        return nn.functional.dropout(rows, drop.share)

    patch.setattr(TextDropout, "__call__", drop_from_all)


# each fault where a method of its own reads what is wrong: noise, anchors, masks, blocks
FAULTS: list[tuple[Any, str, dict[str, Any]]] = [
    (own_divisors, "dflash", {}),
    (own_divisors, "medusa", {"divisor": "levels"}),
    (own_counts, "dflash", {"loss": "tokens", "d_pace": True}),
    (own_counts, "lilicorr", {}),
    (mean_over_parts, "eagle1", {}),
    (draws_by_place, "eagle1", {}),
    (draws_by_place, "peagle", {}),
    (draws_by_place, "falcon", {}),
    (dropout_by_part, "hydra", {"dropout": 0.3}),
]


@pytest.mark.parametrize(
    ("fault", "name", "settings"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_step_that_knows_its_parts_is_seen(
    fault: Any,
    name: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted faults: other divisors, weights and random numbers."""
    # one split over three processes is enough to tell
    fault(monkeypatch)
    assert difference(name, settings, [(3, 1)]) > 1e-4


def test_lengths_of_the_data_are_seen_where_answers_are_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: chunks are weighed by what their answers were before."""
    own_counts(monkeypatch)
    assert difference("draft_model", {}, [(3, 1)], sampled=True) > 1e-4
