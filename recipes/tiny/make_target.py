"""Train a small chat model on Python's documentation, or on the demo's stories: two minutes, without a network."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from itertools import chain, islice, takewhile
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

WINDOW = 512
NUM_STORIES = 3000
HELD_OUT_STORIES = 24
# Of the greedy answers whose loops are counted.
PROMPT_EVERY = 13
NEW_TOKENS = 160
SYSTEM = "You answer questions about Python's libraries."
SYSTEM_EVERY = 8
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
    # Every second layer keeps a gated delta rule's state in place of keys and values.
    "hybrid": {
        "model_type": "qwen3_5_text",
        "layer_types": 5 * ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        # The layer's matrices then have as many parameters as the Llama's attention.
        "linear_value_head_dim": 64,
        "num_key_value_heads": 2,
    },
}
Record = dict[str, Any]
Seconds = dict[str, dict[str, float]]
# The records of each split, and counts of what was kept and dropped.
Splits = tuple[dict[str, list[Record]], dict[str, Counter[str]]]


class Corpus(NamedTuple):
    """Conversations to train on, and how the target is trained on them."""

    out: str
    steps: int
    read: Callable[[int | None], Splits]


def read_docstrings(limit: int | None) -> Splits:
    """Return docstring conversations, at most `limit` to train on, and how many docstrings were kept and dropped."""
    seen: set[str] = set()
    counts = {"train": Counter[str](), "heldout": Counter[str]()}
    train = corpora.docstring_conversations(False, seen, counts["train"])
    splits = {"train": list(islice(train, limit))}
    # A text that is in both splits stays in the first.
    heldout = corpora.docstring_conversations(True, seen, counts["heldout"])
    splits["heldout"] = list(islice(heldout, limit and max(1, limit // 8)))
    return splits, counts


def read_stories(limit: int | None) -> Splits:
    """Return stories; no question occurs in both splits, and nothing is dropped."""
    heldout: dict[str, Record] = {}
    for record in islice(corpora.draw_stories(seed=1), HELD_OUT_STORIES):
        # A question that is drawn twice counts once.
        heldout[record["conversations"][0]["value"]] = record
    train = list(islice(corpora.draw_stories(seed=0, avoid=heldout), limit or NUM_STORIES))
    return {"train": train, "heldout": list(heldout.values())}, {}


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
    """Write `target/`, `data/` and `target_report.json` to `out`, unless they are there; return the report."""
    settings: dict[str, Any] = {
        "corpus": corpus,
        "model": model,
        "steps": CORPORA[corpus].steps if steps is None else steps,
        "seed": seed,
        "max_conversations": max_conversations,
        "made_with": list_versions(),
    }
    suffix = "" if model == "llama" else f"-{model}"
    folder = Path(out or CORPORA[corpus].out + suffix)
    return make_once(folder, settings, lambda unfinished, begun: build(unfinished, begun, settings))


def make_once(
    out: Path, settings: dict[str, Any], build: Callable[[Path, Path], dict[str, Any]]
) -> dict[str, Any]:
    """Publish in `out` what `build` makes in a folder, unless it is there with these settings; return the report.

    `build` also gets a file for its training state, which outlives a stopped run and belongs to these settings.
    """
    report = read_report(out, settings)
    if report:
        print(f"{out / 'target'} is already there, made with the same settings")
        return report
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    begun = out / f".training-{key}.pt"
    with lock_folder(out), tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as name:
        folder = Path(name)
        report = {"settings": settings, **build(folder, begun)}
        (folder / "target_report.json").write_text(json.dumps(report, indent=2) + "\n")
        apply_umask(folder)
        publish(folder, out)
        # Also the states of stopped runs with other settings.
        for path in out.glob(".training-*.pt"):
            path.unlink()
    return report


def list_versions() -> dict[str, str]:
    """Return what decides the weights besides the settings: a hash of this code, and versions of packages."""
    modules = (train_target, train_tokenizer, corpora)
    files = [__file__, *(str(module.__file__) for module in modules), str(corpora.STORIES)]
    installed = {package.name: package.version for package in distributions()}
    packages = [*corpora.PACKAGES, "transformers", "tokenizers", "sentencepiece"]
    versions = {package: installed.get(package, "not installed") for package in packages}
    return {"code": hash_files(files), "python": python_version(), **versions}


def hash_files(files: Iterable[str]) -> str:
    """Return a hash of the contents of files, in their order."""
    content = b"".join(Path(file).read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:16]


def read_report(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report of an earlier run with these settings; it is published last, so its target is complete."""
    try:
        report = json.loads((out / "target_report.json").read_text())
        return report if report["settings"] == settings and (out / "target").is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):
        # No report, or a damaged one.
        return None


def publish(folder: Path, out: Path) -> None:
    """Move a finished build into place; the old report is removed first and the new one moved last."""
    (out / "target_report.json").unlink(missing_ok=True)
    (out / "data").mkdir(exist_ok=True)
    for path in (folder / "target", *(folder / "data").iterdir(), folder / "target_report.json"):
        place = out / path.relative_to(folder)
        # a folder, as of images, cannot be replaced in one step
        shutil.rmtree(place, ignore_errors=True)
        os.replace(path, place)


def build(folder: Path, begun: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make corpus, tokenizer and model in `folder`; return the figures of the report."""
    steps = settings["steps"]
    seed = settings["seed"]
    bf16 = fastest_dtype("cpu") == torch.bfloat16
    seconds: Seconds = {}
    with phase(seconds, "corpus"):
        splits, counts = CORPORA[settings["corpus"]].read(settings["max_conversations"])
        (folder / "data").mkdir()
        for split, records in splits.items():
            write_records(folder / "data" / f"{split}.jsonl", records)
    with phase(seconds, "tokenizer"):
        tokenizer = train_tokenizer.train(splits["train"], folder / "target")
        # Neighbours in the corpus are of one module; a row should hold several.
        random.Random(seed).shuffle(splits["train"])
        train_rows = pack_conversations(splits["train"], tokenizer)
        heldout_rows = pack_conversations(splits["heldout"], tokenizer)
    with phase(seconds, "training"):
        torch.manual_seed(seed)
        model = new_model(tokenizer, settings["model"])
        train(model, train_rows, steps, seed, bf16=bf16, begun=begun)
        model.save_pretrained(folder / "target")
    with phase(seconds, "measuring"):
        answers = greedy_answers(model, tokenizer, splits["heldout"])
        model_perplexity = perplexity(model, heldout_rows)
    return {
        "perplexity": model_perplexity,
        "loop_share": sum(map(ends_in_loop, answers)) / len(answers),
        "mean_answer_tokens": sum(map(len, answers)) / len(answers),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tokens": {"in_corpus": train_rows.numel(), "seen": steps * BATCH * WINDOW},
        "conversations": {split: len(records) for split, records in splits.items()},
        "docstrings": counts,
        "bf16": bf16,
        "seconds": seconds,
    }


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON Lines."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


@contextmanager
def phase(seconds: Seconds, name: str) -> Iterator[None]:
    """Record the wall and CPU seconds of what runs inside."""
    wall = perf_counter()
    cpu = process_time()
    yield
    seconds[name] = {"wall": round(perf_counter() - wall, 1), "cpu": round(process_time() - cpu, 1)}


def pack_conversations(records: Sequence[Record], tokenizer: Any) -> torch.Tensor:
    """Concatenate conversations and cut them into rows of `WINDOW` tokens; the remainder is left out."""
    chats = []
    for i, record in enumerate(records):
        chat = [
            {"role": ROLES[turn["from"]], "content": turn["value"]}
            for turn in record["conversations"]
        ]
        # Prompts of users may or may not have a system message: the model learns both.
        if i % SYSTEM_EVERY == 0:
            chat.insert(0, {"role": "system", "content": SYSTEM})
        chats.append(tokenizer.apply_chat_template(chat, tokenize=False) + tokenizer.eos_token)
    encoded = tokenizer(chats, add_special_tokens=False)["input_ids"]
    stream = torch.tensor(list(chain.from_iterable(encoded)))
    return stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW)


def new_model(tokenizer: Any, architecture: str = "llama") -> Any:
    """Return an untrained target; both end tokens stop its generation."""
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    config = AutoConfig.for_model(vocab_size=len(tokenizer), **ids, **SIZES, **MODELS[architecture])
    # At this size eager attention is faster on a CPU than the fused kernel; the choice is not saved.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids["eos_token_id"] = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(**ids)
    return model


@torch.no_grad()
def perplexity(model: Any, rows: torch.Tensor) -> float:
    """Return the perplexity per token, in fp32."""
    losses = []
    for row in rows:
        logits = model(input_ids=row[None]).logits[0, :-1]
        losses.append(cross_entropy(logits, row[1:]).item())
    return math.exp(sum(losses) / len(losses))


def greedy_answers(model: Any, tokenizer: Any, records: Sequence[Record]) -> list[list[int]]:
    """Return the model's answers to the first question of every `PROMPT_EVERY`th record, without padding."""
    questions = [record["conversations"][0]["value"] for record in records[::PROMPT_EVERY]]
    chats = [[{"role": "user", "content": question}] for question in questions]
    tokenizer.padding_side = "left"
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
    answers = output[:, prompts["input_ids"].shape[1] :].tolist()
    return [list(takewhile(tokenizer.pad_token_id.__ne__, answer)) for answer in answers]


def main(argv: list[str]) -> None:
    """Make the target and print its report."""
    parser = argparse.ArgumentParser(prog="eagle demo --tiny-target", description=__doc__)
    parser.add_argument("--corpus", choices=CORPORA, default="docstrings", help="training data")
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="llama",
        help="architecture; in a hybrid, half of the layers have linear attention",
    )
    parser.add_argument(
        "--out", help="default: runs/tiny; for stories runs/demo, for a hybrid runs/tiny-hybrid"
    )
    parser.add_argument("--steps", type=int, help="training steps (default: 400; for stories 150)")
    parser.add_argument("--seed", type=int, default=0, help="seed for weights and data")
    args = parser.parse_args(argv)
    report = make_target(args.out, args.steps, args.seed, corpus=args.corpus, model=args.model)
    parameters = f"{report['parameters'] / 1e6:.1f} M parameters"
    # The demo's readers see only what its next stages refer to.
    if args.corpus == "stories":
        print(f"{parameters}, trained on {report['conversations']['train']:,} conversations")
        print(f"held-out perplexity {report['perplexity']:.2f}")
        return
    for split, counts in report["docstrings"].items():
        print(f"{split}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    print(f"{parameters}, {report['tokens']['seen']:,} tokens seen")
    print(f"held-out perplexity {report['perplexity']:.1f}")
    print(f"{report['loop_share']:.0%} of greedy answers end in a loop")
    print(
        "seconds: "
        + ", ".join(f"{name} {time['wall']:.0f}" for name, time in report["seconds"].items())
    )


if __name__ == "__main__":
    script(main)
