"""The command line: `eagle VERB ...`, which is `python -m eagle VERB ...`."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from eagle import __version__
from eagle.log import interrupted_by_user, script
from eagle.shipped import HELP_PAGE, reach_stages


class Verb(NamedTuple):
    """The function that a verb runs, and a line about it."""

    module: str
    about: str
    function: str = "main"


GROUPS = {
    "Start": {
        "demo": Verb(
            "recipes.tiny.demo", "every stage on a small model: two to five minutes, no downloads"
        ),
        "init": Verb("recipes.init_recipe", "write a recipe for your model and your conversations"),
        "recipes": Verb(
            "eagle.command.copy_recipe", "list the recipes that come with eagle; copy one"
        ),
        "tiny-target": Verb(
            "recipes.tiny.make_target",
            "train the tiny model of the recipes in tiny/, with its data",
        ),
        "env": Verb("eagle.command.environment", "versions and devices, for a bug report"),
    },
    "Train a head": {
        "prepare": Verb(
            "data_prep.prepare", "write the target's own answers, then show what is learned of them"
        ),
        "extract": Verb("data_prep.extract", "store the target's hidden features"),
        "train": Verb(
            "eagle.command.launcher", "train the head; --check tries everything first", "train"
        ),
        "forecast": Verb("recipes.forecast", "memory, disk and hours of a run"),
        "check-method": Verb(
            "eagle.command.check_method", "what every method must hold, of one of your own"
        ),
        "draft-vocab": Verb(
            "data_prep.draft_vocab", "choose the tokens of a smaller draft vocabulary"
        ),
        "count-tokens": Verb("data_prep.count_tokens", "count tables for drafters without weights"),
        "regenerate": Verb("data_prep.regenerate", "only the first half of prepare"),
        "overlap": Verb("recipes.overlap", "evaluation prompts that stand in the training data"),
        "inspect-mask": Verb("data_prep.inspect_mask", "only the second half of prepare"),
    },
    "Measure": {
        "measure": Verb("eval.measure", "acceptance length and speed, beside plain decoding"),
        "report": Verb("eval.report", "measurements as one page"),
        "compare": Verb("eval.compare", "train and measure several methods on equal terms"),
        "tune": Verb("eval.tune", "the draft tree that is fastest on this machine"),
        "lossless": Verb("eval.lossless", "compare every answer with the untouched model's own"),
    },
    "Use and ship": {
        "chat": Verb(
            "eagle.command.chat",
            "a conversation in the terminal: drafts in green, and what they gain",
        ),
        "generate": Verb(
            "eagle.command.generate", "stream an answer, drafted by a head or a method's name"
        ),
        "export": Verb(
            "eagle.command.ship", "write a head as a serving engine reads it", "run_export"
        ),
        "card": Verb(
            "eagle.command.write_card", "write the README.md of a head or of data, for a hub"
        ),
        "push": Verb(
            "eagle.command.share",
            "send a head, features or answers to a hub; shows first what would go",
            "run_push",
        ),
        "pull": Verb(
            "eagle.command.share", "bring them from a hub, every file verified", "run_pull"
        ),
        "import": Verb("eagle.command.ship", "read a head that another tool wrote", "run_import"),
        "inspect": Verb(
            "eagle.command.ship", "what a checkpoint is, and which traps it holds", "run_inspect"
        ),
        "doctor": Verb(
            "eagle.command.ship", "why a head accepts as little as it does", "run_doctor"
        ),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}
LIGHT = {"recipes"}  # verbs that need no torch
VERDICTS = {"inspect", "doctor"}  # whose status 1 says that a checkpoint is broken
# in which the processes that a verb starts are told
PLUGINS = "EAGLE_PLUGINS"
TRUST_CODE = "EAGLE_TRUST_CODE"
HELP = {"-h", "--help"}
USAGE = "usage: eagle VERB [arguments]      `eagle VERB --help` tells the arguments of one"


def main(argv: list[str] | None = None) -> None:
    """Run the verb with the arguments that follow it."""
    # importing what reads the arguments takes long enough for a Ctrl-C
    with interrupted_by_user(lambda: "give the same command again"):
        verb, rest, status = find_verb(argv)
    script(verb, rest, status=status)


def find_verb(argv: list[str] | None) -> tuple[partial[None], list[str], int]:
    """Return what runs the verb, its arguments and the status of its refusals; end if no verb is to run."""
    plugins, trusts_heads, words = take_code_options(sys.argv[1:] if argv is None else argv)
    if not words:
        print(overview(), file=sys.stderr)
        sys.exit(2)
    name, *rest = words
    if name == "help" and rest:
        # `eagle help VERB` is `eagle VERB --help`
        name, rest = rest[0], ["--help"]
    if name in HELP | {"help"}:
        show(overview())
    if name == "--version":
        show(f"eagle {__version__}")
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(VERBS)}"
        print(f"{USAGE}\nerror: there is no verb {name}: {hint}", file=sys.stderr)
        sys.exit(2)
    if HELP & set(rest):
        # the verb's own parser would import torch first
        text = printed_help(name)
        if text:
            show(text)
    reach_stages()
    verb = partial(run_verb, name, VERBS[name], plugins=plugins, trusts_heads=trusts_heads)
    return verb, rest, 2 if name in VERDICTS else 1


def show(text: str) -> NoReturn:
    """Print a text and end; a reader, as `head`, may close the pipe before its end."""
    script(lambda _: print(text), [])
    sys.exit()


def overview() -> str:
    """Return usage, and all verbs by group."""
    lines = [USAGE]
    for title, group in GROUPS.items():
        lines.append(f"\n{title}:")
        lines += [f"  {name:<14}{verb.about}" for name, verb in group.items()]
    lines.append(
        "\ntrain, prepare, extract, measure and lossless take --processes N: see `eagle train --help`."
    )
    lines.append(
        "All verbs take --plugin PATH.py (methods of your own, by the names that they have there) and"
    )
    lines.append(
        "--trust-code (run the method.py beside a head that another has made: read it first)."
    )
    return "\n".join(lines)


def printed_help(verb: str) -> str | None:
    """Return the `--help` of a verb, from the page that is made of it: its module imports torch for seconds."""
    if not HELP_PAGE.is_file():
        return None
    section = rf"^### eagle {verb}\n.*?^```text\n(.*?)\n```$"
    match = re.search(section, HELP_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return match[1] if match else None


def take_code_options(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """Return the plugins, whether heads' code is trusted, and the other arguments.

    Both are those of this command line or of the process that began this one.
    """
    parser = argparse.ArgumentParser(prog="eagle", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--trust-code", action="store_true")
    args, rest = parser.parse_known_args(argv)
    plugins = [path for path in os.environ.get(PLUGINS, "").split(os.pathsep) if path]
    for path in args.plugin:
        # a process that begins here may run in another folder
        absolute = str(Path(path).expanduser().resolve())
        if absolute not in plugins:
            plugins.append(absolute)
    return plugins, args.trust_code or bool(os.environ.get(TRUST_CODE)), rest


def admit_code(plugins: Sequence[str], trusts_heads: bool) -> None:
    """Register the methods of plugins, and trust heads' code if asked to, here and in processes that begin here."""
    if not (plugins or trusts_heads):
        return
    methods = import_module("eagle.drafters").DRAFTERS
    methods.trusts_heads = trusts_heads
    import_module("eagle.recipe").Trust.in_recipes = trusts_heads
    for path in plugins:
        methods.load_plugin(path)
    if plugins:
        os.environ[PLUGINS] = os.pathsep.join(plugins)
    if trusts_heads:
        os.environ[TRUST_CODE] = "1"


def run_verb(
    name: str,
    verb: Verb,
    argv: list[str],
    *,
    plugins: Sequence[str] = (),
    trusts_heads: bool = False,
) -> None:
    """Run a stage, here or on several processes, or a verb of the package itself."""
    if "torch" not in sys.modules and not HELP & set(argv) and name not in LIGHT:
        print(
            f"eagle {name}: importing torch and transformers, a few seconds ...",
            file=sys.stderr,
            flush=True,
        )
    admit_code(plugins, trusts_heads)
    if verb.module.startswith("eagle."):
        getattr(import_module(verb.module), verb.function)(argv)
    else:
        import_module("eagle.command.launcher").run_stage(name, verb.module, argv)


if __name__ == "__main__":
    main()
