"""Check that a server samples its answers from its model's probabilities: a faulty one gives nonsense, and no error."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, inf, sqrt
from threading import Lock
from typing import Any, NamedTuple

from data_prep.chats.marks import is_broken

# Answers before the run, and the tokens of each.
PROBES = 8
PROBE_TOKENS = 32
# One of so many answers of the run comes with its probabilities.
EVERY = 32
# Tokens of which a server is asked for the probabilities, the maximum of common engines.
LIKELIEST = 20
# The latest answers with probabilities, and without, that are checked together.
ANSWERS = 8
TEXTS = 64
# Standard deviations by which a right sampler never misses its own likeliest tokens.
DEVIATIONS = 5.0
CAUSE = (
    "vLLM does this on a CPU where it drafts above temperature 0: start the server without drafts "
    "(--speculative-config), or ask for greedy answers (regenerate.temperature=0)"
)


class Draws(NamedTuple):
    """How many tokens of an answer were among the likeliest, and how many its probabilities expect."""

    tokens: int
    hits: int
    expected: float
    variance: float
    nll: float  # sum over the tokens, in nats


def draws_of(tokens: Sequence[dict[str, Any]], vocab_size: int, temperature: float) -> Draws:
    """Count from the `logprobs.content` of a chat completion, raw or already at the temperature."""
    hits = 0
    expected = variance = nll = 0.0
    for token in tokens:
        sampled = float(token["logprob"])
        logprobs = [float(entry["logprob"]) for entry in token["top_logprobs"]]
        # Some servers list the sampled token in place of the last one: all but one are certainly the likeliest.
        num_likeliest = max(1, len(logprobs) - 1)
        if sampled not in logprobs:
            logprobs.append(sampled)
        likeliest = sorted(logprobs, reverse=True)[:num_likeliest]
        prob = likeliest_mass([exp(logprob) for logprob in likeliest], vocab_size, temperature)
        hits += sampled >= likeliest[-1]
        expected += prob
        variance += prob * (1 - prob)
        nll -= sampled
    return Draws(len(tokens), hits, expected, variance, nll=nll)


def has_probs(token: Any) -> bool:
    """Return whether a token came with logarithms of probabilities; JSON has none for that of zero."""
    likeliest = token.get("top_logprobs") if isinstance(token, dict) else None
    if not isinstance(likeliest, list) or not likeliest:
        return False
    return all(
        isinstance(entry, dict) and is_logprob(entry.get("logprob"))
        for entry in [token, *likeliest]
    )


def is_logprob(value: Any) -> bool:
    """Return whether a value may be the logarithm of a probability, but for rounding."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -inf < value < 1e-2


def likeliest_mass(probs: list[float], vocab_size: int, temperature: float) -> float:
    """Return the probability of the likeliest tokens together at this temperature, or a bound below it.

    A temperature below 1 and nucleus sampling only add to it; above 1 it is least if the rest is uniform.
    """
    power = 1 / max(1.0, temperature)
    num_others = max(1, vocab_size - len(probs))
    other_prob = max(0.0, 1 - sum(probs)) / num_others
    mass = sum(prob**power for prob in probs)
    if not mass:
        return 0.0
    return min(1.0, mass / (mass + num_others * other_prob**power))


class SamplerCheck:
    """A check of the latest answers of a server together."""

    def __init__(self, vocab_size: int, temperature: float) -> None:
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.tells_probs = True
        self.count = 0
        self.lock = Lock()
        self.draws: deque[Draws] = deque(maxlen=ANSWERS)
        self.broken: deque[bool] = deque(maxlen=TEXTS)

    def is_due(self) -> bool:
        """Return whether to ask for probabilities with the next answer."""
        with self.lock:
            self.count += 1
            return self.tells_probs and self.count % EVERY == 0

    def add(self, choice: dict[str, Any], history: Sequence[dict[str, Any]]) -> str | None:
        """Add one choice of a chat completion, and return what is wrong with the latest ones together."""
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        tokens = []
        if isinstance(content, list):
            tokens = [token for token in content if has_probs(token)]
        text = str((choice.get("message") or {}).get("content") or "")
        with self.lock:
            if tokens:
                self.draws.append(draws_of(tokens, self.vocab_size, self.temperature))
            self.broken.append(is_broken(text, str(choice.get("finish_reason")), history))
            return self._fault_of_draws() or self._fault_of_texts()

    def _fault_of_draws(self) -> str | None:
        if not self.draws:
            return None
        tokens, hits, expected, variance, nll = map(sum, zip(*self.draws, strict=True))
        if expected - hits <= DEVIATIONS * sqrt(variance + 1):
            return None
        return (
            f"of {tokens} tokens drawn at temperature {self.temperature:g}, {hits / tokens:.0%} are among the "
            f"likeliest by its own account, which have {expected / tokens:.0%} of the probability "
            f"(mean NLL {nll / tokens:.1f})"
        )

    def _fault_of_texts(self) -> str | None:
        num_broken = sum(self.broken)
        count = len(self.broken)
        # A right model writes broken characters now and then.
        if num_broken <= 2 + count / 5:
            return None
        return f"{num_broken} of the latest {count} answers hold broken characters (U+FFFD)"
