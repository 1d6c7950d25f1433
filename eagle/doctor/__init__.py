"""Why a head accepts badly: probes, figures and a verdict."""

from eagle.doctor.drift import Drift, measure_drift
from eagle.doctor.examine import diagnose, examine
from eagle.doctor.server import ServerCounts, read_server
from eagle.doctor.verdict import Diagnosis, Effect

__all__ = [
    "Diagnosis",
    "Drift",
    "Effect",
    "ServerCounts",
    "diagnose",
    "examine",
    "measure_drift",
    "read_server",
]
