"""Results of `bench/train_speed.py` as tables; what was aimed at stands in brackets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.machine import markdown

Row = dict[str, Any]
PAIRS = {"speculators": "frozen", "modelopt": "trained"}  # each rival, and ours with its trainable tensors
# what was aimed at in fp32, by tokens of a text and steps
FASTER = {(256, 3): 1.2, (256, 7): 1.4, (1024, 3): 1.4, (1024, 7): 2.1}
FASTER_AT_SHARE = {(256, 3): 1.4, (256, 7): 1.65, (1024, 3): 1.9, (1024, 7): 2.7}
ONE_PASS_FASTER, LEVELS_SMALLER = 2.0, {8192: 0.25, 131072: 0.1}  # the latter by vocabulary
BLOCKS_SMALLER = 0.4
SMALLER = {(256, 7): 0.45, (1024, 3): 0.40, (1024, 7): 0.35}


def eagle1_goals(row: Row) -> dict[str, float]:
    """What a row of EAGLE-1 should reach."""
    wide, bf16 = row["vocab"] > 100000, row["dtype"] == "bf16"
    if row["texts"] == "full":
        return {"ratio": 1.4}
    goals = {"of_limit": 0.55 if wide and bf16 else 0.65, "memory": 0.1 if wide else 0.25}
    return {**goals, "ratio": 2.5 if bf16 else 2.0} if row["length"] >= 1024 else goals


def eagle3_goals(row: Row) -> dict[str, float]:
    """What a row of EAGLE-3 should reach."""
    if row["dtype"] != "fp32":
        return {}
    cell = (row["length"], row["steps"])
    goals = {"ratio": (FASTER if row["all"] else FASTER_AT_SHARE).get(cell)}
    if row["all"]:
        goals |= {"of_limit": 0.7 if cell in FASTER else None, "memory": SMALLER.get(cell)}
    return {name: value for name, value in goals.items() if value is not None}


def ratio(row: Row, suffix: str = "") -> float:
    """How many times faster ours is than the rival nearest to it, by medians, or by the best of each."""
    return min(row[f"ours_{kind}{suffix}"] / row[f"{rival}{suffix}"] for rival, kind in PAIRS.items())


def of_limit(row: Row) -> float:
    """The share of the limit that ours reaches, whichever tensors are trained."""
    return min(row[f"ours_{kind}"] / row[f"limit_{kind}"] for kind in PAIRS.values())


def smaller(row: Row) -> float:
    """The memory of ours in that of the rival nearest to it."""
    return max(row[f"ours_{kind}_mb"] / row[f"{rival}_mb"] for rival, kind in PAIRS.items())


def with_goal(value: str, goals: dict[str, float], name: str, form: str) -> str:
    """A figure, with its goal behind it where there is one."""
    return f"{value} ({goals[name]:{form}})" if name in goals else value


def eagle1_table(results: Row) -> str:
    """Speed and memory of the EAGLE-1 step."""
    header = ["numbers", "V", "T", "texts", "fill", "share", "limit, tokens/s", "published", "ours"]
    header += ["ours / published", "of the limit", "memory, published", "ours", "ratio"]
    lines = []
    for row in results["rows"]:
        goals = eagle1_goals(row)
        texts = f"{row['batch']} real" if row["texts"] == "real" else "1 full"
        cells = [row["dtype"], f"{row['vocab']:,}", f"{row['length']:,}", texts]
        cells += [f"{row['fill']:.2f}", f"{row['share']:.2f}"]
        cells += [f"{row[name]:,.0f}" for name in ("limit", "published", "ours")]
        cells.append(with_goal(f"**{row['ratio']:.2f}**", goals, "ratio", ".1f"))
        cells.append(with_goal(f"{row['of_limit']:.0%}", goals, "of_limit", ".0%"))
        cells += [f"{row[f'{name}_mb']:,.0f} MB" for name in ("published", "ours")]
        cells.append(with_goal(f"{row['ours_mb'] / row['published_mb']:.2f}", goals, "memory", ".2f"))
        lines.append(cells)
    return markdown(header, lines, results["machine"])


def machines_table(files: Iterable[Row]) -> str:
    """How many times faster the EAGLE-1 step is than the published one on each machine that has a result file."""
    cases = [(vocab, dtype) for vocab in (8192, 131072) for dtype in ("fp32", "bf16")]
    header = ["machine", "date", "fp32 GFLOP/s", "bf16 GFLOP/s", *(f"{dtype}, V = {vocab:,}" for vocab, dtype in cases)]
    lines = []
    for results in files:
        machine, rows = results["machine"], results["rows"]
        cells = [machine.get("cpu", machine.get("device")), machine["date"]]
        cells += [
            f"{max(row['peak'] for row in rows if row['dtype'] == dtype) / 1e9:.0f}" for dtype in ("fp32", "bf16")
        ]
        long = [row for row in rows if row["texts"] == "real" and row["length"] == 1024]
        ratios = {(row["vocab"], row["dtype"]): row["ratio"] for row in long}
        lines.append([*cells, *(f"{ratios[case]:.2f}" for case in cases)])
    return markdown(header, lines)


def eagle3_rows(results: Row) -> list[tuple[Row, list[str]]]:
    """The rows of both tables with their first cells; the result file also holds other numbers of steps."""
    rows = [row for row in results["rows"] if row["steps"] in (3, 7)]
    return [
        (row, [row["dtype"], f"{row['length']:,}", str(row["steps"]), "all" if row["all"] else f"{row['share']:.2f}"])
        for row in rows
    ]


def eagle3_table(results: Row) -> str:
    """Speed of the EAGLE-3 step."""
    header = ["numbers", "T", "k", "supervised", "limit", "speculators", "ours", "limit, LM head trained", "modelopt"]
    header += ["ours", "ours / the better rival", "best / best", "of the limit"]
    lines = []
    for row, cells in eagle3_rows(results):
        goals = eagle3_goals(row)
        for rival, kind in PAIRS.items():
            cells += [f"{row[name]:,.0f}" for name in (f"limit_{kind}", rival, f"ours_{kind}")]
        cells += [with_goal(f"**{ratio(row):.2f}**", goals, "ratio", ".2f"), f"{ratio(row, '_best'):.2f}"]
        lines.append([*cells, with_goal(f"{of_limit(row):.0%}", goals, "of_limit", ".0%")])
    return markdown(header, lines, results["machine"])


def eagle3_memory_table(results: Row) -> str:
    """Working memory of the EAGLE-3 step."""
    header = ["numbers", "T", "k", "supervised", "speculators", "ours", "modelopt", "ours, LM head trained"]
    lines = []
    for row, cells in eagle3_rows(results):
        for rival, kind in PAIRS.items():
            cells += [f"{row[f'{name}_mb']:,.0f} MB" for name in (rival, f"ours_{kind}")]
        lines.append([*cells, with_goal(f"**{smaller(row):.2f}**", eagle3_goals(row), "memory", ".2f")])
    return markdown([*header, "ours / the better rival"], lines)


def level_table(results: Row) -> str:
    """Speed and memory of every method's step; what was aimed at stands in brackets."""
    header = ["method", "numbers", "V", "texts", "fill", "share", "released, tokens/s", "ours", "ours / released"]
    lines = []
    for row in results["rows"]:
        texts = f"{row['batch']} real" if row["texts"] == "real" else "1 full"
        cells = [row["method"], row["dtype"], f"{row['vocab']:,}", texts, f"{row['fill']:.2f}", f"{row['share']:.2f}"]
        cells += [f"{row[side]:,.0f}" for side in ("released", "ours")]
        cells += [f"**{row['ratio']:.2f}** ({ONE_PASS_FASTER:.1f})"]
        cells += [f"{row[f'{side}_mb']:,.0f} MB" for side in ("released", "ours")]
        goal, gradients = LEVELS_SMALLER[row["vocab"]], row["gradients_mb"]
        cells.append(f"{row['ours_mb'] / row['released_mb']:.2f} ({goal:.2f})")
        cells.append(f"{max(row['ours_mb'] - gradients, 0) / (row['released_mb'] - gradients):.2f} ({goal:.2f})")
        lines.append(cells)
    header += ["memory, released", "ours", "ratio", "without gradients"]
    return markdown(header, lines, results["machine"])


def block_table(results: Row) -> str:
    """Speed and memory of every step; what was aimed at stands in brackets."""
    header = ["method", "numbers", "T", "supervised", "limit, tokens/s", "speculators", "ours", "ours / speculators"]
    header += ["best / best", "of the limit", "memory, speculators", "ours", "ratio"]
    lines = []
    for row in results["rows"]:
        cells = [row["method"], row["dtype"], f"{row['length']:,}", "all" if row["all"] else f"{row['share']:.2f}"]
        cells += [f"{row[name]:,.0f}" for name in ("limit", "speculators", "ours")]
        best = row["ours_best"] / row["speculators_best"]
        cells += [f"**{row['ratio']:.2f}** ({ONE_PASS_FASTER:.1f})", f"{best:.2f}", f"{row['of_limit']:.0%}"]
        cells += [f"{row[f'{side}_mb']:,.0f} MB" for side in ("speculators", "ours")]
        lines.append([*cells, f"{row['memory']:.2f} ({BLOCKS_SMALLER:.1f})"])
    return markdown(header, lines, results["machine"])
