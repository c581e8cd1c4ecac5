"""The command `longshift`. It imports the rest itself, so that Ctrl-C during the imports is one line."""

import os
import sys


def main() -> None:
    try:
        from longshift.cli import main as run
    except KeyboardInterrupt:
        os.write(2, b"longshift: stopped\n")
        sys.exit(130)
    run()
