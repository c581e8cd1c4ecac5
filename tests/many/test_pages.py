"""Pages that Longshift writes, opened in a headless browser that reaches no network: Debian's chromium, where it is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


def opened(page: Path, *options: str) -> str:
    """The page as it is when its scripts have run."""
    flags = [f"--{name}" for name in ("headless", "no-sandbox", *QUIET, "host-resolver-rules=MAP * ~NOTFOUND", "virtual-time-budget=5000")]
    command = [str(BROWSER), *flags, f"--user-data-dir={page.parent}/browser", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_plan_is_drawn(tmp_path: Path):
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    config = [str(ROOT / "examples" / "auto.yaml"), "--lengths", str(ROOT / "examples" / "lengths" / "github.csv")]
    command = [sys.executable, "-m", "longshift.cli", "plan", *config, "--on", "8xh100", "--html", str(page)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = opened(page, "--dump-dom")
    assert "longshift plan: 1 x 8 NVIDIA H100" in re.sub(r"<script.*?</script>", "", found, flags=re.DOTALL)
    groups = re.findall(r"^ \S+ +(\S+) +\S+ +[0-9.]+", said, re.MULTILINE)
    assert groups
    assert all(f": {group}, packs of" in found for group in groups)
    assert found.count('class="trace bars"') >= 2
    assert found.count('class="point"') >= 3
    opened(page, f"--screenshot={picture}", "--window-size=1200,1300")
    assert picture.stat().st_size > 20_000  # a white page has 5 KB
