"""Longshift: train transformer language models on sequences of any length, under any parallel layout, with the same numbers."""

from longshift.api import check, explain, export, report, train
from longshift.config import Config
from longshift.config_file import load_config
from longshift.errors import LongshiftError
from longshift.layout.layout import Layout
from longshift.switch.links import Links
from longshift.switch.placed import placed
from longshift.switch.plan import switch_plan
from longshift.switch.traffic import traffic
from longshift.train.metrics import StepMetrics

__all__ = [
    "Config",
    "Layout",
    "Links",
    "LongshiftError",
    "StepMetrics",
    "check",
    "explain",
    "export",
    "load_config",
    "placed",
    "report",
    "switch_plan",
    "traffic",
    "train",
]
