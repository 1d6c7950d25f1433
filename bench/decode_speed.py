"""Speed of the decoder against transformers' own `generate`, interleaved in one run: `python bench/decode_speed.py`.

Everything runs on one thread and is timed in CPU seconds; the figures that count are ratios of medians.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, StaticCache

from bench.machine import made_on, markdown, take_turns, time_inside, write_results
from eagle import Budget, DraftTree, Sampling, Target, generate, stream
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.log import script
from eagle.target.structure import base_of

CONTEXTS = (300, 3000)


class RandomTrees(Drafter):
    """Trees of a fixed size with random tokens and random shape, which are hardly ever accepted."""

    taps: tuple[int, ...] = ()

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self.trees = []
        generator = torch.Generator().manual_seed(0)
        for _ in range(64):
            parents = [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, nodes)]
            tokens = torch.randperm(vocab_size, generator=generator)[:nodes]
            self.trees.append((tokens, torch.tensor(parents)))

    def begin(self, noise: Noise | None = None) -> RandomTrees:
        """Start again with the first tree."""
        self.proposed = 0
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """The next tree, under the new root."""
        tokens, parents = self.trees[self.proposed % len(self.trees)]
        self.proposed += 1
        tokens[0] = update.root
        return DraftTree(tokens, parents)


class Ticks:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        """Note the time of a token, or of the prompt."""
        self.times.append(process_time())

    def end(self) -> None:
        """End of the answer."""


def typical_step(times: list[float]) -> float:
    """The median time between tokens, without prefill and first steps."""
    return median(later - sooner for sooner, later in pairwise(times[2:]))


def plain_steps(model: Any, prompt: list[int], count: int) -> float:
    """Seconds per token of transformers' greedy generate."""
    ticks, ids = Ticks(), torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=ticks, **options)
    return typical_step(ticks.times)


def our_steps(target: Target, prompt: list[int], count: int) -> float:
    """Seconds per token of plain decoding here."""
    times = [process_time() for _ in stream(target, NoDrafter(), prompt, max_new_tokens=count, stop=[])]
    return typical_step([0.0, *times])


def median_seconds(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """The median of each run over the rounds."""
    return {name: median(seconds) for name, seconds in take_turns(rounds, runs).items()}


def plain_decoding(model: Any, target: Target, rounds: int) -> dict[str, Any]:
    """Tokens per second of `none` over those of `generate`."""
    rows = {}
    for context in CONTEXTS:
        prompt = random_prompt(target, context)
        times = median_seconds(
            rounds,
            transformers=lambda prompt=prompt: plain_steps(model, prompt, 40),
            ours=lambda prompt=prompt: our_steps(target, prompt, 40),
        )
        rows[str(context)] = {**milliseconds(times), "ratio": round(times["transformers"] / times["ours"], 3)}
    return rows


def overhead(target: Target, rounds: int) -> dict[str, Any]:
    """The share of a cycle that is spent outside the model's forward passes."""
    rows = {}
    for name, drafter in (("ngram", NgramDrafter()), ("trees of 16", RandomTrees(16, target.vocab_size))):
        for temperature in (0.0, 1.0):
            for context in CONTEXTS:
                prompt = (random_prompt(target, 50) * (context // 50))[:context]
                shares = [outside_forward(target, drafter, prompt, temperature) for _ in range(rounds)]
                rows[f"{name}, T={temperature:g}, context {context}"] = round(median(shares), 4)
    return rows


def outside_forward(target: Target, drafter: Any, prompt: list[int], temperature: float) -> float:
    """1 - (time inside the base model and the LM head) / (time of the cycles)."""
    options: dict[str, Any] = {"budget": Budget(10, 10), "sampling": Sampling(temperature=temperature), "stop": []}
    answer = stream(target, drafter, prompt, max_new_tokens=60, **options)
    next(answer)
    with time_inside((base_of(target.model), target.head.output)) as inside:
        begun = process_time()
        for _ in answer:
            pass
        spent = process_time() - begun
    return 1 - inside[0] / spent


def growth(model: Any, target: Target, rounds: int) -> dict[str, Any]:
    """What a cycle of 16 nodes gains in time from short to long context, against the untouched model's forward."""
    drafter, times = RandomTrees(16, target.vocab_size), {}
    for context in CONTEXTS:
        prompt = random_prompt(target, context)
        bare = bare_forward(model, prompt, drafter.trees[0])
        times[context] = median_seconds(
            rounds, transformers=bare, ours=lambda prompt=prompt: our_cycle(target, drafter, prompt)
        )
    gains = {name: times[CONTEXTS[1]][name] - times[CONTEXTS[0]][name] for name in ("transformers", "ours")}
    rows = {str(context): milliseconds(figures) for context, figures in times.items()}
    return {**rows, "gain": milliseconds(gains), "ratio": round(gains["ours"] / gains["transformers"], 3)}


def our_cycle(target: Target, drafter: RandomTrees, prompt: list[int]) -> float:
    """The median cycle with a random tree of 16 nodes."""
    times = [process_time() for _ in stream(target, drafter, prompt, max_new_tokens=16, stop=[], budget=Budget(15, 16))]
    return median(later - sooner for sooner, later in pairwise(times[1:]))


def bare_forward(model: Any, prompt: list[int], shape: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], float]:
    """The untouched model's own forward of the same 16 tokens under the same mask, over its preallocated cache."""
    tree = DraftTree(*shape)
    start, size = len(prompt), len(tree)
    cache = StaticCache(config=model.config, max_cache_len=start + size)
    with torch.inference_mode():
        model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
    mask = torch.zeros(1, 1, size, start + size)
    mask[0, 0, :, start:].masked_fill_(~tree.ancestors(), torch.finfo(torch.float32).min)
    positions = torch.tensor([[start + depth for depth in tree.depths()]])

    def run() -> float:
        times = []
        for _ in range(12):
            for layer in cache.layers:
                layer.cumulative_length.fill_(start)
            begun = process_time()
            with torch.inference_mode():
                model(tree.tokens[None], attention_mask=mask, position_ids=positions, past_key_values=cache)
            times.append(process_time() - begun)
        return median(times)

    return run


def lookup(model: Any, target: Target, tokenizer: Any, rounds: int) -> dict[str, Any]:
    """Tokens per second of `ngram` over transformers' prompt lookup, same draft length, on text that repeats."""
    rows = {}
    for name, prompt in repeating_prompts(target, tokenizer).items():
        emitted: dict[str, list[int]] = {}

        def run_transformers(prompt: list[int] = prompt, emitted: dict[str, list[int]] = emitted) -> float:
            ids = torch.tensor([prompt])
            start = process_time()
            options = {"max_new_tokens": 120, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            output = model.generate(ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=10, **options)
            emitted["transformers"] = output[0, len(prompt) :].tolist()
            return process_time() - start

        def run_ours(prompt: list[int] = prompt, emitted: dict[str, list[int]] = emitted) -> float:
            target.forget()
            start = process_time()
            trace = generate(target, NgramDrafter(), prompt, max_new_tokens=120, stop=[], budget=Budget(10, 10))
            emitted["ours"] = trace.tokens
            return process_time() - start

        times = median_seconds(rounds, transformers=run_transformers, ours=run_ours)
        rows[name] = {**milliseconds(times), "ratio": round(times["transformers"] / times["ours"], 3)}
        rows[name]["identical"] = emitted["transformers"] == emitted["ours"]
    return rows


def repeating_prompts(target: Target, tokenizer: Any) -> dict[str, list[int]]:
    """A summary and a code edit where there is a tokenizer, else random text that repeats."""
    if tokenizer is None:
        return {"repeating random text": random_prompt(target, 60) * 5}
    code = (
        "def area(width, height):\n    return width * height\n\n\n"
        "def volume(width, height, depth):\n    return area(width, height) * depth\n"
    )
    story = (
        "The river rose in the night and took the bridge with it. In the morning the village stood on both sides "
        "and called across. Nobody could remember who had built the bridge, and nobody knew how to build another. "
    )
    asks = {
        "code edit": f"Rename `area` to `surface` and print the whole file again:\n\n{code * 3}",
        "summary": f"Summarise this text in the words of the text:\n\n{story * 4}",
    }
    return {name: target.chat(ask) for name, ask in asks.items()}


def random_prompt(target: Target, length: int) -> list[int]:
    """The same random tokens every time."""
    return torch.randint(target.vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def milliseconds(times: dict[str, float]) -> dict[str, float]:
    """Seconds by name as milliseconds, by name with the unit."""
    return {f"{name}_ms": round(1000 * value, 3) for name, value in times.items()}


def random_llama() -> Any:
    """12 layers x 384 with 4,096 positions and random weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 8192}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [("what", "transformers", "here", "ratio")]
    for context, row in results["none_over_generate"].items():
        rows.append((f"one token, {context} tokens of context", *_figures(row)))
    growth = results["growth_of_a_16_node_cycle"]
    rows.append(("what 16 nodes cost more at 3,000 tokens than at 300", *_figures(growth["gain"]), growth["ratio"]))
    for name, row in results["ngram_over_prompt_lookup"].items():
        rows.append((f"prompt lookup, 10 drafts, 120 tokens, {name}", *_figures(row)))
    for name, share in results["share_outside_forward"].items():
        rows.append((f"share of a cycle outside the forward, {name}", "", f"{share:.1%}", ""))
    return markdown(rows[0], rows[1:], results["machine"])


def _figures(row: dict[str, Any]) -> list[Any]:
    figures = [f"{row['transformers_ms']:.1f} ms", f"{row['ours_ms']:.1f} ms"]
    return [*figures, row["ratio"]] if "ratio" in row else figures


def main(argv: list[str]) -> None:
    """Run all four comparisons, print them, and write them to the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a chat model for the lookup comparison; default: random weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs/results/decode_speed.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = random_llama()
    target = Target(model)
    chat, tokenizer = model, None
    if args.model:
        chat = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    results: dict[str, Any] = {
        "machine": made_on(),
        "none_over_generate": plain_decoding(model, target, args.rounds),
        "share_outside_forward": overhead(target, args.rounds),
        "growth_of_a_16_node_cycle": growth(model, target, args.rounds),
        "ngram_over_prompt_lookup": lookup(chat, Target(chat, tokenizer), tokenizer, args.rounds),
    }
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
