"""Why a head accepts badly: probes, figures and a verdict."""

from eagle.doctor.examine import diagnosed, examine
from eagle.doctor.server import Served, served
from eagle.doctor.verdict import Diagnosis, Effect

__all__ = ["Diagnosis", "Effect", "Served", "diagnosed", "examine", "served"]
