"""Settings of a process before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import runtime.device
import runtime.start
from runtime.device import choose_device, peak_memory_mb
from runtime.report import available_memory, physical_memory
from runtime.start import cores, set_up_process, share_cores
from tests.conftest import CPU, ROOT, refused, run_from_nothing
from tests.fake_cuda import answering


@pytest.fixture
def environment(monkeypatch):
    """Set the variables of a user or of torchrun, and unset all others that this module reads."""

    def put(**given):
        for name in (
            "OMP_NUM_THREADS",
            "TORCHELASTIC_RUN_ID",
            "TORCHINDUCTOR_COMPILE_THREADS",
            "CUDA_VISIBLE_DEVICES",
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_CUDA_ALLOC_CONF",
        ):
            monkeypatch.setenv(name, "")  # restored after the test
            monkeypatch.delenv(name)
        monkeypatch.setenv("GLIBC_TUNABLES", "")  # leaves this process's allocator as it is
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    return put


# faults of pages while 64 MB are taken and given back twice more, as a step does with its buffers
CHURN = """
import resource, sys
if sys.argv[1] == "settled":
    from runtime.start import set_up_process
    set_up_process()
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def step():
    buffer = libc.malloc(64 * 2**20)
    ctypes.memset(buffer, 1, 64 * 2**20)
    libc.free(buffer)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed_by(code, argument, **environment):
    """The number that a process of its own prints."""
    done = run_from_nothing("-c", code, argument, cwd=ROOT, **environment)
    return int(done.stdout)


def test_buffers_that_a_step_frees_are_not_faulted_in_again_by_the_next():
    assert printed_by(CHURN, "plain") > 1000
    assert printed_by(CHURN, "settled") < 100
    assert printed_by(CHURN, "settled", MALLOC_TRIM_THRESHOLD_="131072") > 1000, (
        "what the user has set stands"
    )
    smaller_caches = {
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"
    }  # an example of docs/running.md
    assert printed_by(CHURN, "settled", **smaller_caches) < 100


GROWS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("device", "has_driver", "given", "is_on_gpu", "found"),
    [
        ("auto", True, {}, True, GROWS),
        ("cuda", True, {"CUDA_VISIBLE_DEVICES": "1,0"}, True, GROWS),
        ("cuda", True, {"PYTORCH_CUDA_ALLOC_CONF": "any"}, True, {}),
        ("cpu", True, {}, False, {}),
        ("auto", True, {"CUDA_VISIBLE_DEVICES": "-1"}, False, {}),
        ("auto", True, {"CUDA_VISIBLE_DEVICES": ""}, False, {}),
        ("auto", False, {}, False, {}),
    ],
)
def test_a_gpus_allocator_grows_its_segments_and_a_cpus_keeps_what_is_freed(
    device, has_driver, given, is_on_gpu, found, environment, monkeypatch
):
    retained = []
    environment(**given)
    monkeypatch.setattr(runtime.start, "retain_freed_memory", lambda: retained.append(device))
    monkeypatch.setattr(Path, "exists", lambda path: has_driver)
    set_up_process(device)
    assert bool(retained) != is_on_gpu
    set_up_process(device, retain_memory=False)
    assert len(retained) <= 1
    assert {name: os.environ[name] for name in GROWS if name in os.environ} == found


# MB that the process has gained once 64 buffers of 4 MB have been freed except the newest
FREED = """
import ctypes, os, sys
from runtime.start import return_freed_memory, set_up_process
set_up_process()
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
if sys.argv[1] == "returned":
    return_freed_memory()
print(resident_mb() - before)
"""


def test_freed_memory_is_retained_until_it_is_returned():
    assert printed_by(FREED, "retained") in range(200, 300)
    assert printed_by(FREED, "returned") < 20


@pytest.fixture
def files(monkeypatch):
    """Texts of the system's files by path; all other files are missing."""
    texts = {}

    def read_text(path):
        if str(path) not in texts:
            raise FileNotFoundError(path)
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    return texts


def test_available_memory_is_the_systems_figure_else_all_memory(files):
    assert available_memory() == physical_memory()
    files["/proc/meminfo"] = "MemFree:        1000 kB\nMemAvailable:   3000 kB\n"
    assert available_memory() == 3000 * 1024


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

OF_8_CORES = """if True:
    import os
    import runtime.start as start
    start.cores = lambda: 8
    start.set_up_process()
    print(os.environ["OMP_NUM_THREADS"])
"""
# torchrun sets one thread unless the user has set a number
STARTS = """OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCHELASTIC_RUN_ID=any "$0" -c "$1"; true"""


@pytest.mark.parametrize(("given", "threads"), [({}, 4), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_ranks_share_the_cores_unless_the_user_has_set_their_threads(given, threads, environment):
    environment(WORLD_SIZE="2", **given)
    command = ["bash", "-c", STARTS, sys.executable, OF_8_CORES]
    assert int(subprocess.check_output(command, cwd=ROOT)) == threads


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "threads"),
    [
        ("4", "2", "4"),  # on two machines
        ("3", "", "2"),  # started by hand
        ("16", "", "1"),
        ("1", "", None),  # alone: PyTorch's own choice
    ],
)
def test_a_process_has_its_share_of_the_8_cores_of_its_machine(
    world_size, local_world_size, threads, environment, monkeypatch
):
    environment(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=local_world_size)
    monkeypatch.setattr(runtime.start, "cores", lambda: 8)
    share_cores()
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        assert os.environ.get(name) == threads


def test_two_threads_of_one_core_are_one_core(files, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 6})
    assert cores() == 4, "nothing is known of them"
    for cpu in range(8):
        place = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files[place] = f"{cpu % 4},{cpu % 4 + 4}"
    assert cores() == 3
