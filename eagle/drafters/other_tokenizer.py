"""Draft models with another tokenizer than the target's: token-level intersection (Timor et al. 2025, 2502.05202).

The draft model proposes only tokens that both vocabularies have, so its distribution is over these, renormalised, and
verification is that of any reduced draft vocabulary.
"""

# V target vocabulary, M vocabulary of the draft model, D draft vocabulary

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from eagle.core.trace import BYTE

BYTES = 256
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
