"""A draft model as transformers itself writes one; engines load such a folder as they load any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eagle.formats.engines.engine import Engine
from eagle.formats.layout import Layout, TargetConfig
from eagle.formats.networks.network_layout import NetworkLayout

LANGUAGE_MODEL = "draft_model"  # the network of a whole model

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


@dataclass(frozen=True)
class ModelLayout(NetworkLayout):
    """A whole language model under its own names."""

    def write(self, drafter: Any, target_config: TargetConfig, engine: str) -> Layout:
        """Its own config and tensors; of those that are tied, one."""
        model = drafter.model
        tensors: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in model.state_dict().items():
            tensors.setdefault(tensor.data_ptr(), (name, tensor.detach().cpu()))
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}
        return Layout(config, dict(tensors.values()), self.serve)


TRANSFORMERS = Engine(
    name="transformers",
    title="transformers",
    networks={LANGUAGE_MODEL: ModelLayout(SERVE)},
    scalings=None,
    unknown="{kind!r} is a head, which is no model without its target: export to the engine that will serve it "
    "(docs/serving.md)",
)
