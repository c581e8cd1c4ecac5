"""Pages that Longshift writes, opened in a headless browser that reaches no network: Debian's chromium, where it is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longshift.layout.layout import Layout
from longshift.reports.plan_page import in_words

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


def opened(page: Path, *options: str, query: str = "") -> str:
    """The page as it is when its scripts have run."""
    flags = [f"--{name}" for name in ("headless", "no-sandbox", *QUIET, "host-resolver-rules=MAP * ~NOTFOUND", "virtual-time-budget=5000")]
    command = [str(BROWSER), *flags, f"--user-data-dir={page.parent}/browser", *options, page.as_uri() + query]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def visible(dom: str) -> str:
    """Without scripts and styles."""
    return re.sub(r"<(script|style).*?</\1>", "", dom, flags=re.DOTALL)


def is_too_wide(page: Path) -> bool:
    """Whether a telephone of 400 pixels must scroll sideways."""
    asked = page.with_name(f"asked-{page.name}")
    answer = "<script>document.title = `wide ${document.documentElement.scrollWidth > innerWidth}, ${innerWidth}`</script>"
    asked.write_text(page.read_text() + answer)
    (found,) = re.findall(r"<title>wide (true|false), (\d+)</title>", opened(asked, "--dump-dom", "--window-size=400,900"))
    return found[0] == "true"


def test_a_plan_is_drawn(tmp_path: Path):
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    few = ["train.tokens_per_step=256K", "layout={auto: {pp: 1}}"]  # a short search
    config = [str(ROOT / "examples" / "auto.yaml"), *few, "--lengths", str(ROOT / "examples" / "lengths" / "github.csv")]
    command = [sys.executable, "-m", "longshift.cli", "plan", *config, "--on", "8xh100", "--html", str(page)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shown = visible(opened(page, "--dump-dom"))
    assert "longshift plan: 1 x 8 NVIDIA H100" in shown
    groups = re.findall(r"^ (\S+) +(\S+) +\S+ +[0-9.]+", said, re.MULTILINE)
    assert groups
    for upto, layout in groups:
        assert f"Documents to {upto} with {layout}: " in shown
        assert f"<span>to {upto}: {layout}</span>" in shown
    (seconds,) = re.findall(r"^a step takes (.*)$", said, re.MULTILINE)
    assert f"<p>A step takes {seconds}</p>" in shown
    assert shown.count('class="dots"') >= 6  # three keys, and a way of each
    assert not is_too_wide(page)
    opened(page, f"--screenshot={picture}", "--window-size=1200,1300")
    assert picture.stat().st_size > 20_000  # a white page has 5 KB


def test_a_layout_is_told_in_words():
    assert in_words(Layout.parse("dp8.z2")) == "8 data-parallel replicas, ZeRO-2"
    told = "2 pipeline stages, Ulysses sequence parallelism over 4 ranks, 2 model chunks a rank, gradient checkpointing"
    assert in_words(Layout.parse("pp2:5-4.u4.v2.recompute-full")) == told
    assert in_words(Layout.parse("u4.chunk64K.host.fpdt")).endswith("chunks of 64K tokens, activations in host memory, fpdt")


def test_the_site_begins_with_installing_and_its_search_works_from_a_folder(tmp_path: Path):
    pytest.importorskip("material", reason="mkdocs-material builds the site")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    start = opened(site / "index.html", "--dump-dom")
    assert re.findall(r'<h2 id="([^"]*)"', start)[:2] == ["install", "quick-start"]
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', start)
    found = opened(site / "index.html", "--dump-dom", query="?q=recompute")
    assert re.search(r"result__meta\">\d+ matching documents<", found)
    assert "/reference/layout.html" in re.findall(r'<ol class="md-search-result__list".*?</ol>', found, re.DOTALL)[0]
