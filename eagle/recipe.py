"""Recipes: typed sections, read from YAML with dotted overrides."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from eagle.shipped import find_recipe


class Section(BaseModel):
    """A part of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSection(Section):
    """The frozen model that a head is made for."""

    path: str
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    adapter: str | None = None  # a LoRA adapter, merged at load
    device_map: str | None = None  # "auto" spreads a target that no single device holds


class DataSection(Section):
    """The conversations to learn from."""

    train: str  # a file, a folder of files, or a hub dataset
    heldout: str | None = None
    split: str = "train"  # of a hub dataset
    revision: str | None = None  # of a hub dataset; pinned, a change of it is noticed
    limit: int | None = Field(None, ge=1)
    max_length: int = Field(2048, ge=8)
    turns: Literal["all", "last"] = "all"  # which answers are learned
    template: str | None = None  # a Jinja file, for tokenizers without a chat template or with a wrong one
    template_kwargs: dict[str, Any] = {}  # for every render: enable_thinking, reasoning_effort, a date


class RegenerateSection(Section):
    """Replacing the data's answers by the target's own."""

    source: str  # the conversations whose answers are replaced; `data.train` then names `out`
    out: str
    endpoint: str | None = None  # an OpenAI-compatible server, as http://localhost:8000/v1; without, decode here
    in_flight: int = Field(32, ge=1)  # requests at a time
    batch_size: int = Field(16, ge=1)  # conversations at a time, without an endpoint
    drafter: str = "none"  # without an endpoint: a method, a head's folder, or several by commas; the answers are equal
    max_tokens_in_cache: int | None = Field(None, ge=1)  # of all conversations at a time, padding included
    max_new_tokens: int = Field(1024, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0
    keep_truncated: bool = False  # learn from answers that were cut off, too


class FeaturesSection(Section):
    """Where the target's hidden states are kept, and how."""

    store: str | None = None  # without: computed while training
    dtype: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    shard_bytes: int = Field(1_000_000_000, ge=1)
    batch_tokens: int | None = Field(None, ge=1)  # slots of one forward; by default what suits the device
    shard_target: bool = False  # computed while training: by a target whose layers are spread over all processes


class DrafterSection(BaseModel):
    """Which method; the other keys are that method's settings, which it checks."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str


class TrainSection(Section):
    """One training run."""

    out: str
    init: str | None = None  # a head to start from, instead of fresh weights
    processes: int | None = Field(None, ge=1)  # refused if another number was started
    compile: bool = False  # parts of the head, by torch.compile
    shard_head: bool = False  # weights, gradients and moments spread over all processes
    epochs: int = Field(1, ge=1)
    max_steps: int | None = Field(None, ge=1)
    batch_size: int = Field(4, ge=1)  # conversations a step, over all processes
    accumulation: int = Field(1, ge=1)  # parts in which a process takes its share of a step
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the products; weights stay fp32
    lr: float = Field(3e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(0.5, gt=0)
    clip_by: Literal["norm", "value"] = "norm"
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    schedule_steps: int | None = Field(None, ge=1)  # that the schedule is made for; without, those of the run
    warmup: float = Field(0.05, ge=0)  # a share of these steps below 1, else steps
    final_lr: float = Field(0.0, ge=0, le=1)  # where the schedule ends, a share of lr
    gate: Literal["predicted", "read"] = "predicted"  # a slot counts if the token that it predicts (or reads) does
    seed: int = 0
    validation: float = Field(0.05, ge=0, lt=1)  # share of the conversations that is held out
    validate_every: int | None = Field(None, ge=1)  # steps; without, once an epoch
    decode: int = Field(0, ge=0)  # prompts of eval.prompts that are decoded at each validation
    checkpoint_every: int | None = Field(None, ge=1)  # steps; without, once an epoch
    keep: int = Field(2, ge=1)  # checkpoints
    wandb: str | None = None  # a project


class JointSection(Section):
    """Training a target together with heads, by `recipes/train_medusa2.py`: what comes out is another target."""

    loss: Literal["kl", "tokens"] = "kl"  # of the target: from what it was, or the text's own next token
    heads: float = Field(0.01, gt=0)  # what the heads' loss counts beside that
    rise: bool = True  # from 0, by a sine over the run
    head_lr: float = Field(1.0, gt=0)  # of the heads' matrices, in units of train.lr
    rank: int = Field(32, ge=1)  # of the adapters, on all linear layers but the LM head
    alpha: int = Field(16, ge=1)
    dropout: float = Field(0.05, ge=0, lt=1)  # of what an adapter reads


class BudgetSection(Section):
    """How much is drafted in a cycle; what is left out follows from `paths`, else from the defaults of `Budget`."""

    nodes: int | None = Field(None, ge=0)
    depth: int | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=0)
    paths: tuple[tuple[int, ...], ...] | None = None  # a fixed shape: for every node the ranks on its way
    draw: Literal["noise", "likeliest", "sampled"] | None = None  # of children, where the target samples
    sharpness: float | None = Field(None, gt=0)  # of trees without paths: 1 is EAGLE-2's rule


class MeasuredSection(Section):
    """A drafter that is measured."""

    head: str | None = None  # a folder, a hub id, or the name of a method without weights; without, the run's own
    options: dict[str, Any] = {}  # of methods without weights, as `load_drafter` takes them
    budget: BudgetSection | None = None  # without, that of the head, else nodes, depth and top_k of `eval`


class EvalSection(Section):
    """What to decode, with which drafters, and under which limits."""

    prompts: str | dict[str, str]  # conversations or questions: a file, a folder or a hub dataset; several by name
    split: str = "train"  # of a hub dataset
    count: int = Field(8, ge=1)  # of each set, evenly over its tasks
    max_new_tokens: int = Field(64, ge=1)
    temperatures: tuple[float, ...] = Field((0.0,), min_length=1)
    seeds: tuple[int, ...] = Field((0,), min_length=1)  # where the target samples
    drafters: dict[str, MeasuredSection] = {}  # beside `none`; by default ngram and the head of the run
    nodes: int = Field(8, ge=0)
    depth: int = Field(4, ge=0)
    top_k: int = Field(4, ge=0)
    costs: bool = False  # measure bare forwards too, for modelled time
    goodput_policy: bool = False  # measure each drafter once more, with draft lengths that adapt
    batch_size: tuple[PositiveInt, ...] = Field((1,), min_length=1)  # texts at a time: a number, or several in turn
    max_tokens_in_cache: int | None = Field(None, ge=1)  # of a batch, padding included

    @field_validator("batch_size", mode="before")
    @classmethod
    def _as_sizes(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value


class Recipe(Section):
    """One run, from conversations to report."""

    target: TargetSection
    data: DataSection
    regenerate: RegenerateSection | None = None
    features: FeaturesSection
    drafter: DrafterSection
    train: TrainSection
    eval: EvalSection
    joint: JointSection | None = None

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """A recipe from a file, or from one that comes with eagle; another target moves its files to its own folder."""
        values = yaml.safe_load(find_recipe(path).read_text())
        original = copy.deepcopy(values)
        for override in overrides:
            lay_over(values, override)
        overridden = {override.partition("=")[0] for override in overrides}
        return cls.parse(_move_to_target(values, original, overridden), str(path))

    @classmethod
    def parse(cls, values: Any, source: str) -> Recipe:
        """A recipe from plain values; the error names every mistake."""
        return parse_section(cls, values, source)

    def dump(self) -> str:
        """The recipe as YAML, with every default."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def command_line(program: str, about: str | None) -> argparse.ArgumentParser:
    """The command line that all stages share: a recipe and its overrides."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("recipe", metavar="RECIPE", help="a file, or a name that `eagle recipes` lists")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid over the recipe")
    return parser


def parse_section(model: type[BaseModel], values: Any, source: str) -> Any:
    """The values as an instance of `model`; the error names each mistake, and the nearest key to an unknown one."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(model, mistake, source) for mistake in error.errors())) from None


def _explain(model: type[BaseModel], mistake: Any, source: str) -> str:
    path = ".".join(map(str, mistake["loc"]))
    if mistake["type"] != "extra_forbidden":
        return f"{source}: {path}: got {mistake['input']!r}; {mistake['msg']}"
    owner: Any = model
    for key in mistake["loc"][:-1]:
        owner = _type_of_key(owner, key)
    known = ", ".join(owner.model_fields)
    near = _nearest_key(str(mistake["loc"][-1]), owner.model_fields)
    return f"{source}: unknown key {path}{f': did you mean {near}? Known' if near else '. Known'} here are {known}"


# keys of other trainers that resemble a wrong key here
OTHER_NAMES = {
    **{"learning_rate": "lr", "max_grad_norm": "clip", "gradient_clipping": "clip"},
    **{"warmup_steps": "warmup", "warmup_ratio": "warmup", "lr_scheduler_type": "schedule", "scheduler": "schedule"},
    **{"gradient_accumulation_steps": "accumulation", "num_train_epochs": "epochs", "num_epochs": "epochs"},
    **{"per_device_train_batch_size": "batch_size", "output_dir": "out", "save_total_limit": "keep"},
    **{"save_steps": "checkpoint_every", "eval_steps": "validate_every", "model_name_or_path": "path"},
    **{"max_seq_length": "max_length", "torch_dtype": "dtype"},
}


def _nearest_key(name: str, known: Iterable[str]) -> str | None:
    """The known key that a name resembles, or that other trainers call by it; None where none is near."""
    names = {other: key for other, key in OTHER_NAMES.items() if key in known} | {key: key for key in known}
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return names[near[0]] if near else None


def _type_of_key(owner: Any, key: Any) -> Any:
    """The section or mapping type that a section or a mapping holds under this key."""
    annotation = get_args(owner)[1] if get_origin(owner) is dict else owner.model_fields[key].annotation
    if get_origin(annotation) is dict:
        return annotation
    return next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)


def _move_to_target(values: Any, original: Any, overridden: set[str]) -> Any:
    """The values, with paths in `runs/RECIPE/` moved to `runs/TARGET/` if an override has replaced the target."""
    try:
        folder = Path(original["train"]["out"]).parent
        old, new = (
            Path(target.get("adapter") or target["path"]).name for target in (original["target"], values["target"])
        )
    except (KeyError, TypeError, AttributeError):  # which parsing explains
        return values

    def move(value: Any, key: str) -> Any:
        if key in overridden or key == "target":
            return value
        if isinstance(value, dict):
            return {name: move(child, f"{key}.{name}" if key else name) for name, child in value.items()}
        is_inside = isinstance(value, str) and value.startswith(f"{folder}/")
        return str(folder.with_name(new) / Path(value).relative_to(folder)) if is_inside else value

    return values if new == old else move(values, "")


def lay_over(values: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in nested values, in place."""
    key, equals, value = override.partition("=")
    if not equals:
        raise ValueError(f"override {override!r}: expected key.sub=value")
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ValueError(f"override {override!r}: {parent} holds a value, not a section")
    values[last] = yaml.safe_load(value)
