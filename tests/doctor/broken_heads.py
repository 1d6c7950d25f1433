"""Which faults does the doctor name? `python -m tests.doctor.broken_heads --heads FOLDER --rows FOLDER`.

The REPORTED heads of `other_heads.py`, which had no part in choosing thresholds, are written in the layouts of
others and spoilt in every way of `spoilt_heads.py` that applies; what a fault costs is counted in decoded cycles.
Healthy heads, under-trained and untrained ones among them, must not be called broken.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.machine import made_on
from eagle.core.examples import Batch
from eagle.doctor import Diagnosis, diagnose
from eagle.doctor.examine import borrow_embedding, open_head
from eagle.doctor.texts import answer_prompts, read_prompts, render_prompts
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head, save_pretrained
from eagle.formats.export import export
from eagle.formats.reading.foreign import inspect
from eagle.log import script
from eagle.target.target import Target
from tests.doctor.spoilt_heads import BLOCKS, BREAKS, EAGLE1, EAGLE3, MEDUSA, MTP, PEAGLE, Break

SPOILT = {  # kind: name of the head, and the layout that it is written in; no engine's where there is none
    EAGLE1: ("eagle1-smoothed", "sglang"),
    EAGLE3: ("eagle3-text-512", "speculators"),
    PEAGLE: ("peagle-gated", "speculators"),
    BLOCKS: ("dspark-anchored", "vllm"),
    MEDUSA: ("medusa-tokens", "vllm"),
    MTP: ("mtp-random", ""),
}
HEALTHY = "healthy"
UNTRAINED: list[dict[str, Any]] = [
    {"kind": "eagle1"},
    {"kind": "eagle3"},
    {"kind": "eagle3", "fc_norm": True, "norm_output": True, "draft_vocab": 512},
    {"kind": "medusa"},
    {"kind": "dflash", "blocks": 2},
]
Row = dict[str, Any]


class Asked(NamedTuple):
    """A target with its answers."""

    path: str
    target: Target
    texts: Batch


def look(folder: Path, asked: Asked) -> Diagnosis:
    """The doctor's diagnosis of a folder, as `eagle doctor` gives it."""
    head, refusal = open_head(folder, asked.path)
    if refusal:
        return refusal
    fatal = [finding for finding in inspect(folder, asked.path).findings if finding.fatal]
    return diagnose(head, asked.target, asked.texts, fatal, borrow_embedding(folder, asked.target))


def write_head(folder: Path, layout: str, target: Target, out: Path) -> Path:
    """Write a head as others would, without its history."""
    shutil.rmtree(out, ignore_errors=True)
    head = load_head(folder)
    if layout:
        export(head.bind(target.head), target.config, layout, out)
    else:
        save_pretrained(head, out)
    for name in ("provenance.json", "recipe.yaml"):
        (out / name).unlink(missing_ok=True)
    return out


def spoil(folder: Path, edit: Any) -> None:
    """Put a fault into a folder."""
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


class Rows:
    """What is known of one job, row by row in a file, so that a job that was ended goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: list[Row] = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        )

    def add(self, key: Row, examine: Callable[[], Diagnosis]) -> Row:
        """The row of this key; the verdict and the acceptance in decoded cycles, greedy and drawn, if it is new."""
        for row in self.known:
            if key.items() <= row.items():
                return row
        diagnosis = examine()
        figures = diagnosis.figures
        tau = (
            None
            if figures is None
            else [round(figures.greedy_tau, 4), round(figures.sampled_tau, 4)]
        )
        row = {**key, "doctor": diagnosis.verdict, "broken": diagnosis.broken, "tau": tau}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def try_break(fault: Break, kind: str, heads: Path, asked: Asked, out: Path) -> Diagnosis:
    """The diagnosis of a head with this fault."""
    name, layout = SPOILT[kind]
    spoil(write_head(heads / name, layout, asked.target, out), fault.edit)
    return look(out, asked)


def is_named(row: Row, fault: Break) -> bool:
    """Whether the verdict names the fault."""
    return bool(row["broken"]) and any(words in row["doctor"] for words in fault.names)


def find_costs(row: Row, whole: Row) -> list[float]:
    """The share of the drafted tokens that is lost in decoding, greedy and with drawn drafts."""
    return [
        (before - after) / (before - 1)
        for after, before in zip(row["tau"] or (), whole["tau"], strict=False)
    ]


def describe_cell(row: Row, whole: Row, fault: Break) -> str:
    """Named, called broken by another name, or neither, and the costs; what cannot be read drafts nothing."""
    costs = " ".join(f"{cost:.0%}" for cost in find_costs(row, whole)) or "refused"
    return f"{'named' if is_named(row, fault) else 'called broken' if row['broken'] else '**no**'}, {costs}"


def try_kind(kind: str, heads: Path, asked: Asked, out: Path, rows: Rows) -> None:
    """All breaks of one head, the whole one first."""
    name, layout = SPOILT[kind]
    whole = rows.add(
        {"break": None, "head": kind},
        lambda: look(write_head(heads / name, layout, asked.target, out), asked),
    )
    for fault in BREAKS:
        if kind in fault.kinds:
            row = rows.add(
                {"break": fault.what, "head": kind},
                lambda fault=fault: try_break(fault, kind, heads, asked, out),
            )
            print(
                f"{fault.what} | {kind} | {describe_cell(row, whole, fault)} | {row['doctor']}",
                flush=True,
            )


def try_healthy(heads: Path, asked: Asked, out: Path, rows: Rows) -> None:
    """What the doctor says of heads that nobody has spoilt."""
    for folder in (
        *sorted(file.parent for file in heads.glob("*/config.json")),
        *save_untrained(asked, out),
    ):
        row = rows.add({"head": folder.name}, lambda folder=folder: look(folder, asked))
        print(
            f"healthy | {folder.name} | {'CALLED BROKEN' * row['broken']} | {row['doctor']}",
            flush=True,
        )


def save_untrained(asked: Asked, out: Path) -> list[Path]:
    """Folders of heads that have learned nothing."""
    folders = [out / f"untrained-{values['kind']}-{seed}" for seed, values in enumerate(UNTRAINED)]
    for seed, (folder, values) in enumerate(zip(folders, UNTRAINED, strict=True)):
        torch.manual_seed(seed)
        settings, supervised = (
            settings_of(values, "bench"),
            [asked.texts.tokens[asked.texts.loss_mask]],
        )
        kind, target = DRAFTERS[settings.kind], asked.target
        save_pretrained(kind.for_target(settings, target.config, target.head, supervised), folder)
    return folders


def table(results: dict[str, Any]) -> str:
    """What is named of each head and what it costs, and what is said of healthy heads, as Markdown."""
    kinds = [kind for kind in SPOILT if kind in results["whole"]]
    lines = [f"| fault | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    cells = {(row["break"], row["head"]): row for row in results["faults"]}
    for fault in BREAKS:
        row = [
            describe_cell(cells[fault.what, kind], results["whole"][kind], fault)
            if (fault.what, kind) in cells
            else "–"
            for kind in kinds
        ]
        lines.append(f"| {fault.what} | {' | '.join(row)} |")
    lines += ["", "| head that nobody has spoilt | the doctor says |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {row['head']} | {row['doctor']} |" for row in results["healthy_heads"])]
    )


def main(argv: list[str]) -> None:
    """Each job's rows are kept in a folder, so that several processes may share the work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="runs/tiny/target")
    parser.add_argument("--heads", type=Path, required=True, help="the REPORTED heads")
    parser.add_argument(
        "--rows",
        type=Path,
        required=True,
        help="a folder for each job's rows; what is there is kept",
    )
    parser.add_argument("--jobs", nargs="*", default=[*SPOILT, HEALTHY])
    parser.add_argument(
        "--tokens", type=int, default=1300, help="of the target's answers, at the least"
    )
    parser.add_argument("--tuned-on", default="", help="what the thresholds were chosen with")
    parser.add_argument("--out", type=Path, help="where to write the results of all jobs")
    args = parser.parse_args(argv)
    args.rows.mkdir(parents=True, exist_ok=True)
    target = Target.load(args.target, dtype="float32")
    kept = args.rows / "answers.pt"
    if not kept.is_file():
        prompts = render_prompts(target, read_prompts(None))
        torch.save(answer_prompts(target, prompts, enough=args.tokens), kept)
    asked = Asked(args.target, target, torch.load(kept, weights_only=False))
    for job in args.jobs:
        with TemporaryDirectory() as work:
            examined = args.heads, asked, Path(work) / "head", Rows(args.rows / f"{job}.jsonl")
            try_healthy(*examined) if job == HEALTHY else try_kind(job, *examined)
    if args.out:
        results = gather(args.rows, asked) | {"thresholds_tuned_on": args.tuned_on}
        args.out.write_text(json.dumps(results, indent=2) + "\n")
        print(table(results))


def gather(rows: Path, asked: Asked) -> dict[str, Any]:
    """All that is known, with counts."""
    spoilt = [row for kind in SPOILT for row in Rows(rows / f"{kind}.jsonl").known]
    whole, broken = (
        {row["head"]: row for row in spoilt if not row["break"]},
        [row for row in spoilt if row["break"]],
    )
    foreign = [
        {**row, "head": f"{SPOILT[kind][0]}, in another's layout"} for kind, row in whole.items()
    ]
    healthy = [*Rows(rows / f"{HEALTHY}.jsonl").known, *foreign]
    faults = {fault.what: fault for fault in BREAKS}
    for row in broken:
        row |= {
            "named": is_named(row, faults[row["break"]]),
            "costs": find_costs(row, whole[row["head"]]) or None,
        }
    return {
        **made_on(
            target=Path(asked.path).name, answers=len(asked.texts.lengths), places=asked.texts.slots
        ),
        "named": sum(row["named"] for row in broken),
        "called_broken": sum(row["broken"] for row in broken),
        "broken": len(broken),
        "falsely_called_broken": sum(row["broken"] for row in healthy),
        "healthy": len(healthy),
        "whole": whole,
        "faults": broken,
        "healthy_heads": healthy,
    }


if __name__ == "__main__":
    script(main)
