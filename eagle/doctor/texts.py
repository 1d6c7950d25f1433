"""The target's answers to a few prompts, with its states of every layer."""

# T tokens of one text, L layers, D target width

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
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
TOGETHER = 16  # answers that are written side by side
TEMPERATURES = (0.0, *[1.0] * 11)  # of the answers to each prompt; greedy ones repeat themselves
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
    """The built-in prompts, or the first user turn of every line of a JSONL file."""
    if file is None:
        return list(PROMPTS)
    if not Path(file).is_file():
        raise ValueError(f"no prompts at {file}: expected a JSONL file, each line a prompt, a question or messages")
    prompts: list[str] = []
    for number, line in enumerate(Path(file).read_text().splitlines(), start=1):
        try:
            prompt = _first_turn(json.loads(line)) if line.strip() else ""
        except ValueError:
            raise ValueError(f"{file}:{number} is no JSON: expected one record a line") from None
        if prompt is None:
            keys = ", ".join(TEXT_KEYS + LIST_KEYS)
            raise ValueError(f"{file}:{number} asks nothing: expected one of the keys {keys}")
        prompts += [prompt] if prompt else []
    if not prompts:
        raise ValueError(f"no prompts in {file}: expected at least one line")
    return prompts


def _first_turn(record: Any) -> str | None:
    """The first user text of a record, or None."""
    if isinstance(record, str):
        return record
    if isinstance(record, list):
        turns = [
            turn for turn in record if not isinstance(turn, dict) or turn.get("role", turn.get("from")) != "system"
        ]
        return _first_turn(turns[0]) if turns else None
    values = [record[key] for key in TEXT_KEYS + LIST_KEYS if record.get(key)] if isinstance(record, dict) else []
    return _first_turn(values[0]) if values else None


def render_prompts(target: Target, prompts: Sequence[str], **template_kwargs: Any) -> list[list[int]]:
    """Token ids of the prompts, as the target's chat template asks them where it has one."""
    if target.tokenizer is None:
        raise ValueError("this target has no tokenizer: load it from a folder with its tokenizer's files")
    if getattr(target.tokenizer, "chat_template", None):
        return [list(target.chat(prompt, **template_kwargs)) for prompt in prompts]
    return [list(target.tokenizer.encode(prompt)) for prompt in prompts]


def answer_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int = NEW_TOKENS,
    temperatures: Sequence[float] = TEMPERATURES,
    enough: int | None = ENOUGH_TOKENS,
) -> Batch:
    """The target's answers with its states of all layers: one text for every prompt and temperature.

    All prompts are answered side by side. No further temperature is begun once the answers have `enough` tokens.
    Every third prompt comes first and the texts of a prompt are adjacent, so that the first third has other prompts
    than the rest.
    """
    examples: list[tuple[int, Example]] = []
    total = 0
    for heat in progress(temperatures, "the target's answers", len(temperatures), unit="rounds"):
        if enough is not None and total >= enough:
            break
        samplings = [Sampling(heat, request=len(examples) + number) for number in range(len(prompts))]
        rows = [list(prompt) for prompt in prompts]
        none = DRAFTERS["none"]()
        traces = generate(target, none, rows, sampling=samplings, max_new_tokens=new_tokens, batch_size=TOGETHER)
        for number, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
            text = torch.tensor([*prompt, *trace.tokens])
            examples.append((number, Example(text, torch.arange(len(text)) >= len(prompt), read_states(target, text))))
            total += len(trace.tokens)
    target.forget()
    examples.sort(key=lambda pair: (pair[0] % 3, pair[0]))
    answered = [example for _, example in examples if example.loss_mask[2:].any()]
    return collate(answered, every_tap(target)).to(target.device)


def split_texts(batch: Batch, parts: int) -> tuple[Batch, Batch]:
    """The first 1 / `parts` of the texts, and the others; all texts twice if there are too few."""
    count = len(batch.lengths) // parts
    if count < 2:
        return batch, batch
    return select_texts(batch, 0, count), select_texts(batch, count, len(batch.lengths))


def select_texts(batch: Batch, start: int, end: int) -> Batch:
    """A range of a batch's texts, without copying."""
    rows = slice(sum(batch.lengths[:start]), sum(batch.lengths[:end]))
    columns = (batch.tokens[rows], batch.loss_mask[rows], batch.features[rows])
    return Batch(*columns, batch.lengths[start:end], batch.taps, batch.seeds[start:end])


def count_chains(
    target: Target, head: TrainableDrafter, prompts: Sequence[Sequence[int]], depth: int, new_tokens: int = NEW_TOKENS
) -> list[float]:
    """Acceptance at each place of a chain when this decoder answers the prompts greedily, counted as engines count."""
    drafter, budget = head.bind(target.head), Budget.fixed(chain_paths(depth))
    accepted: list[int] = []
    for prompt in progress(prompts, "chains as the server's", len(prompts), unit="prompts"):
        trace = generate(target, drafter, list(prompt), budget=budget, max_new_tokens=new_tokens)
        accepted += [cycle.accepted for cycle in trace.cycles if cycle.depth == depth]  # none cut at the answer's end
    target.forget()
    return [sum(count > place for count in accepted) / max(len(accepted), 1) for place in range(depth)]


def every_tap(target: Target) -> tuple[int, ...]:
    """The inputs of all layers, the last layer's output, and that output after the final norm."""
    return (*range(len(target.layers) + 1), -1)


def read_states(target: Target, text: Tensor) -> Tensor:
    """[T, L + 2, D], the states that `every_tap` names."""
    taps = every_tap(target)
    outputs: list[Tensor] = []

    def keep(layer: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with target.layers[-1].register_forward_hook(keep):
        states = target.features(text[None], (*taps[:-2], -1))[0]
    last = outputs[0].reshape(-1, states.shape[-1]).to(states)
    return torch.cat([states[:, :-1], last[:, None], states[:, -1:]], dim=1)
