"""Draft models with another tokenizer draft the tokens that both have, and read the others in pieces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.trace import BYTE
from eagle.core.tree import chain_paths
from eagle.drafters import draft_model
from eagle.drafters.other_tokenizer import SharedTokens, contents

PROMPT = "What do you know about otters, and what about the sea?"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def renumber(folder: Path, out: Path, kept: list[int]) -> Path:
    """Write a copy of a model that has only these tokens, numbered in this order.

    Its logits of a token are the model's own, as long as it has read no token that was left out.
    """
    shutil.copytree(folder, out)
    path = out / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = {old: new for new, old in enumerate(kept)}
    vocab = {word: ids[old] for word, old in tokenizer["model"]["vocab"].items() if old in ids}
    # a merge of tokens that are left out would name tokens without an id
    merges = []
    for pair in tokenizer["model"]["merges"]:
        first, second = pair.split() if isinstance(pair, str) else pair
        if {first, second, first + second} <= vocab.keys():
            merges.append(pair)
    tokenizer["model"] |= {"vocab": vocab, "merges": merges}
    for token in tokenizer["added_tokens"]:
        token["id"] = ids[token["id"]]
    path.write_text(json.dumps(tokenizer))
    weights = load_file(out / "model.safetensors")
    for name in TABLES:
        if name in weights:
            weights[name] = weights[name][kept].clone()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(config.get(key), int):
            config[key] = ids[config[key]]
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": len(kept)}))
    (out / "generation_config.json").unlink(missing_ok=True)
    return out


@pytest.fixture(scope="module")
def renumbered(
    mixing_target_dir: Path,
    mixing_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The target itself under other token ids."""
    order = torch.randperm(mixing_target.vocab_size, generator=torch.Generator().manual_seed(0))
    return renumber(mixing_target_dir, tmp_path_factory.mktemp("other") / "m", order.tolist())


@pytest.fixture(scope="module")
def smaller(
    tiny_target_dir: Path,
    tiny_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The trained target without a third of its tokens, those of one byte and special ones not among them."""
    by_id = contents(tiny_target.tokenizer)
    special = {*tiny_target.tokenizer.added_tokens_decoder}
    kept = [
        token
        for token in range(tiny_target.vocab_size)
        if token % 3
        or token in special
        or len(by_id[token]) == 1
        or BYTE.fullmatch(str(by_id[token]))
    ]
    return renumber(
        tiny_target_dir / "target", tmp_path_factory.mktemp("smaller") / "m", kept[::-1]
    )


def test_a_model_with_renumbered_tokens_drafts_what_the_model_drafts(
    mixing_target: Target,
    mixing_target_dir: Path,
    renumbered: Path,
) -> None:
    """Tree by tree: with its own ids and with others it is the same model, and all of a chain is accepted."""
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "stop": [],
        "budget": Budget(12, 4, 3),
    }
    traces = [
        generate(mixing_target, load_drafter(folder, mixing_target), PROMPT, **options)
        for folder in (mixing_target_dir, renumbered)
    ]
    own, other = traces
    assert own.tokens == other.tokens
    for own_cycle, other_cycle in zip(own.cycles, other.cycles, strict=True):
        assert own_cycle.tree.tokens.equal(other_cycle.tree.tokens)
        assert own_cycle.tree.parents.equal(other_cycle.tree.parents)
    # the answer's end cuts the last one off
    assert all(len(cycle.kept) == 4 for cycle in other.cycles[:-1])


MODES = {
    "greedy": (Sampling(), "noise"),
    "noise": (Sampling(0.8, seed=1), "noise"),
    "sampled": (Sampling(0.8, seed=1), "sampled"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_smaller_vocabulary_is_lossless(
    mode: str,
    tiny_target: Target,
    smaller: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Drafted tokens are shared ones, several are accepted, and the output is the target's own."""
    sampling, draw = MODES[mode]
    drafter: Any = load_drafter(smaller, tiny_target)
    assert "tokens that both have" in capsys.readouterr().err
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "stop": [],
        "sampling": sampling,
    }
    budget = Budget.fixed(chain_paths(3), draw)
    trace = generate(tiny_target, drafter, PROMPT, budget=budget, **options)
    shared = {*drafter.shared.drafts.tolist()}
    drafted = {token for cycle in trace.cycles for token in cycle.tree.tokens[1:].tolist()}
    assert drafted <= shared
    # the answer has tokens that the draft model lacks, so that it reads some in pieces
    assert not {*trace.tokens} <= shared
    assert trace.acceptance_length > 1.05
    if draw == "noise":
        plain = generate(
            tiny_target,
            load_drafter("none", tiny_target),
            PROMPT,
            **options,
        )
        assert trace.tokens == plain.tokens


def test_tokens_are_read_as_the_bytes_they_stand_for(tiny_target: Target, smaller: Path) -> None:
    """Whatever is split, the text is the same; special tokens stay whole."""
    tokenizer = AutoTokenizer.from_pretrained(smaller)
    shared = SharedTokens(tokenizer, tiny_target.tokenizer, torch.device("cpu"))
    tokens = tiny_target.chat(PROMPT)
    spelled = shared.spell(tokens)
    assert len(spelled) > len(tokens)
    assert tokenizer.decode(spelled) == tiny_target.tokenizer.decode(tokens)


def test_a_wrong_position_is_seen(
    tiny_target: Target,
    smaller: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: noise of another position ranks the drafts, and fewer are kept."""
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "stop": [],
        "sampling": Sampling(0.8, seed=1),
        "budget": Budget.fixed(chain_paths(3), "noise"),
    }
    drafter: Any = load_drafter(smaller, tiny_target)
    right = generate(tiny_target, drafter, PROMPT, **options)
    request = draft_model.DraftRequest

    def make_shifted(root: int, position: int, *rest: Any) -> Any:
        """Return a request one position further on."""
        return request(root, position + 1, *rest)

    monkeypatch.setattr(draft_model, "DraftRequest", make_shifted)
    wrong = generate(tiny_target, drafter, PROMPT, **options)
    assert wrong.tokens == right.tokens
    assert wrong.acceptance_length < right.acceptance_length


def test_tokenizers_without_a_common_token_are_refused(tiny_target: Target) -> None:
    """No draft could be accepted."""

    class Other:
        all_special_tokens = ()
        added_tokens_decoder = MappingProxyType({})

        def get_vocab(self) -> dict[str, int]:
            return {"no such word": 0}

    with pytest.raises(ValueError, match="no token in common"):
        SharedTokens(Other(), tiny_target.tokenizer, torch.device("cpu"))
