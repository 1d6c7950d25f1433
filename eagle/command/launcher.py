"""Start a stage on one process or several: here, or by accelerate's launcher."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

import yaml

from eagle.shipped import DEMO, RECIPES, find_recipe

TRAIN, TRAIN_JOINTLY = RECIPES / "train_eagle.py", RECIPES / "train_medusa2.py"
USAGE = """\
  --processes N        how many share the work, one a GPU
  --config_file FILE   settings of accelerate: a file, or ddp, zero2, zero3, two_machines; with N the default is ddp
  --machine_rank N, --main_process_ip IP, --main_process_port PORT   for two_machines"""


def launcher_options(argv: list[str]) -> tuple[list[str], list[str]]:
    """The options that accelerate's launcher gets, none where it is not asked for, and the arguments of the stage."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", "--num_processes", dest="num_processes", type=int)
    parser.add_argument("--config_file")
    for name in ("--machine_rank", "--main_process_ip", "--main_process_port"):
        parser.add_argument(name)
    args, rest = parser.parse_known_args(argv)
    if args.config_file is None and args.num_processes is not None:
        args.config_file = "ddp"
    if args.config_file in ("ddp", "zero2", "zero3", "two_machines"):
        args.config_file = f"accelerate/{args.config_file}"
    if args.config_file is not None:
        args.config_file = find_recipe(args.config_file)
    return [f"--{name}={value}" for name, value in vars(args).items() if value is not None], rest


def launch_script(options: list[str], program: list[str]) -> None:
    """Become accelerate's launcher, which starts the program on every process."""
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, *program]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def run_here(module: str, argv: list[str]) -> None:
    """Run the stage of this module in this process."""
    from eagle.log import script  # which imports torch, and takes seconds

    sys.argv[1:] = argv
    script(import_module(module).main)


def run_stage(module: str, argv: list[str]) -> None:
    """Run a stage in this process, or on as many as the options ask for."""
    options, rest = launcher_options(argv)
    if options and not {"-h", "--help"} & set(argv):
        launch_script(options, ["-m", module, *rest])
    run_here(module, rest)


def train(argv: list[str]) -> None:
    """Train the head of a recipe; a recipe with a section `joint` trains its target too."""
    if {"-h", "--help"} & set(argv):
        print(f"usage: eagle train [RECIPE] [key=value ...] [--check] [options]\n\n{train.__doc__}\n")
        sys.exit(
            print(f"  --check              try every stage on two batches, tell memory and hours, and stop\n{USAGE}")
        )
    options, rest = launcher_options(argv)
    if "--check" in rest:
        run_here("recipes.train_eagle", rest)
        return
    recipe = rest[0] if rest and "=" not in rest[0] else DEMO
    is_joint = "joint" in yaml.safe_load(find_recipe(recipe).read_text()) and "joint=null" not in rest
    launch_script(options, [str(TRAIN_JOINTLY if is_joint else TRAIN), *rest])
