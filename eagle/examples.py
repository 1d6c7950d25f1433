"""Placeholder"""
from dataclasses import dataclass
@dataclass
class Batch: ...
