"""Whether a server draws its answers from its model's probabilities: a sampler at fault gives nonsense in silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from threading import Lock
from typing import Any

PROBES, PROBE_TOKENS = 8, 32  # answers before work, and the tokens of each
EVERY = 32  # answers of the run, of which one comes with its probabilities
LIKELIEST = 20  # tokens of which a server is asked to tell the probabilities, the most that engines allow
ANSWERS, TEXTS = 8, 64  # the latest answers with probabilities, and without, that are judged together
DEVIATIONS = 5.0  # standard deviations by which a right sampler never misses its own likeliest tokens
BROKEN = "\N{REPLACEMENT CHARACTER}"
CAUSE = (
    "vLLM does this on a CPU where it drafts above temperature 0: start the server without drafts "
    "(--speculative-config), or ask for greedy answers (regenerate.temperature=0)"
)


@dataclass(frozen=True, slots=True)
class Draws:
    """How many of an answer's tokens were among the likeliest, and what the server's probabilities expect."""

    tokens: int
    hits: int
    expected: float
    variance: float
    nll: float  # sum over the tokens, in nats


def draws_of(tokens: Sequence[dict[str, Any]], vocab_size: int, temperature: float) -> Draws:
    """Count from the `logprobs.content` of a chat completion, raw or already at the temperature."""
    hits, expected, variance, nll = 0, 0.0, 0.0, 0.0
    for token in tokens:
        sampled = float(token["logprob"])
        listed = [float(entry["logprob"]) for entry in token["top_logprobs"]]
        # some list the sampled token in place of the last one: the likeliest but one are sure
        likeliest = sorted(listed if sampled in listed else [*listed, sampled], reverse=True)[: max(1, len(listed) - 1)]
        share = _share([exp(logprob) for logprob in likeliest], vocab_size, temperature)
        hits += sampled >= likeliest[-1]
        expected += share
        variance += share * (1 - share)
        nll -= sampled
    return Draws(len(tokens), hits, expected, variance, nll)


def _is_told(token: dict[str, Any]) -> bool:
    """Whether a token came with numbers; JSON has none for the logarithm of zero."""
    listed = [token, *(token.get("top_logprobs") or [])]
    return len(listed) > 1 and all(isinstance(entry.get("logprob"), int | float) for entry in listed)


def _share(likeliest: list[float], vocab_size: int, temperature: float) -> float:
    """Probability of the likeliest tokens together at this temperature, or a bound below it.

    A temperature below 1 and nucleus sampling only add to it; above 1 it is least where the rest is uniform.
    """
    power, count = 1 / max(1.0, temperature), max(1, vocab_size - len(likeliest))
    rest = max(0.0, 1 - sum(likeliest)) / count
    inside = sum(prob**power for prob in likeliest)
    return min(1.0, inside / (inside + count * rest**power)) if inside else 0.0


def is_broken(text: str, finish: str, history: Sequence[dict[str, Any]]) -> bool:
    """Whether an answer holds broken characters that were neither asked about nor cut through at its end."""
    text = text.rstrip(BROKEN) if finish == "length" else text
    return BROKEN in text and not any(BROKEN in str(turn.get("content")) for turn in history)


class SamplerCheck:
    """The latest answers of a server, and what is wrong with them together."""

    def __init__(self, vocab_size: int, temperature: float) -> None:
        self.vocab_size, self.temperature = vocab_size, temperature
        self.tells = True  # probabilities
        self.count, self.lock = 0, Lock()
        self.draws: deque[Draws] = deque(maxlen=ANSWERS)
        self.broken: deque[bool] = deque(maxlen=TEXTS)

    def is_due(self) -> bool:
        """Whether the next answer is to come with its probabilities."""
        with self.lock:
            self.count += 1
            return self.tells and self.count % EVERY == 0

    def add(self, choice: dict[str, Any], history: Sequence[dict[str, Any]]) -> str | None:
        """Take in one choice of a chat completion; what is wrong with the latest ones is returned."""
        tokens = (choice.get("logprobs") or {}).get("content") or []
        with self.lock:
            if tokens := [token for token in tokens if _is_told(token)]:
                self.draws.append(draws_of(tokens, self.vocab_size, self.temperature))
            text = str((choice.get("message") or {}).get("content") or "")
            self.broken.append(is_broken(text, str(choice.get("finish_reason")), history))
            return self._fault_of_draws() or self._fault_of_texts()

    def _fault_of_draws(self) -> str | None:
        if not self.draws:
            return None
        tokens, hits = sum(draws.tokens for draws in self.draws), sum(draws.hits for draws in self.draws)
        expected = sum(draws.expected for draws in self.draws)
        variance = sum(draws.variance for draws in self.draws)
        if expected - hits <= DEVIATIONS * sqrt(variance + 1):
            return None
        nll = sum(draws.nll for draws in self.draws) / tokens
        return (
            f"of {tokens} tokens drawn at temperature {self.temperature:g}, {hits / tokens:.0%} are among the "
            f"likeliest by its own account, which have {expected / tokens:.0%} of the probability (mean NLL {nll:.1f})"
        )

    def _fault_of_texts(self) -> str | None:
        broken, count = sum(self.broken), len(self.broken)
        if broken <= 2 + count / 5:
            return None
        return f"{broken} of the latest {count} answers hold broken characters (U+FFFD)"
