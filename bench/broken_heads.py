"""Which faults does the doctor name? `python bench/broken_heads.py --heads FOLDER --rows FOLDER`.

The REPORTED heads of `bench/other_heads.py`, which had no part in choosing thresholds, are written in the layouts of
others and spoilt in every way of `bench/spoilt_heads.py` that applies; what a fault costs is counted in decoded cycles.
Healthy heads, under-trained and untrained ones among them, must not be called broken.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.machine import made_on
from bench.spoilt_heads import BLOCKS, BREAKS, EAGLE1, EAGLE3, MEDUSA, MTP, PEAGLE, Break
from eagle.data.examples import Batch
from eagle.doctor import Diagnosis, diagnose
from eagle.doctor.examine import open_head
from eagle.doctor.own_embedding import borrow_embedding
from eagle.doctor.texts import answer_prompts, read_prompts, render_prompts
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head, save_pretrained
from eagle.formats.export import export
from eagle.formats.foreign import inspect
from eagle.log import script
from eagle.target.target import Target

SPOILT = {  # kind: name of the head, and the layout that it is written in; no engine's where there is none
    EAGLE1: ("eagle1-smoothed", "vllm"),
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
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def describe(diagnosis: Diagnosis) -> Row:
    """The verdict and the acceptance in decoded cycles."""
    figures = diagnosis.figures
    tau = None if figures is None else [round(figures.decoded_tau, 4), round(figures.drawn_tau, 4)]
    return {"doctor": diagnosis.verdict, "broken": diagnosis.broken, "tau": tau}


def try_break(fault: Break, kind: str, heads: Path, asked: Asked, out: Path, whole: Row) -> Row:
    """Whether the doctor names a fault, and what the fault costs of what drafts add."""
    name, layout = SPOILT[kind]
    spoil(write_head(heads / name, layout, asked.target, out), fault.edit)
    row = describe(look(out, asked))
    is_named = row["broken"] and any(words in row["doctor"] for words in fault.names)
    pairs = zip(row["tau"] or (), whole["tau"], strict=False)
    costs = [round((before - after) / (before - 1), 3) for after, before in pairs]
    print(f"{fault.what} | {kind} | {'named' if is_named else 'NOT NAMED'} {costs} | {row['doctor']}", flush=True)
    return {"break": fault.what, "head": kind, "named": is_named, "costs": costs or None, **row}


def try_kind(kind: str, heads: Path, asked: Asked, out: Path) -> list[Row]:
    """All breaks of one head, the whole one first."""
    name, layout = SPOILT[kind]
    whole = {"break": None, "head": kind, **describe(look(write_head(heads / name, layout, asked.target, out), asked))}
    print(f"whole | {kind} | {whole['doctor']}", flush=True)
    return [whole, *(try_break(fault, kind, heads, asked, out, whole) for fault in BREAKS if kind in fault.kinds)]


def try_healthy(heads: Path, asked: Asked, out: Path) -> list[Row]:
    """What the doctor says of heads that nobody has spoilt."""
    rows = []
    for folder in (*sorted(file.parent for file in heads.glob("*/config.json")), *save_untrained(asked, out)):
        rows.append({"head": folder.name, **describe(look(folder, asked))})
        print(f"healthy | {folder.name} | {'CALLED BROKEN' * rows[-1]['broken']} | {rows[-1]['doctor']}", flush=True)
    return rows


def save_untrained(asked: Asked, out: Path) -> list[Path]:
    """Folders of heads that have learned nothing."""
    folders = [out / f"untrained-{values['kind']}-{seed}" for seed, values in enumerate(UNTRAINED)]
    for seed, (folder, values) in enumerate(zip(folders, UNTRAINED, strict=True)):
        torch.manual_seed(seed)
        settings, supervised = settings_of(values, "bench"), [asked.texts.tokens[asked.texts.loss_mask]]
        kind, target = DRAFTERS[settings.kind], asked.target
        save_pretrained(kind.for_target(settings, target.config, target.head, supervised), folder)
    return folders


def table(results: dict[str, Any]) -> str:
    """What is named of each head and what it costs, and what is said of healthy heads, as Markdown."""
    lines = [f"| fault | {' | '.join(SPOILT)} |", "|---|" + "---|" * len(SPOILT)]
    cells = {(row["break"], row["head"]): row for row in results["faults"]}
    for fault in BREAKS:
        lines.append(
            f"| {fault.what} | {' | '.join(_describe_cell(cells.get((fault.what, kind))) for kind in SPOILT)} |"
        )
    lines += ["", "| head that nobody has spoilt | the doctor says |", "|---|---|"]
    lines += [f"| {row['head']} | {row['doctor']} |" for row in results["healthy_heads"]]
    about = ", ".join(f"{key} {results[key]}" for key in ("answers", "places", "torch", "date", "commit"))
    return "\n".join([*lines, "", f"<sub>{about}</sub>"])


def _describe_cell(row: Row | None) -> str:
    """Named or not, and the cost of greedy and of drawn drafts."""
    if row is None:
        return "–"
    costs = "refused" if row["costs"] is None else " ".join(f"{cost:.0%}" for cost in row["costs"])
    return f"{'named' if row['named'] else '**broken**' if row['broken'] else '**no**'}, {costs}"


def main(argv: list[str]) -> None:
    """Each job's rows are kept in a folder, so that several processes may share the work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="runs/tiny/target")
    parser.add_argument("--heads", type=Path, required=True, help="the REPORTED heads")
    parser.add_argument("--rows", type=Path, required=True, help="a folder for each job's rows; what is there is kept")
    parser.add_argument("--jobs", nargs="*", default=[*SPOILT, HEALTHY])
    parser.add_argument("--tokens", type=int, default=1300, help="of the target's answers, at the least")
    parser.add_argument("--tuned-on", default="", help="what the thresholds were chosen with")
    parser.add_argument("--out", type=Path, default=Path("docs/results/broken_heads.json"))
    args = parser.parse_args(argv)
    args.rows.mkdir(parents=True, exist_ok=True)
    target = Target.load(args.target, dtype="float32")
    texts = answer_prompts(target, render_prompts(target, read_prompts(None)), enough=args.tokens)
    asked = Asked(args.target, target, texts)
    for job in args.jobs:
        if not (args.rows / f"{job}.json").is_file():
            with TemporaryDirectory() as work:
                folder = Path(work)
                examined = args.heads, asked, folder / "head"
                rows = try_healthy(*examined) if job == HEALTHY else try_kind(job, *examined)
            (args.rows / f"{job}.json").write_text(json.dumps(rows))
    files = {job: args.rows / f"{job}.json" for job in (*SPOILT, HEALTHY)}
    if not all(file.is_file() for file in files.values()):
        return
    rows = {job: json.loads(file.read_text()) for job, file in files.items()}
    broken = [row for kind in SPOILT for row in rows[kind] if row["break"]]
    foreign = [{**rows[kind][0], "head": f"{SPOILT[kind][0]}, in another's layout"} for kind in SPOILT]
    healthy = [*rows[HEALTHY], *foreign]
    results = {
        **made_on(target=Path(args.target).name, answers=len(texts.lengths), places=texts.slots),
        "named": sum(row["named"] for row in broken),
        "called_broken": sum(row["broken"] for row in broken),
        "broken": len(broken),
        "falsely_called_broken": sum(row["broken"] for row in healthy),
        "healthy": len(healthy),
        "thresholds_tuned_on": args.tuned_on,
        "faults": broken,
        "healthy_heads": healthy,
    }
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    script(main)
