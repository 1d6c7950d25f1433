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
from eagle.interrupts import QUIET, interrupted_by_user
from eagle.shipped import HELP_PAGE, reach_stages


class Verb(NamedTuple):
    """The function that a verb runs, and a line about it."""

    module: str
    about: str
    function: str = "main"


# A verb whose arguments choose another program, as `prepare --only masks`, has a line for each; `--help` lists verbs.
GROUPS = {
    "Start": {
        "demo": Verb(
            "recipes.tiny.demo", "see the shipped head draft, then train one: some minutes"
        ),
        "demo --tiny-target": Verb(
            "recipes.tiny.make_target",
            "train the example model of the recipes in tiny/, and write its data",
        ),
        "init": Verb("recipes.init_recipe", "write a recipe for your model and your conversations"),
        "recipes": Verb("eagle.command.copy_recipe", "list the shipped recipes, or copy one"),
        "env": Verb("eagle.command.environment", "print versions and devices, for a bug report"),
    },
    "Train a head": {
        "prepare": Verb(
            "data_prep.prepare", "generate the training answers, and show the loss mask"
        ),
        "prepare --only answers": Verb(
            "data_prep.regenerate", "only generate the training answers"
        ),
        "prepare --only masks": Verb(
            "data_prep.inspect_mask", "show which tokens contribute to the loss"
        ),
        "prepare --only overlap": Verb(
            "recipes.overlap", "find evaluation prompts in the training data"
        ),
        "prepare --only draft-vocab": Verb(
            "data_prep.draft_vocab", "choose the tokens of a smaller draft vocabulary"
        ),
        "prepare --only tokens": Verb(
            "data_prep.count_tokens", "count tokens, for the drafters bigram and unigram"
        ),
        "extract": Verb("data_prep.extract", "store the target's hidden states (features)"),
        "train": Verb(
            "eagle.command.launcher", "train the head; --check tries every stage first", "train"
        ),
        "train --estimate": Verb("recipes.forecast", "forecast memory, disk and hours of a run"),
        "check-method": Verb("eagle.command.check_method", "test a drafting method of your own"),
    },
    "Measure": {
        "measure": Verb("eval.measure", "measure acceptance length and speedup"),
        "measure --verify": Verb(
            "eval.lossless", "compare every answer with that of the unmodified model"
        ),
        "measure --tune": Verb("eval.tune", "find the fastest draft tree for this machine"),
        "report": Verb("eval.report", "write a report of measurements"),
        "compare": Verb("eval.compare", "train and measure several methods on equal terms"),
    },
    "Use and ship": {
        "generate": Verb(
            "eagle.command.generate", "answer a prompt with drafts, or chat in the terminal"
        ),
        "export": Verb("eagle.command.ship", "write a head for a serving engine", "run_export"),
        "push": Verb(
            "eagle.command.share",
            "upload a head or data to the hub",
            "run_push",
        ),
        "push --card": Verb("eagle.command.write_card", "write the model card or dataset card"),
        "pull": Verb("eagle.command.share", "download a head or data from the hub", "run_pull"),
        "import": Verb("eagle.command.ship", "convert a head of another tool", "run_import"),
        "inspect": Verb(
            "eagle.command.ship", "identify a checkpoint, and list its faults", "run_inspect"
        ),
        "doctor": Verb(
            "eagle.command.ship", "find out why few draft tokens are accepted", "run_doctor"
        ),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}
# verbs that go on working, and what is written instead of each
OLD_VERBS = {
    "regenerate": "prepare --only answers",
    "inspect-mask": "prepare --only masks",
    "overlap": "prepare --only overlap",
    "draft-vocab": "prepare --only draft-vocab",
    "count-tokens": "prepare --only tokens",
    "forecast": "train --estimate",
    "lossless": "measure --verify",
    "tune": "measure --tune",
    "card": "push --card",
    "tiny-target": "demo --tiny-target",
    "chat": "generate",
}
# old verbs that stay good names: no note points to what replaced them
ALIASES = {"chat"}
# options of accelerate's launcher: not every verb shows them in its help, so they are never refused as unknown
LAUNCHER = {
    "--processes",
    "--num_processes",
    "--config_file",
    "--machine_rank",
    "--main_process_ip",
    "--main_process_port",
}
LIGHT = {"recipes"}  # verbs that need no torch
VERDICTS = {"inspect", "doctor"}  # whose status 1 says that a checkpoint is broken
# environment variables from which the processes that a verb starts read its --plugin and --trust-code
PLUGINS = "EAGLE_PLUGINS"
TRUST_CODE = "EAGLE_TRUST_CODE"
# environment variables that switch off the progress bars of Hugging Face's libraries
BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
HELP = {"-h", "--help"}
USAGE = "usage: eagle VERB [arguments]      `eagle help VERB` explains the arguments"
FOR_ALL = """\
train, prepare, extract and measure take --processes N. All verbs take -q (no
progress), --plugin PATH.py (load methods of your own) and --trust-code (allow
the method.py in a head's folder to run: read this file first)."""


def main(argv: list[str] | None = None) -> None:
    """Run the verb with the arguments that follow it."""
    # imports take long enough for a user to press Ctrl-C, so `script` is imported here
    with interrupted_by_user(lambda: "give the same command again"):
        verb, rest, status = find_verb(argv)
        import_module("eagle.log").script(verb, rest, status=status)


def find_verb(argv: list[str] | None) -> tuple[partial[None], list[str], int]:
    """Return the call that runs a verb, the verb's arguments, and the exit status of its refusals.

    Help, the version and the refusal of an unknown verb are printed here, and the process exits. The status of a
    refusal is 2 for `inspect` and `doctor`, as their 1 says that a checkpoint is broken.
    """
    # paths of methods of the user's own, whether code beside heads may run, and all other words of the command line
    plugins, trusts_heads, words = take_code_options(sys.argv[1:] if argv is None else argv)
    if not words:
        print(overview(), file=sys.stderr)
        sys.exit(2)
    if words[0] == "help" and words[1:]:
        # `eagle help VERB` is `eagle VERB --help`
        words = [*words[1:], "--help"]
    typed_verb = words[0]
    if typed_verb in HELP | {"help"}:
        show(overview())
    if typed_verb == "--version":
        show(f"eagle {__version__}")
    name, rest = find_program(words)
    if name not in VERBS:
        # a key with a space is an option of another verb
        listed_verbs = [verb for verb in VERBS if " " not in verb]
        near = difflib.get_close_matches(name, [*listed_verbs, *OLD_VERBS], n=1)
        hint = f"expected one of {', '.join(listed_verbs)}"
        if near:
            hint = f"did you mean {OLD_VERBS.get(near[0], near[0])}?"
        print(f"{USAGE}\nerror: there is no verb {name}: {hint}", file=sys.stderr)
        sys.exit(2)
    if typed_verb in OLD_VERBS.keys() - ALIASES and QUIET not in os.environ:
        print(
            f"eagle {typed_verb} is `eagle {OLD_VERBS[typed_verb]}` now; the old name works too",
            file=sys.stderr,
        )
    if HELP & set(rest):
        # answered from the help page, as the verb's own parser would import torch first
        text = printed_help(name)
        if text:
            show(text)
    refuse_unknown_options(name, rest)
    reach_stages()
    verb = partial(run_verb, name, VERBS[name], plugins=plugins, trusts_heads=trusts_heads)
    return verb, rest, 2 if name in VERDICTS else 1


def find_program(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the key of `VERBS` that a command line runs, and the arguments that are left for its program.

    `prepare RECIPE --only masks`, `prepare RECIPE --only=masks` and the old `inspect-mask RECIPE` are one program.
    """
    name, *rest = [*OLD_VERBS.get(words[0], words[0]).split(), *words[1:]]
    for program in VERBS:
        verb, *option = program.split()
        if verb != name or not option:
            continue
        # `--only masks` and `--only=masks`, anywhere among the arguments
        for spelled in (option, ["=".join(option)]):
            for start in range(len(rest)):
                end = start + len(spelled)
                if rest[start:end] == spelled:
                    return program, rest[:start] + rest[end:]
    return name, rest


def show(text: str) -> NoReturn:
    """Print a text and exit; `script` ends it quietly where a reader such as `head` closes the pipe early."""
    import_module("eagle.log").script(lambda _: print(text), [])
    sys.exit()


def overview() -> str:
    """Return the text of `eagle --help`: usage, and all verbs by group."""
    lines = [USAGE]
    for title, group in GROUPS.items():
        lines.append(f"\n{title}:")
        lines += [f"  {name:<14}{verb.about}" for name, verb in group.items() if " " not in name]
    return "\n".join([*lines, "", FOR_ALL])


def printed_help(verb: str) -> str | None:
    """Return the `--help` of a verb as the help page has it; None if it is not there.

    The parser of a verb is in its module, which imports torch for seconds.
    """
    if not HELP_PAGE.is_file():
        return None
    section = rf"^### eagle {verb}\n.*?^```text\n(.*?)\n```$"
    match = re.search(section, HELP_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return match[1] if match else None


def refuse_unknown_options(verb: str, argv: Sequence[str]) -> None:
    """Exit with the usage if an option is not in the verb's help: its own parser would import torch first."""
    text = printed_help(verb)
    # without the help page the verb's own parser refuses
    if text is None:
        return
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) | LAUNCHER
    for word in argv:
        # all words after `--` are arguments
        if word == "--":
            return
        name = word.partition("=")[0]
        # argparse takes abbreviations, so any prefix of an option is accepted
        if word.startswith("--") and not any(option.startswith(name) for option in options):
            command_lines = import_module("eagle.recipe.command_lines")
            command_lines.refuse_option(
                f"eagle {verb}", text.partition("\n\n")[0], options, argv, word
            )


def take_code_options(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """Return the plugins, whether heads' code is trusted, and the other arguments.

    Plugins are absolute paths of Python files with drafting methods. They and the trust come from this command line
    and, by environment variables, from the process that started this one. `--quiet` is obeyed here: it sets the
    environment variables that switch off progress.
    """
    parser = argparse.ArgumentParser(prog="eagle", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--trust-code", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    args, rest = parser.parse_known_args(argv)
    if args.quiet:
        os.environ.update(dict.fromkeys((QUIET, *BARS), "1"))
    plugins = [path for path in os.environ.get(PLUGINS, "").split(os.pathsep) if path]
    for path in args.plugin:
        # a process that this one starts may run in another folder
        absolute = str(Path(path).expanduser().resolve())
        if absolute not in plugins:
            plugins.append(absolute)
    return plugins, args.trust_code or bool(os.environ.get(TRUST_CODE)), rest


def admit_code(plugins: Sequence[str], trusts_heads: bool) -> None:
    """Register the methods of plugins, and trust code in heads' folders if asked to; both run code of others.

    Both hold in this process and, by environment variables, in those that it starts.

    Args:
        plugins: Paths of Python files that define drafting methods.
        trusts_heads: Whether the `method.py` in a head's folder may be run.
    """
    if not (plugins or trusts_heads):
        return
    # imported only now: commands without plugins print their help without torch
    registry = import_module("eagle.drafters").DRAFTERS
    registry.trusts_heads = trusts_heads
    # a recipe beside a head names that code, too
    import_module("eagle.recipe").Trust.in_recipes = trusts_heads
    for path in plugins:
        registry.load_plugin(path)
    # `take_code_options` reads these in every process that is started from here
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
    """Run a verb: a function of the package, or a stage, which several processes may share.

    Args:
        name: The verb's key in `VERBS`.
        verb: Its module; one outside of `eagle` is a stage, a program of data_prep, eval or recipes.
        argv: The arguments of the verb.
        plugins: Paths of Python files that define drafting methods.
        trusts_heads: Whether the `method.py` in a head's folder may be run.
    """
    # the import of torch takes seconds, in which nothing else would be shown
    has_to_wait = "torch" not in sys.modules and not HELP & set(argv) and name not in LIGHT
    if has_to_wait and QUIET not in os.environ:
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
