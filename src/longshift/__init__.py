"""Longshift: train transformer language models on sequences of any length, under any parallel layout, with the same numbers."""

from longshift.answers import Checked, CheckedLayout, CorpusFacts, Exported, LayoutPlan, PlannedGroup, PlannedWay
from longshift.api import check, data, explain, export, plan, report, train
from longshift.config import Config
from longshift.config_file import load_config
from longshift.errors import LongshiftError
from longshift.explained import Explanation
from longshift.layout.layout import Layout
from longshift.switch.links import Links
from longshift.switch.placed import placed
from longshift.switch.plan import switch_plan
from longshift.switch.traffic import traffic
from longshift.trainer.metrics import StepMetrics

__all__ = [
    "Checked",
    "CheckedLayout",
    "Config",
    "CorpusFacts",
    "Explanation",
    "Exported",
    "Layout",
    "LayoutPlan",
    "Links",
    "LongshiftError",
    "PlannedGroup",
    "PlannedWay",
    "StepMetrics",
    "check",
    "data",
    "explain",
    "export",
    "load_config",
    "placed",
    "plan",
    "report",
    "switch_plan",
    "traffic",
    "train",
]
