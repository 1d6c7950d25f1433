"""Open the features that a recipe trains on: stored, computed while training, or of the head's own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, Features
from eagle.data.features import LiveFeatures, roles_of
from eagle.data.identity import (
    MASK_RULES,
    data_identity,
    identity,
    in_precision,
    tap_identity,
    target_name,
)
from eagle.data.on_policy import OnPolicyFeatures
from eagle.data.own_drafts import OwnDrafts
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import TapRoles
from eagle.device import best_device
from eagle.drafters import DRAFTERS
from eagle.recipe import Recipe
from eagle.target.borrowed import Borrowed, is_local_model, load_borrowed
from eagle.target.target import Target


def open_features(
    recipe: Recipe,
    settings: Any,
    read_examples: Callable[[], Sequence[Example]],
    *,
    main: bool = True,
) -> tuple[Target | Borrowed, Features]:
    """Return the target and the features of its states.

    Args:
        recipe: Where target, data and features are.
        settings: Of the drafter, which decide the taps.
        read_examples: Returns the tokens of the data. It is called where features are computed while training.
        main: Whether this is the main process, whose comparison of all weights is enough for all processes.

    Returns:
        The target, of which only embedding and LM head are loaded if nothing needs more, and the features.
    """
    decodes = recipe.train.decode or recipe.train.on_policy
    if recipe.features.store and not decodes and not DRAFTERS[settings.kind].reads.weights:
        store = FeatureStore(recipe.features.store)
        folder = store.borrowed_folder()
        if folder:
            borrowed = load_borrowed(folder, best_device())
            if main:
                store.expect(_expected_identity(recipe, roles_of(settings, borrowed.config), store))
            return borrowed, store
    # from here on the whole target is in memory
    shard = recipe.features.shard_target
    if shard and not recipe.features.store and recipe.data.images is not None:
        raise ValueError(
            "features.shard_target and data.images exclude one another: texts with images are read one by one, and all "
            "processes must read together; expected features.store, or a target that one device holds"
        )
    target = Target.load(**recipe.target.model_dump(), device="cpu" if shard else "auto")
    if shard:
        target.shard()
    roles = roles_of(settings, target.config)
    # a default set may lie outside: the config of some types counts other layers
    target.check_taps(roles.taps)
    expected = identity(recipe, roles)
    if recipe.features.store:
        return target, FeatureStore(recipe.features.store, expected)
    expected = in_precision(expected, target.model.dtype)
    return target, LiveFeatures(target, read_examples(), expected, recipe.features.batch_tokens)


def follow_head(
    recipe: Recipe,
    settings: Any,
    target: Target | Borrowed,
    features: Features,
    head: Any,
    *,
    weights_split: bool,
) -> Features:
    """Return the features that the head learns from.

    They are those given, unless the head samples answers (`drafter.samples: own`) or helps to write them by its drafts
    (`train.on_policy`).
    """
    # the settings of most methods have no such key
    samples_own = getattr(settings, "samples", "data") == "own"
    if not samples_own and recipe.train.on_policy is None:
        return features
    if recipe.data.images is not None:
        raise ValueError(
            "data.images is set, and answers that are written while training are read as text alone: leave out "
            "train.on_policy and drafter.samples=own, or data.images"
        )
    if recipe.train.on_policy is not None:
        return _with_drafts(recipe, target, features, head, weights_split=weights_split)
    if weights_split:
        # processes read weights together, and answers differ
        raise ValueError(
            "drafter.samples is own, which needs all weights on every process, and ZeRO-3 and train.shard_head split "
            "them: launch with recipes/accelerate/ddp.yaml or zero2.yaml, without train.shard_head"
        )
    if not isinstance(features, LiveFeatures):
        raise ValueError(
            f"drafter.samples is own, and features.store is {recipe.features.store}: what the draft says changes with "
            "every step, expected features.store=null, which computes features while training"
        )
    return OnPolicyFeatures(features, head)


def _with_drafts(
    recipe: Recipe, target: Target | Borrowed, features: Features, head: Any, *, weights_split: bool
) -> OwnDrafts:
    """Return the features of a run that learns from the head's own drafts."""
    policy = recipe.train.on_policy
    assert policy is not None
    if type(head).draft_levels is TrainableDrafter.draft_levels:
        raise ValueError(
            f"train.on_policy replays drafts by `draft_levels`, which {type(head).__name__} does not have: leave it "
            "out; a draft model has drafter.samples=own instead"
        )
    if weights_split or recipe.features.shard_target or not isinstance(target, Target):
        raise ValueError(
            "train.on_policy decodes with the head, which needs all weights of head and target on every process: "
            "launch with recipes/accelerate/ddp.yaml or zero2.yaml, without train.shard_head and features.shard_target"
        )
    if recipe.train.stem is not None:
        raise ValueError(
            "train.stem and train.on_policy exclude one another: what is written depends on the run's head"
        )
    return OwnDrafts(features, target, head, policy)


def _expected_identity(recipe: Recipe, roles: TapRoles, store: FeatureStore) -> dict[str, Any]:
    """Return the identity that a store must have; without the target's files only its name is compared."""
    if is_local_model(recipe.target.path, recipe.target.revision):
        return identity(recipe, roles)
    name = target_name(recipe)
    made_from = store.index["made"]["target"]
    if name != made_from:
        raise ValueError(
            f"the target {name} is not here, and {store.folder} was made from {made_from}: name that one, or the "
            "folder where this one lies"
        )
    print(
        f"no target at {recipe.target.path}: its files could not be compared with what made {store.folder}"
    )
    # what needs the target's files is taken from the store, and so is equal
    stored = store.identity
    # the store's folder stands for the target's: `data_identity` finds no tokenizer there, and downloads nothing
    store_as_target = recipe.target.model_copy(update={"path": str(store.folder)})
    # a template that the recipe names is compared, one that comes with the target is not
    uncompared = ["tokenizer"] if recipe.data.template else ["tokenizer", "template"]
    return {
        **data_identity(recipe.model_copy(update={"target": store_as_target})),
        **{key: stored[key] for key in uncompared},
        "masks": {"rules": MASK_RULES, "stop_ids": stored.get("masks", {}).get("stop_ids")},
        "target": {**stored["target"], "dtype": recipe.target.dtype},
        **tap_identity(roles),
        "dtype": recipe.features.dtype,
    }
