"""A drafting method of your own: `python examples/write_a_drafter.py [TARGET]`."""

import sys
from collections import defaultdict

from small_model import TARGET, encode, load_target

from eagle import Budget, DraftTree, generate, load_drafter
from eagle.core.drafter import Committed, Drafter, Noise


class LastSeen(Drafter):
    """Guesses that each token is followed by what followed it last time."""

    def begin(self, noise: Noise | None = None) -> "LastSeenText":
        """Called once for each text. Keep nothing of a text in the drafter itself: many may be open at once."""
        return LastSeenText()


class LastSeenText:
    """What the drafter remembers of one text."""

    def __init__(self) -> None:
        self.followers: dict[int, int] = defaultdict(int)  # 0 where a token was never followed by any
        self.last: int | None = None

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Called before each pass of the target: learn what was written since, then guess."""
        # update.tokens were written since the last call (the prompt, the first time); update.root came last, and the
        # target has yet to read it. A draft starts from the root.
        for token in [*update.tokens.tolist(), update.root]:
            if self.last is not None:
                self.followers[self.last] = token
            self.last = token
        # A chain is a tree without branches. At most `budget.depth` guesses, and at most `budget.nodes`.
        guesses = [update.root]
        for _ in range(min(budget.depth, budget.nodes)):
            guesses.append(self.followers[guesses[-1]])
        return DraftTree.chain(guesses)


def main() -> None:
    """Decode with the new drafter, and check that the text is the model's own."""
    target = load_target(sys.argv[1] if len(sys.argv) == 2 else TARGET)
    prompt = encode(target, "How do I sort the names in Python?")
    trace = generate(target, LastSeen(), prompt, budget=Budget(nodes=3, depth=3, top_k=1), max_new_tokens=96)
    plain = generate(target, load_drafter("none", target), prompt, max_new_tokens=96)

    # Whatever a drafter proposes, the text stays the same: the target checks every token. A bad drafter costs time.
    assert trace.tokens == plain.tokens
    print(f"{len(trace.tokens)} tokens in {len(trace.cycles)} passes, acceptance length {trace.acceptance_length:.2f}")
    print(f"without drafts: {len(plain.cycles)} passes, and the same text")


if __name__ == "__main__":
    main()
