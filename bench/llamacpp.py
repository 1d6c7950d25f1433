"""Measure llama.cpp beside this decoder: `python -m bench.llamacpp TARGET GGUF HEAD ENGINE --prompts FILE --out FILE`.

TARGET is the model's folder, GGUF the same model for llama.cpp, HEAD an EAGLE-3 head of this project, and ENGINE the
environment that `python -m tests.engines.engine_builds` made. Both decode greedily on one thread.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

import torch

from bench.machine import made_on
from data_prep.conversations import read_conversations
from eagle import Budget, Target, generate, load_drafter
from eagle.disk import write_text
from eagle.formats.export import export
from eagle.log import progress, script

CHAIN = 3  # drafted tokens
SPEED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
# an n-gram drafter that finds nothing is plain decoding, which the program does not offer
PLAIN = "--spec-type ngram-simple --spec-ngram-simple-size-n 64"
GREEDY = "--temp 0 --top-k 1 -t 1 --no-escape"


def measure_llamacpp(
    engine: Path, options: list[str], text: str, new_tokens: int
) -> tuple[int, float]:
    """Return how many tokens llama.cpp decoded after a prompt, and the seconds that it says it took."""
    command = [str(engine / "build/bin/llama-speculative-simple"), *options, *GREEDY.split()]
    done = subprocess.run([*command, "-n", str(new_tokens), "-p", text], capture_output=True)
    output = (done.stdout + done.stderr).decode(errors="replace")
    found = SPEED.search(output)
    if found is None:
        raise ValueError(f"llama.cpp told no speed; its last words:\n{output[-1000:]}")
    return int(found[1]), float(found[2])


def convert_head(engine: Path, head: Path, target: Target, folder: Path, work: Path) -> Path:
    """Return the head as a GGUF file for llama.cpp."""
    export(load_drafter(head, target), target.config, "portable", str(work / "head"))
    out = work / "head.gguf"
    converter = str(engine / "llama.cpp/convert_hf_to_gguf.py")
    command = [str(engine / "bin/python"), converter, str(work / "head"), "--outtype", "bf16"]
    command += ["--outfile", str(out), "--target-model-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def measure(args: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Yield tokens and seconds of each arm for each prompt."""
    target = Target.load(args.target, dtype="bfloat16")
    head = load_drafter(args.head, target)
    file = convert_head(args.engine, args.head, target, args.target, work)
    # of the engine's own program: the target is read from GGUF, the head in bf16
    drafted = ["-md", str(file), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(CHAIN)]
    arms = {"llama.cpp": PLAIN.split(), "llama.cpp, eagle3": drafted}
    conversations = list(read_conversations(args.prompts))[: args.count]
    for conversation in progress(conversations, "prompts", len(conversations), unit="prompts"):
        prompt = target.chat([conversation.messages[0]])
        text = target.tokenizer.decode(prompt)
        # the arms take turns, so that other work on the machine disturbs all of them alike
        for name, options in arms.items():
            tokens, seconds = measure_llamacpp(
                args.engine, ["-m", str(args.gguf), *options], text, args.new_tokens
            )
            yield {"arm": name, "tokens": tokens, "seconds": seconds}
        for name, drafter in (("eagle", load_drafter("none", target)), ("eagle, eagle3", head)):
            begun = process_time()
            trace = generate(
                target,
                drafter,
                prompt,
                max_new_tokens=args.new_tokens,
                budget=Budget(CHAIN, CHAIN, 1),
            )
            row = {"tokens": len(trace.tokens), "seconds": process_time() - begun}
            yield {"arm": name, **row, "tau": trace.acceptance_length}


def table(results: dict[str, Any]) -> str:
    """Return the median tokens a second of each arm as a Markdown table."""
    lines = ["| decoded by | tokens/s |", "|---|---:|"]
    for arm in dict.fromkeys(row["arm"] for row in results["rows"]):
        speeds = [row["tokens"] / row["seconds"] for row in results["rows"] if row["arm"] == arm]
        lines.append(f"| `{arm}` | {statistics.median(speeds):.1f} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measure all arms, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "gguf", "head", "engine"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("runs/llamacpp_speed.json"))
    args = parser.parse_args(argv)
    # as llama.cpp gets
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        rows = list(measure(args, Path(work)))
    about = {"head": args.head.parent.name, "gguf": args.gguf.name, "new_tokens": args.new_tokens}
    results = {**about, "rows": rows, "machine": made_on()}
    write_text(args.out, json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    script(main)
