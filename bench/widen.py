"""A small model widened to the cost of a large one: the same text, token by token, at the price of so many weights.

Every MLP gets neurons whose inputs are random and whose outputs are zero. `python -m bench.widen MODEL --chats FILE`
checks answers against the model's own, and times forwards beside those of a random model of an ordinary shape.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.batch_speed import real_texts
from bench.machine import made_on, markdown, write_results
from eagle import Target
from eagle.decoding.cycle_times import bare_costs
from eagle.log import progress, script

TOKENS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 300
SIZES = {"0.3 B": ("float32", "bfloat16"), "1 B": ("float32", "bfloat16"), "3 B": ("bfloat16",)}
STOCK = {  # width, neurons, heads, heads of keys of ordinary models of these sizes
    "0.3 B": (1024, 4096, 16, 8),
    "1 B": (2048, 8192, 32, 8),
    "3 B": (3072, 8192, 24, 8),
}


def find_mlps(model: nn.Module) -> list[tuple[list[nn.Linear], nn.Linear]]:
    """The linears into and out of the neurons of every MLP, found by their shapes."""
    mlps = []
    for module in model.modules():
        linears = [child for child in module.children() if isinstance(child, nn.Linear)]
        for down in [linear for linear in linears if linear.in_features > linear.out_features]:
            ups = [up for up in linears if (up.in_features, up.out_features) == (down.out_features, down.in_features)]
            if ups and len(ups) + 1 == len(linears):
                mlps.append((ups, down))
    return mlps


@torch.no_grad()
def widen(model: nn.Module, weights: float) -> int:
    """Give every MLP as many neurons as bring a model to so many weights; the neurons that each has then.

    The new neurons read random weights, of the spread that the old ones have, and what they write is zero.
    """
    mlps = find_mlps(model)
    if not mlps:
        raise ValueError("no MLP was found to widen: expected linears into and out of more neurons than the width")
    if len({down.in_features for _, down in mlps}) > 1:
        raise ValueError(f"MLPs have {sorted({down.in_features for _, down in mlps})} neurons, expected one number")
    each = sum((len(ups) + 1) * down.out_features for ups, down in mlps)
    more = round((weights - sum(parameter.numel() for parameter in model.parameters())) / each)
    if more <= 0:
        raise ValueError(f"the model has more than {weights:.3g} weights already: ask for more")
    for ups, down in mlps:
        for linear in ups:
            spread = linear.weight.new_empty(more, linear.in_features).normal_() * linear.weight.std()
            linear.weight = nn.Parameter(torch.cat([linear.weight, spread]), requires_grad=False)
            if linear.bias is not None:
                linear.bias = nn.Parameter(torch.cat([linear.bias, linear.bias.new_zeros(more)]), requires_grad=False)
            linear.out_features += more
        silent = down.weight.new_zeros(down.out_features, more)
        down.weight = nn.Parameter(torch.cat([down.weight, silent], dim=1), requires_grad=False)
        down.in_features += more
    return mlps[0][1].in_features


def widened_model(model: Any, weights: float) -> Any:
    """A copy of a model that costs so many weights and can be saved and loaded like any other."""
    wide = copy.deepcopy(model)
    wide.config.intermediate_size = widen(wide, weights)
    return wide


def stock_model(size: str, dtype: torch.dtype, vocab_size: int) -> Any:
    """A Llama with random weights, of an ordinary shape with about so many of them."""
    width, neurons, heads, key_heads = STOCK[size]
    layer = 2 * width * width * (1 + key_heads / heads) + 3 * width * neurons
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=neurons,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        num_hidden_layers=round((float(size.split()[0]) * 1e9 - 2 * vocab_size * width) / layer),
        vocab_size=vocab_size,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.inference_mode()
def count_equal(model: Any, wide: Any, prompts: Sequence[list[int]], new_tokens: int) -> tuple[int, float]:
    """How many greedy answers of a model are the widened one's, and the largest relative difference of their logits.

    The widened model reads each answer in one forward; it writes that answer if it would choose each of its tokens.
    """
    equal, worst = 0, 0.0
    for prompt in prompts:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        logits = wide(text[:, :-1], logits_to_keep=new_tokens).logits[0]
        expected = model(text[:, :-1], logits_to_keep=new_tokens).logits[0]
        worst = max(worst, float((logits - expected).abs().max() / expected.abs().max()))
        equal += int(torch.equal(logits.argmax(-1), text[0, len(prompt) :]))
    return equal, worst


def curve(model: Any, rounds: int) -> list[float]:
    """Milliseconds of a forward over each number of tokens behind a text."""
    costs = bare_costs(Target(model), contexts=(CONTEXT,), sizes=TOKENS, rounds=rounds)
    return [round(1000 * seconds, 1) for seconds in costs.target[0]]


def measure(model: Any, size: str, dtype: str, rounds: int) -> dict[str, Any]:
    """The curves of a widened model and of a stock one."""
    kind = getattr(torch, dtype)
    figures = {"widened": curve(widened_model(model.to(kind), 1e9 * float(size.split()[0])), rounds)}
    return figures | {"stock": curve(stock_model(size, kind, model.config.vocab_size), rounds)}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: each forward over one token's."""
    rows = [
        (f"{name}, {kind}", f"{times[0]:.0f} ms", *(f"{time / times[0]:.2f}" for time in times[1:]))
        for name, figures in results["forward, ms"].items()
        for kind, times in figures.items()
    ]
    parts = [markdown(("tokens", *TOKENS), rows)]
    checks = [(size, check["equal"], f"{check['worst']:.0e}") for size, check in results["answers"].items()]
    return "\n\n".join([*parts, markdown(("size", "equal answers", "worst"), checks, results["machine"])])


def main(argv: list[str]) -> None:
    """Check, measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--chats", type=Path, required=True, help="conversations, whose first questions are asked")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/results/widened.json"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    target = Target.load(args.model, dtype="float32")
    prompts = [prompt for prompt, _ in real_texts(target, args.chats)][: args.prompts]
    results: dict[str, Any] = {"machine": made_on(target=args.model.name), "tokens": TOKENS, "context": CONTEXT}
    results |= {"answers": {}, "forward, ms": {}}
    runs = [(size, dtype) for size in args.sizes for dtype in SIZES[size]]
    for size, dtype in progress(runs, "sizes", len(runs)):
        if dtype == "float32":
            wide = widened_model(target.model, 1e9 * float(size.split()[0]))
            equal, worst = count_equal(target.model, wide, prompts, args.new_tokens)
            results["answers"][size] = {"equal": f"{equal} of {len(prompts)}", "worst": worst}
            del wide
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval()
        results["forward, ms"][f"{size}, {dtype}"] = measure(model, size, dtype, args.rounds)
        write_results(args.out, results)
    print(table(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
