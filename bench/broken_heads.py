"""Does anyone notice a broken head? `python bench/broken_heads.py --heads FOLDER --sibling TARGET`.

The REPORTED heads of `bench/other_heads.py` are exported and spoilt as exports are spoilt: in every way that is known
to be silent somewhere, and in ways drawn at random. `inspect` looks at the files, the doctor at what the head says.
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
from bench.spoilt_heads import SIBLING, Case, catalogue, drawn, further, nothing
from eagle.data.examples import Batch
from eagle.doctor import diagnosed
from eagle.doctor.examine import HEATS, PLACES, TOKENS, opened
from eagle.doctor.texts import answers, prompts_of, rendered
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head, save_pretrained
from eagle.formats.export import export
from eagle.formats.foreign import inspect
from eagle.log import script
from eagle.target.target import Target

OUT = Path("docs/results/broken_heads.json")
UNTRAINED: list[dict[str, Any]] = [
    {"kind": "eagle1"},
    {"kind": "eagle3"},
    {"kind": "eagle3", "lm_head": "random"},
    {"kind": "eagle3", "fc_norm": True, "norm_output": True, "draft_vocab": 512},
]
Asked = dict[str, tuple[Target, Batch]]  # targets, and what they answered


# -- looking ----------------------------------------------------------------------------------------------------------


def look(folder: Path, path: str, target: Target, texts: Batch) -> tuple[list[str], Any]:
    """What `inspect` finds, and the doctor's diagnosis."""
    found = inspect(folder, path).findings
    head, refused = opened(folder, path)
    return [one.what for one in found], refused or diagnosed(head, target, texts, [one for one in found if one.fatal])


def spoilt(case: Case, heads: Path, target: Target, out: Path) -> Path:
    """The head's export with the fault."""
    shutil.rmtree(out, ignore_errors=True)
    export(load_head(heads / case.kind).bind(target.head), target.config, "vllm", out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    case.edit(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "provenance.json").unlink(missing_ok=True)  # as a head from elsewhere comes: without its history
    return out


def examined(case: Case, heads: Path, paths: dict[str, str], asked: Asked, out: Path) -> dict[str, Any]:
    """Who names the fault of a case; what is said of the whole head too does not count."""
    where = "sibling" if case.fault == SIBLING else "target"
    whole = Case("none", case.kind, nothing, ())
    usual = {one.what for one in inspect(spoilt(whole, heads, asked["target"][0], out), paths["target"]).findings}
    findings, said = look(spoilt(case, heads, asked["target"][0], out), paths[where], *asked[where])
    new = [what for what in findings if what not in usual]
    by = {
        "inspect": all(any(words in what for what in new) for words in case.named),
        "doctor": all(words in said.verdict for words in case.named),
    }
    who = [name for name, is_so in by.items() if is_so]
    print(f"{case.fault} | {case.kind} | {', '.join(who) or 'NOBODY'} | {said.verdict}", flush=True)
    effects = [str(one) for one in said.faults]
    return {
        "fault": case.fault,
        "head": case.kind,
        "named_by": who,
        "inspect": new,
        "doctor": said.verdict,
        "effects": effects,
    }


def sound(folder: Path, path: str, target: Target, texts: Batch) -> dict[str, Any]:
    """What the doctor says of a head that nobody has spoilt."""
    name = folder.name
    _, said = look(folder, path, target, texts)
    print(f"healthy | {name} | {'CALLED BROKEN' if said.broken else ''} | {said.verdict}", flush=True)
    return {"head": name, "doctor": said.verdict, "broken": said.broken}


def untrained(target: Target, texts: Batch, out: Path) -> list[Path]:
    """Heads that have learned nothing."""
    folders = []
    for seed, values in enumerate(UNTRAINED):
        torch.manual_seed(seed)
        settings, said = settings_of(values, "bench"), [texts.tokens[texts.loss_mask]]
        folders.append(out / f"untrained-{seed}")
        save_pretrained(DRAFTERS[settings.kind].for_target(settings, target.config, target.head, said), folders[-1])
    return folders


def table(results: dict[str, Any]) -> str:
    """Who names each fault, and what is said of healthy heads, as Markdown."""
    lines = ["| fault | head | named by |", "|---|---|---|"]
    for row in results["faults"]:
        lines.append(f"| {row['fault']} | {row['head']} | {' and '.join(row['named_by']) or '**nobody**'} |")
    lines += ["", f"{results['named']} of {results['broken']} faults are named.", ""]
    lines += ["| head that nobody has spoilt | the doctor says |", "|---|---|"]
    for row in results["healthy_heads"]:
        lines.append(f"| {row['head']} | {row['doctor']} |")
    right = f"Of {results['healthy']} healthy heads {results['falsely_called_broken']} are called broken."
    made = ", ".join(f"{key} {results[key]}" for key in ("answers", "places", "cpu", "torch", "date", "commit"))
    return "\n".join([*lines, "", right, "", f"<sub>{made}</sub>"])


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="runs/tiny/target")
    parser.add_argument("--sibling", required=True, help="a target of the same sizes that the heads were not made for")
    parser.add_argument("--heads", type=Path, required=True, help="a folder of healthy heads, some of them to spoil")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="six drawn faults for each")
    parser.add_argument("--prompts", help="a JSONL file")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """The broken ones, then the healthy ones."""
    args = arguments(argv)
    paths = {"target": args.target, "sibling": args.sibling}
    asked: Asked = {}
    for name, path in paths.items():
        target = Target.load(path, dtype="float32")
        asked[name] = target, answers(target, rendered(target, prompts_of(args.prompts)), TOKENS, HEATS, PLACES)
    cases = [*catalogue(), *(case for seed in args.seeds for case in drawn(seed)), *further()]
    broken, healthy = [], []
    with TemporaryDirectory() as work:
        folders = [*sorted(folder.parent for folder in args.heads.glob("*/config.json"))]
        for folder in (*folders, *untrained(*asked["target"], Path(work))):
            healthy.append(sound(folder, args.target, *asked["target"]))
            write(args, asked["target"][1], broken, healthy)
        for case in cases:
            broken.append(examined(case, args.heads, paths, asked, Path(work) / "spoilt"))
            write(args, asked["target"][1], broken, healthy)
    print(table(json.loads(args.out.read_text())))


def write(args: argparse.Namespace, texts: Batch, broken: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> None:
    """What is known so far."""
    counts = {
        "named": sum(bool(row["named_by"]) for row in broken),
        "broken": len(broken),
        "falsely_called_broken": sum(row["broken"] for row in healthy),
        "healthy": len(healthy),
        "thresholds_tuned_on": f"the TUNING heads of bench/other_heads.py, seed 1: {', '.join(TUNING)}",
    }
    about = made_on(target=Path(args.target).name, answers=len(texts.lengths), places=texts.slots, seeds=args.seeds)
    results = {**about, **counts, "faults": broken, "healthy_heads": healthy}
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    script(main)
