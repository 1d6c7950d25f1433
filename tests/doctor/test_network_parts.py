"""Faults in the parts that only some networks have, in their files and in what is borrowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle import Target
from eagle.core.examples import Batch
from eagle.doctor.agreement import Agreement
from eagle.doctor.examine import borrow_embedding, weigh_findings
from eagle.doctor.probes import Probe, list_orders, list_probes, list_removals
from eagle.doctor.texts import answer_prompts
from eagle.doctor.verdict import Diagnosis, Effect, Gain, decide
from eagle.doctor.wiring import Wiring
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_pretrained
from eagle.formats.reading.head_folder import Finding
from tests.families import build, random_tokens

KINDS: dict[str, dict[str, Any]] = {
    "peagle": {"kind": "peagle", "blocks": 2, "depths": 3, "taps": (1, 2, 3)},
    "dflash": {"kind": "dflash", "blocks": 1, "slots": 4, "taps": (0, 1, 2, 3), "mask_token": 7},
    "dspark": {"kind": "dspark", "blocks": 1, "slots": 4, "rank": 8, "taps": (1, 2)},
    "mtp": {"kind": "mtp", "start": "random"},
    "medusa": {"kind": "medusa", "levels": 3},
    "eagle3": {"kind": "eagle3", "taps": (1, 2, 3), "fc_norm": True},
}


@pytest.fixture(scope="module")
def target() -> Target:
    """A small llama."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def texts(target: Target) -> Batch:
    """An answer to each of two prompts."""
    return answer_prompts(target, [random_tokens(6, seed) for seed in range(2)], 10, (0.0,))


def new_head(kind: str, target: Target) -> Any:
    """A random head, of whose parts no two are alike."""
    torch.manual_seed(0)
    settings = settings_of(KINDS[kind], "here")
    head = DRAFTERS[settings.kind].for_target(settings, target.config, target.head)
    for part in head.parameters():
        part.data.add_(0.2 * torch.randn(part.shape))
    return head.eval()


def turn_blocks(name: str, shift: int) -> Callable[[Any], None]:
    """An edit that turns round the blocks of columns of a tensor."""

    def edit(head: Any) -> None:
        part = head.get_parameter(name)
        blocks = part.data.chunk(len(head.taps), dim=-1)
        part.data = torch.cat([*blocks[shift:], *blocks[:shift]], dim=-1)

    return edit


def exchange(first: str, second: str) -> Callable[[Any], None]:
    """An edit that exchanges two tensors."""

    def edit(head: Any) -> None:
        one, other = (head.get_parameter(name) for name in (first, second))
        one.data, other.data = other.data, one.data

    return edit


def set_mask(token: int) -> Callable[[Any], None]:
    """An edit of the mask token."""

    def edit(head: Any) -> None:
        head.settings = head.settings.model_copy(update={"mask_token": token})

    return edit


def swap_halves(head: Any) -> None:
    """Put the state before the embedding."""
    head.eh_proj.weight.data = torch.cat(head.eh_proj.weight.data.chunk(2, dim=1)[::-1], dim=1)


def swap_query_rows(head: Any) -> None:
    """Exchange a key's rows with as many of the queries."""
    attention = head.layers[0].self_attn
    count = min(len(attention.q_proj.weight) // 2, len(attention.k_proj.weight))
    kept = attention.q_proj.weight.data[:count].clone()
    attention.q_proj.weight.data[:count] = attention.k_proj.weight.data[:count]
    attention.k_proj.weight.data[:count] = kept


BROKEN: list[tuple[str, Callable[[Any], None], str]] = [
    ("peagle", turn_blocks("fc.weight", 1), "the blocks of fc stand in the order"),
    ("peagle", turn_blocks("mask_hidden", 1), ""),
    ("peagle", set_mask(5), "mask_token is 5, expected "),
    ("dflash", turn_blocks("fc.weight", 3), "the blocks of fc stand in the order [3, 0, 1, 2]"),
    ("dflash", set_mask(3), ""),
    (
        "dspark",
        exchange("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        "markov_head.markov_w1 and",
    ),
    ("dspark", set_mask(5), "mask_token is 5, expected "),
    ("mtp", swap_halves, "eh_proj takes [state; embedding], expected [embedding; state]"),
    ("mtp", swap_query_rows, "rows 0 to "),
    ("eagle3", swap_query_rows, "rows 0 to "),
    ("medusa", exchange("blocks.0.0.weight", "blocks.2.0.weight"), ""),
]


@torch.no_grad()
def guess(wiring: Wiring, texts: Batch) -> Tensor:
    """The logits of all levels."""
    return torch.stack([logits(states) for states, logits in wiring.draft_levels(texts, 3)])


@pytest.mark.parametrize(("kind", "edit", "named"), BROKEN)
def test_a_part_is_asked_about(
    kind: str, edit: Callable[[Any], None], named: str, target: Target, texts: Batch
) -> None:
    """One probe, and the first of its kind, gives the whole head's logits back; without a name no probe does."""
    head = new_head(kind, target)
    broken = copy.deepcopy(head)
    edit(broken)
    whole, wiring = guess(Wiring(head, target.head), texts), Wiring(broken, target.head)
    assert not torch.allclose(guess(wiring, texts), whole, atol=1e-4)
    probes = list_probes(wiring, target)
    undone = [
        one.fault
        for one in probes
        if torch.allclose(guess(one.change(wiring), texts), whole, atol=1e-5)
    ]
    assert len({probe.fault for probe in probes}) == len(probes)
    assert bool(undone) == bool(named) and all(fault.startswith(named) for fault in undone[:1])


def test_layer_ids_in_another_order_are_undone_with_what_else_is_by_tap(
    target: Target, texts: Batch
) -> None:
    """Norms of taps stay where they are: another order of fc alone would not do."""
    head = new_head("eagle3", target)
    whole, broken = guess(Wiring(head, target.head), texts), copy.deepcopy(head)
    broken.taps = (3, 1, 2)
    wiring = Wiring(broken, target.head)
    undone = [
        probe.fault
        for probe in list_probes(wiring, target)
        if torch.allclose(guess(probe.change(wiring), texts), whole, atol=1e-5)
    ]
    assert undone == ["layer ids [3, 1, 2] are out of order: [1, 2, 3] was meant"]


def test_orders_hold_all_that_conversions_do() -> None:
    """Of three taps all; of five each exchange of two, each turn, and the reverse, once."""
    assert len(list_orders(3)) == 5
    five = list_orders(5)
    assert len(five) == len(set(five)) == 10 + 4 + 1
    assert {(4, 3, 2, 1, 0), (1, 2, 3, 4, 0), (4, 0, 1, 2, 3), (0, 3, 2, 1, 4)} <= set(five)


@torch.no_grad()
def test_a_removed_part_adds_nothing(target: Target, texts: Batch) -> None:
    """As if the block had no MLP, or no attention."""
    head = new_head("mtp", target)
    wiring = Wiring(head, target.head)
    removals = {
        probe.fault.split(" of ")[0]: probe.change(wiring) for probe in list_removals(wiring)
    }
    assert set(removals) == {"the MLP", "the attention"}
    bare = copy.deepcopy(head)
    bare.layers[0].mlp.forward = lambda hidden: torch.zeros_like(hidden)
    bare.layers[0].mlp.gate_proj.weight.data.zero_()
    assert torch.allclose(
        guess(removals["the MLP"], texts), guess(Wiring(bare, target.head), texts), atol=1e-6
    )


# -- the verdict ------------------------------------------------------------------------------------------------------


def figures_of(rate: float) -> Agreement:
    """A head of two levels, right so often."""
    chance = torch.rand(2, 400, generator=torch.Generator().manual_seed(2))
    there, owner = torch.ones(2, 400, dtype=torch.bool), torch.arange(400) // 20
    overlap = torch.full((2, 400), rate, dtype=torch.double)
    return Agreement(overlap, chance < rate, there, there[0], owner, overlap)


def effect(kind: str, before: float, after: float) -> Effect:
    """A change that led from one rate to another."""
    return Effect(Probe(kind, kind, lambda wiring: wiring), figures_of(before), figures_of(after))


def test_what_inspect_calls_fatal_is_in_the_verdict() -> None:
    """A wrong theta, unless the target's own is worse; files of another target only where it agrees little."""
    theta = Finding("rope_theta is 100, the target's is 10000")
    other = Finding("3 of 9 rows of embed_tokens differ from the target's")
    assert weigh_findings([theta], [effect("rope", 0.6, 0.62)])[0] == [theta.what]
    stands, refuted = weigh_findings([theta], [effect("rope", 0.7, 0.3)])
    assert not stands and "with the target's it drafts worse" in refuted[0]
    healthy = figures_of(0.7)
    assert decide(healthy, [], [theta.what], 0.1) == f"broken: {theta.what}"
    assert decide(healthy, [], [other.what], 0.1).startswith("healthy")
    assert decide(figures_of(0.3), [], [other.what], 0.1).startswith("made for another target")


def test_a_part_that_does_no_good_is_a_fault_of_a_head_that_can_draft() -> None:
    """Dropping it costs a healthy head some of its drafts."""
    assert effect("ablation", 0.6, 0.6).is_idle and effect("ablation", 0.6, 0.62).is_idle
    assert not effect("ablation", 0.6, 0.5).is_idle and not effect("ablation", 0.2, 0.2).is_idle


def test_a_cause_is_named_only_where_undoing_it_helps() -> None:
    """A part may be idle because of a fault before it: such a head is broken, and the report says no more."""
    idle, cured = effect("ablation", 0.6, 0.6), effect("layer ids", 0.6, 0.7)
    figures = figures_of(0.6)
    assert decide(figures, [idle], [], 0.1).startswith(
        f"broken, cause not found: {idle.probe.fault}; level 1 names"
    )
    assert decide(figures, [cured], [], 0.1) == f"broken: {cured.probe.fault}"
    assert decide(figures, [idle], ["fc is cut"], 0.1) == f"broken: {idle.probe.fault}; fc is cut"
    told = str(Diagnosis("broken: x", (cured, idle)))
    assert told.index("what raised acceptance") < told.index("what was left out and cost nothing")
    assert "what raised" not in str(Diagnosis("broken: x", (idle,)))


@pytest.mark.parametrize(
    ("drawn", "greedy", "sure"),
    [
        (
            Gain(2.3, 3.1, 0.04),
            Gain(3.1, 3.22, 0.07),
            True,
        ),  # two thirds more drawn drafts, as swapped projections cost
        (Gain(2.3, 2.5, 0.01), Gain(3.1, 3.22, 0.07), False),  # what flatter probs may bring
        (Gain(2.3, 3.1, 0.04), Gain(3.1, 3.1, 0.07), False),  # probs alone
        (Gain(2.3, 3.1, 0.04), Gain(3.1, 3.12, 0.01), False),  # too little in greedy drafts
        (Gain(2.3, 2.5, 0.01), Gain(3.1, 3.22, 0.04), True),  # both, as before
    ],
)
def test_a_large_gain_in_drawn_drafts_needs_less_of_greedy_ones(
    drawn: Gain, greedy: Gain, sure: bool
) -> None:
    """Greedy drafts of a head that is sure of its tokens hide a fault that halves its drawn ones."""
    change = effect("projections", 0.8, 0.85)
    change.__dict__["sampled"], change.__dict__["greedy"] = drawn, greedy
    assert change.is_sure == sure


def test_the_list_says_what_its_heading_says() -> None:
    """Changes that help a little are no list of which none helps."""
    assert "of which none helps" in str(Diagnosis("healthy: x", tried=(effect("norms", 0.6, 0.5),)))
    helps = Effect(Probe("a", "a", lambda wiring: wiring), figures_of(0.6), figures_of(0.6))
    helps.__dict__["sampled"], helps.__dict__["greedy"] = (
        Gain(2.0, 2.02, 0.002),
        Gain(2.0, 2.01, 0.01),
    )
    told = str(Diagnosis("healthy: x", tried=(helps,)))
    assert (
        "of which none helps" not in told and "1 help by up to 1.0% of the drafted tokens" in told
    )
    # more than what makes a fault, and uncertain in greedy drafts
    helps.__dict__["sampled"], helps.__dict__["greedy"] = (
        Gain(2.0, 2.05, 0.002),
        Gain(2.0, 2.04, 0.04),
    )
    told = str(Diagnosis("healthy: x", tried=(helps,)))
    assert (
        "1 help by up to 4.0% of the drafted tokens, too little or too uncertain to be a fault"
        in told
    )


# -- the folder's own embedding ---------------------------------------------------------------------------------------


def test_the_embedding_of_the_folder_is_the_one_that_is_examined(
    target: Target, texts: Batch, tmp_path: Path
) -> None:
    """Where it is the target's nothing is changed; another one is a fault that is named."""
    head = new_head("eagle3", target)
    save_pretrained(head, tmp_path)
    assert borrow_embedding(tmp_path, target) is target.head
    rows = target.head.embedding.weight.detach().clone()
    for scale, is_own in ((1.0, False), (2.0, True)):
        tensors = load_file(tmp_path / "model.safetensors")
        save_file({**tensors, "embed_tokens.weight": rows * scale}, tmp_path / "model.safetensors")
        borrowed = borrow_embedding(tmp_path, target)
        assert (borrowed is not target.head) == is_own
    assert torch.equal(borrowed.embed(torch.tensor([3])), 2 * rows[3:4])
    wiring = Wiring(head, borrowed)
    (probe,) = (probe for probe in list_probes(wiring, target) if probe.kind == "embedding")
    assert torch.equal(guess(probe.change(wiring), texts), guess(Wiring(head, target.head), texts))
