"""Answers to conversations by the checkout on PYTHONPATH: `python bench/rivals/regenerate.py JOB.json`."""

import json
import sys
from pathlib import Path
from time import process_time

import torch

from data_prep.conversations import read_conversations
from data_prep.regenerate import Reader, converse, make_names_unique
from data_prep.servers.answers import Local
from eagle.recipe import DataSection, RegenerateSection
from eagle.target.target import Target


def main(path: str) -> None:
    """Answer what the job names, and write CPU seconds, tokens and answers to its `out`."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    target = Target.load(job["target"], dtype=job["dtype"])
    section = RegenerateSection(source="-", out="-", **job["settings"])
    local = Local(target, target.tokenizer, section)
    reader = Reader(target.tokenizer, DataSection(train="-", max_length=job["max_length"]), local.positions)
    jobs = list(make_names_unique(read_conversations(job["data"], limit=job["count"])))
    few = [(name, converse(name, conversation, reader, section)) for name, conversation in jobs[:2]]
    list(local.run(iter(few)))  # warms up
    begun = process_time()
    lines = dict(local.run((name, converse(name, conversation, reader, section)) for name, conversation in jobs))
    seconds = process_time() - begun
    records = {name: lines[name]["record"] for name, _ in jobs}
    answers = {name: record["messages"] if record else [] for name, record in records.items()}
    tokens = sum(line["tokens"] for line in lines.values())
    Path(job["out"]).write_text(json.dumps({"seconds": seconds, "tokens": tokens, "answers": answers}))


if __name__ == "__main__":
    main(sys.argv[1])
