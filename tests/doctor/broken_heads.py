"""Which faults does the doctor name? `python -m tests.doctor.broken_heads --heads FOLDER --rows FOLDER`.

The heads of `other_heads.py`, which had no part in choosing thresholds, are written in the layouts of others and
broken in every way of `spoilt_heads.py` that applies; what a fault costs is counted in decoded cycles. Healthy heads,
under-trained and untrained ones among them, must not be called broken.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.machine import made_on
from eagle.core.examples import Batch
from eagle.doctor import Diagnosis, diagnose
from eagle.doctor.examine import borrow_embedding, open_head
from eagle.doctor.target_answers import answer_prompts, read_prompts, render_prompts
from eagle.formats.checkpoint import load_head, save_pretrained
from eagle.formats.export import export
from eagle.formats.reading.foreign import inspect
from eagle.log import script
from eagle.target.target import Target
from tests.doctor.small_heads import make_head
from tests.doctor.spoilt_heads import BLOCKS, BREAKS, EAGLE1, EAGLE3, MEDUSA, MTP, PEAGLE, Break

# the name of a head of each kind, and the layout that it is written in; "" is this project's
SPOILT = {
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


class Bench(NamedTuple):
    """A target, its answers, the heads to break, and a folder to do it in."""

    path: str
    target: Target
    texts: Batch
    heads: Path
    work: Path

    def examine(self, folder: Path) -> Diagnosis:
        """Return the doctor's diagnosis of a folder, as `eagle doctor` gives it."""
        head, refusal = open_head(folder, self.path)
        if refusal:
            return refusal
        fatal = [finding for finding in inspect(folder, self.path).findings if finding.fatal]
        embedding = borrow_embedding(folder, self.target)
        return diagnose(head, self.target, self.texts, fatal, embedding)

    def examine_broken(self, kind: str, fault: Break | None) -> Diagnosis:
        """Write a head as others would, without its history, put a fault into its files, and examine it."""
        name, layout = SPOILT[kind]
        shutil.rmtree(self.work, ignore_errors=True)
        head = load_head(self.heads / name)
        if layout:
            export(
                head.bind(self.target.head),
                self.target.config,
                layout,
                self.work,
            )
        else:
            save_pretrained(head, self.work)
        for file in ("provenance.json", "recipe.yaml"):
            (self.work / file).unlink(missing_ok=True)
        if fault:
            edit_files(self.work, fault)
        return self.examine(self.work)


def edit_files(folder: Path, fault: Break) -> None:
    """Put a fault into a folder."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    fault.edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    # safetensors refuses views
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")


def read_rows(path: Path) -> list[Row]:
    """Return the results of one job so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def add_row(
    path: Path,
    key: Row,
    examine: Callable[[], Diagnosis],
) -> Row:
    """Return the result with this key; a new one is appended to the file, so that a killed job goes on."""
    for row in read_rows(path):
        if key.items() <= row.items():
            return row
    diagnosis = examine()
    tau = None
    if diagnosis.figures is not None:
        # acceptance lengths in decoded cycles, greedy and sampled
        lengths = (diagnosis.figures.greedy_tau, diagnosis.figures.sampled_tau)
        tau = [round(length, 4) for length in lengths]
    row = {
        **key,
        "doctor": diagnosis.verdict,
        "broken": diagnosis.broken,
        "tau": tau,
    }
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def is_named(row: Row, fault: Break) -> bool:
    """Return whether the verdict names the fault."""
    return bool(row["broken"]) and any(words in row["doctor"] for words in fault.names)


def find_costs(row: Row, whole: Row) -> list[float]:
    """Return the share of the drafted tokens that is lost in decoding, greedy and sampled."""
    costs = []
    for after, before in zip(row["tau"] or (), whole["tau"], strict=False):
        costs.append((before - after) / (before - 1))
    return costs


def describe_cell(row: Row, whole: Row, fault: Break) -> str:
    """Return whether a fault is named, and its costs; what cannot be read drafts nothing."""
    costs = " ".join(f"{cost:.0%}" for cost in find_costs(row, whole)) or "refused"
    if is_named(row, fault):
        return f"named, {costs}"
    return f"called broken, {costs}" if row["broken"] else f"**no**, {costs}"


def try_kind(kind: str, bench: Bench, path: Path) -> None:
    """Examine a head with each fault, the whole one first."""
    examine = partial(bench.examine_broken, kind)
    whole = add_row(
        path,
        {"break": None, "head": kind},
        partial(examine, None),
    )
    for fault in BREAKS:
        if kind in fault.kinds:
            row = add_row(
                path,
                {"break": fault.what, "head": kind},
                partial(examine, fault),
            )
            cell = describe_cell(row, whole, fault)
            print(f"{fault.what} | {kind} | {cell} | {row['doctor']}", flush=True)


def try_healthy(bench: Bench, path: Path) -> None:
    """Examine heads that nobody has broken."""
    # under-trained ones of other_heads.py among them
    trained = sorted(file.parent for file in bench.heads.glob("*/config.json"))
    for folder in (*trained, *save_untrained(bench)):
        row = add_row(
            path,
            {"head": folder.name},
            partial(bench.examine, folder),
        )
        mark = "CALLED BROKEN" if row["broken"] else ""
        print(f"healthy | {folder.name} | {mark} | {row['doctor']}", flush=True)


def save_untrained(bench: Bench) -> Iterator[Path]:
    """Yield folders of heads that have learned nothing."""
    for index, section in enumerate(UNTRAINED):
        folder = bench.work / f"untrained-{section['kind']}-{index}"
        save_pretrained(make_head(section, bench.target, bench.texts), folder)
        yield folder


def table(results: dict[str, Any]) -> str:
    """Return what is named of each head and what it costs, and what is said of healthy heads, as Markdown."""
    kinds = [kind for kind in SPOILT if kind in results["whole"]]
    lines = [f"| fault | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    # a head without such a tensor has no row
    rows = {(row["break"], row["head"]): row for row in results["faults"]}
    for fault in BREAKS:
        cells = []
        for kind in kinds:
            row = rows.get((fault.what, kind))
            cells.append(describe_cell(row, results["whole"][kind], fault) if row else "–")
        lines.append(f"| {fault.what} | {' | '.join(cells)} |")
    lines += ["", "| head that nobody has spoilt | the doctor says |", "|---|---|"]
    lines += [f"| {row['head']} | {row['doctor']} |" for row in results["healthy_heads"]]
    return "\n".join(lines)


def gather(rows: Path, bench: Bench) -> dict[str, Any]:
    """Return all results, with counts."""
    whole = {}
    broken = []
    healthy = read_rows(rows / f"{HEALTHY}.jsonl")
    faults = {fault.what: fault for fault in BREAKS}
    for kind, (name, _) in SPOILT.items():
        # the whole head comes first
        for row in read_rows(rows / f"{kind}.jsonl"):
            if not row["break"]:
                whole[kind] = row
                healthy.append({**row, "head": f"{name}, in another's layout"})
                continue
            row["named"] = is_named(row, faults[row["break"]])
            row["costs"] = find_costs(row, whole[kind]) or None
            broken.append(row)
    machine = made_on(
        target=Path(bench.path).name,
        answers=len(bench.texts.lengths),
        places=bench.texts.slots,
    )
    return {
        **machine,
        "named": sum(row["named"] for row in broken),
        "called_broken": sum(row["broken"] for row in broken),
        "broken": len(broken),
        "falsely_called_broken": sum(row["broken"] for row in healthy),
        "healthy": len(healthy),
        "whole": whole,
        "faults": broken,
        "healthy_heads": healthy,
    }


def main(argv: list[str]) -> None:
    """Keep each job's rows in a folder, so that several processes may share the work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="runs/tiny/target")
    parser.add_argument("--heads", type=Path, required=True, help="heads of other_heads.py")
    parser.add_argument("--rows", type=Path, required=True, help="a folder for each job's results")
    parser.add_argument("--jobs", nargs="*", default=[*SPOILT, HEALTHY])
    parser.add_argument("--tokens", type=int, default=1300, help="of the target's answers, or more")
    parser.add_argument("--tuned-on", default="", help="what the thresholds were chosen with")
    parser.add_argument("--out", type=Path, help="where to write the results of all jobs")
    args = parser.parse_args(argv)
    args.rows.mkdir(parents=True, exist_ok=True)
    target = Target.load(args.target, dtype="float32")
    # all processes examine by the same answers
    answers = args.rows / "answers.pt"
    if not answers.is_file():
        prompts = render_prompts(target, read_prompts(None))
        torch.save(answer_prompts(target, prompts, enough=args.tokens), answers)
    texts = torch.load(answers, weights_only=False)
    with TemporaryDirectory() as work:
        bench = Bench(
            args.target,
            target,
            texts,
            args.heads,
            Path(work) / "head",
        )
        for job in args.jobs:
            path = args.rows / f"{job}.jsonl"
            if job == HEALTHY:
                try_healthy(bench, path)
            else:
                try_kind(job, bench, path)
    if args.out:
        results = gather(args.rows, bench) | {"thresholds_tuned_on": args.tuned_on}
        args.out.write_text(json.dumps(results, indent=2) + "\n")
        print(table(results))


if __name__ == "__main__":
    script(main)
