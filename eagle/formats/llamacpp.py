"""llama.cpp's layout (commit 0c1e5709): the folder that its converter takes."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.fused import fused_layout
from eagle.formats.layout import Layout

SERVE = """```sh
python convert_hf_to_gguf.py TARGET --outtype f32 --outfile target.gguf
python convert_hf_to_gguf.py HEAD --target-model-dir TARGET --outtype f32 --outfile head.gguf
llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max DEPTH
```

llama.cpp as of October 2026. `llama-speculative-simple` takes the same flags and prints how many tokens were drafted
and accepted."""


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """Of EAGLE-3's switches it knows the normed residual."""
    made = fused_layout(drafter, target_config, "llamacpp", ("norm_before_residual",), own_embedding=True)
    return made.of(SERVE)
