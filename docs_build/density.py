"""Check that code does not become denser: `python -m docs_build.density`, which `make lint` runs.

Each folder has a budget in `density.json`: so many tokens in all and a line, comments, and habits that pack a line.
A change that needs more raises the budget in the same commit, whose message says what that buys. A change that needs
less lowers it: `python -m docs_build.density --write`. `goals` are where each figure should come to.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_suffix(".json")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
LONG_FUNCTION = 200  # tokens, from which on a function has a comment
MANY_ARGUMENTS = 5
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def measure_folder(folder: Path) -> dict[str, float]:
    """Return the figures of all Python files below a folder, those of habits for 1,000 lines."""
    counts: Counter[str] = Counter()
    longest = 0
    for path in sorted(folder.rglob("*.py")):
        counted, sizes = measure_source(path.read_text())
        counts += counted
        longest = max(longest, *sizes, 0)
    lines = max(counts["lines"], 1)
    habits = (
        "nested comprehensions",
        "walruses",
        "tuple assignments",
        "ternaries",
        "calls with five arguments",
    )
    return {
        "tokens": counts["tokens"],
        "tokens a line": round(counts["tokens"] / lines, 2),
        "longest function": longest,
        "long functions without a comment": counts["bare"],
        "comments per 1,000 lines": round(1000 * counts["comments"] / lines, 1),
        **{f"{habit} per 1,000 lines": round(1000 * counts[habit] / lines, 1) for habit in habits},
    }


def measure_source(source: str) -> tuple[Counter[str], list[int]]:
    """Return the counts of one file, and the tokens of each of its functions.

    A token is one of Python's, a docstring too, but no comment, line break or indentation.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    code = [token.start[0] for token in tokens if token.type not in NO_CODE]
    comments = set()  # the lines of those that stand alone
    for token in tokens:
        is_whole_line = not token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and is_whole_line:
            comments.add(token.start[0])
    counts = Counter(lines=source.count("\n") + 1, tokens=len(code), comments=len(comments))
    sizes = []
    for node in ast.walk(ast.parse(source)):
        counts.update(find_habits(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            last_line = node.end_lineno or node.lineno
            span = range(node.lineno, last_line + 1)
            # `code` holds the line of each token, in order
            size = bisect_right(code, last_line) - bisect_left(code, node.lineno)
            sizes.append(size)
            if size > LONG_FUNCTION and comments.isdisjoint(span):
                counts["bare"] += 1
    return counts, sizes


def find_habits(node: ast.AST) -> Iterator[str]:
    """Yield the habits that pack a line of which a node of a syntax tree is one."""
    if isinstance(node, Comprehension):
        inner = [child for child in ast.walk(node) if isinstance(child, Comprehension)]
        if len(inner) > 1 or len(node.generators) > 1:
            yield "nested comprehensions"
    elif isinstance(node, ast.NamedExpr):
        yield "walruses"
    elif isinstance(node, ast.IfExp):
        yield "ternaries"
    elif isinstance(node, ast.Call) and len(node.args) >= MANY_ARGUMENTS:
        yield "calls with five arguments"
    elif isinstance(node, ast.Assign):
        targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
        if targets and isinstance(node.value, ast.Tuple | ast.GeneratorExp):
            yield "tuple assignments"


def find_excesses(figures: dict[str, float], budget: dict[str, float]) -> Iterator[str]:
    """Yield a sentence for each figure that is worse than its budget."""
    for name, limit in budget.items():
        got = figures[name]
        # comments are the one figure of which more is better
        is_worse = got < limit if name.startswith("comments") else got > limit
        if is_worse:
            yield f"{name}: got {got:,}, the budget is {limit:,}"


def main(argv: list[str] | None = None) -> None:
    """Print every folder's figures beside its budget and goal, and fail if one is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="lower the budgets to today's figures")
    args = parser.parse_args(argv)
    stored: dict[str, Any] = json.loads(BUDGETS.read_text())
    excesses = []
    for folder, budget in stored["budgets"].items():
        figures = measure_folder(ROOT / folder)
        sentences = [f"{folder}: {sentence}" for sentence in find_excesses(figures, budget)]
        excesses += sentences
        goals = {**stored["goals"]["every folder"], **stored["goals"].get(folder, {})}
        described = [f"{name} {got:,} (goal {goals[name]:,})" for name, got in figures.items()]
        print(f"{folder}: {', '.join(described)}")
        # a budget never rises by itself
        if args.write and not sentences:
            stored["budgets"][folder] = figures
    if excesses:
        advice = "write it in fewer tokens, or raise the budget in docs_build/density.json and say in the commit why"
        raise SystemExit("\n".join([*excesses, advice]))
    # only where no folder exceeds its budget
    if args.write:
        BUDGETS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
