"""What `--help` says after the options: examples of each command, and exit codes."""

from collections.abc import Iterable

EXIT_CODES = """Exit codes:
    0  done
    1  a check failed, or an error of Longshift itself
    2  the command line, the config or a layout is wrong, or nothing fits
    3  a document or the tokenizer is wrong
    4  a checkpoint or a folder is damaged, missing or cannot be written
    5  a loss or gradient is not finite
    6  a rank died or did not answer
    7  memory or disk is full
  130  stopped"""
EXAMPLES = {  # of each command, in the order of work
    "init": ("init --to run.yaml", "init Qwen3-0.6B --data 'books/*.txt' --to run.yaml"),
    "data": ("data run.yaml", "data run.yaml data.max_len=32K"),
    "profile": ("profile --quick", "profile -o here.json --html here.html"),
    "plan": ("plan run.yaml --html plan.html", "plan run.yaml --on 64xH100 --emit planned.yaml"),
    "check": ("check run.yaml --against dp2.tp2", "check run.yaml --timeline"),
    "train": (
        "train run.yaml train.lr=2e-5",
        "train run.yaml --explain",
        "train run.yaml --resume",
    ),
    "report": ("report runs/first", "report runs/first runs/second --to both.html"),
    "calibrate": ("calibrate runs/first",),
    "export": (
        "export runs/first --to model",
        "export runs/first --best --precision bf16 --to model",
    ),
}


def epilogue(lines: Iterable[str], end: str) -> str:
    """Examples of command lines, then a last paragraph."""
    return "\n".join(["Examples:", *(f"  longshift {line}" for line in lines), "", end])
