"""The tables of speed from finished turns: speed-ups with intervals over prompts, what cycles cost, goals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.machine import markdown
from bench.speed_arms import ASSISTED, PEERS, PLAIN, POLICY, THEIRS, Setting
from eval.result_files.statistics import estimate

Record = dict[str, Any]
Cell = dict[str, Any]
Turns = Mapping[tuple[int, int], Record]  # by group of prompts and run
CORE = {"size": "1 B", "dtype": "bfloat16", "threads": 1, "context": 0, "batch": 1, "temperature": 0.0}
GOALS = {"over plain": 2.2, "over assisted": 1.3, "batch 16 over plain": 1.0, "tuned / best": 0.97}


def compute_cells(records: Iterable[Record], drafters: Mapping[str, Any]) -> list[Cell]:
    """The figures of every arm of every setting, in the order in which they were first measured."""
    turns: dict[tuple[Any, ...], dict[tuple[int, int], Record]] = defaultdict(dict)
    for record in records:
        place = (*record["setting"], record["arm"])
        turns[place][record["group"], record["run"]] = record
    cells = []
    for (*place, arm), rows in turns.items():
        setting = Setting(*place)
        clock = "cpu" if setting.threads == 1 else "wall"
        plain, theirs, *assisted = (
            turns.get((*place, name), {}) for name in (PLAIN, THEIRS, *filter(is_assisted, PEERS))
        )
        sums = {key: sum(row.get(key) or 0 for row in rows.values()) for key in ("tokens", "cpu", "wall")}
        cells.append(
            {
                "setting": [*setting],
                "arm": arm,
                "tokens/s": round(sums["tokens"] / sums[clock], 2),
                "over plain": compare(plain, rows, plain, clock),
                "over transformers": compare(theirs, rows, plain, clock),
                "over assisted": compare(fastest(assisted, clock), rows, plain, clock),
                "tau": acceptance(rows),
                "cycle": find_cost(drafters, setting, arm),
                "cpu": round(sums["cpu"], 1),
                "wall": round(sums["wall"], 1),
                "unequal": count_answers(rows),
                "prompts": len({group for group, _ in rows}) * setting.batch,
            }
        )
    return cells


def find_cost(drafters: Mapping[str, Any], setting: Setting, arm: str) -> float | None:
    """What a cycle of one text costs over a forward of one token, where it was measured."""
    name, _, shape = arm.partition(", ")
    known = drafters.get(f"{setting.size}, {setting.dtype}, {setting.threads}, {name}", {})
    cost: float | None = known.get("cycles", {}).get(shape) if setting.batch == 1 else None
    return cost


def is_assisted(arm: str) -> bool:
    """Whether it is transformers' assisted generation, however many tokens it drafts."""
    return arm.startswith(ASSISTED)


def compare(base: Turns, rows: Turns, plain: Turns, clock: str) -> list[float | None] | None:
    """Tokens per second over a base's, each over plain decoding in its own turns, with an interval over prompts."""
    sides = [sum_groups(side, plain, clock) for side in (rows, base)]
    clusters = {group: [[*sides[0][group], *sides[1][group]]] for group in sides[0] if group in sides[1]}
    if not clusters:
        return None
    found = estimate(clusters, lambda sums: _over_plain(sums[:4]) / _over_plain(sums[4:]))
    return [round(value, 3) if abs(value) < 1e9 else None for value in found]


def _over_plain(sums: Any) -> Any:
    return sums[0] / sums[1] / (sums[2] / sums[3])


def sum_groups(rows: Turns, plain: Turns, clock: str) -> dict[int, list[float]]:
    """Of each prompt, or group of prompts, tokens and seconds of a side and of plain decoding in the same turns."""
    sums: dict[int, list[float]] = {}
    for turn in [turn for turn in rows if turn in plain]:
        figures = [side[turn][name] for side in (rows, plain) for name in ("tokens", clock)]
        sums[turn[0]] = [sum(pair) for pair in zip(figures, sums.get(turn[0], [0.0] * 4), strict=True)]
    return sums


def fastest(sides: Iterable[Turns], clock: str) -> Turns:
    """The side with the most tokens per second."""
    known = [side for side in sides if side]

    def speed(side: Turns) -> float:
        return sum(row["tokens"] for row in side.values()) / sum(row[clock] for row in side.values())

    return max(known, key=speed, default={})


def acceptance(rows: Turns) -> float | None:
    """Tokens per cycle; None where cycles are not counted."""
    cycles = sum(row.get("cycles", 0) for row in rows.values())
    return round(sum(row["committed"] for row in rows.values()) / cycles, 3) if cycles else None


def count_answers(rows: Turns) -> list[int] | None:
    """Answers unlike plain decoding's, and all that were compared; None if none was."""
    known = [row for row in rows.values() if row["unequal"] is not None]
    return [sum(row["unequal"] for row in known), sum(row["texts"] for row in known)] if known else None


def find_cells(cells: Sequence[Cell], **wanted: Any) -> list[Cell]:
    """The cells of settings with these values."""
    return [
        cell for cell in cells if all(getattr(Setting(*cell["setting"]), key) == value for key, value in wanted.items())
    ]


def list_goals(cells: Sequence[Cell], drafters: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Each goal with what was reached and whether that is enough; goals without a measurement are left out."""
    ours = [cell for cell in cells if cell["arm"] not in (PLAIN, *PEERS)]
    core = find_cells(ours, **CORE)
    policies = [cell for cell in find_cells(ours, size="1 B", batch=16) if cell["arm"].endswith(POLICY)]
    rows = []

    def add(text: str, key: str, goal: float, among: Sequence[Cell], choose: Callable[..., Cell]) -> None:
        known = [cell for cell in among if cell[key]]
        if known:
            cell = choose(known, key=lambda cell: cell[key][0])
            verdict = "met" if cell[key][0] >= goal else "missed"
            rows.append((f"{text}: {goal:g}", f"{cell['arm']}, {show(cell[key])}", verdict))

    add("1 B, T = 0, one text, over plain decoding", "over plain", GOALS["over plain"], core, max)
    add("the same over transformers' assisted generation", "over assisted", GOALS["over assisted"], core, max)
    worst = "1 B, 16 texts, the slowest policy over plain decoding"
    add(worst, "over plain", GOALS["batch 16 over plain"], policies, min)
    for name, known in drafters.items():
        for key, figures in known.items():
            if key.startswith("T = "):
                goal, share = GOALS["tuned / best"], figures["tuned / best"]
                text = f"{name}, {key}, tuned over the best of {figures['of']} budgets, modelled: {goal:g}"
                rows.append((text, f"{share:.3f}", "met" if share >= goal else "missed"))
    return rows


def show(value: Sequence[float | None] | None) -> str:
    """A figure with its interval."""
    if value is None:
        return ""
    middle, low, high = value
    return f"{middle:.2f}" if low is None or high is None else f"{middle:.2f} ({low:.2f} to {high:.2f})"


def name_setting(setting: Setting) -> str:
    """A setting in words."""
    texts = "one text" if setting.batch == 1 else f"{setting.batch} texts"
    threads = "one thread" if setting.threads == 1 else f"{setting.threads} threads"
    context = f", prompts of {setting.context} tokens" if setting.context else ""
    return f"{setting.size or 'as it is'}, {setting.dtype}, {threads}, {texts}, T = {setting.temperature:g}{context}"


def table(results: dict[str, Any]) -> str:
    """All settings as Markdown, then the goals and the machine."""
    places = dict.fromkeys(tuple(cell["setting"]) for cell in results["cells"])
    parts = [setting_table(Setting(*place), results["cells"]) for place in places]
    goals = markdown(("goal", "reached", ""), list_goals(results["cells"], results["drafters"]), results["machine"])
    return "\n\n".join([*parts, goals])


def summary(results: dict[str, Any]) -> str:
    """The fastest arm of each drafter over plain decoding, one row a setting, as Markdown."""
    cells = [cell for cell in results["cells"] if cell["arm"] != PLAIN and cell["over plain"]]
    names = list(dict.fromkeys(name_side(cell["arm"]) for cell in cells))
    rows = []
    for place in dict.fromkeys(tuple(cell["setting"]) for cell in results["cells"]):
        row = [name_setting(Setting(*place))]
        for name in names:
            known = [cell for cell in cells if name_side(cell["arm"]) == name and tuple(cell["setting"]) == place]
            best = max(known, key=lambda cell: cell["over plain"][0], default=None)
            shape = best["arm"].removeprefix(name).strip(", ") if best else ""
            row.append("" if best is None else f"{best['over plain'][0]:.2f}{f' ({shape})' if shape else ''}")
        rows.append(row)
    return markdown(("over plain decoding", *names), rows)


def headline(results: dict[str, Any]) -> str:
    """The fastest arm of each side for one text, greedily, at the size and precision that goals are stated for."""
    best: dict[str, Cell] = {}
    for cell in find_cells(results["cells"], **CORE):
        side = best.setdefault(name_side(cell["arm"]), cell)
        if cell["tokens/s"] > side["tokens/s"]:
            best[name_side(cell["arm"])] = cell
    rows = [
        (
            cell["arm"] if cell["arm"] in PEERS else f"`{cell['arm']}`",
            f"{cell['tokens/s']:.1f}",
            *(show(cell[key]) for key in ("over transformers", "over plain")),
            "" if cell["tau"] is None else f"{cell['tau']:.2f}",
        )
        for cell in best.values()
    ]
    titles = ("", "tokens/s", "over transformers' `generate`", "over `none`", "acceptance length τ")
    return markdown(titles, rows, results["machine"])


def name_side(arm: str) -> str:
    """An arm without its shape, or its number of drafts."""
    return next((peer for peer in (ASSISTED, *PEERS) if arm.startswith(peer) and peer != THEIRS), arm.split(", ")[0])


def setting_table(setting: Setting, cells: Sequence[Cell]) -> str:
    """One setting: the arms with their speeds."""
    header = ("", "tokens/s", "over plain", "over `generate`", "over assisted", "τ", "cycle", "of τ / cycle", "unequal")
    rows = []
    for cell in find_cells(cells, **setting._asdict()):
        tau, cycle, unequal = cell["tau"], cell["cycle"], cell["unequal"]
        share = f"{cell['over plain'][0] * cycle / tau:.0%}" if tau and cycle and cell["over plain"] else ""
        rows.append(
            (
                cell["arm"],
                f"{cell['tokens/s']:.1f}",
                *(show(cell[key]) for key in ("over plain", "over transformers", "over assisted")),
                "" if tau is None else f"{tau:.2f}",
                "" if cycle is None else f"{cycle:.2f}",
                share,
                "" if unequal is None else f"{unequal[0]} of {unequal[1]}",
            )
        )
    return f"**{name_setting(setting)}**\n\n{markdown(header, rows)}"
