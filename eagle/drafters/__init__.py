"""The registry of drafting methods."""

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.drafters.blocks.dflash import DFlash
from eagle.drafters.blocks.dflash2 import DFlash2
from eagle.drafters.blocks.dspark import DSpark
from eagle.drafters.blocks.lilicorr import LiLiCorr
from eagle.drafters.blocks.peagle import Peagle
from eagle.drafters.blocks.xpress import XPress
from eagle.drafters.draft_model import DraftModel
from eagle.drafters.levels.blockwise import Blockwise
from eagle.drafters.levels.hydra import Hydra
from eagle.drafters.levels.medusa import Medusa
from eagle.drafters.levels.mlp_speculator import MlpSpeculator
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.lookup.recycling import RecyclingDrafter
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.lookup.unigram import UnigramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.outside import Methods, name_of
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.drafters.recurrent.falcon import Falcon
from eagle.drafters.recurrent.hass import Hass
from eagle.drafters.recurrent.mtp import Mtp
from eagle.drafters.self_speculation.early_exit import EarlyExit
from eagle.drafters.self_speculation.early_exit_adapter import EarlyExitAdapter
from eagle.drafters.self_speculation.lookahead import LookaheadDrafter
from eagle.drafters.self_speculation.sparse_kv import SparseKv
from eagle.drafters.self_speculation.spire import Spire
from eagle.recipe import parse_section

DRAFTERS = Methods(
    {
        "none": NoDrafter,
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "recycling": RecyclingDrafter,
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
        "dflash2": DFlash2,
        "lilicorr": LiLiCorr,
        "peagle": Peagle,
        "mtp": Mtp,
        "dspark": DSpark,
        "xpress": XPress,
    }
)


def settings_of(section: dict[str, Any], source: str) -> Any:
    """Return the settings of a recipe's drafter section, checked by the method that it names; this may run its code.

    They are an instance of the method's class `Settings`.

    Args:
        section: The section. A `kind` such as PATH.py:CLASS becomes the method's own name.
        source: Where it is from, for a refusal.
    """
    kind = section.get("kind")
    try:
        method = DRAFTERS.find(kind) if isinstance(kind, str) else None
    except ValueError as error:
        raise ValueError(f"{source}: drafter.kind: {error}") from None
    return _parse_settings(method, section, source)


def stored_settings(section: dict[str, Any], source: str) -> Any:
    """Return the settings in a head's config, whose method `DRAFTERS.admit` has registered: no code is run.

    They are an instance of the method's class `Settings`.

    Args:
        section: The head's settings as its config has them, with the method's name as `kind`.
        source: Where they are from, for a refusal.
    """
    kind = section.get("kind")
    # unlike `find`, `get` runs no code
    method = DRAFTERS.get(kind) if isinstance(kind, str) else None
    return _parse_settings(method, section, source)


def _parse_settings(method: type[Any] | None, section: dict[str, Any], source: str) -> Any:
    """Return the settings of a drafter section, checked by its method.

    Args:
        method: The method that `kind` names; None if it is unknown, which is refused, as is one without weights.
        section: The section.
        source: Where it is from, for a refusal.
    """
    kind = section.get("kind")
    if method is None or not issubclass(method, TrainableDrafter):
        # what the refusal advises
        names = [
            name
            for name, registered in DRAFTERS.items()
            if issubclass(registered, TrainableDrafter)
        ]
        # methods of installed packages are listed, too: they are not loaded, so whether they have weights is unknown
        names += DRAFTERS.offered()
        raise ValueError(
            f"{source}: drafter.kind is {kind!r}, expected a method with weights: "
            f"{', '.join(names)}, or PATH.py:CLASS of your own"
        )
    # a method that was named as PATH.py:CLASS is registered by its own name
    name = kind if kind in DRAFTERS else name_of(method, str(kind))
    return parse_section(method.Settings, {**section, "kind": name}, f"{source}: drafter")
