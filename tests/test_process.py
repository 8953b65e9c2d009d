"""What a process sets before torch is imported, seen by the kernel's page faults."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# faults of pages while 64 MB are taken and given back ten times, as a step does with its buffers
CHURN = """
import resource, sys
if sys.argv[1] == "settled":
    from runtime.process import before_torch
    before_torch()
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def step():
    buffer = libc.malloc(64 * 2**20)
    ctypes.memset(buffer, 1, 64 * 2**20)
    libc.free(buffer)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how, **environment):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", CHURN, how], cwd=ROOT, text=True, capture_output=True,
                          env={**plain, **environment})
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux") or not hasattr(os, "confstr") or "glibc" not in str(
    os.confstr("CS_GNU_LIBC_VERSION")), reason="the C library is not glibc")
def test_buffers_that_a_step_frees_are_not_faulted_in_again_by_the_next():
    assert faults("plain") > 1000
    assert faults("settled") < 100
    assert faults("settled", MALLOC_TRIM_THRESHOLD_="131072") > 1000, "what the user has set stands"


def test_the_environment_that_the_user_has_set_stands(monkeypatch):
    from runtime.process import before_torch

    monkeypatch.setenv("GLIBC_TUNABLES", "")  # leaves this process as it is
    for given, found in ((None, "ERROR"), ("INFO", "INFO")):
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
        if given:
            monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
        before_torch()
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == found
