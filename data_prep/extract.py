"""Conversations -> feature store: `[accelerate launch -m | python -m] data_prep.extract RECIPE [key=value ...]`.

A run that was killed goes on where it was when the same command is given again, with any number of processes.
`--forecast` tells size and time and stops; `--verify` reads every byte back; `--repair` computes anew what is broken;
`--strict` takes the first record that would be dropped as an error.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.data.examples import Example
from eagle.data.features import check_room, extract, forecast, plan_extraction, taps_of, world
from eagle.data.identity import identity, in_precision
from eagle.data.store import Absent, Damaged, FeatureStore
from eagle.device import best_device, fastest_dtype
from eagle.disk import lock_folder
from eagle.drafters import settings_of
from eagle.log import interrupted_by_user, progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.borrowed import save_borrowed, target_config
from eagle.target.target import Target

GOES_ON = "whole shards are kept, and the same command goes on"


def main(argv: list[str]) -> None:
    """Read the command, and let every launched process do its share."""
    said = arguments(argv)
    recipe = Recipe.load(said.recipe, said.overrides)
    settings, of = settings_of(recipe.drafter.model_dump(), said.recipe), recipe.target
    taps = taps_of(settings, target_config(of.path, of.revision, trust_remote_code=of.trust_remote_code))
    if said.forecast:
        examples = read(recipe, strict=said.strict)
        target = load(recipe)
        plan = plan_extraction(examples, target, taps, recipe.features)
        print(forecast(target, examples, plan, taps, recipe.features.dtype))
    elif not recipe.features.store:
        raise ValueError(f"{said.recipe} has no features.store: features are computed while training, none are stored")
    elif said.verify:
        verify(Path(recipe.features.store))
    else:
        folder = Path(recipe.features.store)
        with interrupted_by_user(lambda: GOES_ON), lock_folder(folder, hold=world()[0] == 0):
            fill(recipe, folder, taps, repair=said.repair, strict=said.strict)


def arguments(argv: list[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = command_line("data_prep.extract", __doc__.splitlines()[0])
    parser.add_argument("--forecast", action="store_true", help="tell tokens, bytes and time, and stop")
    parser.add_argument("--verify", action="store_true", help="read every byte back")
    parser.add_argument("--repair", action="store_true", help="compute anew what is broken, and only that")
    parser.add_argument("--strict", action="store_true", help="take the first record that would be dropped as an error")
    return parser.parse_intermixed_args(argv)


def fill(recipe: Recipe, folder: Path, taps: tuple[int, ...], *, repair: bool, strict: bool) -> None:
    """This process's share of the shards that are not there yet; the first process prepares the store for all."""
    index, count, wait = world()
    target = prepare(recipe, folder, identity(recipe, taps), repair, strict) if index == 0 else None
    wait()
    store = FeatureStore(folder, partial=True)
    todo = sorted(store.absent)
    if index == 0:
        print(f"{len(todo)} of {len(store.plan)} shards to compute, {count} process{'es' * (count > 1)}")
    wait()  # nobody writes before everybody has seen what is to do
    if mine := todo[index::count]:
        target = target or load(recipe, store.identity["target"]["dtype"])
        tokens = sum(store.index["shard_tokens"][shard] for shard in mine)
        work = extract(target, store, mine)
        for _ in progress(work, "extract", tokens, unit="tokens", size=int, show=index == 0):
            pass
    wait()
    if index == 0:
        store = FeatureStore(folder)
        print(f"features of {len(store)} examples, taps {store.taps}, in {len(store.plan)} shards in {folder}")


def prepare(recipe: Recipe, folder: Path, made: dict[str, Any], repair: bool, strict: bool) -> Target | None:
    """Begin a store that is not there, and remove what a killed run left half and what a repair finds broken."""
    target = None
    for torn in folder.glob("*.part"):
        torn.unlink()
    try:
        FeatureStore(folder, made, partial=True).borrowed_folder()
    except Damaged as error:
        if not repair:
            raise
        print(f"{error}; this is done now")
        target = begin(recipe, folder, made, strict=strict)
    except Absent:
        target = begin(recipe, folder, made, strict=strict)
    if repair:
        store = examined(folder)
        print(store.describe_absent() if store.absent else f"nothing is broken in {folder}")
        store.discard(list(store.absent))
    if target is None and recipe.target.dtype == "auto":
        check_precision(FeatureStore(folder, partial=True))
    return target


def check_precision(store: FeatureStore) -> None:
    """Refuses to complete a store in another precision than that in which it was begun on another machine."""
    begun, auto = store.identity["target"]["dtype"], str(fastest_dtype(best_device())).removeprefix("torch.")
    if store.absent and begun != auto:
        raise ValueError(
            f"{store.folder} was begun in target.dtype {begun}, and auto is {auto} on this machine: set "
            f"target.dtype={begun} to go on, or point features.store at another folder"
        )


def begin(recipe: Recipe, folder: Path, made: dict[str, Any], *, strict: bool) -> Target:
    """Tokenise, plan, and create the store without features yet."""
    examples, target = read(recipe, strict=strict), load(recipe)
    made = in_precision(made, fastest_dtype(best_device()))
    print(precision_note(recipe.target.dtype, made["target"]["dtype"], recipe.features.dtype), end="")
    plan = plan_extraction(examples, target, tuple(made["taps"]), recipe.features)
    width, precision = target.config.hidden_size, str(target.model.dtype).removeprefix("torch.")
    about: dict[str, Any] = {"width": width, "precision": precision, "target": name_of(recipe)}
    about["borrowed"] = save_borrowed(folder, target.head, target.config)
    store = FeatureStore.create(folder, examples, made, plan, **about)
    check_room(store)
    return target


def precision_note(asked: str, dtype: str, kept_in: str) -> str:
    """What a precision that was left to the device is, and whether the store keeps more digits than there are."""
    note = f"target.dtype auto is {dtype} on this machine\n" if asked == "auto" else ""
    if (dtype, kept_in) == ("bfloat16", "float32"):
        note += (
            "features.dtype is float32 and target.dtype bfloat16: the states are no more accurate than bfloat16, in "
            "twice its room; set target.dtype=float32 for accurate ones, or features.dtype=bfloat16\n"
        )
    return note


def read(recipe: Recipe, *, strict: bool) -> list[Example]:
    """The recipe's examples, after a table of what was kept and dropped."""
    examples, tally = tokenize_data(recipe, load_tokenizer(recipe), strict=strict)
    total, supervised = sum(len(e.tokens) for e in examples), sum(int(e.loss_mask.sum()) for e in examples)
    print(f"{tally.table()}\n{len(examples):,} examples, {total:,} tokens, {supervised / total:.0%} supervised")
    return examples


def load(recipe: Recipe, precision: str | None = None) -> Target:
    """The recipe's target, in the precision of a store that was begun."""
    section = recipe.target.model_dump()
    return Target.load(**(section if precision is None else {**section, "dtype": precision}))


def name_of(recipe: Recipe) -> dict[str, Any]:
    """What a recipe calls its target: all that can be compared where the target's files are not."""
    return recipe.target.model_dump(include={"path", "revision", "adapter"})


def examined(folder: Path) -> FeatureStore:
    """The store, serving only the shards whose every byte is right."""
    store = FeatureStore(folder, partial=True)
    faults = progress(store.faults(read=True), "verify", len(store.plan), unit="shards")
    store.serve_all_but({shard: fault for shard, fault in faults if fault})
    return store


def verify(folder: Path) -> None:
    """Read every byte back; what is broken ends the command as an error that names it."""
    store = examined(folder)
    if store.absent:
        raise ValueError(f"{store.describe_absent()}. The same command with --repair computes them anew, and only them")
    store.borrowed_folder()
    print(f"all {len(store.plan)} shards in {folder} hold what was written")


if __name__ == "__main__":
    script(main)
