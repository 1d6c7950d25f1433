"""Check a method, one's own or a registered one, by all that every method must hold."""

from __future__ import annotations

import argparse
import sys

from eagle.conformance.checks import find_method, run_checks
from eagle.device import check_device


def main(argv: list[str]) -> None:
    """Run the checks that every method must pass, on a tiny model with random weights; status 1 if one fails."""
    parser = argparse.ArgumentParser(prog="eagle check-method", description=main.__doc__)
    parser.add_argument("method", help="PATH.py:CLASS, or the name of a method")
    parser.add_argument(
        "--fast", action="store_true", help="omit the slow checks, which take minutes"
    )
    parser.add_argument(
        "--device", default="cpu", help="device, such as `cuda` (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    # called for its refusal, before anything is printed
    find_method(args.method)
    device = check_device(args.device)
    duration = "a minute at most" if args.fast else "some minutes"
    print(f"checking {args.method}, {duration} ...", file=sys.stderr, flush=True)
    count = 0
    faults = 0
    for outcome in run_checks(args.method, fast=args.fast, device=device):
        count += 1
        if outcome.fault is None:
            note = f" ({outcome.note})" if outcome.note else ""
            print(f"ok    {outcome.about}{note}", flush=True)
        else:
            faults += 1
            print(f"FAULT {outcome.about}\n      {outcome.fault}", flush=True)
    print(
        f"{args.method}: {count - faults} of {count} checks hold{'' if faults else ', as they must'}"
    )
    if faults:
        sys.exit(1)
