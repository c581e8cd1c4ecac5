"""Python imports this when it starts, where the survey has put this folder on its path: processes that tests start are traced too."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from line_trace import VARIABLE, LineTrace

sys.path.pop(0)
if VARIABLE in os.environ:
    LineTrace(Path(os.environ[VARIABLE]))
