"""Rows of results: the columns that describe one generation."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from eagle.core.trace import Cycle, Trace
from eval.result_files.results import ends_in_loop

Row = dict[str, Any]


def row_of(trace: Trace, wall: float, cpu: float) -> Row:
    """Return a trace as the columns of a row."""
    return {
        "prompt_tokens": len(trace.prompt),
        "tokens": len(trace.tokens),
        "finish": trace.finish,
        "seconds": round(wall, 6),
        "cpu_seconds": round(cpu, 6),
        "loops": ends_in_loop(trace.tokens),
        "digest": hashlib.sha256(json.dumps(trace.tokens).encode()).hexdigest()[:16],
        "text": trace.text,
        "cycles": list(map(cycle_of, trace.cycles)),
    }


def cycle_of(cycle: Cycle) -> Row:
    """Return a cycle as a row holds it."""
    row = {
        "nodes": cycle.nodes,
        "depth": cycle.depth,
        "accepted": cycle.accepted,
        "committed": cycle.committed,
        "context": cycle.context,
        "path": cycle.path,
    }
    if cycle.confidence:
        row["confidence"] = [(round(prob, 4), accepted) for prob, accepted in cycle.confidence]
    row["seconds"] = {part: round(seconds, 7) for part, seconds in (cycle.seconds or {}).items()}
    return row


def batch_row_of(trace: Trace, share: float, cpu_share: float, latency: float, session: str) -> Row:
    """Return the row of an answer decoded in a batch: its share of each step's seconds, and those since admission.

    Cycles of one session with one number are the same forward, of so many `rows`. Their seconds are the whole cycle's.
    """
    row = row_of(trace, share, cpu_share)
    row["latency"] = round(latency, 6)
    row["session"] = session
    for recorded, cycle in zip(row["cycles"], trace.cycles, strict=True):
        recorded["number"] = cycle.number
        recorded["rows"] = cycle.rows
    return row
