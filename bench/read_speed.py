"""Speed and memory of reading conversations once: `python -m bench.read_speed TOKENIZER --counts 50000 2000000`.

Made-up conversations, as long as those of ShareGPT, go through the cache of tokens in a process of its own; then a
second command reads them. The first count is read twice more: by one process, and killed again and again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import made_on, markdown, write_results
from data_prep.token_cache import MANIFEST
from eagle.log import progress, script

POOL = 4_000_000  # characters from which texts are cut
PAIRS, QUESTION, ANSWER = (1.0, 0.75), (4.49, 1.4), (6.9, 0.8)  # mean and width of ShareGPT's logarithms
READ = """
import json, resource, sys, time
from data_prep.read_once import open_cache
from eagle.recipe import Recipe

if __name__ == "__main__":
    begin = time.perf_counter()
    cache = open_cache(Recipe.model_validate_json(open(sys.argv[1]).read()))
    seconds = time.perf_counter() - begin
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({
        "folder": str(cache.folder), "seconds": seconds, "tokens": int(cache.lengths.sum()),
        "CPU s": sum(one.ru_utime + one.ru_stime for one in used),
        "MB": [round(one.ru_maxrss / 1e3) for one in used],
    }))
"""


def make_text(drawn: np.random.Generator) -> str:
    """A long text of made-up words, few of them frequent and most of them rare."""
    letters = random.Random(0)
    words = ["".join(letters.choices("etaoinshrdlucmfw", k=letters.randint(1, 9))) for _ in range(30_000)]
    ranks = np.minimum(drawn.zipf(1.2, POOL // 5), len(words)) - 1
    ends = drawn.choice([" ", " ", " ", " ", " ", " ", ", ", ". ", ".\n"], len(ranks))
    return "".join(f"{words[rank]}{end}" for rank, end in zip(ranks, ends, strict=True))[:POOL]


def write_conversations(path: Path, count: int) -> None:
    """A file of so many conversations; the first ones of a longer file are those of a shorter one."""
    drawn = np.random.default_rng(0)
    text = make_text(drawn)
    with path.open("w") as file:
        for number in progress(range(count), "write", count):
            pairs = int(np.clip(drawn.lognormal(*PAIRS), 1, 20))
            sizes = np.stack([drawn.lognormal(*QUESTION, pairs), drawn.lognormal(*ANSWER, pairs)], 1).clip(4, 20_000)
            starts = drawn.integers(0, POOL - 20_000, 2 * pairs)
            turns = [
                {"from": ("human", "gpt")[place % 2], "value": text[start : start + int(size)]}
                for place, (start, size) in enumerate(zip(starts, sizes.flatten(), strict=True))
            ]
            file.write(json.dumps({"id": str(number), "conversations": turns}) + "\n")


def digest(folder: Path) -> str:
    """One checksum of the names and bytes of all files."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def start(work: Path, tokenizer: str, count: int, cache: str, workers: int) -> subprocess.Popen[str]:
    """A process that reads the conversations through a cache of this name."""
    data = {"train": str(work / f"{count}.jsonl"), "cache": str(work / cache), "num_proc": workers}
    recipe = {
        "target": {"path": tokenizer}, "data": data, "drafter": {"kind": "eagle1"},
        "train": {"out": str(work)}, "eval": {"prompts": data["train"]}, "features": {},
    }  # fmt: skip
    (work / "recipe.json").write_text(json.dumps(recipe))
    (work / "read.py").write_text(READ)
    command = [sys.executable, str(work / "read.py"), str(work / "recipe.json")]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a reading process found."""
    out, _ = process.communicate()
    if process.returncode:
        raise ValueError(f"reading ended with status {process.returncode}: see above")
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])
    return figures


def kill_and_finish(work: Path, tokenizer: str, count: int, workers: int, kills: int, shards: int) -> str:
    """The digest of a cache whose writers were killed so often, evenly over its shards."""
    folder = work / "killed"
    for kill in range(1, kills + 1):
        process = start(work, tokenizer, count, "killed", workers)
        while len(list(folder.glob("*/shard-*.json"))) < kill * shards // (kills + 1) and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return digest(Path(finish(start(work, tokenizer, count, "killed", workers))["folder"]))


def measure(work: Path, tokenizer: str, count: int, workers: int) -> dict[str, Any]:
    """Speed and memory of a first and a second command."""
    path = work / f"{count}.jsonl"
    if not path.exists():
        write_conversations(path, count)
    first, again = (finish(start(work, tokenizer, count, "cache", workers)) for _ in range(2))
    return {
        "conversations": count, "MB of text": round(path.stat().st_size / 1e6), "tokens": first["tokens"],
        "seconds": round(first["seconds"]), "CPU s": round(first["CPU s"]), "MB, command": first["MB"][0],
        "MB, largest worker": first["MB"][1], "seconds, second command": round(again["seconds"], 1),
        "MB, second command": again["MB"][0], "folder": first["folder"],
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """A row for each count."""
    columns = [name for name in results["rows"][0] if name != "folder"]
    rows = [[f"{row[name]:,}" for name in columns] for row in results["rows"]]
    return markdown(columns, rows)


def main(argv: list[str]) -> None:
    """Measure every count; print the table and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.read_speed", description=__doc__)
    parser.add_argument("tokenizer", help="a folder with a tokenizer and its chat template")
    parser.add_argument("--counts", type=int, nargs="+", default=[50_000, 2_000_000], help="conversations")
    parser.add_argument("--workers", type=int, default=2, help="processes that tokenise")
    parser.add_argument("--kills", type=int, default=5, help="of the first count")
    parser.add_argument("--work", type=Path, default=Path("runs/read_speed"), help="files and caches; removed by you")
    parser.add_argument("--out", type=Path, default=Path("docs/results/read_speed.json"))
    args = parser.parse_args(argv)
    if not Path(args.tokenizer).is_dir():
        raise ValueError(f"no tokenizer at {args.tokenizer}: expected a folder")
    args.work.mkdir(parents=True, exist_ok=True)
    rows = [measure(args.work, args.tokenizer, count, args.workers) for count in args.counts]
    count, folder = args.counts[0], Path(rows[0]["folder"])
    whole, shards = digest(folder), len(json.loads((folder / MANIFEST).read_text())["shards"])
    alone = finish(start(args.work, args.tokenizer, count, "alone", 1))
    killed = kill_and_finish(args.work, args.tokenizer, count, args.workers, args.kills, shards)
    same = {"by one process": digest(Path(alone["folder"])) == whole, "killed": killed == whole}
    results = {**made_on(tokenizer=Path(args.tokenizer).name, workers=args.workers, kills=args.kills, same=same)}
    results["rows"] = [{name: value for name, value in row.items() if name != "folder"} for row in rows]
    write_results(args.out, results)
    print(table(results), f"the same bytes: {same}", sep="\n\n")


if __name__ == "__main__":
    script(main)
