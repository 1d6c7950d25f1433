"""Prompts and their answers, and the target that gives them in batches."""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.core.noise import Noise
from eagle.core.verify import Sampling, warp
from eagle.recipe import RegenerateSection
from eagle.target.target import Target

WINDOW = 4  # batches of conversations from which those of similar length are taken


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends where the target speaks next."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    ids: list[int]  # the same as the target reads it
    room: int  # tokens that the answer may have
    request: int  # what keys its randomness


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant's message, why it ended, and its tokens."""

    message: dict[str, Any]
    finish: str
    tokens: int


Walk = Generator[Prompt, Answer, dict[str, Any]]  # asks for answers in turn, and returns what came of them
Outcome = tuple[str, "dict[str, Any] | str"]  # a conversation's id, and what came of it; text says why it failed


class Local:
    """The target itself, decoding `batch_size` prompts of similar length at a time."""

    def __init__(self, target: Target, tokenizer: Any, section: RegenerateSection) -> None:
        self.target, self.tokenizer, self.positions = target, tokenizer, target.max_positions
        self.sampling = Sampling(temperature=section.temperature, top_p=section.top_p, seed=section.seed)
        self.at_once = section.batch_size
        if self.at_once > 1 and not pads_harmlessly(target):
            print(f"{target.config.model_type} reads a padded text otherwise than the bare one: one prompt at a time")
            self.at_once = 1

    def run(self, walks: Iterator[tuple[str, Walk]]) -> Iterator[Outcome]:
        """Every conversation's outcome, as they end."""
        pool: list[tuple[Prompt, str, Walk]] = []

        def step(name: str, walk: Walk, answer: Any = None) -> Iterator[Outcome]:
            try:
                pool.append((walk.send(answer), name, walk))
            except StopIteration as end:
                yield name, end.value

        while True:
            while len(pool) < WINDOW * self.at_once and (following := next(walks, None)):
                yield from step(*following)
            if not pool:
                return
            pool.sort(key=lambda live: -len(live[0].ids))  # the longest first: what does not fit fails at once
            batch, pool[: self.at_once] = pool[: self.at_once], []
            for (_, name, walk), answer in zip(batch, self.answers([live[0] for live in batch]), strict=True):
                yield from step(name, walk, answer)

    def answers(self, prompts: list[Prompt]) -> list[Answer]:
        """The answers to prompts read side by side."""
        return [self._answer(ids) for ids in decode(self.target, prompts, self.sampling)]

    def _answer(self, ids: list[int]) -> Answer:
        stopped = ids[-1] in self.target.stop_tokens
        text = self.tokenizer.decode(
            ids[: len(ids) - stopped], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Answer({"role": "assistant", "content": text}, "stop" if stopped else "length", len(ids))


@torch.inference_mode()
def decode(target: Target, prompts: list[Prompt], sampling: Sampling) -> list[list[int]]:
    """The tokens that the target says after each prompt, its stop token included; rows that have ended leave."""
    said: list[list[int]] = [[] for _ in prompts]
    noises = [Noise(sampling.seed, prompt.request) for prompt in prompts]
    live, rows = list(range(len(prompts))), _Rows(target, [prompt.ids for prompt in prompts])
    while live:
        scores = rows.logits()
        if sampling.temperature > 0:
            places = [len(prompts[row].ids) + len(said[row]) for row in live]
            scores = warp(scores, sampling) + _noise([noises[row] for row in live], places, scores)
        tokens = scores.argmax(-1).tolist()
        for row, token in zip(live, tokens, strict=True):
            said[row].append(token)
        ended = [said[row][-1] in target.stop_tokens or len(said[row]) >= prompts[row].room for row in live]
        going = [place for place, over in enumerate(ended) if not over]
        live = [live[place] for place in going]
        rows.grow([tokens[place] for place in going], going)
    return said


def _noise(noises: list[Noise], places: list[int], scores: Tensor) -> Tensor:
    """[B, V], each row keyed by its own conversation and place, so that neighbours change nothing."""
    for noise, place in zip(noises, places, strict=True):
        noise.forget(place)
    rows = [noise([place], scores.shape[-1], scores.device) for noise, place in zip(noises, places, strict=True)]
    return torch.cat(rows)


class _Rows:
    """Texts that grow side by side, padded on the left."""

    def __init__(self, target: Target, texts: list[list[int]]) -> None:
        self.target, width = target, max(map(len, texts))
        self.cache: Any = None
        gaps = [width - len(text) for text in texts]
        padded = [[text[0]] * gap + text for gap, text in zip(gaps, texts, strict=True)]
        self.tokens = torch.tensor(padded, device=target.device)  # [B, T]
        self.mask = (torch.arange(width) >= torch.tensor(gaps)[:, None]).long().to(target.device)
        self.takes_positions = "position_ids" in inspect.signature(target.model.base_model.forward).parameters

    def logits(self) -> Tensor:
        """[B, V] after the newest token of every row."""
        places = self.mask.cumsum(-1).sub(1).clamp(min=0)[:, -self.tokens.shape[1] :]
        options = {"position_ids": places} if self.takes_positions else {}
        read = self.target.model.base_model(
            input_ids=self.tokens, attention_mask=self.mask, past_key_values=self.cache, use_cache=True, **options
        )
        if (cache := getattr(read, "past_key_values", None)) is None:
            name = self.target.config.model_type
            raise ValueError(f"{name} keeps no cache that rows can leave: serve it, and name regenerate.endpoint")
        self.cache = cache
        return self.target.head.logits(read.last_hidden_state[:, -1]).float()

    def grow(self, tokens: list[int], going: list[int]) -> None:
        """Append a token to the rows that go on; the others are dropped."""
        if going and len(going) < len(self.mask):
            rows = torch.tensor(going, device=self.mask.device)
            self.mask = self.mask[rows]
            self.cache.reorder_cache(rows)  # which every kind of layer has, and which need not keep all
        self.tokens = torch.tensor(tokens, device=self.mask.device)[:, None]
        self.mask = torch.cat([self.mask[: len(going)], self.mask.new_ones(len(going), 1)], dim=1)


@torch.inference_mode()
def pads_harmlessly(target: Target) -> bool:
    """Whether a text that stands beside a longer one is read as it is alone, at first and with a cache."""
    short, long = ([token % target.vocab_size for token in range(1, end)] for end in (5, 12))
    alone, beside = _Rows(target, [short]), _Rows(target, [short, long])
    tolerance = 1e-4 if target.head.output.weight.dtype == torch.float32 else 5e-2
    for _ in range(2):
        expected, got = alone.logits()[0], beside.logits()[0]
        if not (got - expected).norm() <= tolerance * expected.norm():
            return False
        alone.grow([5], [0])
        beside.grow([5, 5], [0, 1])
    return True
