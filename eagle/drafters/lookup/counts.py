"""Shared by drafters from count tables: the tables, their files, and drafting."""

# V vocabulary, M pairs that occur, K rows

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import DraftTree
from eagle.device import upload
from eagle.disk import write_tensors, write_text
from eagle.drafters.parts.growth import grow
from eagle.target.target import Target

EXACT = 1 << 53  # above it the doubles of the probs could not hold the counts
# factor of the log-probs when paths are ranked: with 0.7 / 1 / 2 / 3 the acceptance length of bigrams was 2.07 / 2.08 /
# 1.97 / 1.90 on a target of 25 M parameters (12 prompts)
SHARPNESS = 1.0
# what refusals advise
AGAIN = "count with this target, by `eagle prepare RECIPE --only tokens --out FOLDER`"

Counts = TypeVar("Counts", bound="CountDrafter")


@dataclass(frozen=True, slots=True)
class Tables:
    """How often each token was counted, and each pair of tokens in sequence, as a sparse matrix by rows (CSR).

    The pairs that begin with token y are those from starts[y] up to starts[y + 1].
    """

    singles: Tensor  # [V], how often each token of the vocabulary was counted
    starts: Tensor  # [V + 1], where the pairs of each first token start among the M pairs
    successors: Tensor  # [M], the second token of each pair, ascending for each first token
    counts: Tensor  # [M], how often each pair was counted
    tokenizer: str | None = None  # whose tokens they are, as `tokenizer_identity` names it

    def __post_init__(self) -> None:
        """Refuse tables that do not fit together, as damaged files would give wrong probs in silence.

        The pairs of one first token are called a row.
        """
        for name, row in self.tensors().items():
            if row.dtype != torch.int64 or row.dim() != 1:
                raise ValueError(
                    f"{name} is {row.dtype} of shape {tuple(row.shape)}, expected a row of int64"
                )
        size = self.vocab_size
        pairs = len(self.successors)
        widths = self.starts.diff()  # [V], pairs of each row
        # the rows begin with the first pair and end with the last
        has_ends = (
            len(self.starts) == size + 1
            and int(self.starts[0]) == 0
            and int(self.starts[-1]) == pairs
        )
        if not has_ends or len(self.counts) != pairs or (widths < 0).any():
            raise ValueError(
                f"{len(self.starts)} starts do not part {pairs} successors with {len(self.counts)} counts into the "
                f"rows of {size} tokens: expected {size + 1} from 0 to {pairs}, ascending, and {pairs} counts"
            )
        if ((self.successors < 0) | (self.successors >= size)).any():
            raise ValueError(f"a successor is outside of the vocabulary: expected 0..{size - 1}")
        # successors must ascend within a row; the next row may begin with any token
        rows = torch.arange(size).repeat_interleave(widths)
        is_same_row = rows.diff() == 0
        if (self.successors.diff()[is_same_row] <= 0).any():
            raise ValueError(
                "the successors of a token are not in order: expected each once, the lowest first"
            )
        # in doubles, as a sum of damaged counts could overflow an integer
        total = float(self.singles.double().sum())
        in_pairs = float(self.counts.double().sum())
        is_too_small = (self.singles < 0).any() or (self.counts < 1).any()
        if is_too_small or total < 1 or max(total, in_pairs) >= EXACT:
            raise ValueError(
                f"{total:.0f} tokens in {in_pairs:.0f} pairs are no counts: expected 1 to {EXACT} tokens"
            )

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return len(self.singles)

    @property
    def tokens(self) -> int:
        """How many tokens were counted."""
        return int(self.singles.sum())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tables by their names in a file."""
        return {name: getattr(self, name) for name in ("singles", "starts", "successors", "counts")}

    def unigram(self) -> Tensor:
        """Return smoothed unigram probs [V] in doubles, where a token that was never counted gets some, too."""
        # Witten and Bell: (count(x) + distinct / V) / (total + distinct)
        distinct = int((self.singles > 0).sum())
        return (self.singles.double() + distinct / self.vocab_size) / (self.tokens + distinct)


def tokenizer_identity(tokenizer: Any) -> str | None:
    """Return a checksum of the tokenizer's vocabulary, on which counts depend; None without a tokenizer."""
    if tokenizer is None:
        return None
    # (word, id) in the order of the ids
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def save_tables(folder: str | Path, tables: Tables, kind: str) -> None:
    """Write the tables and a config that names their kind; refuse a folder that holds a model.

    Args:
        folder: The folder of `model.safetensors` and `config.json`.
        tables: The counts.
        kind: The name of the drafting method that reads them, "unigram" or "bigram".
    """
    folder = Path(folder)
    file = folder / "config.json"
    # a model's config has no key `kind`
    if file.exists() and '"kind"' not in file.read_text(errors="replace"):
        raise ValueError(
            f"{folder} holds a model, which tables of counts would overwrite: name another folder"
        )
    write_tensors(folder / "model.safetensors", tables.tensors())
    config = {
        "kind": kind,
        "vocab_size": tables.vocab_size,
        "tokens": tables.tokens,
        "tokenizer": tables.tokenizer,
    }
    write_text(file, json.dumps(config, indent=2))


def load_tables(folder: str | Path, kind: str) -> Tables:
    """Return the tables in a folder; refuse those of another kind, and files that do not fit together.

    `kind` is the name of the drafting method that reads them.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        if config["kind"] != kind:
            raise ValueError(f"got the kind {config['kind']!r}, expected {kind!r}")
        tables = Tables(**tensors, tokenizer=config["tokenizer"])
        if config["vocab_size"] != tables.vocab_size:
            raise ValueError(
                f"config.json says {config['vocab_size']} tokens, the tables have {tables.vocab_size}"
            )
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} holds no tables of counts ({error}): {AGAIN}") from error
    return tables


class CountDrafter(Drafter):
    """Drafts by log-probs that subclasses compute from count tables."""

    kind: str  # the method's name in recipes and in the config beside its tables
    stored_as = "files"  # a folder keeps its tables, which `load` reads

    def __init__(self, tables: Tables, device: torch.device | str = "cpu") -> None:
        """Take the counts, and the device on which `logits` is computed."""
        self.tables = tables
        self.device = device

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Return log-probs [K, V] of the token that follows each of K tokens, in a vocabulary of V."""

    def begin(self, noise: Noise | None = None) -> CountSequence:
        """Return the state for a new sequence; `noise` is the target's sampling noise, None if it is greedy."""
        return CountSequence(self, noise)

    def save(self, folder: str | Path) -> None:
        """Write the tables, for `load`."""
        save_tables(folder, self.tables, self.kind)

    @classmethod
    def load(cls: type[Counts], folder: str | Path, target: Target) -> Counts:
        """Return the drafter of a folder that `save` wrote; refused for a target with other tokens."""
        tables = load_tables(folder, cls.kind)
        tokenizer = tokenizer_identity(target.tokenizer)
        if tables.vocab_size != target.vocab_size:
            raise ValueError(
                f"{folder} is for {tables.vocab_size} different tokens, the target has {target.vocab_size}: {AGAIN}"
            )
        # without both checksums only the sizes can be compared
        if None not in (tables.tokenizer, tokenizer) and tables.tokenizer != tokenizer:
            raise ValueError(
                f"{folder} counts the tokens of tokenizer {tables.tokenizer}, the target's is {tokenizer}: {AGAIN}"
            )
        return cls(tables, target.device)


class CountSequence:
    """The length of a sequence; drafting needs nothing else but its last token."""

    def __init__(self, drafter: CountDrafter, noise: Noise | None) -> None:
        self.drafter = drafter
        # the target's sampling noise, which trees are ranked with; None if it is greedy
        self.noise = noise
        self.length = 0  # committed tokens, the root not counted

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return a tree within the budget, grown from the counts of what follows each token."""
        self.length += len(update.tokens)
        root = upload(torch.tensor([update.root]), torch.device(self.drafter.device))
        logits = self.drafter.logits(root)[0]
        # the root has the position `length`, and its children the next one
        place = self.length + 1
        return grow(
            update.root,
            logits,
            self._level,
            budget,
            noise=self.noise,
            place=place,
            sharpness=SHARPNESS,
        )

    def _level(self, depth: int, tokens: Tensor, parents: Tensor, tree_mask: Tensor) -> Tensor:
        """Return log-probs [K, V] of what follows the K nodes [K] of a tree's level, for `grow`.

        They depend on the nodes' own tokens alone, so that the other arguments are not needed.
        """
        return self.drafter.logits(tokens)
