"""Single faults of every kind of head: the probe that undoes each, and how effects become a verdict."""

# K levels, S slots of all sequences

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
from eagle.doctor.examine import borrow_embedding, weigh_findings
from eagle.doctor.probes import Probe, list_orders, list_probes, list_removals
from eagle.doctor.verdict import Diagnosis, Effect, Gain, decide
from eagle.doctor.wiring import Wiring
from eagle.formats.checkpoint import save_pretrained
from eagle.formats.reading.head_folder import Finding
from tests.doctor.small_heads import answer_random, make_agreement, make_head

SECTIONS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {
        "kind": "eagle3",
        "taps": (1, 2, 3),
        "fc_norm": True,
    },
    "eagle3.1": {"kind": "eagle3", "fc_norm": True, "norm_output": True, "draft_vocab": 40},
    "peagle": {
        "kind": "peagle",
        "blocks": 2,
        "depths": 3,
        "taps": (1, 2, 3),
    },
    "dflash": {
        "kind": "dflash",
        "blocks": 1,
        "slots": 4,
        "taps": (0, 1, 2, 3),
        "mask_token": 7,
    },
    "dspark": {
        "kind": "dspark",
        "blocks": 1,
        "slots": 4,
        "rank": 8,
        "taps": (1, 2),
    },
    "xpress": {
        "kind": "xpress",
        "blocks": 1,
        "slots": 4,
        "rank": 8,
        "taps": (1, 2),
    },
    "dflash2": {
        "kind": "dflash2",
        "blocks": 1,
        "slots": 4,
        "selector_rank": 8,
        "taps": (1, 2),
    },
    "lilicorr": {
        "kind": "lilicorr",
        "blocks": 1,
        "slots": 4,
        "hidden_size": 16,
        "factor_dim": 16,
        "taps": (1, 2),
    },
    "mtp": {"kind": "mtp", "start": "random"},
    "medusa": {"kind": "medusa", "levels": 3},
}
# changes a head of this target in place
Edit = Callable[[Any, Target], None]


@pytest.fixture(scope="module")
def texts(target: Target) -> Batch:
    """Return an answer to each of two prompts."""
    return answer_random(2, target, 10, (0.0,))


def random_head(name: str, target: Target, texts: Batch) -> Any:
    """Return a head of which no two tensors are alike."""
    head = make_head(SECTIONS[name], target, texts)
    for weight in head.parameters():
        # new norms are all ones, and new biases zero
        weight.data.add_(0.2 * torch.randn(weight.shape))
    return head.eval()


@torch.no_grad()
def compute_logits(wiring: Wiring, texts: Batch) -> Tensor:
    """Return the logits of three levels."""
    return torch.stack([logits(states) for states, logits in wiring.draft_levels(texts, 3)])


# -- the probe that undoes a fault ------------------------------------------------------------------------------------


def rotate_columns(name: str, shift: int) -> Edit:
    """Return an edit that puts the blocks of columns of a tensor, one for each tap, in another order."""

    def edit(head: Any, target: Target) -> None:
        weight = head.get_parameter(name)
        blocks = weight.data.chunk(len(head.taps), dim=-1)
        weight.data = torch.cat(
            [*blocks[shift:], *blocks[:shift]],
            dim=-1,
        )

    return edit


def swap(first: str, second: str) -> Edit:
    """Return an edit that swaps two tensors."""

    def edit(head: Any, target: Target) -> None:
        one = head.get_parameter(first)
        other = head.get_parameter(second)
        one.data, other.data = other.data, one.data

    return edit


def swap_halves(name: str) -> Edit:
    """Return an edit that swaps the columns for the embedding with those for the state."""

    def edit(head: Any, target: Target) -> None:
        weight = head.get_parameter(name)
        weight.data = torch.cat(
            weight.data.chunk(2, dim=1)[::-1],
            dim=1,
        )

    return edit


def swap_query_rows(head: Any, target: Target) -> None:
    """Swap a key's rows with as many of the queries."""
    attention = head.layers[0].self_attn
    query = attention.q_proj.weight.data
    key = attention.k_proj.weight.data
    count = min(len(query) // 2, len(key))
    rows = query[:count].clone()
    query[:count] = key[:count]
    key[:count] = rows


def set_mask(token: int) -> Edit:
    """Return an edit of the mask token."""

    def edit(head: Any, target: Target) -> None:
        head.settings = head.settings.model_copy(update={"mask_token": token})

    return edit


def set_taps(*taps: int) -> Edit:
    """Return an edit of the layer ids."""

    def edit(head: Any, target: Target) -> None:
        head.taps = taps

    return edit


def by_probe(fault: str) -> Edit:
    """Return an edit that is a probe's own change, which the opposite probe undoes."""

    def edit(head: Any, target: Target) -> None:
        probe = find_probe(head, target, fault)
        head.__dict__.update(probe.change(Wiring(head, target.head)).head.__dict__)

    return edit


def find_probe(head: Any, target: Target, fault: str) -> Probe:
    """Return the only probe whose words begin so."""
    probes = list_probes(Wiring(head, target.head), target)
    (probe,) = (probe for probe in probes if probe.fault.startswith(fault))
    return probe


# a head, a fault, and the beginning of the words that name it; nothing names what does not tell right from wrong
FAULTS: list[tuple[str, Edit, str]] = [
    ("eagle1", swap_halves("fc.weight"), "fc takes [state; embedding]"),
    (
        "eagle1",
        swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
        "mlp.gate_proj and mlp.up_proj",
    ),
    (
        "eagle1",
        by_probe("trained on the state in front of"),
        "trained on the state behind the final norm",
    ),
    ("eagle3", swap_query_rows, "rows 0 to "),
    # norms of taps stay where they are: another order of fc alone would not do
    ("eagle3", set_taps(3, 1, 2), "layer ids [3, 1, 2] are out of order: [1, 2, 3] was meant"),
    ("eagle3", by_probe("q, k and v take [state; embedding]"), "q, k and v take [state"),
    ("eagle3", by_probe("norm_before_residual is False"), "norm_before_residual is True"),
    (
        "eagle3",
        by_probe("rope theta is 10000 (default), expected ten times higher"),
        "rope theta is 100000",
    ),
    ("eagle3", by_probe("rows of q and k are not in halves"), "rows of q and k are not interl"),
    (
        "eagle3",
        swap("layers.0.post_attention_layernorm.weight", "norm.weight"),
        "layers.0.post_attention_layernorm and norm",
    ),
    ("eagle3.1", by_probe("norm_output is True"), "norm_output is False, expected True"),
    ("peagle", rotate_columns("fc.weight", 1), "the blocks of fc stand in the order"),
    ("peagle", set_mask(5), "mask_token is 5, expected "),
    ("dflash", rotate_columns("fc.weight", 3), "the blocks of fc stand in the order [3, 0, 1, 2]"),
    (
        "dspark",
        swap("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        "markov_head.markov_w1 and",
    ),
    (
        "xpress",
        swap("refiner_head.down_h.weight", "refiner_head.down_g.weight"),
        "refiner_head.down_h and",
    ),
    (
        "dflash2",
        swap("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"),
        "candidate_selector.predecessor_codebook and",
    ),
    ("mtp", swap_halves("eh_proj.weight"), "eh_proj takes [state; embedding], expected"),
    ("medusa", swap("blocks.0.0.weight", "blocks.2.0.weight"), ""),
]


def test_the_base_of_a_config_without_one_is_tried(
    target: Target, texts: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was trained with 10,000 may state the target's base, as ModelOpt's exports do."""
    head = random_head("dflash", target, texts)
    whole = compute_logits(Wiring(head, target.head), texts)
    theirs = {"rope_type": "default", "rope_theta": 1e6}
    # not the dict itself, which the head shares
    monkeypatch.setattr(target.config, "rope_parameters", theirs)
    by_probe("rope theta is 10000 (default), expected that of the target")(head, target)
    wiring = Wiring(head, target.head)
    # else the probe would have nothing to undo
    assert not torch.allclose(compute_logits(wiring, texts), whole, atol=1e-4)
    probe = find_probe(head, target, "rope theta is 1e+06 (default), expected that of a config")

    assert torch.equal(compute_logits(probe.change(wiring), texts), whole)


@pytest.mark.parametrize(("name", "edit", "fault"), FAULTS)
def test_a_fault_is_undone_by_the_probe_that_names_it(
    name: str,
    edit: Edit,
    fault: str,
    target: Target,
    texts: Batch,
) -> None:
    """One probe gives exactly the whole head's logits back, and no other has its words."""
    head = random_head(name, target, texts)
    broken = copy.deepcopy(head)
    edit(broken, target)
    whole = compute_logits(Wiring(head, target.head), texts)
    wiring = Wiring(broken, target.head)
    # else the fault would do nothing
    assert not torch.allclose(compute_logits(wiring, texts), whole, atol=1e-4)
    probes = list_probes(wiring, target)
    assert len({probe.fault for probe in probes}) == len(probes)
    undoing = []
    for probe in probes:
        if torch.allclose(
            compute_logits(probe.change(wiring), texts),
            whole,
            atol=1e-5,
        ):
            undoing.append(probe.fault)
    if fault:
        assert undoing
        assert undoing[0].startswith(fault)
    else:
        assert undoing == []


def test_orders_contain_all_that_conversions_make() -> None:
    """Of three taps all; of five each exchange of two, each rotation, and the reverse, once."""
    assert len(list_orders(3)) == 5
    five = list_orders(5)
    assert len(five) == len(set(five)) == 10 + 4 + 1
    assert {(4, 3, 2, 1, 0), (1, 2, 3, 4, 0), (4, 0, 1, 2, 3), (0, 3, 2, 1, 4)} <= set(five)


def test_a_removed_branch_adds_nothing(target: Target, texts: Batch) -> None:
    """As if the block had no MLP."""
    head = random_head("mtp", target, texts)
    wiring = Wiring(head, target.head)
    removals = {probe.fault.split(" of ")[0]: probe for probe in list_removals(wiring)}
    assert set(removals) == {"the MLP", "the attention"}
    bare = copy.deepcopy(head)
    bare.layers[0].mlp.down_proj.weight.data.zero_()
    expected = compute_logits(Wiring(bare, target.head), texts)
    logits = compute_logits(removals["the MLP"].change(wiring), texts)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "is_own"),
    [(1.0, False), (2.0, True)],
)
def test_the_embedding_of_the_folder_is_examined(
    scale: float,
    is_own: bool,
    target: Target,
    texts: Batch,
    tmp_path: Path,
) -> None:
    """Another one than the target's is a fault that is named."""
    head = random_head("eagle3", target, texts)
    save_pretrained(head, tmp_path)
    assert borrow_embedding(tmp_path, target) is target.head
    file = tmp_path / "model.safetensors"
    # scale 1 is the target's own embedding, stored again
    rows = scale * target.head.embedding.weight.detach()
    save_file({**load_file(file), "embed_tokens.weight": rows}, file)
    borrowed = borrow_embedding(tmp_path, target)
    assert (borrowed is not target.head) == is_own
    assert borrowed.embed(torch.tensor([3])).equal(rows[3:4])
    wiring = Wiring(head, borrowed)
    probes = [probe for probe in list_probes(wiring, target) if probe.kind == "embedding"]
    assert len(probes) == is_own
    expected = compute_logits(Wiring(head, target.head), texts)
    for probe in probes:
        assert compute_logits(probe.change(wiring), texts).equal(expected)


# -- the verdict ------------------------------------------------------------------------------------------------------


def make_effect(
    kind: str,
    before: float,
    after: float,
    **gains: Gain,
) -> Effect:
    """Return the effect of a change from one rate to another, or with these gains."""
    probe = Probe(kind, kind, lambda wiring: wiring)
    effect = Effect(
        probe, make_agreement(before, before, before), make_agreement(after, after, after)
    )
    # in place of what would be computed once
    effect.__dict__.update(gains)
    return effect


def test_what_inspect_calls_fatal_is_in_the_verdict() -> None:
    """A wrong theta, unless the target's is worse; files of another target only where it agrees little."""
    theta = Finding("rope_theta is 100, the target's is 10000")
    standing, _ = weigh_findings(
        [theta],
        [make_effect("rope", 0.6, 0.62)],
    )
    assert standing == [theta.what]
    standing, refuted = weigh_findings(
        [theta],
        [make_effect("rope", 0.7, 0.3)],
    )
    assert not standing
    assert "with the target's it drafts worse" in refuted[0]
    healthy = make_agreement(0.7, 0.7, 0.7)
    other = "3 of 9 rows of embed_tokens differ from the target's"
    assert decide(healthy, [], [theta.what], 0.1) == f"broken: {theta.what}"
    assert decide(healthy, [], [other], 0.1).startswith("healthy")
    assert decide(make_agreement(0.3, 0.3, 0.3), [], [other], 0.1).startswith(
        "made for another target"
    )


@pytest.mark.parametrize(
    ("before", "after", "is_idle"),
    [
        (0.6, 0.6, True),
        (0.6, 0.62, True),
        (0.6, 0.5, False),
        (0.2, 0.2, False),
    ],
)
def test_a_branch_that_does_no_good_is_a_fault(before: float, after: float, is_idle: bool) -> None:
    """In a head that can draft: removing it costs a healthy one some of its drafts."""
    assert make_effect("ablation", before, after).is_idle == is_idle


def test_a_cause_is_named_only_where_undoing_it_helps() -> None:
    """A branch may be idle because of another fault: such a head is broken, and the report says no more."""
    idle = make_effect("ablation", 0.6, 0.6)
    cured = make_effect("layer ids", 0.6, 0.7)
    figures = make_agreement(0.6, 0.6, 0.6)
    unknown = decide(figures, [idle], [], 0.1)
    assert unknown.startswith("broken, cause not found: ablation; level 1 names")
    assert decide(figures, [cured], [], 0.1) == "broken: layer ids"
    assert decide(figures, [idle], ["fc is cut"], 0.1) == "broken: ablation; fc is cut"
    report = str(Diagnosis("broken: x", (cured, idle)))
    helped = report.index("what raised acceptance")
    assert helped < report.index("what was left out and cost nothing")
    assert "what raised" not in str(Diagnosis("broken: x", (idle,)))


@pytest.mark.parametrize(
    ("sampled", "greedy", "is_sure"),
    [
        # two thirds more sampled drafts, as swapped projections cost
        (
            Gain(2.3, 3.1, 0.04),
            Gain(3.1, 3.22, 0.07),
            True,
        ),
        # what flatter probabilities may bring
        (
            Gain(2.3, 2.5, 0.01),
            Gain(3.1, 3.22, 0.07),
            False,
        ),
        # probabilities alone
        (
            Gain(2.3, 3.1, 0.04),
            Gain(3.1, 3.1, 0.07),
            False,
        ),
        # too little in greedy drafts
        (
            Gain(2.3, 3.1, 0.04),
            Gain(3.1, 3.12, 0.01),
            False,
        ),
        (
            Gain(2.3, 2.5, 0.01),
            Gain(3.1, 3.22, 0.04),
            True,
        ),
    ],
)
def test_a_large_gain_in_sampled_drafts_needs_less_of_greedy_ones(
    sampled: Gain,
    greedy: Gain,
    is_sure: bool,
) -> None:
    """Greedy drafts of a head that is sure of its tokens hide a fault that halves its sampled ones."""
    effect = make_effect("projections", 0.8, 0.85, sampled=sampled, greedy=greedy)
    assert effect.is_sure == is_sure


@pytest.mark.parametrize(
    ("sampled", "greedy", "heading"),
    [
        (
            Gain(2.0, 1.9, 0.01),
            Gain(2.0, 1.9, 0.01),
            "of which none helps",
        ),
        (
            Gain(2.0, 2.02, 0.002),
            Gain(2.0, 2.01, 0.01),
            "1 help by up to 1.0%",
        ),
        # more than what makes a fault, and uncertain in greedy drafts
        (
            Gain(2.0, 2.05, 0.002),
            Gain(2.0, 2.04, 0.04),
            "1 help by up to 4.0%",
        ),
    ],
)
def test_the_heading_says_what_its_list_shows(sampled: Gain, greedy: Gain, heading: str) -> None:
    """Changes that help a little are not a list of which none helps."""
    effect = make_effect("norms", 0.6, 0.6, sampled=sampled, greedy=greedy)
    assert heading in str(Diagnosis("healthy: x", tried=(effect,)))
