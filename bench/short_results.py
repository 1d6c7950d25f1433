"""A results file of `eval.measure` without texts and cycles: `python bench/short_results.py RESULTS.jsonl OUT.jsonl`.

What is left makes the same table, and is small enough to be committed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eagle.disk import write_text
from eagle.log import script
from eval.results import count_cycles, read_results

DROPPED = {"text", "pieces", "digest", "finish"}


def short(path: Path) -> list[str]:
    """What the header says in a word, and the rows with their cycles counted, as lines."""
    results = read_results(path)
    header = {key: value for key, value in results.header.items() if not isinstance(value, dict | list)}
    lines = [{"run": {**header, "target": Path(header["target"]).name}}]
    for answer in results.answers:
        committed, cycles = count_cycles(answer)
        kept = {key: value for key, value in answer.items() if key not in DROPPED}
        lines.append({**kept, "cycles": cycles, "committed": committed})
    return [json.dumps(line) for line in lines]


def main(argv: list[str]) -> None:
    """Shorten one file into another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    write_text(args.out, "\n".join(short(args.results)) + "\n")


if __name__ == "__main__":
    script(main)
