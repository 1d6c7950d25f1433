"""Train a small chat target on Python's documentation, or the demo's on stories: two minutes, no network."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from itertools import islice, takewhile
from pathlib import Path
from platform import python_version
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from data_prep.chats.turns import ROLES
from eagle.device import fastest_dtype
from eagle.disk import apply_umask, lock_folder
from eagle.log import script
from eval.result_files.results import ends_in_loop
from recipes.tiny import corpora, train_target, train_tokenizer
from recipes.tiny.train_target import BATCH, train
from recipes.tiny.train_tokenizer import END, MAX_LENGTH

WINDOW, NUM_STORIES, HELD_OUT_STORIES = 512, 3000, 24
PROMPT_EVERY, NEW_TOKENS = 13, 160  # of the greedy answers whose loops are counted
SYSTEM, SYSTEM_EVERY = "You answer questions about Python's libraries.", 8
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 10,
    "num_attention_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "hybrid": {  # every second layer keeps a gated delta rule's state in place of keys and values
        "model_type": "qwen3_5_text",
        "layer_types": 5 * ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,  # so that its matrices are as many numbers as the Llama's attention
        "num_key_value_heads": 2,
    },
}
Record = dict[str, Any]


class Corpus(NamedTuple):
    """Conversations to train on, and where and how long the target of them is trained."""

    out: str
    steps: int
    read: Callable[[int | None], tuple[dict[str, list[Record]], dict[str, Counter[str]]]]


def read_docstrings(limit: int | None) -> tuple[dict[str, list[Record]], dict[str, Counter[str]]]:
    """Conversations of both splits, at most `limit` to train on, and counts of kept and dropped docstrings."""
    seen: set[str] = set()
    counts = {"train": Counter[str](), "heldout": Counter[str]()}
    limits = {"train": limit, "heldout": limit and max(1, limit // 8)}
    splits = {
        split: list(islice(corpora.docstring_conversations(split == "heldout", seen, counts[split]), limits[split]))
        for split in counts
    }
    return splits, counts


def read_stories(limit: int | None) -> tuple[dict[str, list[Record]], dict[str, Counter[str]]]:
    """Stories of both splits, none of which asks a question of the other; nothing is dropped."""
    held_out = islice(corpora.draw_stories(seed=1), HELD_OUT_STORIES)
    asked = {record["conversations"][0]["value"]: record for record in held_out}  # one that is drawn twice counts once
    train = list(islice(corpora.draw_stories(seed=0, avoid=asked), limit or NUM_STORIES))
    return {"train": train, "heldout": list(asked.values())}, {}


CORPORA = {
    "docstrings": Corpus("runs/tiny", 400, read_docstrings),
    "stories": Corpus("runs/demo", 150, read_stories),
}


def make_target(
    out: str | Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    max_conversations: int | None = None,
    corpus: str = "docstrings",
    model: str = "llama",
) -> dict[str, Any]:
    """Write `target/`, `data/` and `target_report.json` to `out`, unless they are there; returns the report."""
    steps = CORPORA[corpus].steps if steps is None else steps
    settings: dict[str, Any] = {"corpus": corpus, "model": model, "steps": steps, "seed": seed}
    settings |= {"max_conversations": max_conversations, "made_with": list_versions()}
    folder = Path(out or CORPORA[corpus].out + ("" if model == "llama" else f"-{model}"))
    return make_once(folder, settings, lambda unfinished, begun: build(unfinished, begun, settings))


def make_once(out: Path, settings: dict[str, Any], build: Callable[[Path, Path], dict[str, Any]]) -> dict[str, Any]:
    """Publish in `out` what `build` makes in a folder, unless it is there with these settings; returns the report.

    `build` also gets a file for its training state: it outlives a run that is stopped, and is of these settings alone.
    """
    if report := read_report(out, settings):
        print(f"{out / 'target'} is already there, made with the same settings")
        return report
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    with lock_folder(out), tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as name:
        folder, begun = Path(name), out / f".training-{key}.pt"
        report = {"settings": settings, **build(folder, begun)}
        (folder / "target_report.json").write_text(json.dumps(report, indent=2) + "\n")
        apply_umask(folder)
        publish(folder, out)
        for path in out.glob(".training-*.pt"):
            path.unlink()
    return report


def list_versions() -> dict[str, str]:
    """The versions that decide the weights beside the settings: a hash of this code, and of the packages it uses."""
    modules = [str(module.__file__) for module in (train_target, train_tokenizer, corpora)]
    files: list[str | Path] = [__file__, *modules, corpora.STORIES]
    code = b"".join(Path(file).read_bytes() for file in files)
    installed = {package.name: package.version for package in distributions()}
    packages = [*corpora.PACKAGES, "transformers", "tokenizers", "sentencepiece"]
    versions = {package: installed.get(package, "not installed") for package in packages}
    return {"code": hashlib.sha256(code).hexdigest()[:16], "python": python_version(), **versions}


def read_report(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run with these settings; it is published last, so its target is complete."""
    try:
        report = json.loads((out / "target_report.json").read_text())
        return report if report["settings"] == settings and (out / "target").is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
        return None


def publish(folder: Path, out: Path) -> None:
    """Move a finished build into place; the old report is removed first and the new one moved last."""
    (out / "target_report.json").unlink(missing_ok=True)
    shutil.rmtree(out / "target", ignore_errors=True)
    (out / "data").mkdir(exist_ok=True)
    for name in ("target", "data/train.jsonl", "data/heldout.jsonl", "target_report.json"):
        os.replace(folder / name, out / name)


def build(folder: Path, begun: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make corpus, tokenizer and model in `folder`; returns the figures of the report."""
    steps, seed = settings["steps"], settings["seed"]
    seconds: dict[str, dict[str, float]] = {}
    with phase(seconds, "corpus"):
        splits, counts = CORPORA[settings["corpus"]].read(settings["max_conversations"])
        (folder / "data").mkdir()
        for split, records in splits.items():
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
            (folder / "data" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    with phase(seconds, "tokenizer"):
        tokenizer = train_tokenizer.train(splits["train"], folder / "target")
        random.Random(seed).shuffle(splits["train"])
        train_rows, heldout_rows = (pack_conversations(records, tokenizer) for records in splits.values())
    with phase(seconds, "training"):
        torch.manual_seed(seed)
        model, bf16 = new_model(tokenizer, settings["model"]), fastest_dtype("cpu") == torch.bfloat16
        train(model, train_rows, steps, seed, bf16, begun)
        model.save_pretrained(folder / "target")
    with phase(seconds, "measuring"):
        answers = greedy_answers(model, tokenizer, splits["heldout"])
        perplexities = {
            "perplexity": perplexity(model, heldout_rows),
            "bigram_perplexity": bigram_perplexity(train_rows, heldout_rows, len(tokenizer)),
        }
    return {
        **perplexities,
        "loop_share": sum(map(ends_in_loop, answers)) / len(answers),
        "mean_answer_tokens": sum(map(len, answers)) / len(answers),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tokens": {"in_corpus": train_rows.numel(), "seen": steps * BATCH * WINDOW},
        "conversations": {split: len(records) for split, records in splits.items()},
        "docstrings": counts,
        "bf16": bf16,
        "seconds": seconds,
    }


@contextmanager
def phase(seconds: dict[str, dict[str, float]], name: str) -> Iterator[None]:
    """Record the wall and CPU seconds of what runs inside."""
    wall, cpu = perf_counter(), process_time()
    yield
    seconds[name] = {"wall": round(perf_counter() - wall, 1), "cpu": round(process_time() - cpu, 1)}


def pack_conversations(records: Sequence[Record], tokenizer: Any) -> torch.Tensor:
    """Concatenate conversations and cut them into rows of `WINDOW` tokens; the remainder is left out."""
    chats = []
    for place, record in enumerate(records):
        chat = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
        system = [{"role": "system", "content": SYSTEM}] if place % SYSTEM_EVERY == 0 else []
        chats.append(tokenizer.apply_chat_template(system + chat, tokenize=False) + tokenizer.eos_token)
    encoded = tokenizer(chats, add_special_tokens=False)["input_ids"]
    stream = torch.tensor([token for tokens in encoded for token in tokens])
    return stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW)


def new_model(tokenizer: Any, architecture: str = "llama") -> Any:
    """An untrained target; both end tokens stop its generations."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(vocab_size=len(tokenizer), **ids, **SIZES, **MODELS[architecture])
    # eager: at this size faster on a CPU than the fused kernel; it is not saved
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids["eos_token_id"] = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(**ids)
    return model


@torch.no_grad()
def perplexity(model: Any, rows: torch.Tensor) -> float:
    """Perplexity per token, in fp32."""
    losses = [cross_entropy(model(input_ids=row).logits[0, :-1], row[0, 1:]).item() for row in rows.split(1)]
    return math.exp(sum(losses) / len(losses))


def bigram_perplexity(seen: torch.Tensor, rows: torch.Tensor, vocabulary: int, discount: float = 0.75) -> float:
    """Perplexity of a bigram model with interpolated Kneser-Ney smoothing, fitted on `seen`, on the same tokens."""
    pairs = torch.bincount((seen[:, :-1] * vocabulary + seen[:, 1:]).flatten(), minlength=vocabulary**2)
    pairs = pairs.view(vocabulary, vocabulary)
    starts, followers, preceded = pairs.sum(1), (pairs > 0).sum(1), (pairs > 0).sum(0)
    unigram = (preceded + 1) / (preceded + 1).sum()
    first, second = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    kept = (pairs[first, second] - discount).clamp(min=0) + discount * followers[first] * unigram[second]
    likelihood = torch.where(starts[first] > 0, kept / starts[first].clamp(min=1), unigram[second])
    return math.exp(-likelihood.double().log().mean().item())


def greedy_answers(model: Any, tokenizer: Any, records: Sequence[Record]) -> list[list[int]]:
    """The model's answers to the first question of every `PROMPT_EVERY`th record, without padding."""
    chats = [[{"role": "user", "content": record["conversations"][0]["value"]}] for record in records[::PROMPT_EVERY]]
    tokenizer.padding_side = "left"
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False)[:, prompts["input_ids"].shape[1] :]
    return [list(takewhile(tokenizer.pad_token_id.__ne__, answer)) for answer in output.tolist()]


def main(argv: list[str]) -> None:
    """Make the target and print its report."""
    parser = argparse.ArgumentParser(prog="eagle tiny-target", description=__doc__)
    parser.add_argument("--corpus", choices=CORPORA, default="docstrings", help="what it learns")
    parser.add_argument("--model", choices=MODELS, default="llama", help="hybrid: half of the layers linear attention")
    parser.add_argument("--out", help="default: runs/tiny, of stories runs/demo; of a hybrid runs/tiny-hybrid")
    parser.add_argument("--steps", type=int, help="default: 400, of stories 150")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    args = parser.parse_args(argv)
    report = make_target(args.out, args.steps, args.seed, corpus=args.corpus, model=args.model)
    if args.corpus == "stories":
        conversations = report["conversations"]["train"]
        print(f"{report['parameters'] / 1e6:.1f} M parameters, trained on {conversations:,} conversations")
        print(f"held-out perplexity {report['perplexity']:.2f}")
        return
    for split, counts in report["docstrings"].items():
        print(f"{split}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    print(f"{report['parameters'] / 1e6:.1f} M parameters, {report['tokens']['seen']:,} tokens seen")
    print(f"held-out perplexity {report['perplexity']:.1f}, of a bigram {report['bigram_perplexity']:.1f}")
    print(f"{report['loop_share']:.0%} of greedy answers end in a loop")
    print("seconds: " + ", ".join(f"{name} {part['wall']:.0f}" for name, part in report["seconds"].items()))


if __name__ == "__main__":
    script(main)
