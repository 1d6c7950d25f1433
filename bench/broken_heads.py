"""Which tool finds a broken head? `python bench/broken_heads.py --heads FOLDER --sibling TARGET`.

The REPORTED heads of `bench/other_heads.py` are exported and spoilt as exports are spoilt: in every way that is known
to be silent somewhere, and in ways drawn at random. `inspect` looks at the files, the doctor at its drafts.
Healthy heads, under-trained and untrained ones among them, must not be called broken.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.machine import made_on
from bench.other_heads import TUNING
from bench.spoilt_heads import SIBLING, Case, draw_cases, keep_all, known_cases, later_cases
from eagle.data.examples import Batch
from eagle.doctor import Diagnosis, diagnose
from eagle.doctor.examine import open_head
from eagle.doctor.texts import answer_prompts, read_prompts, render_prompts
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head, save_pretrained
from eagle.formats.export import export
from eagle.formats.foreign import inspect
from eagle.log import script
from eagle.target.target import Target

UNTRAINED: list[dict[str, Any]] = [
    {"kind": "eagle1"},
    {"kind": "eagle3"},
    {"kind": "eagle3", "lm_head": "random"},
    {"kind": "eagle3", "fc_norm": True, "norm_output": True, "draft_vocab": 512},
]
Asked = tuple[str, Target, Batch]  # a target's folder, the target, and its answers


def look(folder: Path, asked: Asked) -> tuple[list[str], Diagnosis]:
    """What `inspect` finds, and the doctor's diagnosis."""
    path, target, texts = asked
    findings = inspect(folder, path).findings
    head, refusal = open_head(folder, path)
    fatal = [finding for finding in findings if finding.fatal]
    return [finding.what for finding in findings], refusal or diagnose(head, target, texts, fatal)


def spoil(case: Case, heads: Path, target: Target, out: Path) -> Path:
    """Export the head and put the fault in, without its history, as a head from elsewhere comes."""
    shutil.rmtree(out, ignore_errors=True)
    export(load_head(heads / case.kind).bind(target.head), target.config, "vllm", out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    case.edit(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "provenance.json").unlink(missing_ok=True)
    return out


def try_case(case: Case, heads: Path, own: Asked, sibling: Asked, out: Path) -> dict[str, Any]:
    """Which tool names the fault of a case; findings that the whole head has too do not count."""
    whole = Case("none", case.kind, keep_all, ())
    usual = {finding.what for finding in inspect(spoil(whole, heads, own[1], out), own[0]).findings}
    findings, diagnosis = look(spoil(case, heads, own[1], out), sibling if case.fault == SIBLING else own)
    new = [what for what in findings if what not in usual]
    named = {
        "inspect": all(any(words in what for what in new) for words in case.named),
        "doctor": all(words in diagnosis.verdict for words in case.named),
    }
    row = {"fault": case.fault, "head": case.kind, "named_by": [who for who, names in named.items() if names]}
    print(f"{case.fault} | {case.kind} | {', '.join(row['named_by']) or 'NOBODY'} | {diagnosis.verdict}", flush=True)
    return {**row, "inspect": new, "doctor": diagnosis.verdict, "effects": [str(effect) for effect in diagnosis.faults]}


def try_healthy(folder: Path, asked: Asked) -> dict[str, Any]:
    """The doctor's findings on a healthy head."""
    _, diagnosis = look(folder, asked)
    print(f"healthy | {folder.name} | {'CALLED BROKEN' * diagnosis.broken} | {diagnosis.verdict}", flush=True)
    return {"head": folder.name, "doctor": diagnosis.verdict, "broken": diagnosis.broken}


def save_untrained(asked: Asked, out: Path) -> list[Path]:
    """Folders of heads that have learned nothing."""
    _, target, texts = asked
    folders = [out / f"untrained-{seed}" for seed in range(len(UNTRAINED))]
    for seed, (folder, values) in enumerate(zip(folders, UNTRAINED, strict=True)):
        torch.manual_seed(seed)
        settings, supervised = settings_of(values, "bench"), [texts.tokens[texts.loss_mask]]
        save_pretrained(DRAFTERS[settings.kind].for_target(settings, target.config, target.head, supervised), folder)
    return folders


def table(results: dict[str, Any]) -> str:
    """Who names each fault, and what is said of healthy heads, as Markdown."""
    lines = ["| fault | head | named by |", "|---|---|---|"]
    for row in results["faults"]:
        lines.append(f"| {row['fault']} | {row['head']} | {' and '.join(row['named_by']) or '**nobody**'} |")
    lines += ["", f"{results['named']} of {results['broken']} faults are named.", ""]
    lines += ["| head that nobody has spoilt | the doctor says |", "|---|---|"]
    lines += [f"| {row['head']} | {row['doctor']} |" for row in results["healthy_heads"]]
    called = f"Of {results['healthy']} healthy heads {results['falsely_called_broken']} are called broken."
    about = ", ".join(f"{key} {results[key]}" for key in ("answers", "places", "cpu", "torch", "date", "commit"))
    return "\n".join([*lines, "", called, "", f"<sub>{about}</sub>"])


def main(argv: list[str]) -> None:
    """The healthy ones, then the broken ones, each printed as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="runs/tiny/target")
    parser.add_argument("--sibling", required=True, help="a target of the same sizes that the heads were not made for")
    parser.add_argument("--heads", type=Path, required=True, help="a folder of healthy heads, some of them to spoil")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="six drawn faults for each")
    parser.add_argument("--prompts", help="a JSONL file")
    parser.add_argument("--out", type=Path, default=Path("docs/results/broken_heads.json"))
    args = parser.parse_args(argv)
    asked: list[Asked] = []
    for path in (args.target, args.sibling):
        target = Target.load(path, dtype="float32")
        asked.append((path, target, answer_prompts(target, render_prompts(target, read_prompts(args.prompts)))))
    with TemporaryDirectory() as work:
        folders = [*sorted(file.parent for file in args.heads.glob("*/config.json"))]
        healthy = [try_healthy(folder, asked[0]) for folder in (*folders, *save_untrained(asked[0], Path(work)))]
        cases = [*known_cases(), *(case for seed in args.seeds for case in draw_cases(seed)), *later_cases()]
        broken = [try_case(case, args.heads, *asked, Path(work) / "spoilt") for case in cases]
    path, _, texts = asked[0]
    results = {
        **made_on(target=Path(path).name, answers=len(texts.lengths), places=texts.slots, seeds=args.seeds),
        "named": sum(bool(row["named_by"]) for row in broken),
        "broken": len(broken),
        "falsely_called_broken": sum(row["broken"] for row in healthy),
        "healthy": len(healthy),
        "thresholds_tuned_on": f"the TUNING heads of bench/other_heads.py, seed 1: {', '.join(TUNING)}",
        "faults": broken,
        "healthy_heads": healthy,
    }
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    script(main)
