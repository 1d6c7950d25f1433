"""Recipes: typed sections, read from YAML with dotted overrides."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from eagle.recipe.plain_yaml import lay_over, read_yaml
from eagle.shipped import find_recipe, move_to_target
from eagle.web import check_address, hide_users


class Section(BaseModel):
    """A part of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSection(Section):
    """The frozen model that a head is made for."""

    path: str  # a folder, a hub id, or a GGUF file: one on disk, or owner/name:file.gguf of the hub
    revision: str | None = None  # a branch, tag or commit of the hub id
    # float32, bfloat16 or float16; "auto" is bfloat16 where the device multiplies in it, but float32 for
    # `eagle measure` on a CPU
    dtype: str = "auto"
    trust_remote_code: bool = False  # run modeling code that the checkpoint brings
    adapter: str | None = None  # a LoRA adapter, merged into the model at load
    device_map: str | None = None  # "auto" spreads a target that no single device holds
    images: bool = False  # the class that sees, where the model's type has one for text alone, too
    # weights on a CPU in a layout that is faster to read; null: in bfloat16 alone
    packed: bool | None = None


class DataSection(Section):
    """The conversations to learn from."""

    train: str  # conversations: a file, a folder of files, a hub dataset, or a mix of such
    heldout: str | None = None  # conversations kept apart for measuring; no stage learns from them
    split: str = "train"  # the split of a hub dataset
    # the commit of a hub dataset; if pinned, a change of the data is noticed
    revision: str | None = None
    # use only the first conversations, this many; of regenerate.source, too
    limit: int | None = Field(None, ge=1)
    # go on with what can be read of files that are damaged beyond a few lines
    allow_broken: bool = False
    # the folder of the images that records name; null: records with images are dropped
    images: str | None = None
    max_length: int = Field(2048, ge=8)  # tokens of a conversation; what follows is cut off
    # which answers are learned: all of a conversation, or only the last
    turns: Literal["all", "last"] = "all"
    # a Jinja file, for tokenizers without a chat template or with a wrong one
    template: str | None = None
    drop_duplicates: bool = False  # leave out conversations that ask what an earlier one asks
    # the folder for tokens and masks, made once; null: within Hugging Face's cache of assets
    cache: str | None = None
    num_proc: int | None = Field(None, ge=1)  # processes that tokenise; null: as many as processors
    template_kwargs: dict[
        str, Any
    ] = {}  # arguments of the chat template: enable_thinking, reasoning_effort, a date


Addresses = str | Annotated[tuple[str, ...], Field(min_length=1)]


class RegenerateSection(Section):
    """Replacing the data's answers by the target's own."""

    source: str  # conversations whose answers are replaced, as in data.train, which names `out`
    out: str  # the file that gets the new conversations
    # OpenAI-compatible servers, as http://localhost:8000/v1; if null, decode here
    endpoint: Addresses | None = None
    # the model to ask a server for; by default the one it lists that is the target
    model: str | None = None
    # the environment variable with the servers' API key, if they want one
    key_variable: str = "EAGLE_API_KEY"
    in_flight: int = Field(32, ge=1)  # requests to each server at a time
    timeout: float = Field(600.0, gt=0)  # seconds in which a server must give a whole answer
    # seconds in which a server must take a connection, and list its models
    connect_timeout: float = Field(10.0, gt=0)
    # how often an answer is asked for before its conversation counts as failed
    attempts: int = Field(6, ge=1)
    batch_size: int = Field(16, ge=1)  # conversations decoded at a time, without an endpoint
    # a method or a head's folder that speeds up decoding here; several by commas
    drafter: str = "none"
    # limit on the tokens of a batch, padding included
    max_tokens_in_cache: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(1024, ge=1)  # tokens of one answer
    temperature: float = Field(0.0, ge=0)  # 0 takes the likeliest token; above 0 samples
    # sample from the likeliest tokens of this total probability
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0  # of the sampling
    # learn from answers that were cut off, too: what they say, and no end
    keep_truncated: bool = True
    # conversations made of each one, with other answers; needs a temperature above 0
    samples: int = Field(1, ge=1)
    # what a server tells apart as the reasoning before an answer
    reasoning: Literal["keep", "drop"] = "keep"

    @model_validator(mode="after")
    def _check_addresses(self) -> RegenerateSection:
        """Refuse addresses with a password: a recipe is copied to runs and model cards, and must hold no secrets."""
        addresses = self.endpoint
        if addresses is None:
            return self
        if isinstance(addresses, str):
            addresses = (addresses,)
        instead = (
            f"set the environment variable {self.key_variable} to the key, or to Basic and base64"
        )
        for address in addresses:
            check_address(address, "regenerate.endpoint", f"{instead} of USER:PASSWORD")
        return self


class FeaturesSection(Section):
    """Where the target's hidden states are kept, and how."""

    # the folder of stored hidden states; if null, they are computed while training
    store: str | None = None
    dtype: Literal["float32", "bfloat16", "float8", "float6"] = "bfloat16"  # of the stored states
    shard_bytes: int = Field(1_000_000_000, ge=1)  # size of one file of the store
    # tokens of one forward of the target; by default what suits it
    batch_tokens: int | None = Field(None, ge=1)
    shard_target: bool = False  # without a store: spread the target's layers over all processes


class DrafterSection(BaseModel):
    """Which method; the other keys are that method's settings, which it checks."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str  # the method, or PATH.py:CLASS of one's own; its other keys are listed under [methods](#methods)


Divergence = Literal[
    "cross_entropy", "reverse_kl", "jsd", "tv", "acceptance", "hybrid", "likeliest"
]


class OnPolicySection(Section):
    """Learning from the head's own drafts, where the target writes answers with them during training."""

    # of a step's conversations that get a new answer; the others are the data's
    share: float = Field(0.5, gt=0, le=1)
    # steps whose answers are written at once, with the head as it is then
    every: int = Field(16, ge=1)
    depth: int = Field(5, ge=1)  # tokens of a draft
    temperature: float = Field(1.0, ge=0)  # of the answers
    weight: float = Field(1.0, ge=0)  # of what is learned from drafts, beside the loss of the data
    # from the target's probs, for what drew a token that the target accepted
    accepted: Divergence = "cross_entropy"
    # and for what drew one that it did not, or one behind such a token
    rejected: Divergence = "reverse_kl"
    # weight of each token behind the first rejected one, relative to the last
    decay: float = Field(0.8, ge=0, le=1)


class TrainSection(Section):
    """One training run."""

    out: str  # the folder of the run: checkpoints, metrics and the head
    init: str | None = None  # a head to start from, instead of fresh weights
    # a shorter run with schedule `wsd`, to go on from where its learning rate began to fall
    stem: str | None = None
    processes: int | None = Field(None, ge=1)  # refuse to start with another number of processes
    compile: bool = False  # compile parts of the head with torch.compile
    shard_head: bool = False  # spread the head's weights, gradients and moments over all processes
    epochs: int = Field(1, ge=1)  # passes over the data
    max_steps: int | None = Field(None, ge=1)  # stop after so many steps
    batch_size: int = Field(4, ge=1)  # conversations in a step, over all processes
    # parts of a step, computed in turn; more parts need less memory
    accumulation: int = Field(1, ge=1)
    # of the matrix products; weights stay in float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lr: float = Field(3e-5, gt=0)  # the highest learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = Field(0.0, ge=0)  # of AdamW
    clip: float = Field(0.5, gt=0)  # limit on the gradients; .inf for none
    # whether `clip` limits the norm of all gradients, or each value
    clip_by: Literal["norm", "value"] = "norm"
    # how the learning rate falls after warm-up
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    # the last share of the steps, in which `wsd` falls linearly
    decay_share: float = Field(0.2, gt=0, le=1)
    # steps that the schedule is made for; by default those of the run
    schedule_steps: int | None = Field(None, ge=1)
    warmup: float = Field(0.05, ge=0)  # steps of warm-up; below 1, a share of `schedule_steps`
    final_lr: float = Field(0.0, ge=0, le=1)  # where the schedule ends, as a share of `lr`
    # of the loss: a step's slots, each sequence's, or all its tokens
    mean_over: Literal["step", "texts", "all"] = "step"
    # a slot counts if the token that it predicts (or reads) does
    gate: Literal["predicted", "read"] = "predicted"
    seed: int = 0  # of weights, order of the data and noise
    validation: float = Field(0.05, ge=0, lt=1)  # share of the conversations that is held out
    # steps between validations; by default once an epoch
    validate_every: int | None = Field(None, ge=1)
    # held-out prompts to decode; by default 24 where the target is in memory
    decode: int | None = Field(None, ge=0)
    # what `head/` is: the head that accepts most, or the last
    choose: Literal["best", "last"] = "best"
    # end the run when so many validations brought no better head
    patience: int | None = Field(None, ge=1)
    # learn from the head's own drafts, too; {} for the defaults
    on_policy: OnPolicySection | None = None
    # steps between checkpoints; by default once an epoch
    checkpoint_every: int | None = Field(None, ge=1)
    keep: int = Field(2, ge=1)  # checkpoints that stay on the disk
    log_with: tuple[
        str, ...
    ] = ()  # trackers beside metrics.jsonl: wandb, tensorboard, mlflow, trackio, comet
    project: str = "eagle"  # the project of the trackers in which the run is logged
    # log to this project of Weights & Biases, as `log_with` does with `project`
    wandb: str | None = None

    @field_validator("log_with", mode="before")
    @classmethod
    def _as_names(cls, value: Any) -> Any:
        """Return the names of trackers from a list or a string with commas, spelled as accelerate spells them."""
        names = () if value is None else value
        if isinstance(value, str):
            names = value.split(",")
        # pydantic refuses such a value with a better message
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            return value
        # a dict, as it keeps the order and has each name once
        spelled: dict[str, None] = {}
        for name in names:
            key = name.strip().lower().replace("-", "_")
            if key:
                spelled["comet_ml" if key == "comet" else key] = None
        return tuple(spelled)

    @property
    def trackers(self) -> dict[str, str]:
        """The project of every tracker that the run is logged in, by the tracker's name."""
        projects = dict.fromkeys(self.log_with, self.project)
        if self.wandb is not None:
            projects["wandb"] = self.wandb
        return projects


class JointSection(Section):
    """Training a target together with heads, by `recipes/train_medusa2.py`: what comes out is another target."""

    # of the target: stay close to what it was, or learn the sequence's own next token
    loss: Literal["kl", "tokens"] = "kl"
    heads: float = Field(0.01, gt=0)  # weight of the heads' loss beside the target's
    rise: bool = True  # raise that weight from 0 over the run, by a sine
    # learning rate of the heads' matrices, in units of `train.lr`
    head_lr: float = Field(1.0, gt=0)
    rank: int = Field(32, ge=1)  # of the LoRA adapters, on all linear layers but the LM head
    alpha: int = Field(16, ge=1)  # of the LoRA adapters
    dropout: float = Field(0.05, ge=0, lt=1)  # of what an adapter reads


class BudgetSection(Section):
    """How much is drafted in a cycle; what is left out follows from `paths`, else from the defaults of `Budget`."""

    nodes: int | None = Field(None, ge=0)  # tokens drafted in a cycle, the root not counted
    depth: int | None = Field(None, ge=0)  # levels of the tree
    top_k: int | None = Field(None, ge=0)  # candidates a level
    # a fixed tree: for every node the ranks on its way from the root
    paths: tuple[tuple[int, ...], ...] | None = None
    # how children are chosen where the target samples
    draw: Literal["noise", "likeliest", "sampled"] | None = None
    sharpness: float | None = Field(None, gt=0)  # of trees without paths: 1 is EAGLE-2's rule


class MeasuredSection(Section):
    """A drafter that is measured."""

    # a folder, a hub id, or a method without weights; by default the run's own head
    head: str | None = None
    # of methods without weights, or draft_vocab of a head, as `load_drafter` takes them
    options: dict[str, Any] = {}
    # by default that of the head, else nodes, depth and top_k of `eval`
    budget: BudgetSection | None = None


class EvalSection(Section):
    """The prompts to decode, the drafters and the limits."""

    # a file, folder or hub dataset; several by name; else data.heldout
    prompts: str | dict[str, str] | None = None
    split: str = "train"  # the split of a hub dataset
    count: int = Field(8, ge=1)  # prompts of each set, evenly over its tasks
    max_new_tokens: int = Field(64, ge=1)  # tokens of one answer
    # each prompt is answered at each temperature
    temperatures: tuple[float, ...] = Field((0.0,), min_length=1)
    # answers of a prompt above temperature 0, one for each seed
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    drafters: dict[
        str, MeasuredSection
    ] = {}  # what is measured, by name; by default ngram and the run's head
    nodes: int = Field(8, ge=0)  # tokens drafted in a cycle
    depth: int = Field(4, ge=0)  # levels of the draft tree
    top_k: int = Field(4, ge=0)  # candidates a level
    costs: bool = False  # time single forwards too, for the modelled speed
    goodput_policy: bool = False  # measure each drafter once more with an adaptive draft length
    # sequences at a time: a number, or several in turn
    batch_size: tuple[PositiveInt, ...] = Field((1,), min_length=1)
    # limit on the tokens of a batch, padding included
    max_tokens_in_cache: int | None = Field(None, ge=1)

    @field_validator("batch_size", mode="before")
    @classmethod
    def _as_sizes(cls, value: Any) -> Any:
        """Return a single batch size as a tuple of one; pydantic checks any other value."""
        return (value,) if isinstance(value, int) else value


class Recipe(Section):
    """One run, from conversations to report."""

    target: TargetSection
    data: DataSection
    regenerate: RegenerateSection | None = None
    features: FeaturesSection = FeaturesSection.model_validate({})
    drafter: DrafterSection
    train: TrainSection
    eval: EvalSection = EvalSection.model_validate({})
    joint: JointSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _let_target_see(cls, values: Any) -> Any:
        """Set `target.images` where the data have images, so that the model's class with vision is loaded."""
        if not isinstance(values, dict):
            return values
        data = values.get("data")
        target = values.get("target")
        if isinstance(data, dict) and isinstance(target, dict) and data.get("images") is not None:
            return {**values, "target": {**target, "images": True}}
        return values

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Return a recipe from a file or a shipped recipe's name.

        Args:
            path: A YAML file, or a name that `eagle recipes` lists.
            overrides: Values as `section.key=value`. Another target moves the paths of the run to a folder for it.
        """
        file = find_recipe(path)
        values = read_yaml(file)
        # The values of the file alone: code that it names is not trusted, unlike code that an override names, and paths
        # that it gives in its target's folder are moved with another target.
        original = copy.deepcopy(values)
        for override in overrides:
            lay_over(values, override)
        overridden = {override.partition("=")[0] for override in overrides}
        check_code(original, file, overridden)
        return cls.parse(move_to_target(values, original, overridden), str(path))

    @classmethod
    def parse(cls, values: Any, source: str) -> Recipe:
        """Return a recipe from plain values; the error names every mistake."""
        return parse_section(cls, values, source)

    def dump(self) -> str:
        """Return the recipe as YAML, with every default."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


# -- mistakes ---------------------------------------------------------------------------------------------------------

# keys of other trainers that resemble a wrong key here
OTHER_NAMES = {
    "learning_rate": "lr",
    "max_grad_norm": "clip",
    "gradient_clipping": "clip",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "lr_scheduler_type": "schedule",
    "scheduler": "schedule",
    "gradient_accumulation_steps": "accumulation",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "output_dir": "out",
    "save_total_limit": "keep",
    "save_steps": "checkpoint_every",
    "eval_steps": "validate_every",
    "model_name_or_path": "path",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
}


def parse_section(model: type[BaseModel], values: Any, source: str) -> Any:
    """Return plain values, as read from YAML, as an instance of a section's class.

    Args:
        model: The class of the section.
        values: Its keys and values.
        source: The name of the file or section, which begins every message.

    Raises:
        ValueError: It names each mistake, and the nearest key to an unknown one.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistakes = [_explain(model, mistake, source) for mistake in error.errors()]
        # a value may be an address with a password, which no message may show
        raise ValueError(hide_users("\n".join(mistakes))) from None


def _explain(model: type[BaseModel], mistake: Any, source: str) -> str:
    """Return the message for one of pydantic's errors, with the nearest key for an unknown one.

    Args:
        model: The class of the section that was parsed.
        mistake: An entry of `ValidationError.errors()`.
        source: The name of the file or section, which begins the message.
    """
    path = ".".join(map(str, mistake["loc"]))
    if mistake["type"] != "extra_forbidden":
        # pydantic puts this prefix before the message of a validator of this project
        reason = mistake["msg"].removeprefix("Value error, ")
        return f"{source}: {path}: got {_shorten(mistake['input'])}; {reason}"
    # `loc` is the path of keys to the unknown one: follow it to the section that holds it
    owner: Any = model
    for key in mistake["loc"][:-1]:
        owner = type_of_key(owner, key)
    known = ", ".join(owner.model_fields)
    near = _nearest_key(str(mistake["loc"][-1]), owner.model_fields)
    hint = f": did you mean {near}? Known" if near else ". Known"
    return f"{source}: unknown key {path}{hint} here are {known}"


def _shorten(value: Any) -> str:
    """Return a value as an error shows it; a section is shown by its keys alone."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return f"the keys {', '.join(map(str, value)) or 'of an empty section'}"
    return shorten(repr(value), 80, placeholder=" ...")


def _nearest_key(name: str, keys: Iterable[str]) -> str | None:
    """Return the key that a wrong name resembles, or the key of that name in other trainers; None without either."""
    # by the names to compare with: the key that is meant
    names = {alias: key for alias, key in OTHER_NAMES.items() if key in keys}
    names |= {key: key for key in keys}
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return names[near[0]] if near else None


def type_of_key(owner: Any, key: Any) -> Any:
    """Return the type that a section has under a key, to find the section that a dotted name means.

    Args:
        owner: The class of a section, or a type `dict[str, X]`, under whose every key is an X.
        key: The key.
    """
    # the arguments of a dict type are those of its keys and of its values
    is_mapping = get_origin(owner) is dict
    annotation = get_args(owner)[1] if is_mapping else owner.model_fields[key].annotation
    if get_origin(annotation) is dict:
        return annotation
    # of `Section | None` the section
    return next((arm for arm in get_args(annotation) if arm is not type(None)), annotation)


# -- recipes of strangers ---------------------------------------------------------------------------------------------

CODE = re.compile(r".+:[A-Za-z_]\w*")  # PATH.py:CLASS or MODULE:CLASS


class Trust:
    """Whether the user of this process trusts code that a recipe beside a head names (`eagle --trust-code`)."""

    in_recipes = False


def check_code(values: dict[str, Any], path: Path, overridden: Iterable[str]) -> None:
    """Refuse a recipe in a head's folder that would run code, unless the user trusts it or names the code himself.

    Args:
        values: The values of the recipe's file, before overrides.
        path: The file.
        overridden: The keys that the command line sets, and so does not take from the file.
    """
    # a recipe beside a head's weights came with the head, maybe from a stranger
    is_beside_head = (path.parent / "model.safetensors").exists() and (
        path.parent / "config.json"
    ).exists()
    if not is_beside_head or Trust.in_recipes:
        return
    for key, value in list_code(values):
        # what the user names on the command line is his own choice, and so are the keys below it
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in overridden):
            continue
        raise ValueError(
            f"{path} lies in the folder of a head and would run code: {key} is {value!r:.200}. Read that code first, "
            f"then trust it with --trust-code, or name it yourself with {key}={value!s:.200}"
        )


def list_code(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key by which a recipe would run code from outside of this package."""
    target = _get_mapping(values, "target")
    if target.get("trust_remote_code"):
        yield "target.trust_remote_code", target["trust_remote_code"]
    drafters = {
        "drafter.kind": _get_mapping(values, "drafter").get("kind"),
        "regenerate.drafter": _get_mapping(values, "regenerate").get("drafter"),
    }
    measured = _get_mapping(_get_mapping(values, "eval"), "drafters")
    for name in measured:
        drafters[f"eval.drafters.{name}.head"] = _get_mapping(measured, name).get("head")
    for key, value in drafters.items():
        if not isinstance(value, str):
            continue
        # several drafters are separated by commas
        if any(CODE.fullmatch(name.strip()) for name in value.split(",")):
            yield key, value


def _get_mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping under a key, or {}: the values are not validated yet, so that it may be of another type."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}
