"""Code of the user's own, which a config names as "package.module:name".

A module is looked for in the working directory first, which ranks share with the process that
starts them, then among installed packages. What it prints goes to standard error, as standard
output is the command's. Needs no torch.
"""

import importlib
import sys
import traceback
from contextlib import AbstractContextManager, redirect_stdout
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from longshift.errors import UsageError, did_you_mean

# An attribute of a module: of its source file when it was imported.
_DIGEST = "__longshift_sha256__"


def is_object(text: str) -> bool:
    """Whether a text is meant to name an object, and no word that is known here."""
    return ":" in text


def split_object(text: str) -> tuple[str, str]:
    """The module and the name in it of "package.module:name". Raises ValueError for any other
    text."""
    module, colon, name = text.partition(":")
    if not colon:
        raise ValueError(
            f"{text!r} has no colon: write a module and a name in it, as in"
            f" my_module:{text.rpartition('.')[2] or 'name'}"
        )
    if "/" in module or module.endswith(".py"):
        raise ValueError(
            f"{text!r} names a file: write its module as Python imports it, as in"
            f" {Path(module).stem}:{name or 'name'}"
        )
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{text!r} is no module and a name in it, as in my_module:name")
    return module, name


def load_object(text: str, key: str) -> Any:
    """The object that "package.module:name" names, the value of the config's `key`.

    Raises UsageError where the text is another, the module is not found or cannot be imported, or
    has no such name."""
    module_name, name = _split(text, key)
    module = _import(module_name, f"{key}: {text}")
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise UsageError(
            f"{key}: {text}: {module_name} has no"
            f" {name}{did_you_mean(name, known, otherwise='')} ({module.__file__})"
        )
    return getattr(module, name)


def source_digest(text: str, key: str) -> tuple[Path, str]:
    """The source file of the module that a text names, and its SHA-256. Does not import the module.
    Raises UsageError as `load_object` does, and for a module without a source file."""
    module_name, _ = _split(text, key)
    path = _find(module_name, f"{key}: {text}")
    if path is None:
        raise UsageError(
            f"{key}: {text}: {module_name} has no source file, and tokens are kept under its"
            " SHA-256"
        )
    return path, sha256(path.read_bytes()).hexdigest()


def imported_digest(text: str) -> str | None:
    """The SHA-256 that the source file had when `load_object` first had the module."""
    return getattr(sys.modules[split_object(text)[0]], _DIGEST, None)


def printing_aside() -> AbstractContextManager[object]:
    """Sends what is printed inside to standard error."""
    return redirect_stdout(sys.stderr)


def describe_error(fault: BaseException, module_name: str) -> str:
    """An error of the user's code in a line: its class, the first line of its message, and the line
    of the module where it was."""
    first_line = str(fault).strip().splitlines()[:1]
    message = ": ".join([type(fault).__name__, *first_line])
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(fault.__traceback__)
        if frame.f_globals.get("__name__") == module_name
    ]
    if not frames:
        return message
    frame, line = frames[-1]
    return f"{message} ({frame.f_code.co_filename}, line {line})"


def _split(text: str, key: str) -> tuple[str, str]:
    try:
        return split_object(text)
    except ValueError as fault:
        raise UsageError(f"{key}: {fault}") from None


def _find(module_name: str, where: str) -> Path | None:
    """The source file of a module, None where it has none. Raises UsageError, which begins with
    `where`, for one that is not there."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        # As `python -m` does; it stays, for what the module imports later.
        sys.path.insert(0, folder)
    # The file may be younger than what Python remembers of its folder.
    importlib.invalidate_caches()
    try:
        with printing_aside():
            spec = find_spec(module_name)  # imports the packages above it
    except ModuleNotFoundError as fault:
        if fault.name is None or not f"{module_name}.".startswith(f"{fault.name}."):
            raise _import_error(fault, module_name, where) from fault
        spec = None
    except (Exception, SystemExit) as fault:
        raise _import_error(fault, module_name, where) from fault
    if spec is None:
        file = module_name.partition(".")[0]
        raise UsageError(
            f"{where}: there is no module {module_name} in {folder}, where longshift was"
            " started, nor among installed packages; start longshift in the folder that holds"
            f" {file}, or install its package"
        )
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _import(module_name: str, where: str) -> ModuleType:
    path = _find(module_name, where)
    digest = sha256(path.read_bytes()).hexdigest() if path else None
    try:
        with printing_aside():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as fault:
        raise _import_error(fault, module_name, where) from fault
    # A module is imported once, so the digest is that of its first import.
    vars(module).setdefault(_DIGEST, digest)
    return module


def _import_error(fault: BaseException, module_name: str, where: str) -> UsageError:
    error = describe_error(fault, module_name)
    return UsageError(f"{where}: {module_name} raised while it was imported: {error}")
