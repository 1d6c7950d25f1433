"""Draft models with another tokenizer than the target's, by two methods of Timor et al. 2025 (arXiv 2502.05202).

Token-level intersection (TLI, `SharedTokens`): the draft model proposes only tokens that both vocabularies have, so its
distribution is over these, renormalised, and verification is that of any reduced draft vocabulary.

String-level exact match (SLEM, `TextState`): the draft model proposes any of its own tokens. Their text is split again
by the target's tokenizer, and a token is accepted if the target chooses the same.
"""

# V target vocabulary, M vocabulary of the draft model, D draft vocabulary

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise
from eagle.core.trace import BYTE
from eagle.core.tree import DraftTree

BYTES = 256
# tokens before new text with which it is split again
LOOKBEHIND = 10
SPACE = "▁"  # how SentencePiece writes a space
# byte-level tokenizers write each byte as a printable character: itself, or one of those from 256 on
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
HIDDEN = [byte for byte in range(BYTES) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(BYTES + index): byte for index, byte in enumerate(HIDDEN)
}
BYTE_LEVEL_SPACE = chr(BYTES + HIDDEN.index(ord(" ")))


class SameTokens:
    """The tokens of a draft model whose ids are the target's, although either may have more of them."""

    def __init__(self, model_size: int, target_size: int, last: int, device: torch.device) -> None:
        """Take the sizes of both vocabularies.

        Args:
            model_size: M, the logits of the draft model.
            target_size: V.
            last: The largest id that the draft model reads.
            device: That of the draft model.
        """
        self.size = min(model_size, target_size)
        self.last = last
        # [D], the target's id of each logit; None for all tokens of the target
        self.drafts = torch.arange(self.size, device=device) if self.size < target_size else None

    def select(self, logits: Tensor) -> Tensor:
        """Return the draft model's logits [.., M] of the tokens that can be drafted [.., D]."""
        return logits[..., : self.size]

    def translate(self, tokens: Tensor) -> Tensor:
        """Return drafted tokens, of any shape, as the draft model's ids."""
        return tokens.clamp(max=self.last)

    def spell(self, tokens: Iterable[int]) -> list[int]:
        """Return committed tokens of the target as the draft model reads them."""
        return [min(token, self.last) for token in tokens]


class SharedTokens:
    """The tokens that a draft model shares with the target, and how it reads the target's other tokens.

    Tokens are shared if they stand for the same bytes, or are special tokens of the same name.
    """

    def __init__(self, tokenizer: Any, target_tokenizer: Any, device: torch.device) -> None:
        """Compare the two vocabularies.

        Args:
            tokenizer: The draft model's.
            target_tokenizer: The target's.
            device: That of the draft model.
        """
        self.ids = {content: token for token, content in contents(tokenizer).items()}
        self.target_contents = contents(target_tokenizer)
        self.longest = max(len(content) for content in self.ids)
        shared = [
            (token, self.ids[content])
            for token, content in sorted(self.target_contents.items())
            if content in self.ids
        ]
        if not shared:
            raise ValueError(
                "the draft model and the target have no token in common: expected tokenizers of the same language"
            )
        # [D] each: the target's ids in ascending order, and the draft model's
        self.drafts, self.model_ids = torch.tensor(shared, device=device).unbind(1)
        # [V], the draft model's id of each token that both have
        self.model_id_of = torch.zeros(int(self.drafts[-1]) + 1, dtype=torch.long, device=device)
        self.model_id_of[self.drafts] = self.model_ids
        self.spelled = {token: [model_id] for token, model_id in shared}

    def select(self, logits: Tensor) -> Tensor:
        """Return the draft model's logits [.., M] of the tokens that can be drafted [.., D]."""
        return logits.index_select(-1, self.model_ids)

    def translate(self, tokens: Tensor) -> Tensor:
        """Return drafted tokens, of any shape, as the draft model's ids."""
        return self.model_id_of[tokens]

    def spell(self, tokens: Iterable[int]) -> list[int]:
        """Return committed tokens of the target as the draft model reads them: one of them may become several."""
        spelled = []
        for token in tokens:
            if token not in self.spelled:
                self.spelled[token] = self._split(self.target_contents.get(token, b""))
            spelled += self.spelled[token]
        return spelled

    def _split(self, content: bytes | str) -> list[int]:
        """Return the draft model's tokens for some bytes: the longest that fits, again and again.

        It need not be the tokenizer's own way to split them. A byte that the draft model has no token for is left out,
        but something is read for every token.
        """
        if isinstance(content, str):
            # a special token that the draft model lacks is read as its name
            rest = bytes([int(content[3:5], 16)]) if BYTE.fullmatch(content) else content.encode()
        else:
            rest = content
        tokens = []
        while rest:
            lengths = range(min(self.longest, len(rest)), 0, -1)
            length = next((size for size in lengths if rest[:size] in self.ids), None)
            # a SentencePiece vocabulary may have a token for the byte
            part = f"<0x{rest[0]:02X}>" if length is None else rest[:length]
            if part in self.ids:
                tokens.append(self.ids[part])
            rest = rest[length or 1 :]
        return tokens or [0]


def contents(tokenizer: Any) -> dict[int, bytes | str]:
    """Return what each token of a vocabulary stands for, by its id: bytes, or a special or byte token's name."""
    vocabulary = tokenizer.get_vocab()
    special = {*tokenizer.all_special_tokens}
    special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    is_byte_level = any(BYTE_LEVEL_SPACE in word for word in vocabulary)
    by_id: dict[int, bytes | str] = {}
    for word, token in vocabulary.items():
        if word in special or BYTE.fullmatch(word):
            by_id[token] = word
        elif is_byte_level and BYTE_OF.keys() >= {*word}:
            by_id[token] = bytes(BYTE_OF[character] for character in word)
        else:
            by_id[token] = word.replace(SPACE, " ").encode()
    return by_id


class TextPieces:
    """The tokens of one tokenizer as pieces of text, which are bytes or the names of special tokens, and back."""

    def __init__(self, tokenizer: Any) -> None:
        """Take the tokenizer."""
        self.tokenizer = tokenizer
        self.pieces = contents(tokenizer)
        self.special: dict[bytes | str, int] = {}
        for token, piece in self.pieces.items():
            if BYTE.fullmatch(str(piece)):
                self.pieces[token] = bytes([int(piece[3:5], 16)])
            elif isinstance(piece, str):
                self.special[piece] = token

    def read(self, tokens: Iterable[int]) -> list[bytes | str]:
        """Return the pieces of some tokens; unused ids beyond the tokenizer's have no text."""
        return [self.pieces.get(token, b"") for token in tokens]

    def append(
        self, tokens: list[int], pieces: Iterable[Any], overlap: int | None = None
    ) -> tuple[list[int], bytes]:
        """Split text that follows some tokens, as if the tokenizer split both together.

        Special tokens stay whole, and those that the tokenizer lacks are split as their names.

        Args:
            tokens: The tokens before the text. No special token is put before the first.
            pieces: The text.
            overlap: How many of its first bytes are the last of `tokens` already, all of which then stay. None: none
                are, and the last `LOOKBEHIND` tokens may be split in another way.

        Returns:
            The tokens with those of the text, and the bytes at its end that are a character's beginning: no tokenizer
            can split them before the rest comes.
        """
        pending = b""
        for is_special, group in groupby(pieces, self.special.__contains__):
            if is_special:
                tokens = tokens + [self.special[name] for name in group]
                pending = b""
            else:
                text = b"".join(part.encode() if isinstance(part, str) else part for part in group)
                # bytes that are no text are left out
                decoder = codecs.getincrementaldecoder("utf-8")("ignore")
                text = decoder.decode(text).encode()
                pending = decoder.getstate()[0]
                tokens = self._append_text(tokens, text[overlap or 0 :], overlap is not None)
            # only the beginning overlaps
            overlap = overlap and 0
        return tokens, pending

    def _append_text(self, tokens: list[int], text: bytes, fixed: bool) -> list[int]:
        """Return some tokens with those of the text that follows, as `append` does, without special tokens.

        The last tokens are split again together with the text. From the first boundary on that both splits have, the
        new one holds. If there is none, fixed tokens get nothing appended: they end within a token of the new split.
        """
        start = len(tokens)
        first = max(0, start - LOOKBEHIND)
        while start > first and tokens[start - 1] not in self.special.values():
            start -= 1
        # pieces of special tokens are their names, and there are none here
        split_before = [piece for piece in self.read(tokens[start:]) if isinstance(piece, bytes)]
        whole = (b"".join(split_before) + text).decode(errors="ignore")
        encoded = self.tokenizer.encode(whole, add_special_tokens=False)
        # Boundaries are compared by the bytes that follow them: what precedes may differ, as SentencePiece puts a space
        # before the first word.
        sizes = accumulate(map(len, reversed(split_before)), initial=len(text))
        # bytes after a boundary -> the tokens before it
        tokens_before = {
            left: len(tokens) - back for back, left in enumerate(sizes) if not back or not fixed
        }
        new_sizes = [*accumulate(map(len, reversed(self.read(encoded))))]
        for index, left in enumerate(reversed(new_sizes)):
            # the first token is not trusted where the lookbehind may have cut a word
            if left in tokens_before and (index or not start == first > 0):
                return tokens[: tokens_before[left]] + encoded[index:]
        return tokens if fixed and split_before else tokens[:start] + encoded


class TextState:
    """Sequences that a draft model reads and drafts as text: string-level exact match (SLEM).

    The text of what the target has committed is split by the draft model's tokenizer. The text of each path of its
    draft is split by the target's. Drafts have no probs, so the target accepts the tokens that it chooses itself.
    """

    def __init__(self, state: Any, draft: TextPieces, target: TextPieces) -> None:
        """Begin without rows.

        Args:
            state: The draft model's state of several sequences, in its own tokens, with `rewind`.
            draft: The draft model's tokenizer.
            target: The target's.
        """
        self.state = state
        self.draft = draft
        self.target = target
        # by row: the target's last tokens, the root included; the draft model's tokens of the whole sequence; and the
        # last bytes of the target's that they lack, the beginning of a character
        self.rows: dict[int, tuple[list[int], list[int], bytes]] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row. The noise is not used: it belongs to the target's tokens."""
        self.state.admit(row)
        self.rows[row] = ([], [], b"")

    def fork(self, row: int, other: int) -> None:
        """Copy a row to the new row `other`."""
        self.state.fork(row, other)
        self.rows[other] = self.rows[row]

    def release(self, row: int) -> None:
        """Release a row."""
        self.state.release(row)
        del self.rows[row]

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Read the text that was committed, and return trees of the target's tokens.

        Args:
            updates: By row, the tokens that the target has committed since the last call, and the new root.
            budgets: By row, the limits on its tree.
        """
        draft_updates = {}
        for row, update in updates.items():
            recent, tokens, pending = self.rows[row]
            # the first token of a later update is the last root
            new = [*update.tokens.tolist(), update.root][bool(recent) :]
            tokens, pending = self.draft.append(tokens, [pending, *self.target.read(new)])
            self.rows[row] = ([*recent, *new][-LOOKBEHIND:], tokens, pending)
            if tokens:
                # the last token that stays counts as the last root
                common = max(self.state.rewind(row, tokens), 1)
                draft_updates[row] = Committed(
                    torch.tensor(tokens[common - 1 : -1]), None, tokens[-1]
                )
        draft_trees = self.state.propose(draft_updates, budgets)
        trees = {}
        for row, update in updates.items():
            # a sequence without a whole character cannot be read
            paths = self._translate(row, draft_trees[row]) if row in draft_trees else []
            budget = budgets[row]
            tree = DraftTree.from_paths(update.root, [path[: budget.depth] for path in paths])
            # parents come before their children, so the first nodes are a tree
            count = budget.nodes + 1
            trees[row] = DraftTree(tree.tokens[:count], tree.parents[:count])
        return trees

    def _translate(self, row: int, tree: DraftTree) -> list[list[int]]:
        """Return the paths of a tree of the draft model's tokens in tokens of the target, without the root."""
        recent, _, pending = self.rows[row]
        paths = []
        # a node that is no parent ends a path
        for leaf in sorted({*range(1, len(tree))}.difference(tree.parents.tolist())):
            pieces = self.draft.read(tree.tokens[tree.path(leaf)[1:]].tolist())
            tokens, _ = self.target.append(recent, pieces, overlap=len(pending))
            paths.append(tokens[len(recent) :])
        return paths
