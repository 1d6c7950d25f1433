"""What every method must hold, on a tiny target that is made on the spot."""

from eagle.conformance.checks import Outcome, run_checks
from eagle.conformance.trial import Fault

__all__ = ["Fault", "Outcome", "run_checks"]
