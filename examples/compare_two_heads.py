"""Compare two drafters on the same prompts: `python examples/compare_two_heads.py [TARGET FIRST SECOND]`."""

import random
import sys
from pathlib import Path

from small_model import HEAD, TARGET, encode, load_target

from eagle import Target, generate, load_drafter

QUESTIONS = [
    "Tell me about foxes.",
    "What do you know about penguins?",
    "Describe camels.",
    "How do I make apple pie?",
    "Tell me how to make lemonade.",
    "How do I sort the names in Python?",
]
Counts = dict[str, tuple[int, int]]  # of each question: tokens written, and passes of the target


def count_passes(target: Target, name: str) -> Counts:
    """Answer all questions with a drafter, and count."""
    drafter = load_drafter(name, target)
    counts = {}
    for question in QUESTIONS:
        trace = generate(target, drafter, encode(target, question), max_new_tokens=64)
        # The first token comes from reading the prompt, which every drafter pays alike: cycles count what follows.
        counts[question] = sum(cycle.committed for cycle in trace.cycles), len(trace.cycles)
    return counts


def acceptance_length(counts: Counts, questions: list[str]) -> float:
    """Tokens of each pass: a ratio of sums, so that long answers count as often as they have passes."""
    tokens, passes = (sum(column) for column in zip(*(counts[question] for question in questions), strict=True))
    return tokens / passes


def main() -> None:
    """Print both acceptance lengths, and their difference with its interval."""
    trained = HEAD if Path(HEAD).is_dir() else "suffix"
    path, *names = sys.argv[1:] if len(sys.argv) == 4 else (TARGET, "ngram", trained)
    target = load_target(path)
    first, second = (count_passes(target, name) for name in names)
    for name, counts in zip(names, (first, second), strict=True):
        print(f"{name}: acceptance length {acceptance_length(counts, QUESTIONS):.2f} on {len(QUESTIONS)} prompts")

    # Some prompts are easy for every drafter. Pairing takes that out: draw prompts with replacement, many times, and
    # compare both drafters on the same draw. If the interval contains 0, these prompts do not tell which is better.
    draws = [random.choices(QUESTIONS, k=len(QUESTIONS)) for _ in range(1000)]
    differences = sorted(acceptance_length(second, draw) - acceptance_length(first, draw) for draw in draws)
    low, high = differences[25], differences[-26]  # 95% lie between
    print(f"{names[1]} - {names[0]}: between {low:+.2f} and {high:+.2f}")


if __name__ == "__main__":
    main()
