"""Steps on a device that is not the CPU, without one: all tensors of an operation are on the same device, and GPU kernels take theirs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot make up a device")
    script = str(Path(__file__).with_name("fake_gpu.py"))  # in a process of its own, since a device is made up for good
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_steps_run_on_another_device_than_the_cpu(faults: dict[str, str]):
    good = {name: fault for name, fault in faults.items() if name != "positions on the CPU"}
    assert len(good) == 20
    assert not any(good.values()), good


def test_a_tensor_left_on_the_cpu_is_noticed(faults: dict[str, str]):
    assert "same device" in faults["positions on the CPU"]
