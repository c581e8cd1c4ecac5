"""Longshift as a machine with a GPU may have it: torch and numpy, without what the package itself imports (pydantic and others). To be
imported before anything of it."""

import sys
from pathlib import Path
from types import ModuleType

if "longshift" not in sys.modules:
    sys.modules["longshift"] = ModuleType("longshift")
    sys.modules["longshift"].__path__ = [str(Path(__file__).parents[2] / "src" / "longshift")]
