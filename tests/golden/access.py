"""Reach what the golden record needs inside the project: a change of internal names is made here alone.

Everything else in this folder uses public calls: `generate`, `load_drafter`, `beam_search`, recipes and command lines.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from data_prep.extract import main as extract_command
from eagle import Budget, Target, load_drafter
from eagle.__main__ import VERBS, run_verb
from eagle.conformance.trial import make_head
from eagle.core import verify
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, collate
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.data import stored_rows
from eagle.data.features import LiveFeatures, taps_of
from eagle.data.store import FeatureStore
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.counts import CountDrafter
from eagle.drafters.parts import objectives
from eagle.drafters.parts.scoring import ChildScorer
from eagle.drafters.parts.validation import figures
from eagle.drafters.recurrent import feature_head
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import read_head
from eagle.recipe import Recipe
from eagle.training.plan import Plan
from eval.comparison.compare_plan import Comparison
from recipes.tiny import train_tokenizer
from recipes.tiny.corpora import draw_stories
from recipes.train_eagle import main as train_command
from recipes.train_medusa2 import main as train_jointly_command
from tests import families, foreign_heads
from tests.formats.every_layout import EVERY as FOREIGN
from tests.tables import some_tables
from tests.trained import finished, launched

__all__ = [
    "FOREIGN",
    "PUBLISHED_TREE",
    "TREES",
    "VERBS",
    "chain_paths",
    "extract_command",
    "finished",
    "launched",
    "load_head",
    "save_head",
    "train_command",
    "train_jointly_command",
]

ROOT = Path(__file__).parents[2]
# small, so that random drafts are now and then right
VOCAB_SIZE = 16
TREES = {"chain": chain_paths(3), "tree": PUBLISHED_TREE}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# conversations that the tokenizer is made of
TOKENIZER_STORIES = 600
# and those of them to learn from
STORIES = 40
# where the default taps are those of deeper targets
ON_TWO_LAYERS = {"taps": [0, 1, -1]}

TRAINED = [name for name, method in DRAFTERS.items() if issubclass(method, TrainableDrafter)]
FAMILIES = [*families.FAMILIES, *families.OTHER_MEANS]
UNTRAINED = [name for name in DRAFTERS if name not in TRAINED]
# every method as it is by default, and switches that change what is drafted
DECODED: dict[str, dict[str, Any]] = {
    **{name: {"kind": name} for name in TRAINED},
    "eagle3": {
        "kind": "eagle3",
        **ON_TWO_LAYERS,
    },
    "peagle": {
        "kind": "peagle",
        **ON_TWO_LAYERS,
    },
    "eagle3.1": {
        "kind": "eagle3",
        "fc_norm": True,
        "norm_output": True,
        "draft_vocab": 12,
        **ON_TWO_LAYERS,
    },
    "eagle3, window": {
        "kind": "eagle3",
        "window": {"sinks": 1, "recent": 3},
        **ON_TWO_LAYERS,
    },
    "eagle3, normed residual": {
        "kind": "eagle3",
        "norm_before_residual": True,
        **ON_TWO_LAYERS,
    },
    "hydra++": {
        "kind": "hydra",
        "layers": 2,
        "prefix": True,
        "regression": 0.1,
    },
    "mlp_speculator, tied": {
        "kind": "mlp_speculator",
        "tie_weights": True,
        "scale_input": True,
    },
    "dflash, causal": {
        "kind": "dflash",
        "causal": True,
        "decay": None,
    },
    "dspark, domino": {
        "kind": "dspark",
        "markov": "domino",
    },
    "xpress, from the anchor": {
        "kind": "xpress",
        "sample_from_anchor": True,
        "passes": 2,
    },
}
# and switches that change what is learned or written
HEADS = {
    **DECODED,
    "dflash, window": {
        "kind": "dflash",
        "window": {"recent": 16},
        "window_blocks": (0, 2),
        "causal": "window",
    },
    "dspark, draft vocabulary": {
        "kind": "dspark",
        "draft_vocab": 12,
    },
    "xpress, draft vocabulary": {
        "kind": "xpress",
        "draft_vocab": 12,
        "divisor": "reached",
    },
    "eagle1 as published": {
        "kind": "eagle1",
        "fc_bias": False,
        "noise_as_published": True,
    },
    "hass without bias": {
        "kind": "hass",
        "fc_bias": False,
    },
    "eagle3, draft vocabulary": {
        "kind": "eagle3",
        "draft_vocab": 12,
        **ON_TWO_LAYERS,
    },
    "eagle3, hybrid loss": {
        "kind": "eagle3",
        "loss": "hybrid",
        "train_lm_head": False,
        **ON_TWO_LAYERS,
    },
    "eagle3, reverse KL": {
        "kind": "eagle3",
        "loss": "reverse_kl",
        "regression": 0.5,
        **ON_TWO_LAYERS,
    },
    "medusa, tokens": {
        "kind": "medusa",
        "lm_head": "target",
        "loss": "tokens",
        "weights": "falling",
    },
    "blockwise, drawn": {
        "kind": "blockwise",
        "drawn": True,
        "loss": "tokens",
    },
    "dflash, d_pace": {
        "kind": "dflash",
        "blocks": 1,
        "slots": 4,
        "anchors": 6,
        "loss": "tokens",
        "d_pace": True,
    },
    "draft_model, jsd": {
        "kind": "draft_model",
        "divergence": "jsd",
    },
}


# -- the target and its drafters --------------------------------------------------------------------------------------


def fill_exactly(module: nn.Module, seed: int, largest: float = 0.5) -> None:
    """Replace every weight by a multiple of a power of two, which no machine rounds; `largest` is of matrices."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            drawn = torch.randint(-512, 513, weight.shape, generator=generator)
            share = drawn.to(weight.dtype) / 512
            if weight.dim() > 1:
                weight.copy_(share * largest)
            else:
                # norms, which start at 1, and biases, which start near 0
                weight.copy_(weight.round() + share / 8)


def make_target(vocab_size: int = VOCAB_SIZE, **overrides: Any) -> Target:
    """Return a target in fp64, of two layers unless it is said otherwise; the same on every machine."""
    ends = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    sizes = {
        **SHAPE,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        **ends,
        **overrides,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes))
    fill_exactly(model, seed=7)
    return Target(model.double().eval())


def make_family(name: str) -> Target:
    """Return a target of one of the families that the decoder is held to, in fp64."""
    # some weights are what the model's class samples
    torch.manual_seed(0)
    model = families.build(name, torch.float64)
    # the other implementations know no fp64
    model.set_experts_implementation("eager")
    return Target(model)


def make_counting(target: Target) -> Any:
    """Return a drafter that counted pairs of tokens."""
    return DRAFTERS["bigram"](some_tables(target.vocab_size))


def make_knowing(text: list[int]) -> Any:
    """Return a drafter that knows a text, and drafts its next tokens among wrong ones."""
    return families.PlantedTrees(text)


def new_head(name: str, target: Target) -> Any:
    """Return an untrained head with one of the settings in `HEADS`, as its method makes it."""
    settings = dict(HEADS[name])
    # engines read the default taps alone
    if target.config.num_hidden_layers > 2:
        settings.pop("taps", None)
    if "draft_vocab" not in settings:
        return make_head(settings.pop("kind"), target, **settings)
    # which tokens a head may say is counted in texts
    torch.manual_seed(0)
    texts = [torch.tensor([*range(VOCAB_SIZE), *range(0, VOCAB_SIZE, 2)])]
    return DRAFTERS[settings["kind"]].for_target(
        settings_of(settings, name), target.config, target.head, texts
    )


def exact_head(name: str, target: Target) -> Any:
    """Return a head whose every weight is the same number on every machine."""
    head = new_head(name, target)
    fill_exactly(head, seed=11, largest=0.125)
    return head


def make_drafter(name: str, target: Target, folder: Path) -> Any:
    """Return a drafter ready to draft; one with weights has been saved and loaded."""
    if name in HEADS:
        save_head(folder, new_head(name, target), "recipe", {})
        return load_drafter(folder, target)
    if issubclass(DRAFTERS[name], CountDrafter):
        return DRAFTERS[name](some_tables(target.vocab_size))
    return load_drafter(name, target)


# -- training ---------------------------------------------------------------------------------------------------------


def make_batches(name: str, target: Target) -> list[Any]:
    """Return batches of three texts in turn, with all that the head of this name reads, in fp64."""
    settings = settings_of(HEADS[name], "golden")
    taps = taps_of(settings, target.config)
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in (24, 17, 30, 9):
        tokens = torch.randint(target.vocab_size, (length,), generator=generator)
        positions = torch.arange(length)
        # an answer with a gap, as two turns of a conversation have it
        examples.append(Example(tokens, (positions >= 4) & (positions % 7 != 6)))
    live = LiveFeatures(target, examples, {"taps": taps, "dtype": "float32"})
    groups = [[0, 1, 2], [1, 3, 0], [2, 3, 1]]
    batches = [collate(live.read(group), live.taps) for group in groups]
    return [replace(batch, features=batch.features.double()) for batch in batches]


def loss_terms(head: Any, batch: Any, target: Target, progress: float) -> dict[str, Tensor]:
    """Return the terms of the loss; `total` is what training minimises."""
    terms: dict[str, Tensor] = head(replace(batch, progress=progress), target.head)
    return terms


def validation_figures(head: Any, batch: Any, target: Target) -> dict[str, float]:
    """Return what validation tells of a head on one batch."""
    with torch.no_grad():
        found: dict[str, float] = figures(head.eval().validate(batch, target.head, TREES))
    return found


# -- a folder of a target, as stages read it --------------------------------------------------------------------------


def write_target(folder: Path) -> None:
    """Write a target with its tokenizer to `target/`, and conversations to `train.jsonl`; nothing is learned."""
    folder.mkdir(parents=True, exist_ok=True)
    stories = draw_stories(seed=0)
    records = [next(stories) for _ in range(TOKENIZER_STORIES)]
    tokenizer = train_tokenizer.train(records, folder / "target")
    ends = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    target = make_target(
        len(tokenizer),
        num_hidden_layers=4,
        max_position_embeddings=2048,
        **ends,
    )
    with torch.no_grad():
        # so that some tokens are likelier than others, and there is much to learn
        target.model.lm_head.weight *= 2
    target.model.float().save_pretrained(folder / "target")
    lines = [json.dumps(record) + "\n" for record in records[:STORIES]]
    (folder / "train.jsonl").write_text("".join(lines))


def recipe_arguments(folder: Path, *overrides: str) -> list[str]:
    """Return the command line of a stage: the tiny recipe on what `write_target` wrote."""
    return [
        str(ROOT / "recipes/tiny/eagle1.yaml"),
        f"target.path={folder / 'target'}",
        "target.dtype=float64",
        f"data.train={folder / 'train.jsonl'}",
        "data.max_length=96",
        f"data.cache={folder / 'cache'}",
        "train.dtype=float32",
        *overrides,
    ]


def read_store(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tokens, masks and features of all texts in a store, each by the number of the text."""
    store = FeatureStore(folder)
    examples = list(enumerate(store.read(range(len(store)))))
    features = {
        str(number): example.features
        for number, example in examples
        if example.features is not None
    }
    return {
        "tokens": {str(number): example.tokens for number, example in examples},
        "masks": {str(number): example.loss_mask for number, example in examples},
        "features": features,
        "taps": {"taps": torch.tensor(store.taps)},
    }


# -- files ------------------------------------------------------------------------------------------------------------


def config_of_library() -> dict[str, Any]:
    """Return the keys that transformers writes into every config, with the values that say nothing."""
    config: dict[str, Any] = PreTrainedConfig().to_dict()
    return config


def engines() -> list[str]:
    """Return the names that `--to` of an export takes."""
    return list(EXPORTERS)


def export_head(head: Any, target: Target, engine: str, folder: Path) -> bool:
    """Write a head for an engine; False if the engine's exporter refuses such a head."""
    try:
        export(head.bind(target.head), target.config, engine, folder)
    except ValueError:
        return False
    return True


def write_foreign(name: str, folder: Path) -> None:
    """Write a head of random weights as another tool does, one of those named in `FOREIGN`."""
    config, tensors = FOREIGN[name]
    # random numbers differ between processors in their last bits: few are left, which are the same on all
    exact = {}
    for key, tensor in tensors.items():
        exact[key] = (tensor * 16).round() / 16 if tensor.is_floating_point() else tensor
    foreign_heads.write(folder, (config, exact))


def import_head(folder: Path, target: str | None = None) -> Any:
    """Return the head in a folder that another tool's layout is in; None if it is refused."""
    try:
        return read_head(folder, target)
    except ValueError:
        return None


# -- faults that the record must see ---------------------------------------------------------------------------------


def plant_sharper_scores(patch: pytest.MonkeyPatch) -> None:
    """Scale the scores by which the nodes of different levels of a draft tree are compared."""
    score = ChildScorer.score

    def planted(scorer: Any, seeds: Any, depth: int, logits: Tensor) -> Any:
        scores, probs = score(scorer, seeds, depth, logits)
        return (scores if seeds[0].noise is not None else 2 * scores), probs

    patch.setattr(ChildScorer, "score", planted)


def plant_lower_floors(patch: pytest.MonkeyPatch) -> None:
    """Accept tokens of half the probability that typical acceptance asks for."""
    floors = verify.typical_floors
    patch.setattr(verify, "typical_floors", lambda probs, *bounds: floors(probs, *bounds) / 2)


def plant_shifted_target(patch: pytest.MonkeyPatch) -> None:
    """Let the regression of EAGLE-1 and HASS learn the state one token further."""
    regression = objectives.feature_regression

    def planted(predicted: Tensor, true: Tensor, weights: Tensor) -> Tensor:
        return regression(predicted, true.roll(-1, 0), weights)

    patch.setattr(feature_head, "feature_regression", planted)


def plant_swapped_tensors(patch: pytest.MonkeyPatch, engine: str) -> None:
    """Let the exporter of an engine write keys where values belong, and values where keys do."""
    write = EXPORTERS[engine]

    def planted(head: Any, config: Any) -> Any:
        layout = write(head, config)
        other = {"k_proj": "v_proj", "v_proj": "k_proj"}
        renamed = {
            re.sub("[kv]_proj", lambda found: other[found[0]], key): layout.tensors[key]
            for key in layout.tensors
        }
        return replace(layout, tensors=renamed)

    patch.setitem(EXPORTERS, engine, planted)


def plant_higher_rates(patch: pytest.MonkeyPatch) -> None:
    """Raise every learning rate by a thousandth."""
    rate = Plan.lr
    patch.setattr(Plan, "lr", lambda plan, step: 1.001 * rate(plan, step))


def plant_lost_moments(patch: pytest.MonkeyPatch) -> None:
    """Let a run that goes on begin with an optimizer that has forgotten."""
    patch.setattr(torch.optim.Optimizer, "load_state_dict", lambda optimizer, state: None)


def plant_coarser_float8(patch: pytest.MonkeyPatch) -> None:
    """Use half of the range of float8 in stores."""
    patch.setattr(stored_rows, "MAX_FLOAT8", 224.0)


def plant_other_default(patch: pytest.MonkeyPatch) -> None:
    """Let a tree have eleven nodes by default."""
    _, *others = Budget.__init__.__defaults__ or ()
    patch.setattr(Budget.__init__, "__defaults__", (11, *others))


# -- the command line -------------------------------------------------------------------------------------------------


def help_text(verb: str) -> str:
    """Return what `eagle VERB --help` prints, by the verb's own parser."""
    printed = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "200"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            run_verb(verb, VERBS[verb], ["--help"])
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return printed.getvalue()


def shipped_recipes() -> tuple[list[Path], list[Path]]:
    """Return the files of all recipes, and those of all comparisons."""
    files = sorted((ROOT / "recipes").glob("*/*.yaml"))
    comparisons = [file for file in files if file.parent.name == "compare"]
    recipes = [file for file in files if file.parent.name not in ("compare", "accelerate")]
    return recipes, comparisons


def resolve_recipe(file: Path) -> dict[str, Any]:
    """Return all keys of a recipe with their values, those of its drafter by its method."""
    recipe = Recipe.load(file)
    values: dict[str, Any] = recipe.model_dump(mode="json")
    values["drafter"] = settings_of(recipe.drafter.model_dump(), file.name).model_dump(mode="json")
    return values


def resolve_comparison(file: Path) -> dict[str, dict[str, Any]]:
    """Return the recipe of each arm of a comparison, without the dtypes that it takes from the machine."""
    arms = {}
    for arm in Comparison.load(file).arms.values():
        values = arm.recipe.model_dump(mode="json")
        for section in ("target", "train"):
            values[section].pop("dtype")
        arms[arm.name] = values
    return arms


def default_recipe() -> dict[str, Any]:
    """Return all keys of a recipe that says no more than it must, with every optional section."""
    values: dict[str, Any] = {
        "target": {"path": "TARGET"},
        "data": {"train": "DATA"},
        "regenerate": {"source": "SOURCE", "out": "DATA"},
        "drafter": {"kind": "none"},
        "train": {"out": "OUT", "on_policy": {}},
        "joint": {},
    }
    return Recipe.parse(values, "golden").model_dump(mode="json")


def default_settings(name: str) -> dict[str, Any]:
    """Return the settings of a method of which a recipe says nothing."""
    values: dict[str, Any] = settings_of({"kind": name}, "golden").model_dump(mode="json")
    return values
