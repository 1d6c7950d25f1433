"""A draft model as transformers itself writes one; engines load such a folder as they load any model."""

from __future__ import annotations

from eagle.formats.engines.engine import Engine
from eagle.formats.networks.networks import LANGUAGE_MODEL, ModelLayout

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
TRANSFORMERS = Engine(
    name="transformers",
    title="transformers",
    networks={LANGUAGE_MODEL: ModelLayout(SERVE)},
    scalings=None,
    unknown="{kind!r} is a head, which is no model without its target: export to the engine that will serve it "
    "(docs/serving.md)",
)
