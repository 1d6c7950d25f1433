"""The methods, one line each."""

from eagle.drafters.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter

DRAFTERS = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
}
