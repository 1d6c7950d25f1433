"""Write a head for an engine, read one of another tool, and examine both."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from eagle.doctor import Diagnosis, Drift, examine, measure_drift
from eagle.formats.checkpoint import load_head
from eagle.formats.engines.registry import name_reader
from eagle.formats.export import EXPORTERS, check_replaceable, export
from eagle.formats.networks.eagle_heads import MEANINGS
from eagle.formats.reading.foreign import import_head, inspect
from eagle.formats.reading.target_files import embedding_dtype
from eagle.log import JSON_HELP, json_alone
from eagle.target.target import Target

TARGET = "the head's target: a folder or a hub id"


def run_export(argv: list[str]) -> None:
    """Write a head in the file layout of a serving engine."""
    parser = argparse.ArgumentParser(prog="eagle export", description=run_export.__doc__)
    parser.add_argument("head", help="the head's folder")
    parser.add_argument("--target", "--model", required=True, help=TARGET)
    parser.add_argument("--to", required=True, choices=list(EXPORTERS), help="the engine or layout")
    parser.add_argument("out", help="the folder to write")
    args = parser.parse_args(argv)
    head = load_head(args.head)
    # checked before the target is loaded, which may take minutes
    check_replaceable(Path(args.out))
    # the export may hold the target's embedding: in the checkpoint's dtype, not in the one that is fastest here
    target = Target.load(args.target, dtype=embedding_dtype(args.target), device="cpu")
    if export(head.bind(target.head), target.config, args.to, args.out, args.head):
        print(f"the earlier export in {args.out} is replaced")
    print(
        f"{args.out} is ready for {name_reader(args.to, head)}; its README.md tells how to serve it"
    )


def run_import(argv: list[str]) -> None:
    """Convert a head of another tool, or an export, for use with eagle."""
    parser = argparse.ArgumentParser(prog="eagle import", description=run_import.__doc__)
    parser.add_argument(
        "folder", help="the other tool's checkpoint, or an export: a folder or a hub id"
    )
    parser.add_argument("out", help="the folder to write")
    parser.add_argument(
        "--target",
        "--model",
        help=f"{TARGET}; needed if its embedding or sizes are not in the checkpoint",
    )
    parser.add_argument(
        "--taps", help="layers whose inputs it reads, such as 2,16,29, if its config lacks them"
    )
    parser.add_argument(
        "--norm-output", choices=list(MEANINGS), help="what reads the normalised output of the head"
    )
    args = parser.parse_args(argv)
    try:
        taps = tuple(map(int, args.taps.split(","))) if args.taps else None
    except ValueError:
        raise ValueError(
            f"--taps is {args.taps!r}, expected numbers as 2,16,29: the inputs of layers"
        ) from None
    print(import_head(args.folder, args.out, args.target, taps, args.norm_output))


def run_inspect(argv: list[str]) -> None:
    """Identify a checkpoint, and list its known faults; status 1 if one of them is fatal."""
    parser = argparse.ArgumentParser(prog="eagle inspect", description=run_inspect.__doc__)
    parser.add_argument(
        "folder", help="a head, an export or another tool's checkpoint: a folder or a hub id"
    )
    parser.add_argument("--target", "--model", help=f"{TARGET}, to compare the checkpoint with")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_args(argv)
    with json_alone(args.json) as write_json:
        findings = inspect(args.folder, args.target)
        print(findings)
        write_json({**asdict(findings), "fatal": findings.fatal})
    if findings.fatal:
        sys.exit(1)


def run_doctor(argv: list[str]) -> None:
    """Find out why few draft tokens of a head are accepted; status 1 if the head is broken.

    This takes minutes, and --tokens makes it shorter.
    """
    parser = argparse.ArgumentParser(prog="eagle doctor", description=run_doctor.__doc__)
    parser.add_argument("head", help="a head's folder or hub id")
    parser.add_argument("--target", "--model", required=True, help=TARGET)
    parser.add_argument("--prompts", help="a file of prompts; by default twelve built-in questions")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="number of tokens to decode (default: 5760); with fewer, the doctor is faster but may miss "
        "small faults",
    )
    parser.add_argument(
        "--server", help="address of a running vLLM or SGLang server, to compare its acceptance"
    )
    parser.add_argument(
        "--base",
        help="the base model; shows how much acceptance the head keeps on TARGET, a fine-tuned model or adapter",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_args(argv)
    if args.base and args.server:
        raise ValueError(
            "--base compares two targets without a server: got --server too, expected one of both"
        )
    if args.base and args.tokens is not None:
        raise ValueError("--tokens is for an examination without --base: got both, expected one")
    report: Diagnosis | Drift
    with json_alone(args.json) as write_json:
        if args.base:
            report = measure_drift(args.head, args.base, args.target, args.prompts)
        else:
            report = examine(args.head, args.target, args.prompts, args.server, args.tokens)
        print(report)
        write_json(report.to_json())
    # a drift calls for training, not for repairs
    if isinstance(report, Diagnosis) and report.broken:
        sys.exit(1)
