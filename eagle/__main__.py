"""`python -m eagle VERB ...`: what needs no checkout."""

from __future__ import annotations

import argparse
import sys

from eagle.checkpoint import load_drafter, load_head
from eagle.decode import stream
from eagle.export import EXPORTERS, export
from eagle.target import Target
from eagle.verify import Sampling


def main(argv: list[str] | None = None) -> None:
    """Parse the verb and do it."""
    parser = argparse.ArgumentParser(prog="eagle", description="Run and ship draft heads.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    saying = verbs.add_parser("generate", help="stream an answer, drafted by a head or a method's name")
    saying.add_argument("drafter")
    saying.add_argument("prompt")
    saying.add_argument("--target", required=True)
    saying.add_argument("--temperature", type=float, default=0.0)
    saying.add_argument("--max-new-tokens", type=int, default=128)
    shipping = verbs.add_parser("export", help="write a head as an engine reads it")
    shipping.add_argument("head")
    shipping.add_argument("--target", required=True)
    shipping.add_argument("--to", required=True, choices=list(EXPORTERS))
    shipping.add_argument("out")
    args = parser.parse_args(argv)
    try:
        {"generate": _generate, "export": _export}[args.verb](args)
    except ValueError as error:
        sys.exit(f"eagle: {error}")


def _generate(args: argparse.Namespace) -> None:
    target = Target.load(args.target)
    drafter, tokens = load_drafter(args.drafter, target), []
    shown = ""
    for new in stream(
        target,
        drafter,
        target.chat(args.prompt),
        sampling=Sampling(temperature=args.temperature),
        max_new_tokens=args.max_new_tokens,
    ):
        tokens += new
        text = target.tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()


def _export(args: argparse.Namespace) -> None:
    target = Target.load(args.target)
    export(load_head(args.head), target.config, args.to, args.out)
    print(f"{args.out} is ready for {args.to}")


if __name__ == "__main__":
    main()
