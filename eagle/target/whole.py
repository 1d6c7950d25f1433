"""Whether a model has all its weights after transformers has loaded it, and no unknown ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# names of tensors that a checkpoint may have beside a model's weights: buffers that older releases saved and newer ones
# compute, and multi-token prediction layers, which transformers does not run
COMPUTED = re.compile(
    r"(rotary_emb|rotary_pos_emb)\.inv_freq$|\.(attn|attention|self_attn)\.(masked_)?bias$|^(model\.)?mtp(_layers)?\."
)
MAX_NAMED = 4  # tensors that an error lists


def check_weights(path: str | Path, model: Any, report: dict[str, Any]) -> None:
    """Refuse a model whose files lack weights, which would be random, or hold weights that it does not have.

    `report` is the loading info of transformers' `from_pretrained`.
    """
    missing = sorted(report["missing_keys"])
    unexpected = [name for name in sorted(report["unexpected_keys"]) if not is_spare(name, model)]
    # a config with sub-configs: the model may be the text part of a larger one, whose files hold the other parts too
    if vars(model.config).get("sub_configs", {}) or type(model.config).sub_configs:
        unexpected = []
    faults = []
    if missing:
        faults.append(f"missing weights {_list_some(missing)}")
    if unexpected:
        faults.append(f"unknown weights {_list_some(unexpected)}")
    if faults:
        raise ValueError(
            f"{path} is no whole {model.config.model_type} model: {'; '.join(faults)}. Missing weights would be "
            "random: take a folder that save_pretrained wrote. A draft head that was exported, or that another tool "
            "made, comes in by `eagle import`"
        )


def is_spare(name: str, model: Any) -> bool:
    """Return whether a tensor that a model does not load is a computed buffer, or of a multi-token prediction layer.

    Such tensors may be missing from a model without harm.
    """
    if COMPUTED.search(name):
        return True
    # DeepSeek-V3 and others number multi-token prediction layers on from the last decoder layer
    layer = re.search(r"\.layers\.(\d+)\.", name)
    extra = getattr(model.config, "num_nextn_predict_layers", None) or 0
    return layer is not None and 0 <= int(layer[1]) - model.config.num_hidden_layers < extra


def _list_some(names: list[str]) -> str:
    """Return the first names of tensors for an error message, and how many more there are."""
    listed = ", ".join(names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{listed} and {more} more" if more > 0 else listed
