"""What training starts from: the features of a recipe, stored or computed while training, and the first head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, Features
from eagle.data.features import LiveFeatures, roles_of
from eagle.data.identity import (
    MASK_RULES,
    data_identity,
    differences,
    identity,
    in_precision,
    tap_identity,
    target_name,
)
from eagle.data.on_policy import OnPolicyFeatures, OwnDrafts
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import TapRoles
from eagle.device import best_device
from eagle.drafters import DRAFTERS
from eagle.drafters.parts.reduced_vocab import load_draft_vocab
from eagle.formats.checkpoint import load_head
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
    """Return the target and the features that a recipe trains on.

    Args:
        recipe: It says where target, data and features are.
        settings: The settings of the drafter, which decide the taps: the layers whose states are stored or computed.
        read_examples: Returns the tokens of the data. It is called only if features are computed while training.
        main: Whether this is the main process, whose comparison of the target's files is enough for all processes.

    Returns:
        The target, of which only embedding and LM head are loaded if nothing needs more, and the features.
    """
    # the whole target is needed to decode during training, to compute features, and by methods that read its weights
    decodes = recipe.train.decode or recipe.train.on_policy
    if recipe.features.store and not decodes and not DRAFTERS[settings.kind].reads.weights:
        store = FeatureStore(recipe.features.store)
        # the target's embedding and LM head, if the store has kept them
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
            "features.shard_target and data.images exclude one another: examples with images are read one by one, and "
            "all processes must read together; expected features.store, or a target that one device holds"
        )
    target = Target.load(**recipe.target.model_dump(), device="cpu" if shard else "auto")
    if shard:
        target.shard()
    # the taps that the head reads at every slot, and those that it learns from at supervised ones
    roles = roles_of(settings, target.config)
    # even default taps may not exist: the config of some model types counts other layers
    target.check_taps(roles.taps)
    expected = identity(recipe, roles)
    if recipe.features.store:
        return target, FeatureStore(recipe.features.store, expected)
    # a store keeps the precision in which it was computed, and features that are computed now have the target's
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
    """Return the features (examples with the target's hidden states) that the head learns from.

    They are `features` itself, unless the head samples answers (`drafter.samples: own`) or the target writes answers
    with the head's drafts (`train.on_policy`).

    Args:
        recipe: The recipe of the run.
        settings: The settings of the drafter.
        target: The target, as `open_features` returned it.
        features: The features that it returned.
        head: The head that is trained.
        weights_split: Whether each process holds only a share of the head's weights, so that it cannot decode.
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
        # a forward of split weights needs all processes at once, and their answers differ in length
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
    """Return the features of a run with `train.on_policy`, whose answers the target writes with the head's drafts.

    Settings that exclude it are refused. `features` are those of the data. With `weights_split` no process holds all
    weights of the head, so that it cannot decode.
    """
    policy = recipe.train.on_policy
    assert policy is not None
    # the method has not defined it
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
    """Return the identity that a store must have for a recipe.

    Where the target's files are not on this machine, its name is compared instead, and the identity takes from the
    store whatever those files would decide.

    Args:
        recipe: It names the target and the data.
        roles: The taps (target layers) that training needs: of the head's inputs, and of its teacher.
        store: The store that is checked, for what cannot be computed here.
    """
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
    stored = store.identity
    # with the store's folder in place of the target's, `data_identity` finds no tokenizer and downloads nothing
    store_as_target = recipe.target.model_copy(update={"path": str(store.folder)})
    # a template file that the recipe names can be compared, one that comes with the target cannot
    uncompared = ["tokenizer"] if recipe.data.template else ["tokenizer", "template"]
    return {
        **data_identity(recipe.model_copy(update={"target": store_as_target})),
        **{key: stored[key] for key in uncompared},
        "masks": {"rules": MASK_RULES, "stop_ids": stored.get("masks", {}).get("stop_ids")},
        "target": {**stored["target"], "dtype": recipe.target.dtype},
        **tap_identity(roles),
        "dtype": recipe.features.dtype,
    }


def first_head(
    recipe: Recipe, settings: Any, target: Target | Borrowed, features: Features
) -> TrainableDrafter:
    """Return the head that training starts from: a new one, or one with the weights of `train.init`.

    The head of `train.init` must have the same network and sizes. Its attention window may differ, because a window
    changes no weights.

    Args:
        recipe: The recipe of the run.
        settings: The settings of the drafting method, checked by it.
        target: Its config, embedding and LM head fix the head's sizes.
        features: Its supervised tokens are counted for a draft vocabulary.
    """
    draft_vocab = getattr(settings, "draft_vocab", None)
    if isinstance(draft_vocab, str):
        # the result is not used here: the call refuses a vocabulary file that was made with another tokenizer
        load_draft_vocab(draft_vocab, {"tokenizer": features.identity["tokenizer"]})
    method = DRAFTERS[settings.kind]
    # only methods that read the target's weights take this argument
    weights = {"weights": target.tensor} if method.reads.weights else {}
    head: TrainableDrafter = method.for_target(
        settings, target.config, target.head, _supervised_tokens(features), **weights
    )
    if recipe.train.init is None:
        return head
    initial = load_head(recipe.train.init)
    wrong = []
    # (name, value in the head of `train.init`, value in the new one) of all that differs
    differing = differences(_describe_network(initial), _describe_network(head))
    for name, found, needed in differing:
        wrong.append(f"{name}: {found!r}, needed {needed!r}")
    if wrong:
        raise ValueError(
            f"the head in {recipe.train.init} does not fit: {'; '.join(wrong)}. Train without train.init"
        )
    head.load_state_dict(initial.state_dict())
    return head


def _supervised_tokens(features: Features) -> Iterator[Tensor]:
    """Yield the supervised tokens (those of answers) of every example; a draft vocabulary is made of frequent ones."""
    for index in range(len(features)):
        tokens, loss_mask = features.tokens_and_mask(index)
        yield tokens[loss_mask]


def _describe_network(head: TrainableDrafter) -> dict[str, Any]:
    """Return what two heads must have in common to exchange weights: network, sizes, and shapes of all weights."""
    shapes = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    # the window may differ, so all windows compare as None
    return {**head.network, "window": None, **head.shape.to_dict(), **shapes}
