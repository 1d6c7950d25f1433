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
    ids: list[int]  # the tokens of the messages
    room: int  # tokens that the answer may have
    request: int  # the key of its randomness


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant's message, why it ended, and its tokens."""

    message: dict[str, Any]
    finish: str
    tokens: int


# asks for answers in turn, and returns the line of a part
Dialogue = Generator[Prompt, Answer, dict[str, Any]]
Outcome = tuple[str, "dict[str, Any] | str"]  # a conversation's id, and its line or the reason for which it failed


class Local:
    """The target itself, decoding `batch_size` prompts of similar length at a time."""

    def __init__(self, target: Target, tokenizer: Any, section: RegenerateSection) -> None:
        self.target, self.tokenizer, self.positions = target, tokenizer, target.max_positions
        self.sampling = Sampling(temperature=section.temperature, top_p=section.top_p, seed=section.seed)
        self.at_once = section.batch_size
        if self.at_once > 1 and not pads_harmlessly(target):
            print(f"{target.config.model_type} reads a padded text otherwise than the bare one: one prompt at a time")
            self.at_once = 1

    def run(self, dialogues: Iterator[tuple[str, Dialogue]]) -> Iterator[Outcome]:
        """The outcome of every conversation, as they end."""
        waiting: list[tuple[Prompt, str, Dialogue]] = []

        def step(name: str, dialogue: Dialogue, answer: Any = None) -> Iterator[Outcome]:
            try:
                waiting.append((dialogue.send(answer), name, dialogue))
            except StopIteration as end:
                yield name, end.value

        while True:
            while len(waiting) < WINDOW * self.at_once and (following := next(dialogues, None)):
                yield from step(*following)
            if not waiting:
                return
            waiting.sort(key=lambda entry: -len(entry[0].ids))  # the longest first: what does not fit fails at once
            batch, waiting[: self.at_once] = waiting[: self.at_once], []
            answers = self.answer([prompt for prompt, _, _ in batch])
            for (_, name, dialogue), answer in zip(batch, answers, strict=True):
                yield from step(name, dialogue, answer)

    def answer(self, prompts: list[Prompt]) -> list[Answer]:
        """The answers to prompts that are decoded side by side."""
        answers = []
        for ids in decode(self.target, prompts, self.sampling):
            stopped = ids[-1] in self.target.stop_tokens
            text = self.tokenizer.decode(
                ids[: len(ids) - stopped], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            message = {"role": "assistant", "content": text}
            answers.append(Answer(message, "stop" if stopped else "length", len(ids)))
        return answers


@torch.inference_mode()
def decode(target: Target, prompts: list[Prompt], sampling: Sampling) -> list[list[int]]:
    """The tokens of the target's answer to each prompt, with the stop token; rows that have ended leave the batch."""
    answers: list[list[int]] = [[] for _ in prompts]
    noises = [Noise(sampling.seed, prompt.request) for prompt in prompts]
    live = list(range(len(prompts)))
    rows = PaddedRows(target, [prompt.ids for prompt in prompts])
    while live:
        scores = rows.logits()
        if sampling.temperature > 0:
            places = [len(prompts[row].ids) + len(answers[row]) for row in live]
            scores = warp(scores, sampling) + draw_noise([noises[row] for row in live], places, scores)
        tokens = scores.argmax(-1).tolist()
        going = []
        for place, (row, token) in enumerate(zip(live, tokens, strict=True)):
            answers[row].append(token)
            if token not in target.stop_tokens and len(answers[row]) < prompts[row].room:
                going.append(place)
        live = [live[place] for place in going]
        rows.grow([tokens[place] for place in going], going)
    return answers


def draw_noise(noises: list[Noise], places: list[int], scores: Tensor) -> Tensor:
    """[B, V], each row keyed by its own conversation and place, so that its neighbours change nothing."""
    rows = []
    for noise, place in zip(noises, places, strict=True):
        noise.forget(place)
        rows.append(noise([place], scores.shape[-1], scores.device))
    return torch.cat(rows)


class PaddedRows:
    """Texts that grow side by side, padded on the left, and the target's cache of them."""

    def __init__(self, target: Target, texts: list[list[int]]) -> None:
        self.target = target
        self.cache: Any = None
        width = max(map(len, texts))
        gaps = [width - len(text) for text in texts]
        padded = [[text[0]] * gap + text for gap, text in zip(gaps, texts, strict=True)]
        self.tokens = torch.tensor(padded, device=target.device)  # [B, T]
        self.mask = (torch.arange(width) >= torch.tensor(gaps)[:, None]).long().to(target.device)
        self.takes_positions = "position_ids" in inspect.signature(target.model.base_model.forward).parameters

    def logits(self) -> Tensor:
        """[B, V] after the newest token of every row."""
        positions = self.mask.cumsum(-1).sub(1).clamp(min=0)[:, -self.tokens.shape[1] :]
        options = {"position_ids": positions} if self.takes_positions else {}
        output = self.target.model.base_model(
            input_ids=self.tokens, attention_mask=self.mask, past_key_values=self.cache, use_cache=True, **options
        )
        self.cache = getattr(output, "past_key_values", None)
        if self.cache is None:
            name = self.target.config.model_type
            raise ValueError(f"{name} keeps no cache that rows can leave: serve it, and name regenerate.endpoint")
        return self.target.head.logits(output.last_hidden_state[:, -1]).float()

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
    """Whether the logits of a text beside a longer one are those of the text alone, at first and with a cache."""
    short, long = ([token % target.vocab_size for token in range(1, end)] for end in (5, 12))
    alone, beside = PaddedRows(target, [short]), PaddedRows(target, [short, long])
    tolerance = 1e-4 if target.head.output.weight.dtype == torch.float32 else 5e-2
    for _ in range(2):
        expected, got = alone.logits()[0], beside.logits()[0]
        if not (got - expected).norm() <= tolerance * expected.norm():
            return False
        alone.grow([5], [0])
        beside.grow([5, 5], [0, 1])
    return True
