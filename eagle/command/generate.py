"""Stream one answer, with the drafted part in green."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any

from eagle.command.answering import (
    GREEN,
    HARMLESS,
    PLAIN,
    parse_options,
    stream_text,
    supports_colour,
    writer_to,
)
from eagle.command.chat import talk
from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.sampling import PUBLISHED_TYPICAL
from eagle.core.trace import Trace
from eagle.core.verify import Sampling
from eagle.decoding.beam import beam_search
from eagle.decoding.decode import generate
from eagle.decoding.goodput import Goodput
from eagle.demo_model import SMOLLM2, fetch_model
from eagle.device import choose_threads
from eagle.formats.checkpoint import check_drafter, load_drafter
from eagle.shipped import SHIPPED_HEAD, check_shipped_head
from eagle.target.bits.invariant import HALF
from eagle.target.bits.near_ties import first_difference, measure_tie
from eagle.target.target import Target


def main(argv: list[str]) -> None:
    """Answer a prompt, or chat in the terminal, with drafts of a head or of a method without weights.

    Without arguments, chat with SmolLM2-135M-Instruct and the shipped head. The model is downloaded the first time.
    """
    parser = argparse.ArgumentParser(prog="eagle generate", description=main.__doc__)
    parser.add_argument(
        "drafter",
        nargs="?",
        help="a head's folder or hub id, or a method without weights, such as ngram",
    )
    parser.add_argument("prompt", nargs="?", help="the question; without it, chat in the terminal")
    parser.add_argument(
        "--target",
        "--model",
        help="the model that answers: a folder, a hub id or a GGUF file; needed with a drafter",
    )
    parser.add_argument(
        "--image", action="append", default=[], metavar="PATH", help="image before the prompt"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="default: 0, which is greedy"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for sampling, which makes answers reproducible"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, help="length limit of an answer (default: 128, in a chat 512)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also decode without drafts, and compare speed and output",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the drafter, such as draft_vocab=FILE for a head",
    )
    parser.add_argument(
        "--policy", action="store_true", help="choose the draft length, or no draft, in each cycle"
    )
    parser.add_argument("--typical", action="store_true", help="typical acceptance, which is LOSSY")
    parser.add_argument(
        "--beams", type=int, metavar="N", help="print the best answer of a beam search"
    )
    parser.add_argument(
        "--dtype", help="of the target; default: the fastest, or float32 with --compare"
    )
    args = parser.parse_intermixed_args(argv)
    if (args.drafter is None) != (args.target is None):
        missing = "drafter" if args.drafter is None else "--target"
        parser.error(f"the following arguments are required: {missing}")
    if args.max_new_tokens is None:
        args.max_new_tokens = 512 if args.prompt is None else 128
    if args.prompt is None:
        names = ("image", "compare", "policy", "typical", "beams")
        unfit = [f"--{name}" for name in names if getattr(args, name)]
        if unfit:
            raise ValueError(f"{', '.join(unfit)} got no prompt, expected one behind the drafter")
        if args.drafter is None:
            take_shipped(args)
        talk(args)
    # a beam search knows its answer only at the end, so there is nothing to stream
    elif args.beams is None:
        _generate(args)
    else:
        _search_beams(args)


def take_shipped(args: argparse.Namespace) -> None:
    """Set the arguments to the shipped head and its target, which is downloaded if it is not in the cache."""
    check_shipped_head()
    args.target = fetch_model(SMOLLM2)
    args.drafter = str(SHIPPED_HEAD)
    # said in words, as the head's path is a long one inside the installation
    print(f"{SMOLLM2.name} with the head that comes with eagle", file=sys.stderr)


def _load(args: argparse.Namespace) -> tuple[Target, Drafter]:
    """Return the target and the drafter that the arguments name."""
    options = parse_options(args.option)
    # a wrong drafter is refused before the target is loaded
    check_drafter(args.drafter, options)
    target = Target.load(args.target, dtype=args.dtype or "auto", images=bool(args.image))
    return target, load_drafter(args.drafter, target, **options)


def read_prompt(target: Target, args: argparse.Namespace) -> list[int]:
    """Return the tokens of the command line's prompt, after its images."""
    content = args.prompt
    if args.image:
        content = [{"type": "image", "image": path} for path in args.image]
        content.append({"type": "text", "text": args.prompt})
    return target.chat([{"role": "user", "content": content}])


def _generate(args: argparse.Namespace) -> None:
    """Stream an answer, and say what it took and, if asked, how it compares with plain decoding."""
    if args.typical and args.policy:
        raise ValueError(
            "--policy measures exact verification, --typical is lossy: leave one of them out"
        )
    target, drafter = _load(args)
    plain = load_drafter("none", target)
    prompt = read_prompt(target, args)
    if target.device.type == "cpu":
        choose_threads(partial(generate, target, plain, prompt, max_new_tokens=2))
    # the thresholds of typical acceptance, a lossy rule; None for the exact one
    typical = PUBLISHED_TYPICAL if args.typical else None
    sampling = Sampling(args.temperature, seed=args.seed, typical=typical)
    if args.compare:
        # the first forwards are slow, and would count only against the drafter, which is timed first
        for warmed in (drafter, plain):
            generate(
                target,
                warmed,
                prompt,
                sampling=sampling,
                max_new_tokens=min(8, args.max_new_tokens),
            )
    policy = None
    budget: Any = None
    if args.policy:
        budget = policy = _measure_policy(target, drafter, prompt, sampling)
    elif args.typical:
        # by default the target's sampling noise takes part in the ranking of drafts: the first ones are often unlikely
        # tokens, which typical acceptance rejects
        budget = replace(drafter.budget or Budget(), draw="likeliest")
    is_coloured = supports_colour(sys.stdout)
    decode = partial(
        stream_text, target, prompt=prompt, sampling=sampling, max_new_tokens=args.max_new_tokens
    )
    # else the warm-up's KV cache would save the prompt's forward
    target.forget()
    drafted = decode(drafter, write=writer_to(sys.stdout, is_coloured), budget=budget)
    print()
    legend = f" ({GREEN}green{PLAIN}: drafted)" if is_coloured else ""
    _print_note(f"{args.drafter}: {drafted}{legend}")
    # a policy chooses for itself, whatever the head was tuned to
    if policy is None and drafter.budget is not None and not drafter.budget.nodes:
        _print_note("nothing was drafted: `eagle measure --tune` found no draft that pays")
    # the usual way to read a tree, by an attention mask, is not worth a line
    if target.describe() != "mask":
        _print_note(f"trees are read by {target.describe()}")
    if policy is not None:
        depths = [cycle.depth for cycle in drafted.trace.cycles]
        _print_note(
            f"policy: {fmean(depths or [0]):.1f} levels a cycle, of 0 to {policy.budget.depth}"
        )
    if args.typical:
        _print_note(
            "typical acceptance is LOSSY: the answer does not follow the model's distribution"
        )
    if args.compare:
        target.forget()
        undrafted = decode(plain, write=lambda *_: None)
        _print_note(f"none: {undrafted}")
        verdict = _compare_answers(
            target, drafted.trace, undrafted.trace, sampling, is_lossy=args.typical
        )
        _print_note(f"{drafted.speed / undrafted.speed:.2f} × as fast, {verdict}")


def _print_note(line: str) -> None:
    """Print a line to stderr, so that a pipe gets the answer alone."""
    print(line, file=sys.stderr)


def _search_beams(args: argparse.Namespace) -> None:
    """Print the best answer of a beam search, and what it took."""
    names = ("temperature", "compare", "policy", "typical")
    unfit = [f"--{name}" for name in names if getattr(args, name)]
    if unfit:
        raise ValueError(
            f"--beams searches by the target's own probabilities: leave {', '.join(unfit)} out"
        )
    target, drafter = _load(args)
    prompt = read_prompt(target, args)
    start = perf_counter()
    result = beam_search(
        target, drafter, prompt, beams=args.beams, max_new_tokens=args.max_new_tokens
    )
    seconds = perf_counter() - start
    # one prompt was given, and its best answer alone is kept
    [answer] = result.tokens
    [score] = result.scores
    text = target.tokenizer.decode(answer, skip_special_tokens=True)
    print(text.translate(HARMLESS) if sys.stdout.isatty() else text)
    _print_note(
        f"{args.drafter}: score {score:.4f}; {result.steps} steps, {result.forwards} forwards after the prompt's, "
        f"{result.steps_per_forward:.2f} steps each; {len(answer) / seconds:.1f} tokens/s"
    )


def _measure_policy(
    target: Target, drafter: Drafter, prompt: list[int], sampling: Sampling
) -> Goodput:
    """Return a policy that drafts as many levels in each cycle as pay, by costs that it measures on this machine.

    They are measured in a generation of up to 256 tokens, as far as the model has positions left.
    """
    new_tokens = 256
    if target.max_positions is not None:
        new_tokens = max(min(256, target.max_positions - len(prompt)), 1)
    return Goodput.measure(target, drafter, prompt, sampling=sampling, max_new_tokens=new_tokens)


def _compare_answers(
    target: Target, drafted: Trace, plain: Trace, sampling: Sampling, *, is_lossy: bool = False
) -> str:
    """Return a phrase that says whether two answers are the same, or at which token and how near a tie they part.

    Args:
        target: The model that answered.
        drafted: Its answer with drafts.
        plain: Its answer without.
        sampling: How it chose tokens in both.
        is_lossy: Whether the rule of acceptance may change the answer.
    """
    if drafted.tokens == plain.tokens:
        return "and the output is the same"
    # counted from 1
    first = first_difference(drafted.tokens, plain.tokens) + 1
    if is_lossy:
        return (
            f"but the output parts from it at token {first}, as a lossy rule of acceptance makes it"
        )
    if target.model.dtype not in HALF:
        return f"but the output differs from token {first} on, which must not be"
    # in half precision a forward over a tree rounds otherwise than one over a token, which decides near-ties
    tie = measure_tie(target, plain.prompt, plain.tokens, drafted.tokens, sampling)
    dtype = str(target.model.dtype).removeprefix("torch.")
    how = "" if tie is None else f", at a near-tie of {tie:.2g} units in the last place of {dtype}"
    return f"but 0 of 1 answers are identical: they part at token {first}{how}; --dtype float32 is exact"
