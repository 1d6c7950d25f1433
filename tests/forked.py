"""Commands of `eagle` in processes of their own that need not import anything: forked from one that has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
# reads {argv, folder, log, room, stop} as JSON, answers with the status; argv is a verb with its words, or `-c` and the
# text of a program; `room` limits the bytes of a file, as a full disk does, also for root; `stop` is when Ctrl-C comes,
# in seconds
PROGRAM = """
import json, os, resource, signal, sys, threading, time, traceback
import huggingface_hub, torch
import data_prep.prepare, data_prep.extract, data_prep.draft_vocab, data_prep.count_tokens, data_prep.dataset_card
import eval.measure, eval.report, eval.compare, eval.tune, eval.lossless, recipes.forecast, recipes.train_eagle
import eagle.command.chat, eagle.command.generate, eagle.command.ship, eagle.command.write_card, eagle.command.launcher
from eagle.__main__ import main
torch.set_num_threads(1)
huggingface_hub.constants.HF_HUB_OFFLINE = True  # names of no model would be asked for, with pauses

def run(job, out):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    signal.alarm(120)
    os.chdir(job["folder"])
    os.dup2(out, 1)  # a pipe, which no limit on files cuts off
    os.dup2(out, 2)
    sys.stdin = open(os.devnull)  # not the jobs, which `eagle chat` would take for questions
    if job["room"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["room"], job["room"]))
    if job["stop"] is not None:
        signal.setitimer(signal.ITIMER_REAL, job["stop"])
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        if job["argv"][0] == "-c":
            exec(job["argv"][1], {"__name__": "__main__"})
        else:
            main(job["argv"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    os._exit(status)

for line in sys.stdin:
    job, (reader, writer) = json.loads(line), os.pipe()
    if not (pid := os.fork()):
        os.close(reader)
        # torch makes its thread pool anew after a fork, at first use: two threads at once would find none
        torch.set_num_threads(torch.get_num_threads())
        run(job, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as printed, open(job["log"], "wb") as log:
        log.write(printed.read())
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass
class Ended:
    """A command that has ended: its words, its status, and what it printed, a progress bar's last state alone."""

    argv: list[str]
    status: int
    output: str

    def __str__(self) -> str:
        return f"$ eagle {' '.join(self.argv)}\n{self.output.rstrip()}\n[status {self.status}]\n"


class Server:
    """Runs commands one after another; every one is added to the file that EAGLE_TRANSCRIPT names."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "forked.log"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
        }
        self.process: Any = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environment,
        )

    def run(
        self,
        argv: list[str],
        folder: Path,
        room: int | None = None,
        stop: float | None = None,
    ) -> Ended:
        """Run a command in this folder, and return it once it has ended.

        Args:
            argv: a verb with its words, or `-c` and the text of a program.
            folder: where it runs.
            room: the most bytes of a file, as on a full disk.
            stop: the seconds after which Ctrl-C comes.
        """
        # one line a job, and one line with its status
        paths = {"folder": str(folder), "log": str(self.log)}
        job = {"argv": argv, **paths, "room": room, "stop": stop}
        stdin: IO[str] = self.process.stdin
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        status = int(self.process.stdout.readline())
        ended = Ended(argv, status, self.log.read_text(errors="replace"))
        # torch's thread pool sometimes does not outlive a fork
        if argv[0] == "-c" and "Invalid thread pool" in ended.output:
            again = subprocess.run(
                [sys.executable, *argv],
                cwd=folder,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            ended = Ended(argv, again.returncode, again.stdout + again.stderr)
        transcript = os.environ.get("EAGLE_TRANSCRIPT")
        if transcript:
            with open(transcript, "a") as file:
                file.write(f"{ended}\n")
        return ended

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()
