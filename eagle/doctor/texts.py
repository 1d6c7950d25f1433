"""What the target says to a few prompts, and its states of every layer while it does."""

# T tokens of one text, L layers, D target width

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle.core.decode import generate
from eagle.core.drafter import Budget, TrainableDrafter
from eagle.core.tree import chain_paths
from eagle.core.verify import Sampling
from eagle.data.examples import Batch, Example, collate
from eagle.drafters import DRAFTERS
from eagle.log import progress
from eagle.target.target import Target

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
SAID = ("prompt", "question", "instruction", "content", "value", "text")
LISTS = ("turns", "messages", "conversations")


def prompts_of(file: str | None) -> list[str]:
    """What to ask: the built-in prompts, or the first user turn of every line of a JSONL file."""
    if file is None:
        return list(PROMPTS)
    if not Path(file).is_file():
        raise ValueError(f"no prompts at {file}: expected a JSONL file, each line a prompt, a question or messages")
    found: list[str] = []
    for number, line in enumerate(Path(file).read_text().splitlines(), start=1):
        try:
            asked = _asked(json.loads(line)) if line.strip() else ""
        except ValueError:
            raise ValueError(f"{file}:{number} is no JSON: expected one record a line") from None
        if asked is None:
            raise ValueError(f"{file}:{number} asks nothing: expected one of the keys {', '.join(SAID + LISTS)}")
        found += [asked] if asked else []
    if not found:
        raise ValueError(f"no prompts in {file}: expected at least one line")
    return found


def _asked(record: Any) -> str | None:
    """The text that a record begins with, or None."""
    if isinstance(record, str):
        return record
    if isinstance(record, list):
        users = [one for one in record if not isinstance(one, dict) or one.get("role", one.get("from")) != "system"]
        return _asked(users[0]) if users else None
    values = [record[key] for key in SAID + LISTS if record.get(key)] if isinstance(record, dict) else []
    return _asked(values[0]) if values else None


def rendered(target: Target, prompts: Sequence[str], **template_kwargs: Any) -> list[list[int]]:
    """Token ids of the prompts, as the target's chat template asks them where it has one."""
    if target.tokenizer is None:
        raise ValueError("this target has no tokenizer: load it from a folder with its tokenizer's files")
    if getattr(target.tokenizer, "chat_template", None):
        return [list(target.chat(prompt, **template_kwargs)) for prompt in prompts]
    return [list(target.tokenizer.encode(prompt)) for prompt in prompts]


def answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    temperatures: Sequence[float],
    enough: int | None = None,
) -> Batch:
    """The target's own answers with its states of all layers: one text for every prompt and temperature.

    No further temperature is begun once the answers hold `enough` tokens. Every third prompt comes first, and the texts
    of a prompt lie side by side: a third of them is as the others, and of other prompts.
    """
    jobs = [(prompt, heat, number) for heat in temperatures for number, prompt in enumerate(prompts)]
    examples: list[tuple[int, Example]] = []
    taps, places = every_tap(target), 0
    for prompt, heat, number in progress(jobs, "the target's answers", len(jobs)):
        if number == 0 and enough is not None and places >= enough:
            break
        sampling = Sampling(heat, request=len(examples))
        said = generate(target, DRAFTERS["none"](), list(prompt), sampling=sampling, max_new_tokens=tokens).tokens
        text = torch.tensor([*prompt, *said])
        examples.append((number, Example(text, torch.arange(len(text)) >= len(prompt), states_of(target, text))))
        places += len(said)
    target.forget()
    examples.sort(key=lambda pair: (pair[0] % 3, pair[0]))
    return collate([one for _, one in examples if one.loss_mask[2:].any()], taps).to(target.device)


def split_texts(batch: Batch, parts: int) -> tuple[Batch, Batch]:
    """The first of so many parts of the texts, and the others; all of them twice where they are too few."""
    count = len(batch.lengths) // parts
    if count < 2:
        return batch, batch
    return select_texts(batch, slice(count)), select_texts(batch, slice(count, None))


def select_texts(batch: Batch, chosen: slice) -> Batch:
    """Some texts of a batch that lie side by side, none copied."""
    ends = [0, *accumulate(batch.lengths)]
    numbers = range(len(batch.lengths))[chosen]
    rows = slice(ends[numbers.start], ends[numbers.stop])
    columns = (batch.tokens[rows], batch.loss_mask[rows], batch.features[rows])
    return Batch(*columns, batch.lengths[chosen], batch.taps, batch.seeds[chosen])


def count_chains(
    target: Target, head: TrainableDrafter, prompts: Sequence[Sequence[int]], depth: int, tokens: int
) -> list[float]:
    """How often a chain is kept up to each place where this decoder answers the prompts greedily, as engines count."""
    drafter, budget, accepted = head.bind(target.head), Budget.fixed(chain_paths(depth)), []
    for prompt in progress(prompts, "chains as the server's", len(prompts)):
        trace = generate(target, drafter, list(prompt), budget=budget, max_new_tokens=tokens)
        accepted += [cycle.accepted for cycle in trace.cycles if cycle.depth == depth]  # none cut at the answer's end
    target.forget()
    return [sum(count > place for count in accepted) / max(len(accepted), 1) for place in range(depth)]


def every_tap(target: Target) -> tuple[int, ...]:
    """The inputs of all layers; what the last one gives out, not yet normed; and that normed."""
    return (*range(len(target.layers) + 1), -1)


def states_of(target: Target, text: Tensor) -> Tensor:
    """[T, L + 2, D], the states that `every_tap` names."""
    taps = every_tap(target)
    out: list[Tensor] = []

    def catch(_: nn.Module, __: Any, given: Any) -> None:
        out.append(given[0] if isinstance(given, tuple) else given)

    hook = target.layers[-1].register_forward_hook(catch)
    try:
        states = target.features(text[None], (*taps[:-2], -1))[0]
    finally:
        hook.remove()
    last = out[0].reshape(-1, states.shape[-1]).to(states)
    return torch.cat([states[:, :-1], last[:, None], states[:, -1:]], dim=1)
