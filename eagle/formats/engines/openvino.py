"""OpenVINO GenAI's layout (2026.4.1): what optimum-intel converts, to which offsets are necessary in any case."""

from __future__ import annotations

from eagle.formats.engines.engine import Engine
from eagle.formats.networks.eagle_layouts import FUSED, FusedLayout
from eagle.formats.reading import faults

SERVE = """Convert, say which layers the head reads, counted by their *outputs* (left out, OpenVINO reads each one too
late), and serve both:

```sh
as="--task text-generation-with-past --weight-format fp32"
optimum-cli export openvino --model TARGET $as target-ov
optimum-cli export openvino --model HEAD $as --trust-remote-code head-raw
```

```python
import openvino, openvino_genai as genai

model = openvino.Core().read_model("head-raw/openvino_model.xml")
model.set_rt_info("LAYERS", ["hidden_layers_list"])
openvino.save_model(model, "head-ov/openvino_model.xml", compress_to_fp16=False)  # copy the other files of head-raw too
pipe = genai.LLMPipeline("target-ov", "CPU", draft_model=genai.draft_model("head-ov", "CPU"))
config = genai.GenerationConfig(max_new_tokens=128, do_sample=False, num_assistant_tokens=DEPTH)
```

OpenVINO GenAI 2026.4.1 with optimum-intel 2.2.0, greedy decoding only. A tree instead of a chain: `tree_depth` and
`branching_factor`."""
OPENVINO = Engine(
    name="openvino",
    title="OpenVINO",
    networks={FUSED: FusedLayout(SERVE, needs_offsets=True)},
    faults=(faults.MIDLAYER_ONLY, faults.NO_IDS),
)
