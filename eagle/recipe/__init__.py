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
    """The model that the head speeds up. It is not trained."""

    # a folder, a hub id or a GGUF file (a path, or owner/name:file.gguf for one on the hub)
    path: str
    revision: str | None = None  # a branch, tag or commit of the hub id
    # float32, bfloat16 or float16; "auto": bfloat16 if the device supports it, but float32 for `eagle measure` on a
    # CPU
    dtype: str = "auto"
    trust_remote_code: bool = False  # run modeling code from the checkpoint's repository
    adapter: str | None = None  # a LoRA adapter, which is merged into the model when it is loaded
    device_map: str | None = None  # "auto" spreads the target over all devices
    images: bool = False  # load the class with vision, for models that also have a text-only class
    # store the weights on a CPU in a layout for faster verification; null: only in bfloat16
    packed: bool | None = None


class DataSection(Section):
    """The conversations for training and measuring."""

    # the training conversations: a file, a folder of files, a hub dataset or a [mix](#mix)
    train: str
    heldout: str | None = None  # conversations for measuring; they are never used for training
    split: str = "train"  # split of the hub dataset
    # commit of the hub dataset; if set, later changes of the dataset are noticed
    revision: str | None = None
    # use only the first so many conversations, also of regenerate.source
    limit: int | None = Field(None, ge=1)
    allow_broken: bool = False  # continue with the readable records of a damaged file
    # folder of the images that records name; null: records with images are dropped
    images: str | None = None
    # maximum number of tokens of a conversation; the rest is cut off
    max_length: int = Field(2048, ge=8)
    # supervise all answers of a conversation, or only the last
    turns: Literal["all", "last"] = "all"
    # a Jinja file, for tokenizers without a chat template or with a wrong one
    template: str | None = None
    drop_duplicates: bool = False  # keep only the first conversation with each question
    # folder for the tokenised conversations; null: in Hugging Face's assets cache
    cache: str | None = None
    # number of processes that tokenise; null: one per CPU core
    num_proc: int | None = Field(None, ge=1)
    # arguments of the chat template, such as enable_thinking, reasoning_effort or a date
    template_kwargs: dict[str, Any] = {}


Addresses = str | Annotated[tuple[str, ...], Field(min_length=1)]


class RegenerateSection(Section):
    """The target's own answers, which replace those in the data."""

    source: str  # conversations whose answers are replaced
    out: str  # file for the new conversations; set data.train to the same file
    # OpenAI-compatible servers, such as http://localhost:8000/v1; null: generate the answers here
    endpoint: Addresses | None = None
    # the server's name for the target; by default the name in its list that matches the target
    model: str | None = None
    # environment variable with the servers' API key, if they need one
    key_variable: str = "EAGLE_API_KEY"
    in_flight: int = Field(32, ge=1)  # number of concurrent requests to each server
    timeout: float = Field(600.0, gt=0)  # time limit for a whole answer, in seconds
    # time limit for connecting to a server and listing its models, in seconds
    connect_timeout: float = Field(10.0, gt=0)
    attempts: int = Field(6, ge=1)  # number of attempts before a conversation counts as failed
    batch_size: int = Field(16, ge=1)  # conversations decoded at a time, if there is no endpoint
    # drafter that speeds up generation here: a method or a head's folder, or several, separated by commas
    drafter: str = "none"
    # maximum number of tokens of a batch in the KV cache, including padding
    max_tokens_in_cache: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(1024, ge=1)  # maximum number of tokens of an answer
    temperature: float = Field(0.0, ge=0)  # 0: greedy; above 0: sampled
    # sample only from the most probable tokens with this total probability
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0  # seed for sampling
    # train on answers that reached max_new_tokens, too (without an end token)
    keep_truncated: bool = True
    # number of answers per conversation; more than 1 needs a temperature above 0
    samples: int = Field(1, ge=1)
    # what to do with reasoning that a server returns in a separate field
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
    """Where and how the target's hidden states are stored."""

    # folder of the stored hidden states; null: compute them during training
    store: str | None = None
    # dtype of the stored states
    dtype: Literal["float32", "bfloat16", "float8", "float6"] = "bfloat16"
    shard_bytes: int = Field(1_000_000_000, ge=1)  # size of one file of the store, in bytes
    # tokens per forward pass of the target; by default chosen automatically
    batch_tokens: int | None = Field(None, ge=1)
    # if the states are computed during training: spread the target's layers over all processes
    shard_target: bool = False


class DrafterSection(BaseModel):
    """The method and its settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    # the method, or PATH.py:CLASS for your own; the other keys depend on it (see [methods](#methods))
    kind: str


Divergence = Literal[
    "cross_entropy", "reverse_kl", "jsd", "tv", "acceptance", "hybrid", "likeliest"
]


class OnPolicySection(Section):
    """Training on the head's own drafts, with which the target generates answers during training."""

    # share of the conversations of a step that get a new answer
    share: float = Field(0.5, gt=0, le=1)
    # number of steps for which answers are generated at once, with the current head
    every: int = Field(16, ge=1)
    depth: int = Field(5, ge=1)  # length of the drafts, in tokens
    temperature: float = Field(1.0, ge=0)  # temperature of the answers
    weight: float = Field(1.0, ge=0)  # weight of this loss, relative to the loss on the data
    # divergence from the target's distribution at accepted draft tokens
    accepted: Divergence = "cross_entropy"
    rejected: Divergence = "reverse_kl"  # divergence from the first rejected draft token on
    # weight of each token after the first rejected one, relative to the token before it
    decay: float = Field(0.8, ge=0, le=1)


class TrainSection(Section):
    """The training run."""

    out: str  # folder of the run, for checkpoints, metrics and the head
    init: str | None = None  # head to start from; null: new weights
    # folder of a shorter run with schedule `wsd`; this run continues from the point where its learning rate began
    # to fall
    stem: str | None = None
    # if set, refuse to start with another number of processes
    processes: int | None = Field(None, ge=1)
    compile: bool = False  # compile parts of the head with torch.compile
    # spread the head's weights, gradients and optimizer states over all processes
    shard_head: bool = False
    epochs: int = Field(1, ge=1)  # passes over the data
    max_steps: int | None = Field(None, ge=1)  # maximum number of optimizer steps
    batch_size: int = Field(4, ge=1)  # conversations per step, in all processes together
    # number of parts into which each process splits its share of a batch; more parts need less memory
    accumulation: int = Field(1, ge=1)
    # dtype of matrix products; weights stay in float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lr: float = Field(3e-5, gt=0)  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # betas of AdamW
    weight_decay: float = Field(0.0, ge=0)  # weight decay of AdamW
    clip: float = Field(0.5, gt=0)  # limit for gradient clipping; .inf for none
    clip_by: Literal["norm", "value"] = "norm"  # clip the norm of all gradients, or each value
    # how the learning rate changes after warm-up
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    # share of the steps at the end in which `wsd` decays linearly
    decay_share: float = Field(0.2, gt=0, le=1)
    # length of the schedule in steps; by default that of the run
    schedule_steps: int | None = Field(None, ge=1)
    # length of the warm-up: below 1 a share of `schedule_steps`, otherwise a number of steps
    warmup: float = Field(0.05, ge=0)
    final_lr: float = Field(0.0, ge=0, le=1)  # final learning rate, as a share of `lr`
    # average of the loss: over the supervised tokens of a step, within each sequence first (`texts`), or over all
    # tokens
    mean_over: Literal["step", "texts", "all"] = "step"
    # a slot enters the loss if the token that it predicts, or the token that it reads, is supervised
    gate: Literal["predicted", "read"] = "predicted"
    seed: int = 0  # seed for weights, data order and noise
    # share of the conversations that is held out for validation
    validation: float = Field(0.05, ge=0, lt=1)
    # steps between validations; by default one epoch
    validate_every: int | None = Field(None, ge=1)
    # number of held-out prompts to decode at each validation; by default 24 if the target is loaded, otherwise 0
    decode: int | None = Field(None, ge=0)
    # which head is saved in `head/`: the one with the highest acceptance length, or the last
    choose: Literal["best", "last"] = "best"
    # end the run after so many validations without a better head
    patience: int | None = Field(None, ge=1)
    # also train on the head's own drafts; {} for the defaults
    on_policy: OnPolicySection | None = None
    # steps between checkpoints; by default one epoch
    checkpoint_every: int | None = Field(None, ge=1)
    keep: int = Field(2, ge=1)  # number of checkpoints to keep
    # trackers in addition to metrics.jsonl: wandb, tensorboard, mlflow, trackio, comet
    log_with: tuple[str, ...] = ()
    project: str = "eagle"  # the run's project in the trackers
    # log to this project of Weights & Biases; short for `log_with` and `project`
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
    """Medusa-2: training of the target together with its heads. The result is a new target."""

    # loss of the target: KL to the original target, or cross-entropy with the tokens of the data
    loss: Literal["kl", "tokens"] = "kl"
    heads: float = Field(0.01, gt=0)  # weight of the heads' loss, relative to the target's
    rise: bool = True  # raise this weight from 0 during the run, along a sine curve
    # learning rate of the heads' matrices, as a multiple of `train.lr`
    head_lr: float = Field(1.0, gt=0)
    # rank of the LoRA adapters, which are on all linear layers except the LM head
    rank: int = Field(32, ge=1)
    alpha: int = Field(16, ge=1)  # alpha of the LoRA adapters
    dropout: float = Field(0.05, ge=0, lt=1)  # dropout at the input of the LoRA adapters


class BudgetSection(Section):
    """The shape of the drafts; other keys follow from `paths`, if it is set, or have the defaults of `Budget`."""

    nodes: int | None = Field(None, ge=0)  # number of draft tokens per cycle, without the root
    depth: int | None = Field(None, ge=0)  # number of levels of the tree
    top_k: int | None = Field(None, ge=0)  # maximum number of children of a node
    # a fixed tree: for each node, the ranks of the tokens on its path from the root
    paths: tuple[tuple[int, ...], ...] | None = None
    # how draft tokens are chosen above temperature 0 ([the three rules](../trees.md#sampling-above-temperature-0))
    draw: Literal["noise", "likeliest", "sampled"] | None = None
    # [sharpness](../trees.md#sharpness-of-dynamic-trees) of dynamic trees; 1 is EAGLE-2's rule
    sharpness: float | None = Field(None, gt=0)
    # least predicted acceptance rate at which a token gets successors, for heads with a confidence output
    confidence: float | None = Field(None, ge=0, le=1)


class MeasuredSection(Section):
    """A drafter that is measured."""

    # a head's folder or hub id, or a method without weights; by default the head of this run
    head: str | None = None
    options: dict[str, Any] = {}  # options of the drafter, as for `load_drafter`
    # the draft tree; by default the one stored in the head, or else nodes, depth and top_k of `eval`
    budget: BudgetSection | None = None


class EvalSection(Section):
    """What `eagle measure` measures: prompts, drafters and draft trees."""

    # a file, folder or hub dataset of questions, conversations or a benchmark (SPEED-Bench, MRCR,
    # LongBench-v2, sessions of agents), or several by name; by default data.heldout
    prompts: str | dict[str, str] | None = None
    split: str = "train"  # split of the hub dataset
    count: int = Field(8, ge=1)  # number of prompts per set, spread evenly over its tasks
    max_new_tokens: int = Field(64, ge=1)  # maximum number of tokens of an answer
    # temperatures at which each prompt is answered
    temperatures: tuple[float, ...] = Field((0.0,), min_length=1)
    # seeds; above temperature 0, each prompt is answered once per seed
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    # the drafters to measure, by name; by default ngram and the head of this run
    drafters: dict[str, MeasuredSection] = {}
    nodes: int = Field(8, ge=0)  # number of draft tokens per cycle
    depth: int = Field(4, ge=0)  # number of levels of the draft tree
    top_k: int = Field(4, ge=0)  # maximum number of children of a node
    costs: bool = False  # also time single forward passes, for the modelled speedup
    goodput_policy: bool = False  # also measure each drafter with an adaptive draft length
    # batch size, or a list of batch sizes to measure
    batch_size: tuple[PositiveInt, ...] = Field((1,), min_length=1)
    # maximum number of tokens of a batch in the KV cache, including padding
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
