"""Store the target's hidden states for the training conversations: `eagle extract RECIPE [key=value ...]`.

A run that was killed goes on where it was when the same command is given again, with any number of processes.
`--forecast` prints size and time and stops; `--verify` reads every byte back; `--repair` computes what is broken again;
`--strict` takes the first record that would be dropped as an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.read_once import read_examples
from eagle.core.examples import Example
from eagle.data.features import check_room, extract, forecast, plan_extraction, roles_of, world
from eagle.data.identity import identity, in_precision, tap_identity, target_name
from eagle.data.store import Absent, Damaged, FeatureStore
from eagle.data.stored_rows import SequenceSizes, TapRoles, parts_of
from eagle.device import best_device, fastest_dtype
from eagle.disk import lock_folder
from eagle.drafters import settings_of
from eagle.interrupts import interrupted_by_user
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line
from eagle.target.borrowed import save_borrowed, target_config
from eagle.target.loading import check_loadable
from eagle.target.target import Target


def main(argv: list[str]) -> None:
    """Fill, verify or forecast the recipe's feature store; every launched process does its share."""
    parser = command_line("eagle extract", __doc__.splitlines()[0])
    parser.add_argument(
        "--estimate",
        "--forecast",
        dest="forecast",
        action="store_true",
        help="only print the number of tokens, the disk space and the time",
    )
    parser.add_argument(
        "--verify", action="store_true", help="check every file of an existing store"
    )
    parser.add_argument("--repair", action="store_true", help="recompute only the damaged files")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop with an error instead of dropping a record",
    )
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    settings = settings_of(recipe.drafter.model_dump(), args.recipe)
    target = recipe.target
    config = target_config(target.path, target.revision, trust_remote_code=target.trust_remote_code)
    roles = roles_of(settings, config)
    if args.forecast:
        print_forecast(recipe, roles, strict=args.strict)
    elif not recipe.features.store:
        raise ValueError(
            f"{args.recipe} has no features.store: features are computed while training, none are stored"
        )
    elif args.verify:
        verify_store(Path(recipe.features.store))
    else:
        folder = Path(recipe.features.store)
        # The first process holds the lock for all of them.
        hint = "whole shards are kept, and the same command goes on"
        with interrupted_by_user(lambda: hint), lock_folder(folder, hold=world()[0] == 0):
            fill_store(recipe, folder, roles, repair=args.repair, strict=args.strict)


def print_forecast(recipe: Recipe, roles: TapRoles, *, strict: bool) -> None:
    """Print the tokens, bytes and time of an extraction."""
    examples = read_examples(recipe, strict=strict)
    target = load_target(recipe)
    tensors = parts_of(tap_identity(roles))
    sizes = sizes_of(examples)
    plan = plan_extraction(sizes, target, tensors, recipe.features)
    print(forecast(target, examples, sizes, plan, parts=tensors, dtype=recipe.features.dtype))


def fill_store(
    recipe: Recipe, folder: Path, roles: TapRoles, *, repair: bool, strict: bool
) -> None:
    """Compute this process's share of the absent shards; the first process prepares the store for all."""
    index, count, wait = world()
    target = None
    if index == 0:
        target = prepare_store(recipe, folder, identity(recipe, roles), repair, strict=strict)
    wait()
    store = FeatureStore(folder, partial=True)
    absent = sorted(store.absent)
    if index == 0:
        size = f"{store.bytes_per_token:,.0f} bytes a token"
        processes = f"{count} process" if count == 1 else f"{count} processes"
        print(f"{len(absent)} of {len(store.plan)} shards to compute, {size}, {processes}")
    # Nobody writes before everybody has seen which shards are absent.
    wait()
    if not repair:
        # A repair has just read every byte.
        present = [shard for shard in range(len(store.plan)) if shard not in store.absent][
            index::count
        ]
        is_shown = index == 0 and bool(present)
        for _ in progress(
            store.verify(present), "verify", len(present), unit="shards", show=is_shown
        ):
            pass
    share = absent[index::count]
    if share:
        target = target or load_target(recipe, store.identity["target"]["dtype"])
        tokens = sum(store.index["shard_tokens"][shard] for shard in share)
        for _ in progress(
            extract(target, store, share),
            "extract",
            tokens,
            unit="tokens",
            size=int,
            show=index == 0,
        ):
            pass
    wait()
    if index == 0:
        store = FeatureStore(folder)
        print(
            f"features of {len(store)} examples, taps {store.taps}, in {len(store.plan)} shards in {folder}"
        )


def prepare_store(
    recipe: Recipe, folder: Path, expected: dict[str, Any], repair: bool, strict: bool
) -> Target | None:
    """Create an absent store, or remove what a killed run left incomplete and what a repair finds broken."""
    target = None
    for unfinished in folder.glob("*.part"):
        unfinished.unlink()
    try:
        FeatureStore(folder, expected, partial=True).borrowed_folder()
    except (Absent, Damaged) as error:
        if isinstance(error, Damaged):
            if not repair:
                raise
            print(f"{error}; this is done now")
        target = create_store(recipe, folder, expected, strict=strict)
    if repair:
        store = check_shards(folder)
        if store.absent:
            print(store.describe_absent())
        else:
            print(f"nothing is broken in {folder}")
        # Shards that are absent are computed as in a first run.
        store.discard(list(store.absent))
    return target


def create_store(recipe: Recipe, folder: Path, expected: dict[str, Any], *, strict: bool) -> Target:
    """Tokenise and plan, and create the store without features yet; return the target that computes them."""
    # Reading the data may take long: a target that cannot be loaded is refused first.
    check_loadable(recipe.target.path, best_device(), recipe.target.revision)
    examples = read_examples(recipe, strict=strict)
    target = load_target(recipe)
    expected = in_precision(expected, fastest_dtype(best_device()))
    dtype = expected["target"]["dtype"]
    if recipe.target.dtype == "auto":
        print(f"target.dtype auto is {dtype} on this machine")
    if (dtype, recipe.features.dtype) == ("bfloat16", "float32"):
        print(
            "features.dtype is float32 and target.dtype bfloat16: the states are no more accurate than bfloat16, in "
            "twice its room; set target.dtype=float32 for accurate ones, or features.dtype=bfloat16"
        )
    sizes = sizes_of(examples)
    _, processes, _ = world()
    plan = plan_extraction(sizes, target, parts_of(expected), recipe.features, processes)
    store = FeatureStore.create(
        folder,
        examples,
        expected,
        plan,
        sizes=sizes,
        width=target.width_of(tuple(expected["taps"])),
        precision=str(target.model.dtype).removeprefix("torch."),
        target=target_name(recipe),
        conversations={"kept": examples.tally.kept, "dropped": dict(examples.tally.dropped)},
        borrowed=save_borrowed(folder, target.head, target.config),
    )
    check_room(store)
    return target


def sizes_of(examples: Sequence[Example]) -> SequenceSizes:
    """Return the sizes of all examples, each of which is read once."""
    each = progress(examples, "count tokens", len(examples), unit="examples")
    return SequenceSizes.of((example.loss_mask, example.shared) for example in each)


def load_target(recipe: Recipe, precision: str | None = None) -> Target:
    """Return the recipe's target, in the precision of a store if one is given."""
    section = recipe.target.model_dump()
    if precision is not None:
        section["dtype"] = precision
    return Target.load(**section)


def check_shards(folder: Path) -> FeatureStore:
    """Return the store, serving only the shards whose every byte is right."""
    store = FeatureStore(folder, partial=True)
    faults = progress(store.faults(read=True), "verify", len(store.plan), unit="shards")
    store.serve_all_but({shard: fault for shard, fault in faults if fault})
    return store


def verify_store(folder: Path) -> None:
    """Read every byte back; what is broken ends the command as an error that names it."""
    store = check_shards(folder)
    if store.absent:
        raise ValueError(
            f"{store.describe_absent()}. The same command with --repair computes only these again"
        )
    store.borrowed_folder()
    print(f"all {len(store.plan)} shards in {folder} hold what was written")


if __name__ == "__main__":
    script(main)
