"""Write an answer with a draft head: `python examples/decode_with_a_head.py [TARGET HEAD]`."""

import sys
from pathlib import Path

from small_model import HEAD, TARGET, encode, load_target

from eagle import Budget, Sampling, generate, load_drafter


def main() -> None:
    """Decode once with drafts and once without, and compare."""
    path, head = sys.argv[1:] if len(sys.argv) == 3 else (TARGET, HEAD)
    target = load_target(path)

    # A drafter is a trained head's folder, or the name of a method without weights.
    # `suffix` needs no training: it proposes what followed the same words earlier in the text.
    drafter = load_drafter(head if Path(head).is_dir() else "suffix", target)
    prompt = encode(target, "What do you know about otters?")

    # The budget is the draft tree of each step: at most 8 guessed tokens, 4 levels deep, 4 children for each node.
    # The temperature decides what is written, the budget only how fast.
    options = {"sampling": Sampling(temperature=0.7, seed=1), "max_new_tokens": 96}
    trace = generate(target, drafter, prompt, budget=Budget(nodes=8, depth=4, top_k=4), **options)

    # The trace tells the story of the decoding: one cycle for each forward pass of the target.
    print(trace.text if target.tokenizer else trace.tokens)
    for number, cycle in enumerate(trace.cycles[:5], start=1):
        print(f"pass {number}: {cycle.nodes} tokens guessed, {cycle.accepted} accepted, {cycle.committed} written")

    # Acceptance length: tokens written in each pass. Plain decoding writes 1.
    print(f"acceptance length {trace.acceptance_length:.2f} in {len(trace.cycles)} passes")

    # Drafts change the speed and nothing else, at any temperature: the random numbers belong to the position in the
    # text, not to the draft. So the same seed without drafts gives the same tokens.
    plain = generate(target, load_drafter("none", target), prompt, **options)
    assert trace.tokens == plain.tokens
    print(f"the same {len(plain.tokens)} tokens without drafts, in {len(plain.cycles)} passes")


if __name__ == "__main__":
    main()
