"""Compare the output with that of the unmodified model: `eagle measure RECIPE --verify`."""

# V vocabulary

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from eagle.core.arguments import media_of
from eagle.core.budget import Budget
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose
from eagle.decoding.decode import generate
from eagle.disk import write_text
from eagle.formats.checkpoint import load_drafter
from eagle.log import JSON_HELP, json_alone, progress, script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line
from eagle.target.bits.near_ties import add_noise, first_difference, in_last_places
from eagle.target.structure import cache_name_of
from eagle.target.talk import inputs_of
from eagle.target.target import Target
from eval.load_run import (
    MeasuredDrafter,
    add_policies,
    describe_run,
    describe_start,
    load_drafters,
    load_target,
)
from eval.prompts import KEY_NAMES, Case, Key, cases, encode_prompt, questions

Truth = Literal["steps", "whole texts"]
TEMPERATURES = (0.0, 1.0)
# steps whose logits show how the model rounds
REMEMBERED = 32
# that are answered before they are compared, for each sequence of a batch
QUESTIONS_AT_A_TIME = 2


@dataclass(frozen=True)
class ModelAnswer:
    """The untouched model's answer, and the logits [V] of its last steps."""

    prompt: list[int]
    tokens: list[int]
    last_logits: list[Tensor]
    choose: Choose  # the rule and the noise that it was decoded with
    in_float32: list[int] | None = None  # its answer in fp32, where that was asked for


@dataclass(frozen=True)
class Divergence:
    """The first token where drafted output differs from the model's own."""

    key: Key
    position: int  # in the answer
    drafted: int | None  # None: the answer had ended
    own: int | None
    texts: tuple[str, str]
    gap: float | None  # by how much the model prefers its own token, in units of plain logits
    rounding: float  # largest difference of the model's logits between reading token by token and all at once
    # the model itself writes the drafted tokens where it decodes in its other way
    is_models_own: bool = False
    ulps: float | None = None  # the gap in units of the last place of the larger logit

    @property
    def is_rounding(self) -> bool:
        """Return whether the tokens are so close that rounding, which moves both, can decide between them."""
        return self.gap is not None and self.gap <= 2 * self.rounding

    def __str__(self) -> str:
        name, conversation, turn, _, seed = self.key
        gap = "no gap to tell" if self.gap is None else f"logit gap {self.gap:.2g}"
        return (
            f"{name}/{conversation}, turn {turn + 1}, seed {seed}, token {self.position + 1}: drafted {self.drafted} "
            f"{self.texts[0]!r}, the model's own {self.own} {self.texts[1]!r}, {gap}, rounding {self.rounding:.2g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with the parts of the key under their names."""
        row = asdict(self)
        key = dict(zip(KEY_NAMES, row.pop("key"), strict=True))
        return {**key, **row, "is_rounding": self.is_rounding}


@dataclass
class Verdict:
    """The comparison of one drafter at one temperature and batch size."""

    drafter: str
    temperature: float
    batch_size: int = 1
    answers: int = 0
    left_out: int = 0  # turns that leave the model no room for an answer
    divergences: list[Divergence] = field(default_factory=list)
    dtype: str = "float32"
    to_plain: int = 0  # answers that are those of plain decoding by this library, in the same dtype
    to_float32: int | None = None  # answers that are those of the model in fp32; None: not compared
    # what lets plain decoding and drafted output part in half precision; None: nothing may
    variance: str | None = None

    @property
    def is_lossless(self) -> bool:
        """Return whether all answers are plain decoding's, if they must be, and the model's own up to rounding."""
        if self.variance is None and self.to_plain < self.answers:
            return False
        return all(
            divergence.is_rounding or divergence.is_models_own for divergence in self.divergences
        )

    @property
    def identical(self) -> int:
        """Return the number of answers that are the model's own token by token."""
        return self.answers - len(self.divergences)

    def __str__(self) -> str:
        together = f", {self.batch_size} at a time" if self.batch_size > 1 else ""
        text = (
            f"{self.drafter} at T = {self.temperature:g}{together}: identical to plain decoding here in "
            f"{self.to_plain} of {self.answers}, to the untouched model in {self.dtype} in {self.identical}"
        )
        if self.to_float32 is not None:
            text += f", to the model in float32 in {self.to_float32}"
        widths = [divergence.ulps for divergence in self.divergences if divergence.ulps is not None]
        if widths:
            text += f"; the others part at near-ties of at most {max(widths):.2g} units in the last place"
        if self.left_out:
            text += f" ({self.left_out} more leave no room for an answer)"
        if self.variance and self.to_plain < self.answers:
            text += f"\n  {self.variance}"
        if self.divergences:
            text += f"\n  {self._describe_worst()}"
        return text

    def _describe_worst(self) -> str:
        # the least explained first: beyond rounding, then the model's own, then rounding
        worst = min(
            self.divergences,
            key=lambda divergence: (divergence.is_rounding, divergence.is_models_own),
        )
        if worst.is_rounding:
            return f"rounding: {worst}"
        if worst.is_models_own:
            return f"the model differs from itself: {worst}"
        return f"BEYOND ROUNDING: {worst}"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as the certificate holds it."""
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "batch_size": self.batch_size,
            "answers": self.answers,
            "left_out": self.left_out,
            "identical": self.identical,
            "dtype": self.dtype,
            "to_plain": self.to_plain,
            "to_float32": self.to_float32,
            "variance": self.variance,
            "lossless": self.is_lossless,
            "divergences": [divergence.to_json() for divergence in self.divergences],
        }


@torch.inference_mode()
def decode_untouched(
    model: Any,
    choose: Choose,
    prompt: list[int],
    stop: Sequence[int],
    count: int,
    truth: Truth = "steps",
) -> ModelAnswer:
    """Decode with the model alone; only the rule of choice is this project's.

    Args:
        model: A causal language model of transformers.
        choose: The rule that drafted output follows, with its noise.
        prompt: Token ids.
        stop: Tokens that end an answer.
        count: The most tokens of the answer.
        truth: "steps" of one token over the model's cache, as in `generate`, or a forward over "whole texts" for each
            token, which a prompt with images always takes.
    """
    name = cache_name_of(model)
    tokens: list[int] = []
    cache = None
    if media_of(prompt):
        truth = "whole texts"
    last_logits: deque[Tensor] = deque(maxlen=REMEMBERED)
    while len(tokens) < count and not (tokens and tokens[-1] in stop):
        if truth == "steps":
            inputs = torch.tensor([tokens[-1:] if tokens else prompt], device=model.device)
            output = model(input_ids=inputs, use_cache=True, **{name: cache})
            cache = getattr(output, name)
            # a view would keep the logits of the whole prompt
            logits = output.logits[0, -1].clone()
        else:
            logits = _logits(model, prompt, tokens)[-1].clone()
        last_logits.append(logits)
        tokens.append(_choose_token(choose, logits, prompt + tokens))
    return ModelAnswer(prompt, tokens, list(last_logits), choose)


def _choose_token(choose: Choose, logits: Tensor, prefix: list[int]) -> int:
    """Return the token after a prefix, by the rule that drafted output follows."""
    if choose.noise is not None:
        choose.noise.forget(len(prefix))
    # a tree of the last token alone
    tree = DraftTree.chain(prefix[-1:])
    output = TargetOutput(tree, logits[None], None, len(prefix) - 1, sequence=prefix[:-1])
    return choose(output, [0])[0]


def find_divergence(
    model: Any,
    tokenizer: Any,
    key: Key,
    answer: ModelAnswer,
    drafted: list[int],
    *,
    steps_differ: bool = False,
) -> Divergence | None:
    """Return the first difference of drafted tokens from the model's answer, or None.

    Args:
        model: The untouched model.
        tokenizer: Shows the two tokens as text.
        key: Names the answer.
        answer: The model's answer.
        drafted: The drafted answer's tokens.
        steps_differ: Whether the model's steps by one token differ from its forwards over whole sequences; if so, it is
            compared with its steps alone.
    """
    if drafted == answer.tokens:
        return None
    position = first_difference(drafted, answer.tokens)
    # either may be the beginning of the other
    token = drafted[position] if position < len(drafted) else None
    expected = answer.tokens[position] if position < len(answer.tokens) else None
    gap = None
    ulps = None
    if token is not None and expected is not None:
        logits = _logits_at(model, answer, position, steps=steps_differ)
        scores = add_noise(logits, answer.choose, len(answer.prompt) + position)
        gap = float(scores[expected] - scores[token])
        ulps = in_last_places(scores, logits, (expected, token), model.dtype)
    return Divergence(
        key=key,
        position=position,
        drafted=token,
        own=expected,
        texts=(_decode_token(tokenizer, token), _decode_token(tokenizer, expected)),
        gap=gap,
        rounding=least_rounding(answer) if steps_differ else measure_rounding(model, answer),
        ulps=ulps,
    )


def _logits_at(model: Any, answer: ModelAnswer, position: int, *, steps: bool) -> Tensor:
    """Return the model's logits [V] at a position of its answer, by steps or by one forward."""
    if not steps:
        return _logits(model, answer.prompt, answer.tokens[:position])[-1].float()
    again = decode_untouched(
        model, Choose(answer.choose.sampling), answer.prompt, [], count=position + 1
    )
    return again.last_logits[-1].float()


def _decode_token(tokenizer: Any, token: int | None) -> str:
    if token is None:
        return ""
    return str(tokenizer.decode([token]))


def _compare_steps(
    target: Target, model: Any, divergence: Divergence, answer: ModelAnswer, drafted: list[int]
) -> Divergence:
    """Return the divergence, marked as the model's own if its steps by one token give the drafted tokens too."""
    choose = Choose(answer.choose.sampling)
    stepped = decode_untouched(model, choose, answer.prompt, target.stop_tokens, count=len(drafted))
    return replace(divergence, is_models_own=stepped.tokens == drafted)


def measure_rounding(model: Any, answer: ModelAnswer) -> float:
    """Return the largest difference between the logits of the model's last steps and of one forward over all."""
    rows = torch.stack(answer.last_logits)
    whole = _logits(model, answer.prompt, answer.tokens[:-1])[-len(rows) :]
    return max(least_rounding(answer), float((whole - rows).abs().max()))


def least_rounding(answer: ModelAnswer) -> float:
    """Return the rounding that must be expected of logits as large as these."""
    rows = torch.stack(answer.last_logits)
    # 8 units in the last place of the largest
    return 8 * torch.finfo(rows.dtype).eps * float(rows.abs().max())


@torch.inference_mode()
def _logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the logits [T, V] of one forward without a cache, over a prompt and the beginning of an answer."""
    return model(**inputs_of(model, prompt, answer), use_cache=False).logits[0]


def answer_turns(
    recipe: Recipe, target: Target, model: Any, case: Case, truth: Truth
) -> Iterator[tuple[int, ModelAnswer | None]]:
    """Yield the model's own answer to each turn of a question, or None where it has no room for one."""
    texts: list[str] = []
    for turn in range(len(case.question.turns)):
        prompt = encode_prompt(recipe, target, case.question, texts)
        if prompt is None:
            yield turn, None
            # later turns are longer still
            return
        choose = Choose(case.sampling(turn))
        limit = recipe.eval.max_new_tokens
        answer = decode_untouched(
            model, choose, prompt, target.stop_tokens, count=limit, truth=truth
        )
        yield turn, answer
        texts.append(target.tokenizer.decode(answer.tokens, skip_special_tokens=True))


def certify(
    recipe: Recipe,
    target: Target,
    model: Any,
    drafters: dict[str, MeasuredDrafter],
    batch_sizes: Sequence[int] = (1,),
    truth: Truth = "steps",
    in_float32: Any = None,
) -> list[Verdict]:
    """Compare every drafter at every temperature with the model's own single answers to the recipe's questions.

    Args:
        recipe: Names the questions, temperatures and seeds.
        target: Decodes with every drafter, and plainly.
        model: The untouched model, of which no forward reads a tree.
        drafters: What is compared, by name.
        batch_sizes: How many prompts are decoded at once.
        truth: How the untouched model answers.
        in_float32: The model in fp32, which answers are then compared with too.

    Returns:
        A verdict for each temperature, batch size and drafter whose drafts are not sampled.
    """
    certifier = _Certifier(recipe, target, model, drafters, truth=truth, in_float32=in_float32)
    # asked before anything is decoded, which may change what is known
    variance = target.variance()
    plain = MeasuredDrafter(load_drafter("none", target), Budget(), "none")
    # a few at a time: the model's answers hold logits
    size = QUESTIONS_AT_A_TIME * max(batch_sizes)

    verdicts = []
    for temperature in sorted({*TEMPERATURES, *recipe.eval.temperatures}):
        at_temperature = certifier.open_verdicts(temperature, batch_sizes, variance)
        every = cases(recipe, questions(recipe), [temperature])
        groups = [every[start : start + size] for start in range(0, len(every), size)]
        title = f"compare at T = {temperature:g}"
        for group in progress(groups, title, len(every), unit="questions", size=len):
            certifier.compare_group(group, at_temperature, plain)
        verdicts += at_temperature
    return verdicts


@dataclass(frozen=True)
class _Certifier:
    """The models and drafters that are compared."""

    recipe: Recipe
    target: Target
    model: Any
    drafters: dict[str, MeasuredDrafter]
    truth: Truth
    in_float32: Any

    def open_verdicts(
        self, temperature: float, batch_sizes: Sequence[int], variance: str | None
    ) -> list[Verdict]:
        """Return the verdicts of one temperature, without answers."""
        verdicts = []
        for batch_size, (name, measured) in product(batch_sizes, self.drafters.items()):
            # sampled drafts keep the distribution of the output, not its tokens
            if temperature > 0 and measured.is_sampled:
                continue
            verdict = Verdict(
                name,
                temperature,
                batch_size,
                dtype=str(self.model.dtype).removeprefix("torch."),
                variance=variance,
                to_float32=None if self.in_float32 is None else 0,
            )
            verdicts.append(verdict)
        return verdicts

    def compare_group(
        self, group: Sequence[Case], verdicts: Sequence[Verdict], plain: MeasuredDrafter
    ) -> None:
        """Answer some questions in every way, and add the comparison to the verdicts."""
        left_out = 0
        # all turns of the group are answered before the drafters decode them in batches
        answered = []
        for case in group:
            for turn, answer in answer_turns(
                self.recipe, self.target, self.model, case, truth=self.truth
            ):
                if answer is None:
                    left_out += 1
                else:
                    answered.append((case.key(turn), self._add_float32(answer)))

        answers = [answer for _, answer in answered]
        plain_tokens = list(self._decode(plain, answers, 1))
        for verdict in verdicts:
            verdict.left_out += left_out
            verdict.answers += len(answered)
            drafted = self._decode(self.drafters[verdict.drafter], answers, verdict.batch_size)
            for (key, answer), own, tokens in zip(answered, plain_tokens, drafted, strict=True):
                verdict.to_plain += tokens == own
                if verdict.to_float32 is not None:
                    verdict.to_float32 += tokens == answer.in_float32
                divergence = self._find_divergence(key, answer, tokens)
                if divergence is not None:
                    verdict.divergences.append(divergence)

    def _find_divergence(
        self, key: Key, answer: ModelAnswer, tokens: list[int]
    ) -> Divergence | None:
        steps_differ = self.target.reader.follows_steps
        divergence = find_divergence(
            self.model,
            self.target.tokenizer,
            key,
            answer,
            drafted=tokens,
            steps_differ=steps_differ,
        )
        # the target follows the model's steps, and the answer is that of its other way
        if divergence is not None and steps_differ and self.truth != "steps":
            return _compare_steps(self.target, self.model, divergence, answer, drafted=tokens)
        return divergence

    def _add_float32(self, answer: ModelAnswer) -> ModelAnswer:
        """Return the answer, with the tokens that the model writes in fp32 where that is given."""
        if self.in_float32 is None:
            return answer
        wide = decode_untouched(
            self.in_float32,
            Choose(answer.choose.sampling),
            answer.prompt,
            self.target.stop_tokens,
            count=self.recipe.eval.max_new_tokens,
            truth=self.truth,
        )
        return replace(answer, in_float32=wide.tokens)

    def _decode(
        self, measured: MeasuredDrafter, answers: Sequence[ModelAnswer], batch_size: int
    ) -> Iterator[list[int]]:
        """Yield the drafted tokens for each of the model's answers."""
        section = self.recipe.eval
        options: dict[str, Any] = {
            "budget": measured.plan,
            "max_new_tokens": section.max_new_tokens,
        }
        if batch_size == 1:
            for answer in answers:
                # each prompt is read again
                self.target.forget()
                sampling = answer.choose.sampling
                yield generate(
                    self.target, measured.drafter, answer.prompt, sampling=sampling, **options
                ).tokens
        elif answers:
            self.target.forget()
            traces = generate(
                self.target,
                measured.drafter,
                [answer.prompt for answer in answers],
                sampling=[answer.choose.sampling for answer in answers],
                batch_size=batch_size,
                max_tokens_in_cache=section.max_tokens_in_cache,
                **options,
            )
            for trace in traces:
                yield trace.checked().tokens


def main(argv: list[str]) -> None:
    """Compare, print the verdicts, and write them beside the results; ends with 1 if output differs."""
    parser = command_line("eagle measure --verify", __doc__)
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="batch size (default: the recipe's)"
    )
    parser.add_argument(
        "--truth",
        choices=get_args(Truth),
        default="steps",
        help="how the unmodified model decodes: token by token with a KV cache, as in generate, or with a forward pass "
        "over the whole sequence for each token (default: %(default)s)",
    )
    parser.add_argument(
        "--with-float32",
        action="store_true",
        help="also compare with the model in float32, which needs memory for a third copy of the weights",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_intermixed_args(argv)
    with json_alone(args.json) as write_json:
        certificate = certify_recipe(args)
        write_json(certificate)
    if not all(verdict["lossless"] for verdict in certificate["verdicts"]):
        sys.exit(f"the output of a drafter is not the model's own: see {certificate['file']}")


def certify_recipe(args: argparse.Namespace) -> dict[str, Any]:
    """Compare as a command line asks, print the verdicts, and return the certificate with the file that holds it."""
    overrides = list(args.overrides)
    if args.batch_size is not None:
        overrides.append(f"eval.batch_size={args.batch_size}")
    recipe = Recipe.load(args.recipe, overrides)
    target = load_target(recipe)
    # a second copy, which reads no tree, ever
    model = load_target(recipe, packed=False).model
    drafters = load_drafters(recipe, target)
    if recipe.eval.goodput_policy:
        drafters = add_policies(recipe, target, drafters, questions(recipe))
    in_float32 = None
    if args.with_float32:
        in_float32 = load_target(recipe, packed=False, dtype="float32").model
    batch_sizes = sorted(set(recipe.eval.batch_size))
    verdicts = certify(
        recipe,
        target,
        model,
        drafters,
        batch_sizes=batch_sizes,
        truth=args.truth,
        in_float32=in_float32,
    )

    print(*verdicts, sep="\n")
    print(f"Trees are read by {target.describe()}; the untouched model answered by {args.truth}")
    for name, measured in drafters.items():
        if measured.is_sampled:
            print(
                f"{name} above T = 0: drafts are sampled, so the output keeps the model's distribution, not each token"
            )

    header = {
        **describe_start(recipe, args.recipe),
        **describe_run(recipe, target, drafters),
        "truth": args.truth,
    }
    certificate = {"run": header, "verdicts": [verdict.to_json() for verdict in verdicts]}
    path = Path(recipe.train.out) / "lossless.json"
    write_text(path, json.dumps(certificate, indent=2) + "\n")
    return {"file": str(path), **certificate}


if __name__ == "__main__":
    script(main)
