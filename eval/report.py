"""Results as a page or as a table: `python -m eval.report RESULTS.jsonl [MORE.jsonl ...] [--html OUT] [--markdown]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle.disk import write_text
from eagle.log import script
from eval.figures import format_number
from eval.page import page
from eval.results import ACCEPTANCE_LENGTH, MODELLED_SPEED_UP, SPEED_UP, TOKENS_PER_SECOND, Group, Metric, read_results


def markdown(path: str | Path) -> str:
    """The results as a table with intervals, and under it what made them."""
    results = read_results(path)
    groups = results.groups()
    speeds = {"speed-up": SPEED_UP}
    if groups and all(group.is_modelled for group in groups):
        speeds["in modelled time"] = MODELLED_SPEED_UP
    columns = ["T", "drafter", "acceptance length τ", "tokens/s", *speeds, "output", "answers that loop"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for group in groups:
        gains = ["1.00 ×" if group.drafter == "none" else _format(group, metric, " ×") for metric in speeds.values()]
        lines.append(
            f"| {group.temperature:g} | `{group.drafter}` | {_format(group, ACCEPTANCE_LENGTH)} | "
            f"{_format(group, TOKENS_PER_SECOND, digits=0)} | {' | '.join(gains)} | {_output(group)} | "
            f"{group.looping:.0%} |"
        )
    header = {key: value for key, value in results.header.items() if key != "id" and not isinstance(value, dict | list)}
    return "\n".join([*lines, "", f"<sub>{', '.join(f'{key} {value}' for key, value in header.items())}</sub>"])


def _format(group: Group, metric: Metric, unit: str = "", digits: int = 2) -> str:
    return format_number(group.estimate(metric), unit, digits)


def _output(group: Group) -> str:
    return "**differs**" if group.differing else "identical" if group.identical else "same distribution"


def main(argv: list[str]) -> None:
    """Write the page, print the table, or both; by default the page lies beside the first file."""
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
