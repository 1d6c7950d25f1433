"""Heads trained on plain or on quantised states of a target, each decoded with both: `python -m bench.quantised`.

Needs `make tiny` and the packages of the formats that it is to measure; a format whose package is missing is left out
and named. `--fast` trains for few steps on few texts, to see that it runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from bench.machine import made_on, markdown, write_results
from data_prep.read_once import read_examples
from eagle import Budget, Sampling, Target, generate
from eagle.core.examples import Example, collate
from eagle.data.features import roles_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.log import progress, script
from eagle.recipe import Recipe
from recipes.held_out import first_prompt

FORMATS = {  # package, and the config by which transformers quantises
    "int8 weights": ("torchao", lambda: TorchAoConfig(_torchao("Int8WeightOnlyConfig"))),
    "fp8 weights": ("torchao", lambda: TorchAoConfig(_torchao("Float8WeightOnlyConfig"))),
    "int8 weights and inputs": ("torchao", lambda: TorchAoConfig(_torchao("Int8DynamicActivationInt8WeightConfig"))),
    "LLM.int8 without outliers": (
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "nf4": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
}
BUDGET = Budget(25, 6, 6)
NEW_TOKENS, BATCH, LR = 48, 4, 1e-3


def _torchao(name: str) -> Any:
    import torchao.quantization

    return getattr(torchao.quantization, name)()


def quantised_target(path: str, kind: str, folder: Path) -> Target:
    """The target in a format, by way of a checkpoint on disk."""
    config = FORMATS[kind][1]()
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    model.save_pretrained(folder)
    return Target.load(folder, dtype="float32", device="cpu")


def trained_head(settings: Any, target: Target, examples: Sequence[Example], steps: int, seed: int) -> Any:
    """A head trained on a target's states for some steps, on texts in an order of its seed."""
    torch.manual_seed(seed)
    head: Any = DRAFTERS[settings.kind].for_target(settings, target.config, target.head, supervised=())
    roles, frozen = roles_of(settings, target.config), target.head.cast(torch.float32)
    optimizer = torch.optim.AdamW(head.parameters(), lr=LR)
    for _ in progress(range(steps), "train", steps):
        batch = [examples[int(place)] for place in torch.randint(len(examples), (BATCH,))]
        read = [
            Example(
                example.tokens,
                example.loss_mask,
                target.features(example.tokens[None], roles.taps, torch.float32)[0].clone(),
            )
            for example in batch
        ]
        head.train()(collate(read, roles.taps), frozen)["total"].backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


def acceptance_length(target: Target, head: Any, prompts: list[list[int]], temperature: float) -> float:
    """Tokens a target forward, over all prompts."""
    drafter = head.bind(target.head)
    tokens = forwards = 0
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=number)
        trace = generate(target, drafter, prompt, sampling=sampling, budget=BUDGET, max_new_tokens=NEW_TOKENS)
        tokens += sum(cycle.committed for cycle in trace.cycles)
        forwards += len(trace.cycles)
    return tokens / max(forwards, 1)


def measure(
    path: str, target: Target, kinds: list[str], settings: Any, data: Any, steps: int, seed: int
) -> Iterator[dict[str, Any]]:
    """The acceptance lengths of heads trained on each side's states, decoded with each side: a row for each format."""
    examples, prompts = data
    plain = trained_head(settings, target, examples, steps, seed)
    for kind in kinds:
        begun = perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            small = quantised_target(path, kind, Path(folder))
            own = trained_head(settings, small, examples, steps, seed)
            arms = {"plain, plain": (target, plain), "plain, quantised": (small, plain)}
            arms |= {"quantised, quantised": (small, own)}
            row: dict[str, Any] = {"format": kind, "package": _with_version(FORMATS[kind][0]), "seed": seed}
            for arm, (decoded, head) in arms.items():
                row |= {f"{arm}, T = {at}": acceptance_length(decoded, head, prompts, at) for at in (0, 1)}
            tokens = examples[0].tokens[None]
            states, expected = (each.features(tokens, (-1,)) for each in (small, target))
            row["states apart"] = float((states - expected).norm() / expected.norm())
        yield {**row, "seconds": round(perf_counter() - begun)}


def _with_version(package: str) -> str:
    return f"{package} {version(package)}"


def _is_there(package: str) -> bool:
    try:
        version(package)
    except ModuleNotFoundError:
        print(f"{package} is not installed: its formats are left out")
        return False
    return True


def table(results: dict[str, Any]) -> str:
    """Acceptance lengths by format: trained on, decoded with."""
    arms = [f"{arm}, T = {at}" for at in (0, 1) for arm in ("plain, plain", "plain, quantised", "quantised, quantised")]
    header = ["format", "with", "seed", "states apart", *arms]
    rows = [
        [row["format"], row["package"], row["seed"], f"{row['states apart']:.1%}", *(f"{row[arm]:.2f}" for arm in arms)]
        for row in results["rows"]
    ]
    return markdown(header, rows)


def main(argv: list[str]) -> None:
    """Measure every format whose package is there."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantised", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of recipes/tiny/eagle1.yaml")
    parser.add_argument("--fast", action="store_true", help="few steps and prompts")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=450, help="of each head, as six epochs of the tiny recipe")
    parser.add_argument("--out", type=Path, default=Path("docs/results/quantised.json"))
    args = parser.parse_args(argv)
    if args.fast:
        args.seeds, args.steps = 1, min(args.steps, 30)
    recipe = Recipe.load("recipes/tiny/eagle1.yaml", args.overrides)
    target = Target.load(recipe.target.path, dtype="float32", device="cpu")
    examples = read_examples(recipe)
    most = 4 if args.fast else 40
    heldout = recipe.data.model_copy(update={"train": recipe.data.heldout, "limit": most})
    asked = [
        first_prompt(each.tokens, each.loss_mask) for each in read_examples(recipe.model_copy(update={"data": heldout}))
    ]
    kinds = [kind for kind in args.formats if _is_there(FORMATS[kind][0])]
    settings = settings_of(recipe.drafter.model_dump(), "recipe")
    results: dict[str, Any] = {**made_on(prompts=len(asked), steps=args.steps), "rows": []}
    for seed in range(args.seeds):
        for row in measure(recipe.target.path, target, kinds, settings, (examples, asked), args.steps, seed):
            results["rows"].append(row)
            write_results(args.out, results)
    print(table(results))


if __name__ == "__main__":
    script(main)
