"""Does anyone notice a broken head? `python bench/broken_heads.py --sibling TARGET --healthy HEAD ...`.

Trained heads are exported and spoilt as exports are spoilt: in every way that is known to be silent somewhere, and in
ways drawn at random. `inspect` looks at the files, the doctor at what the head says. Healthy heads, under-trained and
untrained ones among them, must not be called broken.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.machine import made_on
from eagle.checkpoint import load_head, save_pretrained
from eagle.doctor import diagnosed
from eagle.doctor.examine import HEATS, PLACES, TOKENS, opened
from eagle.doctor.texts import answers, prompts_of, rendered
from eagle.drafters import DRAFTERS, settings_of
from eagle.examples import Batch
from eagle.export import export
from eagle.foreign import inspect
from eagle.log import script
from eagle.target import Target

OUT = Path("docs/results/broken_heads.json")
SIBLING = "the head of a sibling target"
IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
KINDS = ("eagle1", "hass", "eagle3", "eagle3-full", "eagle3.1")
UNTRAINED: list[dict[str, Any]] = [
    {"kind": "eagle1"},
    {"kind": "eagle3"},
    {"kind": "eagle3", "lm_head": "random"},
    {"kind": "eagle3", "fc_norm": True, "norm_output": True, "draft_vocab": 512},
]
Asked = dict[str, tuple[Target, Batch]]  # targets, and what they answered
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]  # of an exported head's config and tensors


@dataclass(frozen=True)
class Case:
    """A head to spoil, how, and by which words the fault is named."""

    fault: str
    kind: str
    edit: Edit
    named: tuple[str, ...]  # every one of them must be said


# -- ways to spoil a head ---------------------------------------------------------------------------------------------


def nothing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The export as it is."""


def without(*names: str) -> Edit:
    """Tensors left out."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors.pop(name)

    return edit


def with_tensor(name: str, made: Callable[[dict[str, Any], dict[str, Tensor]], Tensor]) -> Edit:
    """A tensor put in, or another in its place."""
    return lambda config, tensors: tensors.update({name: made(config, tensors)})


def with_key(name: str, made: Callable[[Any], Any]) -> Edit:
    """Another value in the config."""
    return lambda config, tensors: config.update({name: made(config.get(name))})


def opposite(name: str) -> Edit:
    """A switch turned."""
    return with_key(name, lambda on: not on)


def blocks(order: tuple[int, ...]) -> Edit:
    """The blocks of `fc` in another order."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        parts = tensors["fc.weight"].chunk(len(order), dim=1)
        tensors["fc.weight"] = torch.cat([parts[place] for place in order], dim=1)

    return edit


def halves(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Queries, keys and values of EAGLE-3 with their halves swapped."""
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)


def layers(shift: int) -> Edit:
    """Layer ids moved, in both places."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for section in (config, config["eagle_config"]):
            moved = [layer + shift for layer in section.pop(IDS)]
            section.update({IDS: moved} if min(moved) >= 0 else {})  # no output stands in front of the first layer's

    return edit


def swapped(one: str, other: str) -> Edit:
    """Two norms in each other's place."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        first, second = f"{one}.weight", f"{other}.weight"
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def renamed(pattern: str, by: str) -> Edit:
    """Tensors under other names."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[re.sub(pattern, by, name)] = tensors.pop(name)

    return edit


def catalogue() -> list[Case]:
    """What is known to be wrong and silent in some engine."""
    ids = with_tensor("d2t", lambda config, tensors: tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    zeros = with_tensor("d2t", lambda config, tensors: torch.zeros(config["vocab_size"], dtype=torch.long))
    bias = with_tensor("fc.bias", lambda config, tensors: torch.full((config["hidden_size"],), 0.1))
    norm = with_tensor("layers.0.input_layernorm.weight", lambda config, tensors: torch.ones(config["hidden_size"]))
    prefix, plain = renamed("^(?=fc|midlayer|norm|lm_head)", "model."), renamed("^midlayer", "layers.0")
    residual, full, taken = "norm_before_residual", "eagle3-full", "[state; embedding]"
    rows: list[tuple[str, str, Edit, str]] = [
        ("`model.` in front of the names", "eagle3", prefix, "`model.`"),
        ("fc.weight missing", "eagle3", without("fc.weight"), "fc.weight is missing"),
        ("fc's blocks in wrong layer order", "eagle3", blocks((2, 1, 0)), "blocks of fc"),
        ("[state; embedding] in attention", full, halves, f"take {taken}"),
        ("d2t holds ids, not offsets", "eagle3", ids, "d2t holds"),
        ("d2t missing with a draft vocabulary", "eagle3", without("d2t", "t2d"), "d2t is missing"),
        ("d2t present with the full vocabulary", full, zeros, "d2t is there although"),
        ("norm_before_residual wrong", "eagle3", opposite(residual), residual),
        ("layer ids one too high", full, layers(1), "1 too high"),
        ("layer ids one too low", "eagle3", layers(-1), "1 too low"),
        ("layers.0 for OpenVINO", "eagle3", plain, "layers.0: OpenVINO"),
        ("lm_head missing", full, without("lm_head.weight"), "lm_head.weight is missing"),
        ("fc.bias in EAGLE-3", "eagle3", bias, "fc.bias"),
        ("fc.bias in EAGLE-1", "eagle1", bias, "fc.bias"),
        ("EAGLE-1 with an input norm", "eagle1", norm, "input_layernorm"),
        ("EAGLE-1, fc's halves swapped", "eagle1", blocks((1, 0)), f"takes {taken}"),
        ("HASS, fc's halves swapped", "hass", blocks((1, 0)), f"takes {taken}"),
    ]
    return [Case(fault, kind, edit, (words,)) for fault, kind, edit, words in rows]


def drawn(seed: int) -> list[Case]:
    """Six faults, of which chance decides the details."""
    chance = random.Random(seed)
    orders, fused = [*permutations(range(3))][1:], ["eagle3", "eagle3-full", "eagle3.1"]
    order, shift, (one, other) = chance.choice(orders), chance.choice((2, -2)), chance.sample(NORMS, 2)
    theta = with_key("rope_theta", lambda value: value * 10)
    singles = {
        "blocks of fc": blocks(chance.choice(orders)),
        "take [state; embedding]": halves,
        "2 too low": layers(-2),
        "norm_before_residual": opposite("norm_before_residual"),
    }
    both = tuple(chance.sample(list(singles), 2))

    def two(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in both:
            singles[name](config, tensors)

    amount = f"2 too {'high' if shift > 0 else 'low'}"
    return [
        Case(f"fc's blocks as {order}", chance.choice(fused), blocks(order), ("blocks of fc",)),
        Case(f"layer ids {amount}", chance.choice(fused), layers(shift), (amount,)),
        Case("rope theta × 10", chance.choice(["eagle1", *fused]), theta, ("rope",)),
        Case(f"{one} and {other} swapped", chance.choice(fused), swapped(one, other), ("are swapped",)),
        Case(f"two faults: {both[0]}, {both[1]}", chance.choice(fused), two, both),
        Case(SIBLING, chance.choice(["eagle1", *fused]), nothing, ("another target",)),
    ]


# -- looking ----------------------------------------------------------------------------------------------------------


def look(folder: Path, path: str, target: Target, texts: Batch) -> tuple[list[str], Any]:
    """What `inspect` finds, and the doctor's diagnosis."""
    found = inspect(folder, path).findings
    head, refused = opened(folder, path)
    return [one.what for one in found], refused or diagnosed(head, target, texts, [one for one in found if one.fatal])


def spoilt(case: Case, heads: dict[str, str], target: Target, out: Path) -> Path:
    """The head's export with the fault."""
    shutil.rmtree(out, ignore_errors=True)
    export(load_head(heads[case.kind]).bind(target.head), target.config, "vllm", out)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    case.edit(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "provenance.json").unlink(missing_ok=True)  # as a head from elsewhere comes: without its history
    return out


def examined(case: Case, heads: dict[str, str], paths: dict[str, str], asked: Asked, out: Path) -> dict[str, Any]:
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
    name = "/".join(folder.parts[-3:-1] if folder.name == "head" else folder.parts[-1:])
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
    said = f"{results['named']} of {results['broken']} faults are named"
    right = f"of {results['healthy']} healthy heads {results['falsely_called_broken']} are called broken"
    made = ", ".join(f"{key} {results[key]}" for key in ("answers", "places", "cpu", "torch", "date", "commit"))
    return "\n".join([*lines, "", f"{said}; {right}.", "", f"<sub>{made}</sub>"])


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="runs/tiny/target")
    parser.add_argument("--sibling", required=True, help="a target of the same sizes that the heads were not made for")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", default=f"runs/tiny/{kind}/head", dest=kind)
    parser.add_argument("--healthy", nargs="*", default=[], help="further heads, trained for however long")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="six drawn faults for each")
    parser.add_argument("--prompts", help="a JSONL file")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """The broken ones, then the healthy ones."""
    args = arguments(argv)
    heads = {kind: getattr(args, kind) for kind in KINDS}
    paths = {"target": args.target, "sibling": args.sibling}
    asked: Asked = {}
    for name, path in paths.items():
        target = Target.load(path, dtype="float32")
        asked[name] = target, answers(target, rendered(target, prompts_of(args.prompts)), TOKENS, HEATS, PLACES)
    cases = [*catalogue(), *(case for seed in args.seeds for case in drawn(seed))]
    with TemporaryDirectory() as work:
        broken = [examined(case, heads, paths, asked, Path(work) / "spoilt") for case in cases]
        folders = [*map(Path, (*heads.values(), *args.healthy)), *untrained(*asked["target"], Path(work))]
        healthy = [sound(folder, args.target, *asked["target"]) for folder in folders]
    counts = {
        "named": sum(bool(row["named_by"]) for row in broken),
        "broken": len(broken),
        "falsely_called_broken": sum(row["broken"] for row in healthy),
        "healthy": len(healthy),
    }
    texts = asked["target"][1]
    about = made_on(target=Path(args.target).name, answers=len(texts.lengths), places=texts.slots, seeds=args.seeds)
    results = {**about, **counts, "faults": broken, "healthy_heads": healthy}
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    script(main)
