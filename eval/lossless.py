"""Compare drafted output with the untouched model's own: `eagle lossless RECIPE [--batch-size N]`."""

# V vocabulary

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.bits.near_ties import add_noise, first_difference, in_last_places
from eagle.target.structure import cache_name_of
from eagle.target.talk import inputs_of
from eagle.target.target import Target
from eval.load_run import MeasuredDrafter, add_policies, describe_run, describe_start, load_drafters, load_target
from eval.prompts import KEY_NAMES, Case, Key, cases, encode_prompt, questions

Truth = Literal["steps", "whole texts"]
TEMPERATURES = (0.0, 1.0)
REMEMBERED = 32  # steps whose logits show how the model rounds
QUESTIONS_AT_A_TIME = 2  # that are answered before they are compared, for each text at a time


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
    is_models_own: bool = False  # the model itself writes the drafted tokens where it decodes in its other way
    ulps: float | None = None  # the gap in units of the last place of the larger logit

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

    def to_json(self) -> dict[str, Any]:
        """The fields with the key spelt out."""
        row = asdict(self)
        return {**dict(zip(KEY_NAMES, row.pop("key"), strict=True)), **row, "is_rounding": self.is_rounding}


@dataclass
class Verdict:
    """The comparison of one drafter at one temperature, with so many texts at a time."""

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
        """Whether all answers are plain decoding's, if they must be, and the model's own up to rounding."""
        if self.variance is None and self.to_plain < self.answers:
            return False
        return all(divergence.is_rounding or divergence.is_models_own for divergence in self.divergences)

    @property
    def identical(self) -> int:
        """Number of answers that are the model's own token by token."""
        return self.answers - len(self.divergences)

    def __str__(self) -> str:
        together = f", {self.batch_size} at a time" if self.batch_size > 1 else ""
        text = f"{self.drafter} at T = {self.temperature:g}{together}: identical to plain decoding here in "
        text += f"{self.to_plain} of {self.answers}, to the untouched model in {self.dtype} in {self.identical}"
        text += "" if self.to_float32 is None else f", to the model in float32 in {self.to_float32}"
        ties = [divergence.ulps for divergence in self.divergences]
        widths = [ulps for ulps in ties if ulps is not None]
        if widths:
            text += f"; the others part at near-ties of at most {max(widths):.2g} units in the last place"
        text += f" ({self.left_out} more leave no room for an answer)" if self.left_out else ""
        text += f"\n  {self.variance}" if self.variance and self.to_plain < self.answers else ""
        for worst in sorted(self.divergences, key=lambda each: (each.is_rounding, each.is_models_own))[:1]:
            kind = "the model differs from itself" if worst.is_models_own else "BEYOND ROUNDING"
            text += f"\n  {'rounding' if worst.is_rounding else kind}: {worst}"
        return text

    def to_json(self) -> dict[str, Any]:
        """The verdict as the certificate holds it."""
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
    model: Any, choose: Choose, prompt: list[int], stop: Sequence[int], count: int, truth: Truth = "steps"
) -> ModelAnswer:
    """Decode with the model alone; only the rule of choice is this project's.

    It goes by "steps" of one token over its own cache, as in `generate`. Or it reads whole texts: always with images.
    """
    name, tokens, cache = cache_name_of(model), list[int](), None
    truth = "whole texts" if media_of(prompt) else truth
    last_logits: deque[Tensor] = deque(maxlen=REMEMBERED)
    while len(tokens) < count and not (tokens and tokens[-1] in stop):
        if truth == "steps":
            inputs = torch.tensor([tokens[-1:] if tokens else prompt], device=model.device)
            output = model(input_ids=inputs, use_cache=True, **{name: cache})
            cache = getattr(output, name)
            last_logits.append(output.logits[0, -1].clone())
        else:
            last_logits.append(_logits(model, prompt, tokens)[-1].clone())
        tokens.append(_choose_token(choose, last_logits[-1], prompt + tokens))
    return ModelAnswer(prompt, tokens, list(last_logits), choose)


def _choose_token(choose: Choose, logits: Tensor, prefix: list[int]) -> int:
    """The token after a prefix, by the rule that drafted output follows."""
    if choose.noise is not None:
        choose.noise.forget(len(prefix))
    return choose(TargetOutput(DraftTree.chain(prefix[-1:]), logits[None], None, len(prefix) - 1, prefix[:-1]), [0])[0]


def find_divergence(
    model: Any, tokenizer: Any, key: Key, answer: ModelAnswer, drafted: list[int], *, steps_differ: bool = False
) -> Divergence | None:
    """The first difference of drafted tokens from the model's answer, or None.

    A model whose `steps_differ` from its forwards over whole texts is compared with its steps alone.
    """
    if drafted == answer.tokens:
        return None
    at = first_difference(drafted, answer.tokens)
    token = drafted[at] if at < len(drafted) else None
    expected = answer.tokens[at] if at < len(answer.tokens) else None
    gap = ulps = None
    if token is not None and expected is not None:
        if steps_differ:
            own = decode_untouched(model, Choose(answer.choose.sampling), answer.prompt, [], at + 1)
            logits = own.last_logits[-1].float()
        else:
            logits = _logits(model, answer.prompt, answer.tokens[:at])[-1].float()
        scores = add_noise(logits, answer.choose, len(answer.prompt) + at)
        gap = float(scores[expected] - scores[token])
        ulps = in_last_places(scores, logits, (expected, token), model.dtype)
    texts = ["" if each is None else tokenizer.decode([each]) for each in (token, expected)]
    rounding = least_rounding(answer) if steps_differ else measure_rounding(model, answer)
    return Divergence(key, at, token, expected, (texts[0], texts[1]), gap, rounding, ulps=ulps)


def _compare_steps(
    target: Target, model: Any, divergence: Divergence, answer: ModelAnswer, drafted: list[int]
) -> Divergence:
    """The divergence, marked as the model's own if its steps by one token lead to the drafted tokens too."""
    choose = Choose(answer.choose.sampling)
    stepped = decode_untouched(model, choose, answer.prompt, target.stop_tokens, len(drafted)).tokens
    return replace(divergence, is_models_own=stepped == drafted)


def measure_rounding(model: Any, answer: ModelAnswer) -> float:
    """The largest difference between the logits of the model's last steps and those of one forward over all."""
    rows = torch.stack(answer.last_logits)
    whole = _logits(model, answer.prompt, answer.tokens[:-1])[-len(rows) :]
    return max(least_rounding(answer), float((whole - rows).abs().max()))


def least_rounding(answer: ModelAnswer) -> float:
    """The rounding of logits as large as these that must be expected in any case."""
    rows = torch.stack(answer.last_logits)
    return 8 * torch.finfo(rows.dtype).eps * float(rows.abs().max())


@torch.inference_mode()
def _logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """[T, V] of one forward over a prompt, with its images, and the beginning of an answer, without a cache."""
    return model(**inputs_of(model, prompt, answer), use_cache=False).logits[0]


def answer_turns(
    recipe: Recipe, target: Target, model: Any, case: Case, truth: Truth
) -> Iterator[tuple[int, ModelAnswer | None]]:
    """The model's own answers to a question's turns, each after those before; None where it has no room for one."""
    turns: list[str] = []
    for turn, text in enumerate(case.question.turns):
        prompt = encode_prompt(recipe, target, [*turns, text], case.question.images)
        if prompt is None:
            yield turn, None
            return  # later turns are longer still
        choose = Choose(case.sampling(turn))
        answer = decode_untouched(model, choose, prompt, target.stop_tokens, recipe.eval.max_new_tokens, truth)
        yield turn, answer
        turns += [text, target.tokenizer.decode(answer.tokens, skip_special_tokens=True)]


def certify(
    recipe: Recipe,
    target: Target,
    model: Any,
    drafters: dict[str, MeasuredDrafter],
    batch_sizes: Sequence[int] = (1,),
    truth: Truth = "steps",
    in_float32: Any = None,
) -> list[Verdict]:
    """Compare every drafter at every temperature with the model's own single answers to all questions of the recipe.

    They are compared with plain decoding by this library, too, and with the model `in_float32` where it is given.
    """
    temperatures = sorted({*TEMPERATURES, *recipe.eval.temperatures})
    dtype = str(model.dtype).removeprefix("torch.")
    about: dict[str, Any] = {"dtype": dtype, "variance": target.variance()}
    about["to_float32"] = None if in_float32 is None else 0
    plain = MeasuredDrafter(load_drafter("none", target), Budget(), "none")
    # sampled drafts keep the distribution of the output, not its tokens
    verdicts = {
        temperature: [
            Verdict(name, temperature, batch_size, **about)
            for batch_size in batch_sizes
            for name, measured in drafters.items()
            if temperature == 0 or not measured.is_sampled
        ]
        for temperature in temperatures
    }
    for temperature, part in verdicts.items():
        every = cases(recipe, questions(recipe), [temperature])
        size = QUESTIONS_AT_A_TIME * max(batch_sizes)
        groups = [every[start : start + size] for start in range(0, len(every), size)]
        for group in progress(groups, f"compare at T = {temperature:g}", len(every), unit="questions", size=len):
            turns = [(case, *turn) for case in group for turn in answer_turns(recipe, target, model, case, truth)]
            answered = [(case.key(turn), answer) for case, turn, answer in turns if answer is not None]
            if in_float32 is not None:
                answered = [(key, _in_float32(recipe, target, in_float32, answer, truth)) for key, answer in answered]
            by_plain = list(_decode(recipe, target, plain, answered, 1))
            for verdict in part:
                verdict.left_out += len(turns) - len(answered)
                verdict.answers += len(answered)
                drafted = _decode(recipe, target, drafters[verdict.drafter], answered, verdict.batch_size)
                for (key, answer), own, tokens in zip(answered, by_plain, drafted, strict=True):
                    verdict.to_plain += tokens == own
                    if verdict.to_float32 is not None:
                        verdict.to_float32 += tokens == answer.in_float32
                    differ = target.reader.follows_steps
                    divergence = find_divergence(model, target.tokenizer, key, answer, tokens, steps_differ=differ)
                    if divergence is not None and differ and truth != "steps":
                        divergence = _compare_steps(target, model, divergence, answer, tokens)
                    verdict.divergences += [divergence] if divergence else []
    return [verdict for part in verdicts.values() for verdict in part]


def _in_float32(recipe: Recipe, target: Target, model: Any, answer: ModelAnswer, truth: Truth) -> ModelAnswer:
    """The answer, with the tokens that the model writes in fp32."""
    choose = Choose(answer.choose.sampling)
    count = recipe.eval.max_new_tokens
    return replace(
        answer, in_float32=decode_untouched(model, choose, answer.prompt, target.stop_tokens, count, truth).tokens
    )


def _decode(
    recipe: Recipe,
    target: Target,
    measured: MeasuredDrafter,
    answers: Sequence[tuple[Key, ModelAnswer]],
    batch_size: int,
) -> Iterator[list[int]]:
    """The drafted tokens for each of the model's answers, so many texts at a time; each prompt is read anew."""
    section = recipe.eval
    options: dict[str, Any] = {"budget": measured.plan, "max_new_tokens": section.max_new_tokens}
    if batch_size == 1:
        for _, answer in answers:
            target.forget()
            sampling = answer.choose.sampling
            yield generate(target, measured.drafter, answer.prompt, sampling=sampling, **options).tokens
    elif answers:
        target.forget()
        options |= {"batch_size": batch_size, "max_tokens_in_cache": section.max_tokens_in_cache}
        samplings = [answer.choose.sampling for _, answer in answers]
        prompts = [answer.prompt for _, answer in answers]
        for trace in generate(target, measured.drafter, prompts, sampling=samplings, **options):
            yield trace.checked().tokens


def main(argv: list[str]) -> None:
    """Compare, print the verdicts, and write them beside the results; ends with 1 if output differs."""
    parser = command_line("eagle lossless", __doc__)
    parser.add_argument("--batch-size", type=int, metavar="N", help="texts at a time (default: the recipe's)")
    parser.add_argument(
        "--truth",
        choices=get_args(Truth),
        default="steps",
        help="the model's own answers: by steps of one token over its cache, as in generate, or by a forward over the "
        "whole text for each token (default: %(default)s)",
    )
    parser.add_argument(
        "--with-float32",
        action="store_true",
        help="compare with the model in float32 too, which needs memory for a third set of weights",
    )
    args = parser.parse_intermixed_args(argv)
    size = [] if args.batch_size is None else [f"eval.batch_size={args.batch_size}"]
    recipe = Recipe.load(args.recipe, [*args.overrides, *size])
    target, model = load_target(recipe), load_target(recipe, packed=False).model  # the second one reads no tree, ever
    drafters = load_drafters(recipe, target)
    if recipe.eval.goodput_policy:
        drafters = add_policies(recipe, target, drafters, questions(recipe))
    in_float32 = None
    if args.with_float32:
        wide = recipe.model_copy(update={"target": recipe.target.model_copy(update={"dtype": "float32"})})
        in_float32 = load_target(wide, packed=False).model
    verdicts = certify(recipe, target, model, drafters, sorted(set(recipe.eval.batch_size)), args.truth, in_float32)
    print(*verdicts, sep="\n")
    print(f"Trees are read by {target.describe()}; the untouched model answered by {args.truth}")
    for name in (name for name, measured in drafters.items() if measured.is_sampled):
        print(f"{name} above T = 0: drafts are sampled, so the output keeps the model's distribution, not each token")
    header = {**describe_start(recipe, args.recipe), **describe_run(recipe, target, drafters), "truth": args.truth}
    path = Path(recipe.train.out) / "lossless.json"
    write_text(path, json.dumps({"run": header, "verdicts": [each.to_json() for each in verdicts]}, indent=2) + "\n")
    if not all(verdict.is_lossless for verdict in verdicts):
        sys.exit(f"the output of a drafter is not the model's own: see {path}")


if __name__ == "__main__":
    script(main)
