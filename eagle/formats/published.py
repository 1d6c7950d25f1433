"""The layouts in which the authors of methods published their heads, beside EAGLE's own: what their code loads."""

from __future__ import annotations

from eagle.formats.engine import Engine
from eagle.formats.level_layouts import (
    FALCON,
    HYDRA,
    MEDUSA,
    SPECULATOR,
    PublishedFalcon,
    PublishedHydra,
    PublishedMedusa,
    PublishedSpeculator,
)

MEDUSA_CODE = Engine(
    name="medusa",
    title="FasterDecoding/Medusa",
    networks={
        MEDUSA: PublishedMedusa(
            """```python
# of FasterDecoding/Medusa: for LM heads of their own, and for the target's (drafter.lm_head=target)
from medusa.model.medusa_model import MedusaModelLlama
from medusa.model.medusa_model_legacy import MedusaModel

model = MedusaModelLlama.from_pretrained("HEAD")
```

The first class makes five heads whatever the config says: one that is missing stays random, and costs acceptance at its
place alone. Both draw "typically" at a temperature above 0, which is not the target's law.

Its heads say here what they say there; generation by that code was not run by this project."""
        )
    },
)
HYDRA_CODE = Engine(
    name="hydra",
    title="zankner/Hydra",
    networks={
        HYDRA: PublishedHydra(
            """```python
from hydra.model.hydra_model import HydraModel  # of zankner/Hydra

model = HydraModel.from_pretrained("HEAD", base_model="TARGET")
```

At a temperature above 0 it accepts "typically", which is not the target's law.

Its heads say here what they say there; generation by that code was not run by this project."""
        )
    },
    scalings=(),  # of its own modelling file, which knows none of today's
)
FMS = Engine(
    name="fms",
    title="fms-extras",
    networks={
        SPECULATOR: PublishedSpeculator(
            """```python
from fms_extras.models.hf.modeling_mlp_speculator import MLPSpeculatorPreTrainedModel

speculator = MLPSpeculatorPreTrainedModel.from_pretrained("HEAD")
```

vLLM served such a folder up to 0.9.2. What it says is what it says here; generation by that code was not run by this
project."""
        )
    },
)
FALCON_CODE = Engine(
    name="falcon",
    title="Bestpay-inc/Falcon",
    networks={
        FALCON: PublishedFalcon(
            """```python
from models.falcon_model import FaModel  # of Bestpay-inc/Falcon

model = FaModel.from_pretrained(base_model_path="TARGET", fa_model_path="HEAD")
```

As published, that code feeds the whole tuple of its LSTM to the next layer and does not run: take the first part of it.
Names, shapes and keys are those of its source."""
        )
    },
    scalings=(),
)
