"""The target's answers to a few prompts, with its states of every layer."""

# T tokens of one sequence, L layers, D target width

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import chain_paths
from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.drafters import DRAFTERS
from eagle.log import progress
from eagle.target.target import Target

NEW_TOKENS = 96  # of an answer
BATCH_SIZE = 16  # answers that are decoded together
TEMPERATURES = (
    0.0,
    *[1.0] * 11,
)  # of the answers to each prompt: one greedy, as a second would be the same
ENOUGH_TOKENS = 5760  # of all answers, after which none is asked for again: twelve prompts, five full answers each
PROMPTS = (
    "What is a hash table, and when is it slower than a list?",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a Python function that returns the longest word of a text.",
    "Translate into French: The train leaves at seven tomorrow morning.",
    "A shirt costs 24 euros after a discount of 20 %. What did it cost before?",
    "Give me three ideas for a cheap birthday party.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "What does the function sorted do in Python? Show an example.",
    "Write a short letter that asks a landlord to repair the heating.",
    "How does a vaccine work?",
    "List the planets of the solar system with one fact about each.",
    "Which is better for a small team, a monorepo or many repositories?",
)
TEXT_KEYS = ("prompt", "question", "instruction", "content", "value", "text")
LIST_KEYS = ("turns", "messages", "conversations")


def read_prompts(file: str | None) -> list[str]:
    """Return the built-in prompts, or the first user turn of every line of a JSONL file."""
    if file is None:
        return list(PROMPTS)
    if not Path(file).is_file():
        raise ValueError(
            f"no prompts at {file}: expected a JSONL file, each line a prompt, a question or messages"
        )
    prompts = []
    for number, line in enumerate(Path(file).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompt = _first_turn(json.loads(line))
        except ValueError:
            raise ValueError(f"{file}:{number} is no JSON: expected one record a line") from None
        if prompt is None:
            keys = ", ".join(TEXT_KEYS + LIST_KEYS)
            raise ValueError(f"{file}:{number} asks nothing: expected one of the keys {keys}")
        if prompt:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"no prompts in {file}: expected at least one line")
    return prompts


def limit_prompts(prompts: list[str], tokens: int | None) -> tuple[list[str], int]:
    """Return the prompts to ask, and after how many tokens of all answers no further round of answers begins.

    Without a number of `tokens` these are all prompts and the usual limit.
    """
    if tokens is None:
        return prompts, ENOUGH_TOKENS
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}, expected at least 1")
    # a round asks all of them: with few tokens only the first ones are asked
    return prompts[: max(tokens // NEW_TOKENS, 1)], tokens


def _first_turn(record: Any) -> str | None:
    """Return the text of the first user turn of a record, or None.

    A record may be a text, a list of turns, or a dict with a text or turns under one of several keys.
    """
    if isinstance(record, str):
        return record
    if isinstance(record, list):
        for turn in record:
            # ShareGPT's files call the role `from`; a turn that is a plain text is the user's
            role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else "user"
            if role != "system":
                return _first_turn(turn)
    if isinstance(record, dict):
        for key in TEXT_KEYS + LIST_KEYS:
            if record.get(key):
                return _first_turn(record[key])
    return None


def render_prompts(
    target: Target, prompts: Sequence[str], **template_kwargs: Any
) -> list[list[int]]:
    """Return the token ids of each prompt, rendered by the target's chat template if it has one.

    `template_kwargs` are arguments of that template, such as `enable_thinking`.
    """
    if target.tokenizer is None:
        raise ValueError(
            "this target has no tokenizer: load it from a folder with its tokenizer's files"
        )
    if getattr(target.tokenizer, "chat_template", None):
        return [list(target.chat(prompt, **template_kwargs)) for prompt in prompts]
    return [list(target.tokenizer.encode(prompt)) for prompt in prompts]


def answer_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int = NEW_TOKENS,
    temperatures: Sequence[float] = TEMPERATURES,
    enough: int = ENOUGH_TOKENS,
    after_first: Callable[[Batch, float, int], None] | None = None,
) -> Batch:
    """Return the target's answers with its states of all layers: one sequence for every prompt and temperature.

    Every third prompt comes first and the answers to a prompt are adjacent, so that the first third of the answers has
    other prompts than the rest.

    Args:
        target: The model that answers.
        prompts: Token ids.
        new_tokens: Tokens of an answer, at most.
        temperatures: Of a round of answers to all prompts each.
        enough: Tokens of all answers, after which no further round begins.
        after_first: Takes the answers of the first round, its seconds, and how many rounds there will be.
    """
    # for each prompt, its answers of all rounds
    rounds: list[list[Example]] = [[] for _ in prompts]
    total = 0  # tokens of all answers
    requests = 0
    for temperature in progress(
        temperatures, "the target's answers", len(temperatures), unit="rounds"
    ):
        if total >= enough:
            break
        start = perf_counter()
        # each answer is sampled with a noise of its own
        samplings = [Sampling(temperature, request=requests + i) for i in range(len(prompts))]
        requests += len(prompts)
        traces = generate(
            target,
            # plain decoding, without drafts
            DRAFTERS["none"](),
            [list(prompt) for prompt in prompts],
            sampling=samplings,
            max_new_tokens=new_tokens,
            batch_size=BATCH_SIZE,
        )
        for answers, trace in zip(rounds, traces, strict=True):
            tokens = torch.tensor([*trace.prompt, *trace.tokens])
            mask = torch.arange(len(tokens)) >= len(trace.prompt)
            total += len(trace.tokens)
            # a slot is two positions before the token that it drafts, so an answer needs a token from the third on
            if mask[2:].any():
                answers.append(Example(tokens, mask, read_states(target, tokens)))
        is_first = requests == len(prompts)
        if after_first is not None and is_first and any(rounds):
            num_rounds = min(len(temperatures), ceil(enough / total))
            after_first(_batch_of(rounds, target), perf_counter() - start, num_rounds)
    # drop the KV cache of the last sequence
    target.forget()
    return _batch_of(rounds, target)


def _batch_of(rounds: Sequence[Sequence[Example]], target: Target) -> Batch:
    """Return the answers to all prompts as one batch, every third prompt first.

    `rounds` has a list of answers for each prompt.
    """
    examples: list[Example] = []
    for answers in [*rounds[0::3], *rounds[1::3], *rounds[2::3]]:
        examples += answers
    return collate(examples, every_tap(target)).to(target.device)


def split_answers(batch: Batch, parts: int) -> tuple[Batch, Batch]:
    """Return the first 1 / `parts` of the sequences, and the rest; all of them twice if that gives fewer than two."""
    count = len(batch.lengths) // parts
    if count < 2:
        return batch, batch
    return select_answers(batch, 0, count), select_answers(batch, count, len(batch.lengths))


def select_answers(batch: Batch, start: int, end: int) -> Batch:
    """Return a range of a batch's sequences, without copying."""
    # the tokens of all sequences are in one dimension
    rows = slice(sum(batch.lengths[:start]), sum(batch.lengths[:end]))
    return Batch(
        tokens=batch.tokens[rows],
        loss_mask=batch.loss_mask[rows],
        features=batch.features[rows],
        lengths=batch.lengths[start:end],
        taps=batch.taps,
        seeds=batch.seeds[start:end],
    )


def count_chains(
    target: Target, head: TrainableDrafter, prompts: Sequence[Sequence[int]], depth: int
) -> list[float]:
    """Return how often greedy decoding here accepts a chain up to each of `depth` positions, counted as engines do.

    The head is bound to the target, in place.
    """
    drafter = head.bind(target.head)
    budget = Budget.fixed(chain_paths(depth))
    accepted = []
    for prompt in progress(prompts, "chains as the server's", len(prompts), unit="prompts"):
        trace = generate(target, drafter, list(prompt), budget=budget, max_new_tokens=NEW_TOKENS)
        # chains that the answer's end cuts short are not counted
        accepted += [cycle.accepted for cycle in trace.cycles if cycle.depth == depth]
    target.forget()
    rates = []
    for position in range(depth):
        passed = sum(count > position for count in accepted)
        rates.append(passed / max(len(accepted), 1))
    return rates


def every_tap(target: Target) -> tuple[int, ...]:
    """Return the taps of the inputs of all layers, the last layer's output, and that output after the final norm."""
    return (*range(len(target.layers) + 1), -1)


def read_states(target: Target, tokens: Tensor) -> Tensor:
    """Return [T, L + 2, D], the target's states at T tokens: L layers' inputs, the last output, that after the norm.

    D is the target's width. The order is that of `every_tap`.
    """
    taps = every_tap(target)
    outputs: list[Tensor] = []

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the layer's output; some layers return a tuple whose first item it is."""
        outputs.append(output[0] if isinstance(output, tuple) else output)

    # taps are inputs of layers, which the last layer's output is not: a hook records it. `taps` ends in the id of that
    # output and in -1, so the first is left out.
    with target.layers[-1].register_forward_hook(record):
        states = target.features(tokens[None], (*taps[:-2], -1))[0]
    # [T, 1, D]
    last = outputs[0].reshape(-1, 1, states.shape[-1]).to(states)
    return torch.cat([states[:, :-1], last, states[:, -1:]], dim=1)
