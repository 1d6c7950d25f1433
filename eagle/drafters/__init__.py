"""The registry of drafting methods."""

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.drafters.bigram import BigramDrafter
from eagle.drafters.blockwise import Blockwise
from eagle.drafters.dflash import DFlash
from eagle.drafters.draft_model import DraftModel
from eagle.drafters.dspark import DSpark
from eagle.drafters.eagle1 import Eagle1
from eagle.drafters.eagle3 import Eagle3
from eagle.drafters.early_exit import EarlyExit
from eagle.drafters.early_exit_adapter import EarlyExitAdapter
from eagle.drafters.falcon import Falcon
from eagle.drafters.hass import Hass
from eagle.drafters.hydra import Hydra
from eagle.drafters.lookahead import LookaheadDrafter
from eagle.drafters.medusa import Medusa
from eagle.drafters.mlp_speculator import MlpSpeculator
from eagle.drafters.mtp import Mtp
from eagle.drafters.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.peagle import Peagle
from eagle.drafters.sparse_kv import SparseKv
from eagle.drafters.spire import Spire
from eagle.drafters.suffix import SuffixDrafter
from eagle.drafters.unigram import UnigramDrafter
from eagle.recipe import parse_section

DRAFTERS: dict[str, type[Any]] = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "lookahead": LookaheadDrafter,
    "sparse_kv": SparseKv,
    "unigram": UnigramDrafter,
    "bigram": BigramDrafter,
    "early_exit": EarlyExit,
    "draft_model": DraftModel,
    "eagle1": Eagle1,
    "hass": Hass,
    "eagle3": Eagle3,
    "medusa": Medusa,
    "mlp_speculator": MlpSpeculator,
    "blockwise": Blockwise,
    "hydra": Hydra,
    "falcon": Falcon,
    "early_exit_adapter": EarlyExitAdapter,
    "spire": Spire,
    "dflash": DFlash,
    "peagle": Peagle,
    "mtp": Mtp,
    "dspark": DSpark,
}


def settings_of(section: dict[str, Any], source: str) -> Any:
    """A recipe's drafter section, checked by the method that it names."""
    kind = section.get("kind")
    method = DRAFTERS.get(kind) if isinstance(kind, str) else None
    if method is None or not issubclass(method, TrainableDrafter):
        trained = [name for name, known in DRAFTERS.items() if issubclass(known, TrainableDrafter)]
        raise ValueError(f"{source}: drafter.kind is {kind!r}, expected a method with weights: {', '.join(trained)}")
    return parse_section(method.Settings, section, f"{source}: drafter")
