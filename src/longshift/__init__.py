"""Longshift: train transformer language models on sequences of any length, under any parallel
layout, with the same numbers."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longshift.api import (
        calibrate,
        check,
        check_memory,
        data,
        explain,
        export,
        plan,
        report,
        train,
    )
    from longshift.command_results import (
        CalibrationResult,
        CheckedLayout,
        CorpusFacts,
        ExportedFolder,
        LayoutCheck,
        MemoryCheck,
    )
    from longshift.config import Config
    from longshift.config_file import load_config
    from longshift.errors import LongshiftError
    from longshift.layout.layout import Layout
    from longshift.layout_plan import LayoutPlan, PlannedGroup, PlannedWay
    from longshift.step_report import Explanation
    from longshift.switch.links import Links
    from longshift.switch.plan import switch_plan
    from longshift.switch.spread import spread_weights
    from longshift.switch.traffic import traffic
    from longshift.trainer.metrics import StepMetrics

__all__ = [
    "CalibrationResult",
    "CheckedLayout",
    "Config",
    "CorpusFacts",
    "Explanation",
    "ExportedFolder",
    "Layout",
    "LayoutCheck",
    "LayoutPlan",
    "Links",
    "LongshiftError",
    "MemoryCheck",
    "PlannedGroup",
    "PlannedWay",
    "StepMetrics",
    "calibrate",
    "check",
    "check_memory",
    "data",
    "explain",
    "export",
    "load_config",
    "plan",
    "report",
    "spread_weights",
    "switch_plan",
    "traffic",
    "train",
]

# Where each name is. A name is imported when it is asked for: a search for a plan needs no config,
# and starts in less than half the time.
_FROM = {
    "longshift.api": (
        "calibrate",
        "check",
        "check_memory",
        "data",
        "explain",
        "export",
        "plan",
        "report",
        "train",
    ),
    "longshift.command_results": (
        "CalibrationResult",
        "LayoutCheck",
        "CheckedLayout",
        "CorpusFacts",
        "ExportedFolder",
        "MemoryCheck",
    ),
    "longshift.config": ("Config",),
    "longshift.config_file": ("load_config",),
    "longshift.errors": ("LongshiftError",),
    "longshift.step_report": ("Explanation",),
    "longshift.layout.layout": ("Layout",),
    "longshift.layout_plan": ("LayoutPlan", "PlannedGroup", "PlannedWay"),
    "longshift.switch.links": ("Links",),
    "longshift.switch.spread": ("spread_weights",),
    "longshift.switch.plan": ("switch_plan",),
    "longshift.switch.traffic": ("traffic",),
    "longshift.trainer.metrics": ("StepMetrics",),
}


def __getattr__(name: str) -> object:
    """A name of `__all__`, whose module is imported when it is first asked for."""
    for module, names in _FROM.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
