"""Results as a page or as a table: `python -m eval.report RESULTS.jsonl [MORE.jsonl ...] [--html OUT] [--markdown]`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from eagle.disk import write_text
from eagle.log import script
from eval.figures import number
from eval.page import page
from eval.page_parts import is_modelled, modelled, price
from eval.results import Group, beside, pace, read, speed_up, summary, taken

COLUMNS = ("T", "drafter", "acceptance length τ", "tokens/s", "speed-up", "output", "answers that loop")


def markdown(path: str | Path) -> str:
    """The newest run as a table, with what made it; with intervals where rows name their conversation."""
    results = read(path)
    known = bool(results.answers) and all("conversation" in answer for answer in results.answers)
    groups = results.groups() if known else []
    for group in groups:
        price(results, group)
    priced = bool(groups) and all(map(is_modelled, groups))
    columns = [*COLUMNS[:5], *["in modelled time"] * priced, *COLUMNS[5:]]
    head = f"| {' | '.join(columns)} |\n|" + "---|" * len(columns)
    rows = [_sure(group, priced) for group in groups] if known else list(map(_plain, summary(results.answers)))
    made = {key: value for key, value in results.header.items() if key != "id" and not isinstance(value, dict | list)}
    return "\n".join([head, *rows, "", f"<sub>{', '.join(f'{key} {value}' for key, value in made.items())}</sub>"])


def _plain(row: dict[str, Any]) -> str:
    return (
        f"| {row['temperature']:g} | `{row['drafter']}` | {row['acceptance_length']:.2f} | "
        f"{row['tokens_per_second']:.0f} | {row['speed_up']:.2f} × | "
        f"{'identical' if row['identical'] else '**differs**'} | {row['loops']:.0%} |"
    )


def _sure(group: Group, priced: bool) -> str:
    measures = [beside, *[modelled] * priced]
    speeds = [number(group.estimate(measure, speed_up), " ×") for measure in measures]
    speeds = ["1.00 ×"] * len(measures) if group.drafter == "none" else speeds
    return (
        f"| {group.temperature:g} | `{group.drafter}` | {number(group.estimate(taken))} | "
        f"{number(group.estimate(pace), digits=0)} | {' | '.join(speeds)} | {_output(group)} | {group.looping:.0%} |"
    )


def _output(group: Group) -> str:
    return "**differs**" if group.differing else "identical" if group.identical else "same law"


def main(argv: list[str]) -> None:
    """Write the page, print the table, or both; the page lies beside the first file unless told otherwise."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="what eval.measure wrote; several are compared by prompt")
    parser.add_argument("--html", type=Path, metavar="OUT", help="where the page goes (default: beside the first file)")
    parser.add_argument("--markdown", action="store_true", help="print a table for a README, and write no page")
    args = parser.parse_args(argv)
    if args.markdown:
        for path in args.results:
            print(markdown(path))
    if args.html or not args.markdown:
        out = args.html or args.results[0].with_name("report.html")
        write_text(out, page(args.results))
        print(f"report: {out}")


if __name__ == "__main__":
    script(main)
