"""Why a head accepts badly: probes, figures and a verdict."""

from eagle.doctor.examine import diagnose, examine
from eagle.doctor.server import ServerCounts, read_server
from eagle.doctor.verdict import Diagnosis, Effect

__all__ = ["Diagnosis", "Effect", "ServerCounts", "diagnose", "examine", "read_server"]
