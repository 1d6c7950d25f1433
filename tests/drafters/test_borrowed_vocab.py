"""Heads that borrow the target's LM head may draft a part of its vocabulary: FR-Spec, without training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.drafter import TrainableDrafter
from eagle.core.tree import chain_paths
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.reduced_vocab import save_draft_vocab
from eagle.formats.checkpoint import DRAFT_VOCAB, load_head, restrict_drafts, save_pretrained

# one head for each class that borrows its logits
BORROWING: dict[str, dict[str, Any]] = {
    "eagle1": {},
    "hass": {},
    "mtp": {},
    "dflash": {"slots": 4, "blocks": 1},
}
SAMPLINGS = {
    "greedy": (Sampling(), None),
    "noise": (Sampling(0.8), "noise"),
    "sampled": (Sampling(0.8), "sampled"),
}


def make_head(kind: str, target: Target, **settings: Any) -> TrainableDrafter:
    """Return an untrained head of this kind."""
    torch.manual_seed(0)
    method = DRAFTERS[kind]
    parsed = settings_of({"kind": kind, **settings}, "recipe")
    extra = {}
    if method.reads.weights:
        extra["weights"] = target.tensor
    return method.for_target(parsed, target.config, target.head, **extra)


@pytest.fixture(scope="module")
def vocab_file(mixing_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft vocabulary of every third token."""
    counts = torch.zeros(mixing_target.vocab_size, dtype=torch.long)
    counts[::3] = 1
    path = tmp_path_factory.mktemp("vocab") / "vocab.safetensors"
    save_draft_vocab(path, counts, size=int(counts.sum()), identity={})
    return path


@pytest.fixture(params=BORROWING, scope="module")
def head_folder(
    request: pytest.FixtureRequest,
    mixing_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """A saved head of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    head = make_head(request.param, mixing_target, **BORROWING[request.param])
    save_pretrained(head, folder)
    yield folder


def drafted_tokens(trace: Any) -> set[int]:
    """Return all tokens that were drafted after the roots."""
    tokens: set[int] = set()
    for cycle in trace.cycles:
        tokens.update(cycle.tree.tokens[1:].tolist())
    return tokens


@pytest.mark.parametrize("way", SAMPLINGS)
def test_drafts_are_of_the_vocabulary_and_output_is_lossless(
    way: str,
    head_folder: Path,
    mixing_target: Target,
    vocab_file: Path,
) -> None:
    """Greedy and with noise by position, plain decoding gives the same tokens; sampled drafts have a law of theirs."""
    sampling, draw = SAMPLINGS[way]
    budget = Budget(8, 3, 3)
    # sampled drafts need a fixed shape
    if draw == "sampled":
        budget = Budget.fixed(chain_paths(3), draw)
    drafter = load_drafter(head_folder, mixing_target, draft_vocab=str(vocab_file))
    prompt = [5, 6, 7, 5, 6]
    options = {"sampling": sampling, "max_new_tokens": 24, "stop": []}
    trace = generate(mixing_target, drafter, prompt, budget=budget, **options)
    allowed = set(range(0, mixing_target.vocab_size, 3))
    drafted = drafted_tokens(trace)
    assert drafted
    assert drafted <= allowed
    if draw != "sampled":
        plain = generate(
            mixing_target,
            load_drafter("none", mixing_target),
            prompt,
            **options,
        )
        assert trace.tokens == plain.tokens


def test_logits_are_those_of_the_whole_head(
    head_folder: Path,
    mixing_target: Target,
    vocab_file: Path,
) -> None:
    """A narrowed head computes the same numbers, of fewer tokens."""
    whole = load_drafter(head_folder, mixing_target)
    narrow = load_drafter(head_folder, mixing_target, draft_vocab=str(vocab_file))
    assert isinstance(whole, TrainableDrafter)
    assert isinstance(narrow, TrainableDrafter)
    state = torch.randn(3, mixing_target.config.hidden_size, dtype=torch.float64)
    expected = whole.target_head.logits(state)[:, ::3]
    torch.testing.assert_close(narrow.target_head.logits(state), expected)
    # the embedding still takes every token, as committed tokens may be any
    assert narrow.target_head.embedding is whole.target_head.embedding
    # the older name, by which methods of one's own ask for it
    assert narrow.frozen == (narrow.target_head,)


def test_a_head_without_the_mapping_is_seen(
    mixing_target: Target,
    vocab_file: Path,
    tmp_path: Path,
) -> None:
    """Planted: rows of the small matrix taken for token ids leave the vocabulary."""
    save_pretrained(make_head("eagle1", mixing_target), tmp_path)
    drafter = load_drafter(tmp_path, mixing_target, draft_vocab=str(vocab_file))
    assert isinstance(drafter, TrainableDrafter)
    drafter.drafts = None
    trace = generate(
        mixing_target,
        drafter,
        [5, 6, 7],
        max_new_tokens=24,
        budget=Budget(8, 3, 3),
    )
    assert not drafted_tokens(trace) <= set(range(0, mixing_target.vocab_size, 3))


@pytest.fixture
def narrow_folder(mixing_target: Target, tmp_path: Path) -> Path:
    """A head whose loss compared every third token."""
    head: Any = make_head("eagle1", mixing_target)
    head.loss_tokens = torch.arange(0, mixing_target.vocab_size, 3)
    save_pretrained(head, tmp_path)
    return tmp_path


def test_a_head_drafts_what_it_was_trained_on(mixing_target: Target, narrow_folder: Path) -> None:
    """Without an option; with "all" it drafts other tokens, too, and the output is the same."""
    trained = set(range(0, mixing_target.vocab_size, 3))
    options: dict[str, Any] = {
        "budget": Budget(8, 3, 3),
        "max_new_tokens": 24,
        "stop": [],
    }
    traces = {}
    for choice in (None, "all"):
        drafter = load_drafter(narrow_folder, mixing_target, draft_vocab=choice)
        traces[choice] = generate(mixing_target, drafter, [5, 6, 7], **options)
    assert drafted_tokens(traces[None]) <= trained
    assert not drafted_tokens(traces["all"]) <= trained
    assert traces[None].tokens == traces["all"].tokens


def test_a_faulty_file_of_its_tokens_is_refused(mixing_target: Target, narrow_folder: Path) -> None:
    """Of another vocabulary, of another method, and no such file at all."""
    path = narrow_folder / DRAFT_VOCAB
    save_draft_vocab(path, torch.ones(100, dtype=torch.long), size=10, identity={})
    with pytest.raises(ValueError, match="or delete it: the head then drafts all tokens"):
        load_head(narrow_folder)
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(narrow_folder)
    save_pretrained(make_head("dflash", mixing_target, slots=4, blocks=1), narrow_folder)
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(narrow_folder)


REFUSED = {
    "own LM head": ("medusa", {}, "does not draft by the target's LM head"),
    "other size": ("eagle1", {"size": 100}, "make one with this target's recipe"),
    "absent": ("eagle1", {"absent": True}, "no draft vocabulary"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_restricted_is_refused(
    case: str,
    mixing_target: Target,
    vocab_file: Path,
    tmp_path: Path,
) -> None:
    """Each with what to do instead."""
    kind, fault, keyword = REFUSED[case]
    path = vocab_file
    if "size" in fault:
        path = tmp_path / "other.safetensors"
        save_draft_vocab(
            path,
            torch.ones(fault["size"], dtype=torch.long),
            size=10,
            identity={},
        )
    if "absent" in fault:
        path = tmp_path / "absent.safetensors"
    head = make_head(kind, mixing_target).bind(mixing_target.head)
    with pytest.raises(ValueError, match=keyword):
        restrict_drafts(head, str(path))


def test_all_tokens_are_refused_for_a_head_that_cannot_draft_them(
    mixing_target: Target,
    vocab_file: Path,
    tmp_path: Path,
) -> None:
    """Its own LM head has rows for its draft vocabulary alone."""
    head = make_head(
        "eagle3",
        mixing_target,
        draft_vocab=str(vocab_file),
        taps=[0],
    )
    save_pretrained(head, tmp_path)
    with pytest.raises(ValueError, match="was trained with a draft vocabulary of"):
        load_drafter(tmp_path, mixing_target, draft_vocab="all")


def test_a_draft_model_takes_no_draft_vocabulary(mixing_target_dir: Path, vocab_file: Path) -> None:
    """A language model has an LM head of its own."""
    target = Target.load(mixing_target_dir, dtype=torch.float64)
    with pytest.raises(ValueError, match="draft_vocab for a trained head"):
        load_drafter(mixing_target_dir, target, draft_vocab=str(vocab_file))
