"""A causal language model and its tokenizer from a folder or a hub, whole: no weight made up, none left over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# what older releases saved beside the weights, and compute anew; layers that predict further tokens, which nobody runs
COMPUTED = re.compile(r"(rotary_emb|rotary_pos_emb)\.inv_freq$|\.(attn|attention|self_attn)\.(masked_)?bias$|^mtp\.")
NAMED = 4  # tensors of which a refusal tells


def load_model(path: str | Path, dtype: torch.dtype, adapter: str | None = None, **source: Any) -> Any:
    """The model of a folder of save_pretrained or a hub id; refused where weights are missing or of something else."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} is no model: got a folder without config.json, expected one of save_pretrained")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True, **source)
    except OSError as error:
        raise ValueError(f"no model at {path}: expected a folder of save_pretrained, or a hub id") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"{path} holds weights of other sizes than its config.json says: {error}") from error
    model, report = loaded
    check_weights(path, model, report)
    return model if adapter is None else merge_adapter(model, adapter)


def check_weights(path: str | Path, model: Any, report: dict[str, Any]) -> None:
    """Refuse a model with weights that no file held, or with files of weights that are not the model's."""
    missing = sorted(report["missing_keys"])
    parts = {name for name in vars(model.config).get("sub_configs", {}) or type(model.config).sub_configs}
    unexpected = [] if parts else [name for name in sorted(report["unexpected_keys"]) if not _is_spare(name, model)]
    if missing or unexpected:
        found = [
            f"{kind} weights {_some(names)}" for kind, names in (("missing", missing), ("unknown", unexpected)) if names
        ]
        raise ValueError(
            f"{path} is no whole {model.config.model_type} model: {'; '.join(found)}. What is missing would be made up "
            "at random: take a folder that save_pretrained wrote. A draft head that was exported, or that another tool "
            "made, comes in by `eagle import`"
        )


def _is_spare(name: str, model: Any) -> bool:
    """Whether a tensor is one that the model computes, or belongs to layers behind its last that nobody runs."""
    layer, config = re.search(r"\.layers\.(\d+)\.", name), model.config
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    behind = layer is not None and 0 <= int(layer[1]) - config.num_hidden_layers < extra
    return behind or COMPUTED.search(name) is not None


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def merge_adapter(model: Any, adapter: str) -> Any:
    """The model with a LoRA adapter added into its weights."""
    try:
        from peft import PeftModel
    except ImportError:
        raise ValueError(f"the adapter {adapter} needs peft: `pip install peft`, or merge it beforehand") from None
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def check_model(model: Any) -> None:
    """Refuse what is no causal language model of transformers."""
    if isinstance(model, str | Path):
        raise ValueError(f"Target takes a model, got the path {str(model)!r}: use Target.load({str(model)!r})")
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "base_model"):
        raise ValueError(f"Target takes a model of transformers, got {type(model).__name__}: load one with Target.load")
    name = type(model).__name__
    if model.base_model is model and model.get_output_embeddings() is not None:
        raise ValueError(f"{name} keeps no base model apart from its LM head: the states between them cannot be read")
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no LM head: got a model that is no causal language model of transformers, "
            "expected one of AutoModelForCausalLM"
        )


def tokenizer_of(path: str | Path, **source: Any) -> Any:
    """The tokenizer beside a model, or None: ids are enough for all but text; `chat` and stop strings ask for it."""
    try:
        return AutoTokenizer.from_pretrained(path, **source)
    except (OSError, ValueError):
        return None


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """The floating-point type of that name."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}, expected 'auto', 'float32', 'bfloat16', 'float16' or 'float64'")
    return dtype
