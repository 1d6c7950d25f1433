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
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
PLACES = "vllm:spec_decode_num_accepted_tokens_per_pos"
LENGTH = "sglang:spec_accept_length"


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """An engine's acceptance counts since its start, over all requests."""

    engine: str
    tau: float
    per_position: tuple[float, ...] = ()  # how often a draft was accepted up to there
    drafts: int = 0

    def __str__(self) -> str:
        places = ", ".join(f"{rate:.3f}" for rate in self.per_position)
        counted = f" over {self.drafts:,} drafts" if self.drafts else ""
        text = f"{self.engine} accepts {self.tau:.3f} tokens a step{counted}"
        return f"{text}, up to each place {places}" if places else text

    def compare(self, per_position: Sequence[float], source: str) -> str:
        """Compare the server's acceptance at each place of a chain with that of `source`."""
        places = min(len(self.per_position) or len(per_position), len(per_position))
        counted = 1 + sum(self.per_position[:places]) if self.per_position else self.tau
        expected = 1 + sum(per_position[:places])
        ratio = (counted - 1) / max(expected - 1, 1e-9)
        text = f"{self}. {source} keeps {expected:.3f} with chains of {places}"
        if not self.per_position:
            text += f" ({self.engine} does not tell how many tokens it drafts: start it with {places})"
        elif places < len(self.per_position):
            text += f", where the server keeps {counted:.3f}"
        text += f": drafts add {ratio:.0%} of what they should"
        if ratio >= ENOUGH:
            return text
        return (
            f"{text}. Other prompts, or a temperature, explain some of it; else the server runs something else "
            "than this head: look there at the layer ids, fc, d2t and the norms' switches"
        )


def read_server(url: str) -> ServerCounts:
    """The counters of a running vLLM or SGLang."""
    check_address(url, "the server", "show its metrics without one")
    address = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with make_opener().open(address, timeout=SECONDS) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        raise ValueError(f"no metrics at {address}: {error}; SGLang shows them with --enable-metrics") from None
    return parse_metrics(text, address)


def parse_metrics(text: str, source: str) -> ServerCounts:
    """Parse acceptance counts from Prometheus' text format, summed over models and ranks."""
    samples = list(_read_samples(text))
    drafts, accepted = (sum(value for name, _, value in samples if name == wanted) for wanted in (DRAFTS, ACCEPTED))
    if drafts:
        places: dict[int, float] = {}
        for name, labels, value in samples:
            if name == PLACES and (place := POSITION.search(labels)):
                places[int(place[1])] = places.get(int(place[1]), 0.0) + value
        rates = tuple(places[place] / drafts for place in sorted(places))
        return ServerCounts("vLLM", 1 + accepted / drafts, rates, int(drafts))
    lengths = [value for name, _, value in samples if name == LENGTH and value > 0]
    if lengths:
        return ServerCounts("SGLang", sum(lengths) / len(lengths))
    raise ValueError(
        f"{source} counts no drafts: expected {DRAFTS}_total of a vLLM or {LENGTH} of an SGLang that has answered "
        "something with speculative decoding on; SGLang's is 0 while it is idle"
    )


def _read_samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each line with a number; NaN (an idle gauge) is skipped."""
    for line in text.splitlines():
        if sample := SAMPLE.match(line):
            try:
                value = float(sample[3])
            except ValueError:
                continue
            if not math.isnan(value):
                yield sample[1], sample[2] or "", value
