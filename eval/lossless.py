"""Drafted output against the untouched model's own decoding: `python -m eval.lossless RECIPE [key=value ...]`."""

# V vocabulary

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from eval.drafters import Measured, load_drafters, load_target, made_by, started
from torch import Tensor

from eagle.core.decode import generate
from eagle.core.tree import DraftTree, Reading
from eagle.core.verify import Choose
from eagle.disk import write_text
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.target import Target
from eval.prompts import Case, Key, cases, key_of, prompt_of, questions, sampling_of

TEMPERATURES = (0.0, 1.0)
REMEMBERED = 32  # steps whose logits show how the model rounds


@dataclass(frozen=True)
class Own:
    """The untouched model's answer, and the logits [V] of its last steps."""

    prompt: list[int]
    tokens: list[int]
    last: list[Tensor]


@dataclass(frozen=True)
class Divergence:
    """Where drafted output first differs from the model's own."""

    key: Key
    position: int  # in the answer
    drafted: int | None  # None: the answer had ended
    own: int | None
    texts: tuple[str, str]
    gap: float | None  # by how much the model prefers its own token, in units of plain logits
    rounding: float  # how far the model is from itself, reading token by token and all at once

    @property
    def is_rounding(self) -> bool:
        """Whether the tokens are so close that rounding, which moves both, can decide between them."""
        return self.gap is not None and self.gap <= 2 * self.rounding

    def __str__(self) -> str:
        name, conversation, turn, _, seed = self.key
        gap = "no gap to tell" if self.gap is None else f"logit gap {self.gap:.2g}"
        return (
            f"{name}/{conversation}, turn {turn + 1}, seed {seed}, token {self.position + 1}: drafted {self.drafted} "
            f"{self.texts[0]!r}, the model's own {self.own} {self.texts[1]!r}, {gap}, rounding {self.rounding:.2g}"
        )


@dataclass
class Verdict:
    """What came of one drafter at one temperature."""

    drafter: str
    temperature: float
    answers: int = 0
    left_out: int = 0  # turns that leave the model no room for an answer
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def is_lossless(self) -> bool:
        """Whether all answers are the model's own, up to rounding."""
        return all(divergence.is_rounding for divergence in self.divergences)

    def __str__(self) -> str:
        same = self.answers - len(self.divergences)
        said = f"{self.drafter} at T = {self.temperature:g}: identical on {same} of {self.answers}"
        said += f" ({self.left_out} more leave no room for an answer)" if self.left_out else ""
        worst = sorted(self.divergences, key=lambda one: one.is_rounding)[:1]
        return "\n".join([said, *(f"  {'rounding' if one.is_rounding else 'DIFFERS'}: {one}" for one in worst)])

    def told(self) -> dict[str, Any]:
        """As JSON."""
        names = ("set", "conversation", "turn", "temperature", "seed")
        divergences = []
        for one in self.divergences:
            row = asdict(one)
            divergences.append({**dict(zip(names, row.pop("key"), strict=True)), **row, "is_rounding": one.is_rounding})
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "answers": self.answers,
            "left_out": self.left_out,
            "identical": self.answers - len(divergences),
            "lossless": self.is_lossless,
            "divergences": divergences,
        }


@torch.inference_mode()
def own_answer(model: Any, choose: Choose, prompt: list[int], stop: Sequence[int], count: int) -> Own:
    """The model's own decoding, token by token over its own cache: nothing of ours but the rule of choice."""
    new, tokens, cache = torch.tensor([prompt], device=model.device), list[int](), None
    last: deque[Tensor] = deque(maxlen=REMEMBERED)
    while len(tokens) < count and not (tokens and tokens[-1] in stop):
        said = model(input_ids=new, past_key_values=cache, use_cache=True)
        cache = said.past_key_values
        last.append(said.logits[0, -1].clone())
        tokens.append(_choice(choose, last[-1], prompt + tokens))
        new = torch.tensor([tokens[-1:]], device=model.device)
    return Own(prompt, tokens, list(last))


def _choice(choose: Choose, logits: Tensor, text: list[int]) -> int:
    """The token after a text, by the rule that drafted output follows."""
    if choose.noise is not None:
        choose.noise.forget(len(text))
    return choose(Reading(DraftTree.chain(text[-1:]), logits[None], None, [len(text)], text[:-1]), [0])[0]


def compared(model: Any, tokenizer: Any, key: Key, choose: Choose, own: Own, drafted: list[int]) -> Divergence | None:
    """The first difference, or None."""
    if drafted == own.tokens:
        return None
    shorter = min(len(drafted), len(own.tokens))
    at = next((place for place in range(shorter) if drafted[place] != own.tokens[place]), shorter)
    one, other = (tokens[at] if at < len(tokens) else None for tokens in (drafted, own.tokens))
    gap = None
    if one is not None and other is not None:
        text = own.prompt + own.tokens[:at]
        scores = _logits(model, text)[-1].float()
        if (offered := choose.offer(len(scores), scores.device)) is not None:
            scores = scores + offered([len(text)])[0]
        gap = float(scores[other] - scores[one])
    texts = tuple("" if token is None else tokenizer.decode([token]) for token in (one, other))
    return Divergence(key, at, one, other, (texts[0], texts[1]), gap, rounding(model, own))


def rounding(model: Any, own: Own) -> float:
    """The largest difference between the logits of the model's last steps and those of one forward over all."""
    rows = torch.stack(own.last)
    least = 8 * torch.finfo(rows.dtype).eps * float(rows.abs().max())
    return max(least, float((_logits(model, own.prompt + own.tokens[:-1])[-len(rows) :] - rows).abs().max()))


@torch.inference_mode()
def _logits(model: Any, text: list[int]) -> Tensor:
    """[T, V] of one forward without a cache."""
    return model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0]


def own_turns(recipe: Recipe, target: Target, model: Any, case: Case) -> Iterator[tuple[int, Choose, Own | None]]:
    """The model's own answers to a question's turns, each after those before; None where it has no room for one."""
    said: list[str] = []
    for turn, text in enumerate(case[2].turns):
        prompt, choose = prompt_of(recipe, target, [*said, text]), Choose(sampling_of(case, turn))
        if prompt is None:
            yield turn, choose, None
            return  # later turns are longer still
        own = own_answer(model, choose, prompt, target.stop_tokens, recipe.eval.max_new_tokens)
        yield turn, choose, own
        said += [text, target.tokenizer.decode(own.tokens, skip_special_tokens=True)]


def certify(recipe: Recipe, target: Target, model: Any, drafters: dict[str, Measured]) -> list[Verdict]:
    """Every drafter and temperature beside the model's own answers to all questions of the recipe."""
    temperatures = sorted({*TEMPERATURES, *recipe.eval.temperatures})
    # drafts that carry their law share the law of the output, not its tokens
    verdicts = {
        (name, temperature): Verdict(name, temperature)
        for temperature in temperatures
        for name, measured in drafters.items()
        if temperature == 0 or not measured.drawn
    }
    every = cases(recipe, questions(recipe), temperatures)
    for case in progress(every, "compare", len(every), unit="questions"):
        here = [verdict for (_, temperature), verdict in verdicts.items() if temperature == case[0]]
        for turn, choose, own in own_turns(recipe, target, model, case):
            for verdict in here:
                if own is None:
                    verdict.left_out += 1
                    continue
                measured = drafters[verdict.drafter]
                options = {"budget": measured.budget, "max_new_tokens": recipe.eval.max_new_tokens}
                target.forget()
                drafted = generate(target, measured.drafter, own.prompt, sampling=choose.sampling, **options).tokens
                different = compared(model, target.tokenizer, key_of(case, turn), choose, own, drafted)
                verdict.answers += 1
                verdict.divergences += [different] if different else []
    return list(verdicts.values())


def main(argv: list[str]) -> None:
    """Compare, print what was found, and write it beside the results; ends with 1 if output differs."""
    asked = command_line("eval.lossless", __doc__).parse_args(argv)
    recipe = Recipe.load(asked.recipe, asked.overrides)
    target, model = load_target(recipe), load_target(recipe).model  # the second one reads no tree, ever
    drafters = load_drafters(recipe, target)
    verdicts = certify(recipe, target, model, drafters)
    print(*verdicts, sep="\n")
    for name in (name for name, measured in drafters.items() if measured.drawn):
        print(f"{name} above T = 0: its drafts carry their law, so that of the output is the model's, not each token")
    made = {**started(recipe, asked.recipe), **made_by(recipe, target, drafters)}
    path = Path(recipe.train.out) / "lossless.json"
    write_text(path, json.dumps({"run": made, "verdicts": [verdict.told() for verdict in verdicts]}, indent=2) + "\n")
    if not all(verdict.is_lossless for verdict in verdicts):
        sys.exit(f"the output of a drafter is not the model's own: see {path}")


if __name__ == "__main__":
    script(main)
