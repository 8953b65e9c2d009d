"""Settings of a process before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import runtime.device
from runtime.device import choose_device, peak_memory_mb
from runtime.start import cores, set_up_process, share_cores
from tests.conftest import CPU, ROOT, refused, run_from_nothing
from tests.fake_cuda import answering


@pytest.fixture
def environment(monkeypatch):
    """Set the variables of a user or of torchrun, and unset all others."""
    return lambda **given: monkeypatch.setattr(os, "environ", given)


# MB that a process has gained once 64 buffers of 4 MB have been freed except the newest
FREED = """
import ctypes, os, sys
from runtime.start import return_freed_memory, set_up_process
set_up_process(retain_memory="retain" in sys.argv)
def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = resident_mb()
buffers = [libc.malloc(4 * 2**20) for _ in range(64)]
for buffer in buffers:
    ctypes.memset(buffer, 1, 4 * 2**20)
for buffer in buffers[:-1]:
    libc.free(buffer)
if "return" in sys.argv:
    return_freed_memory()
print(resident_mb() - before)
"""


@pytest.mark.parametrize(
    ("words", "mb"), [("retain", range(200, 300)), ("retain return", range(20)), ("", range(20))]
)
def test_freed_memory_is_retained_until_it_is_returned(words, mb):
    assert int(run_from_nothing("-c", FREED, *words.split(), cwd=ROOT).stdout) in mb


@pytest.mark.parametrize(
    ("device", "given", "grows"),
    [
        ("auto", {}, True),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1,0"}, True),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "any"}, False),
        ("cpu", {}, False),
        ("auto", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
    ],
)
def test_a_gpus_allocator_grows_its_segments(device, given, grows, environment, monkeypatch):
    environment(**given)
    monkeypatch.setattr(Path, "exists", lambda _: True)  # NVIDIA's driver
    set_up_process(device, retain_memory=False)
    assert (os.environ.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True") == grows


# ---- the device


@pytest.mark.parametrize("cuda", ["13.0", None], ids=["old driver", "PyTorch for CPUs"])
def test_a_gpu_that_pytorch_cannot_use_is_an_error_and_not_a_run_on_the_cpu(cuda, monkeypatch):
    monkeypatch.setattr(runtime.device, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with answering(is_available=False):
        for device in ("auto", "cuda"):
            message = f"--device {device}: this PyTorch .* CUDA {cuda}. finds no GPU .*--device cpu"
            with refused(message):
                choose_device(device)
        assert choose_device("cpu") == CPU


def test_more_ranks_than_gpus_are_an_error(environment):
    environment(WORLD_SIZE="4")
    with (
        answering(is_available=True, device_count=2),
        refused("4 ranks, but 2 CUDA devices; start at most one for each"),
    ):
        choose_device("auto")


def test_a_peak_of_memory_is_in_bytes_on_macos(monkeypatch):
    in_kib = peak_memory_mb(CPU)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory_mb(CPU) * 1024 == pytest.approx(in_kib, rel=0.5)


# ---- threads


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "4"),  # on two machines
        ({"WORLD_SIZE": "3"}, "2"),  # started by hand
        ({"WORLD_SIZE": "16"}, "1"),
        ({"WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}, "3"),
        ({}, None),  # alone: PyTorch's own choice
    ],
)
def test_a_rank_has_its_share_of_the_8_cores_of_its_machine(given, threads, environment):
    environment(**given)
    share_cores(8)
    assert os.environ.get("OMP_NUM_THREADS") == threads


SHARES = """if True:
    import os
    from runtime.start import share_cores
    share_cores(8)
    print(os.environ["OMP_NUM_THREADS"])
"""
# torchrun sets one thread unless the user has set a number
STARTS = """OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHELASTIC_RUN_ID=any "$0" -c "$1"; true"""


@pytest.mark.parametrize(("given", "threads"), [({}, 4), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_one_thread_of_the_users_is_told_from_torchruns(given, threads):
    command = ["bash", "-c", STARTS, sys.executable, SHARES]
    printed = subprocess.check_output(command, cwd=ROOT, env={"WORLD_SIZE": "2"} | given)
    assert int(printed) == threads


def test_two_threads_of_one_core_are_one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 6})
    monkeypatch.setattr(Path, "read_text", lambda path: f"siblings {int(path.parts[5][3:]) % 4}")
    assert cores() == 3
