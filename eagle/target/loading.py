"""Load a causal language model and its tokenizer; refuse checkpoints with missing or unknown weights."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from eagle.target.gguf import hint_files, is_gguf, model_folder
from eagle.target.structure import base_of, decoder_layers
from eagle.target.twin import share_weights
from eagle.target.weights.dense import keep_layout, unpack_weights
from eagle.target.weights.packed import unpack_model
from eagle.target.weights.quantised import (
    check_quantised,
    device_map_of,
    read_quantization,
    why_not_here,
)
from eagle.target.whole import check_weights, is_spare

# without this argument transformers may ask in the terminal whether to run a repository's code
NO_CODE = {"trust_remote_code": False}


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    adapter: str | None = None,
    *,
    device: str = "cpu",
    images: bool = False,
    **source: Any,
) -> Any:
    """Load a causal language model in transformers, with clear errors for what cannot be loaded.

    Args:
        path: a save_pretrained folder, a hub id, or a GGUF file as in `model_folder`.
        dtype: of the weights.
        adapter: an adapter that is merged; None for none.
        device: where a quantised model is loaded to, unless a device_map says otherwise.
        images: whether to load the class that reads images where the model's type has one for text alone, too.
        source: revision, trust_remote_code and device_map, as in transformers' `from_pretrained`.

    Raises:
        ValueError: if weights are missing, torn or of another model.
    """
    source = {**NO_CODE, **source}
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"{path} is no model: got a folder without config.json, expected one of save_pretrained"
            f"{hint_files(Path(path))}"
        )
    name = str(path)
    # a GGUF file is unpacked into this folder first
    path = model_folder(path, source.get("revision"))
    quantization = read_quantization(path, **source)
    if quantization is not None:
        check_quantised(path, quantization, device, dtype)
        source["device_map"] = source.get("device_map") or device_map_of(device)
    with _explaining_errors(path):
        loader = choose_loader(path, images=images, **source)
        model, report = loader.from_pretrained(
            path,
            dtype=dtype,
            output_loading_info=True,
            **source,
        )
    check_weights(path, model, report)
    # heads and exports must record the GGUF file that the user named, not the folder that it was unpacked into
    if is_gguf(name):
        model.config.name_or_path = name
    if adapter is None:
        return model
    # an adapter cannot be merged into weights that are still packed
    if quantization is not None:
        unpack_weights(model)
    return open_adapter(model, adapter).merge_and_unload()


@contextmanager
def _explaining_errors(path: str | Path) -> Iterator[None]:
    """A context in which errors of transformers' loader become ValueErrors that say what is wrong at `path`."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"no model at {path}: expected a folder of save_pretrained, or a hub id: {_first_line(error)}"
        ) from error
    except SafetensorError as error:
        # an interrupted download leaves files that are shorter than their header says
        torn = ", ".join(
            sorted(file.name for file in Path(path).glob("*.safetensors") if not _is_whole(file))
        )
        raise ValueError(
            f"{path} holds weights that cannot be read: {torn or error}; download or write it again"
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"{path} holds weights of other sizes than its config.json says: {error}"
        ) from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if it has no message, for another message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def choose_loader(path: str | Path, *, images: bool = False, **source: Any) -> Any:
    """Return the auto class of transformers that loads a model: for text if its type has such a class, else for images.

    Args:
        path: a save_pretrained folder or a hub id.
        images: take the class that reads images in any case.
        source: revision, trust_remote_code and device_map, as in transformers' `from_pretrained`.
    """
    options = {
        name: value for name, value in source.items() if name in ("revision", "trust_remote_code")
    }
    # the config's class tells the model's type
    kind = type(AutoConfig.from_pretrained(path, **options))
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if images and not sees:
        raise ValueError(
            f"images is True, and {path} is a {kind.model_type}, which sees none: leave images out"
        )
    if sees and (images or kind not in MODEL_FOR_CAUSAL_LM_MAPPING):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def check_loadable(path: str | Path, device: str, revision: str | None = None) -> None:
    """Refuse a quantised checkpoint that cannot be loaded on a device, from its config alone.

    Commands call it before they download or load anything.
    """
    quantization = read_quantization(path, revision=revision)
    if quantization is None:
        return
    reason = why_not_here(quantization, device)
    if reason:
        raise ValueError(f"{path} {reason}")


def _is_whole(file: Path) -> bool:
    """Return whether a safetensors file is complete: it has a header, and all the bytes that the header names."""
    try:
        with safe_open(file, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


def read_spare_tensor(model: Any, name: str) -> Tensor | None:
    """Return a tensor of a multi-token prediction layer by its name; None if the model has no such tensor.

    transformers does not load these layers, so the tensor is read from the model's files.
    """
    if not is_spare(name, model):
        return None
    path = _find_file(model.config, SAFE_WEIGHTS_NAME)
    index = _find_file(model.config, SAFE_WEIGHTS_INDEX_NAME)
    # where weights are in several files, the index names the file of the tensor
    if index is not None:
        shard = json.loads(Path(index).read_text())["weight_map"].get(name)
        path = None if shard is None else _find_file(model.config, shard)
    if path is None:
        return None
    with safe_open(path, "pt") as file:
        if name not in set(file.keys()):
            return None
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _find_file(config: Any, name: str) -> str | None:
    """Return the path of one of a loaded model's files, from its folder or the hub; None if it has no such file.

    Tensors that transformers does not load are read from it.
    """
    if not config.name_or_path:
        return None
    options: dict[str, Any] = {
        "revision": getattr(config, "_commit_hash", None),
        # return None for a file that does not exist
        "_raise_exceptions_for_missing_entries": False,
    }
    folder = model_folder(config.name_or_path, options["revision"])
    path: str | None = cached_file(folder, name, **options)
    return path


def adapt_model(model: Any, config: Any, adapter: str | Path) -> Any:
    """Return a second module tree over a model's weights that runs with an adapter; the model itself runs as before.

    Args:
        model: the model, whose packed weights are made plain, as adapters may read them.
        config: its text config.
        adapter: a folder or a hub id of an adapter.
    """
    unpack_model(model)
    # peft replaces modules in the second tree alone
    twin, _ = share_weights(model, config, decoder_layers(base_of(model), config.num_hidden_layers))
    adapted = open_adapter(twin, adapter).get_base_model()
    # draft heads borrow the embedding and the LM head as plain matrices, so the adapter must not wrap them
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        changed = getattr(adapted, getter)()
        if type(changed) is not type(getattr(model, getter)()):
            raise ValueError(
                f"the adapter {adapter} changes the embedding or the LM head, which heads borrow as plain matrices: "
                f"got a {type(changed).__name__}, expected an adapter of layers alone; merge it, as Target.load(.., "
                "adapter=..) does"
            )
    return adapted


def open_adapter(model: Any, adapter: str | Path) -> Any:
    """Return a peft model that runs a model with an adapter; the model's layers are wrapped in place.

    Args:
        model: the model.
        adapter: a folder or a hub id of the adapter.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise ValueError(
            f"the adapter {adapter} needs peft, 0.18 or newer: `pip install -U peft`, or merge it beforehand"
        ) from None
    try:
        with warnings.catch_warnings(), keep_layout(model):
            # peft only warns of weights that the adapter's files lack, and leaves them at random
            warnings.filterwarnings("error", "Found missing adapter keys")
            # a downloaded config must not choose what code runs here
            if getattr(PeftConfig.from_pretrained(str(adapter)), "megatron_config", None):
                raise ValueError(
                    "its megatron_config makes peft import the module that megatron_core names"
                )
            adapted: Any = PeftModel.from_pretrained(model, str(adapter))
    except (OSError, RuntimeError, SafetensorError, UserWarning, ValueError) as error:
        raise ValueError(
            f"no adapter for this {model.config.model_type} at {adapter}: expected a folder that peft's "
            f"save_pretrained wrote, or a hub id, and of a base of these sizes: {_first_line(error):.300}"
        ) from error
    # an adapter of the prompt acts outside of the layers, which alone are used
    refuse_prompt_adapter(adapted.active_peft_config, f"the adapter {adapter}")
    return adapted


def refuse_prompt_adapter(config: Any, name: str) -> None:
    """Raise a ValueError if an adapter does more than change layers at every token, such as prompt tuning.

    Args:
        config: the adapter's config of peft.
        name: how the message names the adapter.
    """
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            f"{name} adds to the prompt or waits for a token in it: got {config.peft_type.value}, "
            "expected one that changes linear layers at every token, as LoRA and DoRA do"
        )


def unwrap_adapters(model: Any) -> Any:
    """Return the transformers model inside a peft model, whose layers run with the adapters; any other model unchanged.

    Raises:
        ValueError: if an adapter acts outside of the layers, so that the inner model alone would ignore it.
    """
    while type(model).__module__.startswith("peft."):
        # looked up on the class, as an instance passes unknown names on to the model inside
        if "active_peft_config" in dir(type(model)):
            refuse_prompt_adapter(
                model.active_peft_config,
                f"{type(model).__name__} has an adapter that",
            )
        # `_modules` rather than attributes, which peft looks up in the model inside too
        modules = model._modules
        model = modules["base_model" if "base_model" in modules else "model"]
    return model


def add_adapter(model: Any, rank: int, alpha: int, dropout: float) -> Any:
    """Add LoRA adapters to all linear layers but the LM head for training; all other weights are frozen.

    The adapters have no effect at first. The model is changed in place; the returned peft model can switch adapters
    off and merge them.

    Args:
        model: the target's model.
        rank: of the adapters' matrices.
        alpha: LoRA's scale: adapters are multiplied by alpha / rank.
        dropout: the share of the adapters' inputs that is zeroed in training.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(
            "training a target needs peft, 0.18 or newer, which makes its adapters: `pip install -U peft`"
        ) from None
    # adapters and gradients need plain weights
    unpack_model(model)
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear")
    return get_peft_model(model, config)


def check_model(model: Any) -> Any:
    """Return the model that a target is made of: a causal language model of transformers, taken out of peft's wrapper.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(model, str | Path):
        raise ValueError(
            f"Target takes a model, got the path {str(model)!r}: use Target.load({str(model)!r})"
        )
    model = unwrap_adapters(model)
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "base_model"):
        raise ValueError(
            f"Target takes a model of transformers, got {type(model).__name__}: load one with Target.load"
        )
    name = type(model).__name__
    if getattr(model.config, "return_dict", True) is False:
        raise ValueError(
            f"{name}.config.return_dict is False, expected True: outputs are read by their names"
        )
    # transformers' name for the LM head
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no LM head: got a model that is no causal language model of transformers, "
            "expected one of AutoModelForCausalLM"
        )
    return model


def settle_weights(model: Any, device: torch.device) -> None:
    """Run a model once if it rewrites its weights in its first forward, as RWKV rescales its own.

    The model remembers that in an attribute. A second module tree that copied the attribute before would rewrite the
    shared weights again.
    """
    base = base_of(model)
    # only models that rewrite their weights have this attribute
    if getattr(base, "layers_are_rescaled", None) is False:
        with torch.no_grad():
            base(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))


def tokenizer_of(path: str | Path, **source: Any) -> Any:
    """Return the tokenizer of a model, or None; only `chat`, stop strings and text output need one.

    Args:
        path: a folder, a hub id or a GGUF file.
        source: `revision` and `trust_remote_code`, as in transformers' `from_pretrained`.
    """
    path = model_folder(path, source.get("revision"))
    try:
        return AutoTokenizer.from_pretrained(path, **{**NO_CODE, **source})
    except (OSError, ValueError):
        return None


def processor_of(path: str | Path, model: Any, **source: Any) -> Any:
    """Return the processor that prepares images for a model; None without one, or if pillow is not installed.

    Args:
        path: a folder, a hub id or a GGUF file.
        model: the loaded model.
        source: `revision` and `trust_remote_code`, as in transformers' `from_pretrained`.
    """
    # a model that reads no images needs none
    if "pixel_values" not in inspect.signature(type(base_of(model)).forward).parameters:
        return None
    path = model_folder(path, source.get("revision"))
    try:
        return AutoProcessor.from_pretrained(path, **{**NO_CODE, **source})
    except (OSError, ValueError, ImportError):
        return None


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the floating-point dtype of a name such as "bfloat16", or the dtype itself; refuse all others."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"dtype is {name!r}, expected 'auto', 'float32', 'bfloat16', 'float16' or 'float64'"
        )
    return dtype
