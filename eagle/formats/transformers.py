"""A draft model as transformers itself writes one; engines load such a folder as they load any model."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout

SERVE = """```python
from transformers import AutoModelForCausalLM

target, draft = (AutoModelForCausalLM.from_pretrained(name) for name in ("TARGET", "HEAD"))
target.generate(..., assistant_model=draft)
```

```sh
vllm serve TARGET --speculative-config '{"method": "draft_model", "model": "HEAD", "num_speculative_tokens": DEPTH}'
```

It has no tokenizer of its own, for it speaks the target's: copy those files beside it for an engine that asks.
transformers was run with this layout, vLLM was not."""


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """Its own config, and its tensors under its own names; of those that are tied, one."""
    model: Any = getattr(drafter, "model", None)
    if model is None:
        raise ValueError(
            f"transformers: {drafter.settings.kind!r} is a head, which is no model without its target: export to the "
            "engine that will serve it (docs/serving.md)"
        )
    tensors, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().cpu()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}
    return Layout(config, tensors, SERVE)
