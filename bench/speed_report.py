"""The tables of speed: speedups with intervals over prompts, and what cycles cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.machine import markdown
from bench.speed_arms import ASSISTED, PEERS, PLAIN, THEIRS
from eval.result_files.statistics import estimate

Rows = Sequence[Mapping[str, Any]]  # the figures of one arm on each batch of prompts
Cell = dict[str, Any]


class Setting(NamedTuple):
    """A target and how it is asked."""

    size: str  # as "1 B"
    dtype: str
    threads: int
    context: int  # tokens of a prompt; 0: its own
    batch: int
    temperature: float


CORE = Setting("1 B", "bfloat16", threads=1, context=0, batch=1, temperature=0.0)
OWN = "own"  # the size of a target that is not widened


def compute_cells(
    setting: Setting, arms: Mapping[str, Rows], costs: Mapping[str, float | None]
) -> list[Cell]:
    """Return the figures of every arm of a setting.

    Args:
        setting: The setting, which all arms share.
        arms: The figures of each arm on the same batches of prompts.
        costs: What a cycle of an arm costs over a forward of one token, where it was measured.
    """
    assisted = [rows for arm, rows in arms.items() if arm.startswith(ASSISTED)]
    bases = {
        "over plain": arms[PLAIN],
        "over transformers": arms.get(THEIRS),
        "over assisted": max(assisted, key=tokens_per_second, default=None),
    }
    cells = []
    for arm, rows in arms.items():
        # transformers does not tell its cycles
        tau = None
        cycles = total(rows, "cycles")
        if cycles:
            tau = round(total(rows, "committed") / cycles, 3)

        # answers at T > 0 are not compared with those of transformers
        unequal = None
        compared = [row for row in rows if row["unequal"] is not None]
        if compared:
            unequal = [total(compared, "unequal"), total(compared, "texts")]

        cells.append(
            {
                "setting": list(setting),
                "arm": arm,
                "tokens/s": round(tokens_per_second(rows), 2),
                **{name: compare(rows, base) for name, base in bases.items()},
                "tau": tau,
                "cycle": costs.get(arm),
                "unequal": unequal,
            }
        )
    return cells


def total(rows: Rows, key: str) -> Any:
    """Return the sum of a figure."""
    return sum(row.get(key, 0) for row in rows)


def tokens_per_second(rows: Rows) -> float:
    """Return the tokens per second of an arm."""
    return float(total(rows, "tokens") / total(rows, "seconds"))


def compare(rows: Rows, base: Rows | None) -> list[float | None] | None:
    """Return the tokens per second of an arm over a base's, with an interval over prompts.

    Args:
        rows: The figures of the arm on each batch of prompts.
        base: Those of the base on the same batches, None if it was not timed.

    Returns:
        The ratio and the low and high end of its interval; None without a base.
    """
    if base is None:
        return None
    clusters = {}
    for i, (row, base_row) in enumerate(zip(rows, base, strict=True)):
        clusters[i] = [[row["tokens"], row["seconds"], base_row["tokens"], base_row["seconds"]]]
    found = estimate(clusters, lambda sums: sums[0] / sums[1] / (sums[2] / sums[3]))
    # the interval of a single prompt is infinite
    return [round(value, 3) if abs(value) < 1e9 else None for value in found]


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """Return a table of each setting."""
    settings = dict.fromkeys(tuple(cell["setting"]) for cell in results["cells"])
    return "\n\n".join(setting_table(Setting(*values), results["cells"]) for values in settings)


def setting_table(setting: Setting, cells: Sequence[Cell]) -> str:
    """Return the arms of one setting with their speeds."""
    header = (
        "",
        "tokens/s",
        "over plain",
        "over `generate`",
        "over assisted",
        "τ",
        "cycle",
        "of τ / cycle",
        "unequal",
    )
    rows = []
    for cell in cells:
        if tuple(cell["setting"]) != setting:
            continue
        share = ""
        if cell["tau"] and cell["cycle"]:
            # of the speedup that follows from acceptance and costs
            share = f"{cell['over plain'][0] * cell['cycle'] / cell['tau']:.0%}"
        unequal = cell["unequal"]
        row = [cell["arm"], f"{cell['tokens/s']:.1f}"]
        row += [
            show_interval(cell[key]) for key in ("over plain", "over transformers", "over assisted")
        ]
        row += [show(cell["tau"]), show(cell["cycle"]), share]
        row.append(f"{unequal[0]} of {unequal[1]}" if unequal else "")
        rows.append(row)
    return f"**{name_setting(setting)}**\n\n{markdown(header, rows)}"


def show(value: float | None) -> str:
    """Return a figure with two decimals, nothing for None."""
    return "" if value is None else f"{value:.2f}"


def show_interval(value: Sequence[float | None] | None) -> str:
    """Return a figure with its interval."""
    if value is None:
        return ""
    middle, low, high = value
    return show(middle) if low is None else f"{show(middle)} ({show(low)} to {show(high)})"


def name_setting(setting: Setting) -> str:
    """Return a setting in words."""
    batch = f"batch size {setting.batch}"
    context = f", prompts of {setting.context} tokens" if setting.context else ""
    size = "the target as it is" if setting.size == OWN else setting.size
    threads = "one thread" if setting.threads == 1 else f"{setting.threads} threads"
    return f"{size}, {setting.dtype}, {threads}, {batch}, T = {setting.temperature:g}{context}"


def headline(results: dict[str, Any]) -> str:
    """Return the fastest arm of each side for one sequence, greedily, in bf16, at 1 B or of a target as it is."""
    best: dict[str, Cell] = {}
    for cell in results["cells"]:
        arm = cell["arm"]
        # only the setting that a reader compares first
        if Setting(*cell["setting"]) not in (CORE, CORE._replace(size=OWN)):
            continue
        side = arm if arm in PEERS else arm.partition(", ")[0]
        if arm.startswith(ASSISTED):
            side = ASSISTED
        if side not in best or cell["tokens/s"] > best[side]["tokens/s"]:
            best[side] = cell
    rows = []
    for cell in best.values():
        arm = cell["arm"] if cell["arm"] in PEERS else f"`{cell['arm']}`"
        speedups = [show_interval(cell[key]) for key in ("over transformers", "over plain")]
        rows.append([arm, f"{cell['tokens/s']:.1f}", *speedups, show(cell["tau"])])
    titles = ("", "tokens/s", "over transformers' `generate`", "over `none`", "acceptance length τ")
    return markdown(titles, rows, results["machine"])
