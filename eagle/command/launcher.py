"""Start a stage: in this process, or on several by accelerate's launcher once its recipe was read."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line, parse_train
from eagle.shipped import DEMO, find_recipe

CHECKS = """\
  --check              try every stage on two batches, forecast memory and hours, and stop
  --estimate           forecast memory, disk and hours without running anything: see `eagle help train --estimate`"""
USAGE = """\
  --processes N        number of processes, one per GPU
  --config_file FILE   configuration of accelerate: a file, or ddp (the default), zero2, zero3, two_machines
  --machine_rank N, --main_process_ip IP, --main_process_port PORT   for two_machines"""

ESTIMATE = "train --estimate"
# verbs whose work several processes may share
SHARED = {
    "prepare",
    "prepare --only answers",
    "extract",
    "measure",
    "measure --verify",
}


def launcher_options(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of accelerate's launcher, and the remaining arguments, which are the stage's.

    A stage is a program such as `train` or `extract`. There are no options where one process runs, which needs no
    launcher.
    """
    parser = argparse.ArgumentParser(prog="eagle", add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", "--num_processes", dest="num_processes", type=int)
    parser.add_argument("--config_file")
    for name in ("--machine_rank", "--main_process_ip", "--main_process_port"):
        parser.add_argument(name)
    args, rest = parser.parse_known_args(argv)
    if args.num_processes is not None:
        if args.num_processes < 1:
            raise ValueError(
                f"--processes is {args.num_processes}, expected how many share the work: 1 or more"
            )
        args.config_file = args.config_file or "ddp"
    # DDP on one process is a plain run
    if args.config_file == "ddp" and args.num_processes == 1:
        return [], rest
    if args.config_file is not None:
        # the short names are those of files that come with the package
        is_short = args.config_file in ("ddp", "zero2", "zero3", "two_machines")
        args.config_file = find_recipe(
            f"accelerate/{args.config_file}" if is_short else args.config_file
        )
    return [f"--{name}={value}" for name, value in vars(args).items() if value is not None], rest


def asks_for_help(argv: list[str]) -> bool:
    """Whether a command line asks for help."""
    return "-h" in argv or "--help" in argv


def run_stage(name: str, module: str, argv: list[str]) -> None:
    """Run a stage in this process, or in as many as the options of the launcher ask for.

    Args:
        name: The key of the verb, as `measure --verify`.
        module: The module of the stage, whose `main` takes the arguments.
        argv: The arguments, those of the launcher among them.
    """
    options, rest = launcher_options(argv)
    if name == ESTIMATE:
        # an estimate computes with the number of processes and starts none
        options, rest = [], argv
    if options and not asks_for_help(argv):
        check_recipe(rest)
        # imported only now: it imports torch and accelerate, which takes seconds
        import_module("eagle.training.launch").launch_processes(
            options, ["-m", "eagle", *name.split(), *rest]
        )
        return
    sys.argv[1:] = rest
    try:
        import_module(module).main(rest)
    except SystemExit as ended:
        # the help of the stage does not have the options of the launcher
        if not ended.code and name in SHARED and asks_for_help(argv):
            print(f"\nseveral processes:\n{USAGE}")
        raise


def check_recipe(argv: list[str]) -> None:
    """Read the recipe, its drafter's settings and the target's config once, instead of failing on every process."""
    # without the name of a recipe the demo's is read
    if not argv or "=" in argv[0]:
        argv = [DEMO, *argv]
    args, _ = command_line("eagle", None).parse_known_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, [word for word in args.overrides if "=" in word])
    # both calls only check: wrong settings, or a target that is not there, are refused
    import_module("eagle.drafters").settings_of(recipe.drafter.model_dump(), args.recipe)
    target = recipe.target
    read_config = import_module("eagle.target.borrowed").target_config
    read_config(target.path, target.revision, trust_remote_code=target.trust_remote_code)


def train(argv: list[str]) -> None:
    """Train the head of a recipe; a recipe with a section `joint` trains its target too."""
    if asks_for_help(argv):
        print(
            f"usage: eagle train [RECIPE] [key=value ...] [--check] [options]\n\n{train.__doc__}\n"
        )
        print(f"{CHECKS}\n{USAGE}")
        sys.exit()
    options, rest = launcher_options(argv)
    args = parse_train(rest)
    # the program that trains a head alone
    module = "recipes.train_eagle"
    if args.check:
        # a check runs in one process, which is told how many the run will have
        argv = rest
        if not any(word.startswith("train.processes=") for word in argv):
            argv += [
                option.replace("--num_processes", "train.processes")
                for option in options
                if "num_processes" in option
            ]
    elif Recipe.load(args.recipe or DEMO, args.overrides).joint is not None:
        if args.recipe is None:
            raise ValueError(
                "joint=... trains a target too, and the demo's stays as it is: name a recipe with a section `joint`, "
                "as `eagle train tiny/medusa2 joint.rank=16`"
            )
        module = "recipes.train_medusa2"
    run_stage("train", module, argv)
