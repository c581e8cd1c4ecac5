"""The one table of number formats is torch's."""

from typing import get_args

import pytest

from longshift.spec.formats import FORMATS, PrecisionName
from longshift.state.precision import Precision


def test_every_precision_has_a_format():
    assert tuple(FORMATS) == (*get_args(PrecisionName), "float64-float8")


@pytest.mark.parametrize("name", get_args(PrecisionName))
def test_formats_are_torchs(name: PrecisionName):
    formats, precision = FORMATS[name], Precision.of(name)
    assert (str(precision.compute), str(precision.home)) == (f"torch.{formats.compute}", f"torch.{formats.home}")
    assert (precision.compute.itemsize, precision.home.itemsize) == (formats.compute_bytes, formats.home_bytes)
    assert precision.home.itemsize >= max(4, precision.compute.itemsize)
