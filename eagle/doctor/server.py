"""A running engine's acceptance counts, from its /metrics page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException

from eagle.web import check_address, make_opener

ENOUGH = 0.9  # of what drafts were expected to add
SECONDS = 10  # in which a server must give its whole page
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*?)(?:_total)?(?:\{(.*)\})?\s+(\S+)")
POSITION = re.compile(r'position="(\d+)"')
# names of counters, without the ending `_total`
DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos"
LENGTH = "sglang:spec_accept_length"


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """An engine's acceptance counts since its start, over all requests."""

    engine: str
    tau: float
    per_position: tuple[float, ...] = ()  # how often a draft was accepted up to there
    drafts: int = 0

    def __str__(self) -> str:
        """Return the counts in a phrase."""
        text = f"{self.engine} accepts {self.tau:.3f} tokens a step"
        if self.drafts:
            text += f" over {self.drafts:,} drafts"
        if self.per_position:
            text += f", up to each place {', '.join(f'{rate:.3f}' for rate in self.per_position)}"
        return text

    def compare(self, per_position: Sequence[float], source: str) -> str:
        """Return a sentence that compares the server's acceptance with that of `source`.

        Args:
            per_position: How often `source` accepts a chain up to each position.
            source: What was measured, as the sentence names it.
        """
        text = str(self)
        # how many positions of a chain are compared: those that both have
        positions = len(per_position)
        counted = self.tau
        if self.per_position:
            positions = min(positions, len(self.per_position))
            # the acceptance length with chains as short as the others
            counted = 1 + sum(self.per_position[:positions])
        expected = 1 + sum(per_position[:positions])
        text += f". {source} keeps {expected:.3f} with chains of {positions}"
        if not self.per_position:
            text += f" ({self.engine} does not tell how many tokens it drafts: start it with {positions})"
        elif positions < len(self.per_position):
            text += f", where the server keeps {counted:.3f}"
        # one token of each step is the target's own and no draft
        ratio = (counted - 1) / max(expected - 1, 1e-9)
        text += f": drafts add {ratio:.0%} of what they should"
        if ratio < ENOUGH:
            text += (
                ". Other prompts, or a temperature, explain some of it; else the server runs something else "
                "than this head: look there at the layer ids, fc, d2t and the norms' switches"
            )
        return text


def read_server(url: str) -> ServerCounts:
    """Return the acceptance counts of a running vLLM or SGLang, from its page /metrics in Prometheus' format."""
    check_address(url, "the server", advice="show its metrics without one")
    address = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with make_opener().open(address, timeout=SECONDS) as response:
            text = response.read().decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        raise ValueError(
            f"no metrics at {address}: {error}; SGLang shows them with --enable-metrics"
        ) from None
    return parse_metrics(text, address)


def parse_metrics(text: str, source: str) -> ServerCounts:
    """Parse acceptance counts from Prometheus' text format, summed over models and ranks.

    Args:
        text: The page.
        source: Its address, for the message where it counts no drafts.
    """
    # how many drafts were made, how many of their tokens were accepted, and how many of those at each position
    drafts = accepted = 0.0
    by_position: dict[int, float] = {}
    lengths = []
    for name, labels, value in _read_samples(text):
        if name == DRAFTS:
            drafts += value
        elif name == ACCEPTED:
            accepted += value
        elif name == ACCEPTED_AT:
            match = POSITION.search(labels)
            if match:
                position = int(match[1])
                by_position[position] = by_position.get(position, 0.0) + value
        elif name == LENGTH and value > 0:
            lengths.append(value)
    # vLLM has counters, SGLang only the mean acceptance length of its latest answers
    if drafts:
        rates = tuple(by_position[position] / drafts for position in sorted(by_position))
        # each draft's step adds one token of the target itself
        return ServerCounts("vLLM", 1 + accepted / drafts, rates, int(drafts))
    if lengths:
        return ServerCounts("SGLang", sum(lengths) / len(lengths))
    raise ValueError(
        f"{source} counts no drafts: expected {DRAFTS}_total of a vLLM or {LENGTH} of an SGLang that has answered "
        "something with speculative decoding on; SGLang's is 0 while it is idle"
    )


def _read_samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of each line with a number; NaN (an idle gauge) is skipped."""
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if not sample:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if not math.isnan(value):
            yield sample[1], sample[2] or "", value
