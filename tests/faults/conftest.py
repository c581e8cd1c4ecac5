"""A place with a text and its tokenizer, and a process that starts runs there, for the whole session."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import disks
import pytest
from launches import Launches


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("faults")
    disks.make_data(place)
    return place


@pytest.fixture(scope="session")
def launches(place: Path) -> Iterator[Launches]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    with Launches(disks.library(place), place) as found:
        yield found
