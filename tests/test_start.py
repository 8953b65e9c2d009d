"""What a process sets before torch is imported."""

import math
import os
import subprocess
import sys

import pytest

import runtime.start
from runtime.start import cores, memory_left, set_up_process, share_cores
from tests.conftest import ROOT, TORCHRUN

# faults of pages while 64 MB are taken and given back ten times, as a step does with its buffers
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
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed_by(code, argument, **environment):
    """The number that a process of its own prints, in which nothing else is said of how memory is
    kept.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code, argument],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**plain, **environment},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


glibc_only = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or not hasattr(os, "confstr")
    or "glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")),
    reason="the C library is not glibc",
)


@glibc_only
def test_buffers_that_a_step_frees_are_not_faulted_in_again_by_the_next():
    assert printed_by(CHURN, "plain") > 1000
    assert printed_by(CHURN, "settled") < 100
    assert printed_by(CHURN, "settled", MALLOC_TRIM_THRESHOLD_="131072") > 1000, (
        "what the user has set stands"
    )
    smaller_caches = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}  # as docs/running.md has it
    assert printed_by(CHURN, "settled", **smaller_caches) < 100


# MB that the process has beyond what it began with, once 64 buffers of 4 MB have been freed but for
# the newest, after a step
FREED = """
import sys
import runtime.start as start
start.set_up_process()
start.memory_left = lambda: start.resident_memory() * float(sys.argv[1])
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = start.resident_memory()
buffers = [libc.malloc(4 * 2**20) for _ in range(64)]
for buffer in buffers:
    ctypes.memset(buffer, 1, 4 * 2**20)
for buffer in buffers[:-1]:
    libc.free(buffer)
start.trim_memory_if_short()
print((start.resident_memory() - before) >> 20)
"""


@glibc_only
@pytest.mark.parametrize(
    ("left", "kept"),
    [("0.6", range(200, 300)), ("0.4", range(20))],
    ids=["enough left", "little left"],
)
def test_what_is_kept_is_given_back_between_steps_where_memory_is_short(left, kept):
    assert printed_by(FREED, left) in kept


def test_the_memory_that_is_left_is_the_machines_or_the_containers(tmp_path):
    assert memory_left(tmp_path) == math.inf, "a system that does not tell"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   3000 kB\n"
    )
    assert memory_left(tmp_path) == 3000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    (group / "memory.current").write_text("3000000\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text(
        "1:cpu:/\n0::/job/step\n"
    )  # of which nothing else is known here
    for limit, left in (("max", 3000 * 1024), ("9000000", 3000 * 1024), ("4000000", 2_000_000)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert memory_left(tmp_path) == left


def test_the_environment_that_the_user_has_set_stands(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # leaves this process as it is
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "kept")
    for given, found in ((None, "ERROR"), ("INFO", "INFO")):
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
        if given:
            monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
        set_up_process()
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == found
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "kept"


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({}, ".cache/torch/inductor"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/torch/inductor"),
        ({"XDG_CACHE_HOME": "xdg", "TORCH_HOME": "hub"}, "hub/inductor"),
        ({"XDG_CACHE_HOME": "white space"}, None),
        ({"XDG_CACHE_HOME": "file"}, None),
    ],
    ids=["home", "xdg", "torch's home", "white space, which breaks the compiler", "not a folder"],
)
def test_what_is_compiled_is_kept_in_the_users_own_cache_if_that_is_possible(
    environment, kept, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in environment.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    set_up_process()
    found = os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    assert found == (kept and str(tmp_path / kept))
    assert not kept or (tmp_path / kept).is_dir()


# ---- threads

OF_8_CORES = """
import os
import runtime.start as start
start.cores = lambda pid=0: 8
start.set_up_process()
print(os.environ["OMP_NUM_THREADS"] + "\\n", end="", flush=True)  # at once: several processes print
"""


def test_processes_share_the_cores_unless_the_user_has_set_their_threads(tmp_path):
    """torchrun sets one thread where the user has set nothing, which looks like a user's 1."""
    (tmp_path / "script.py").write_text(OF_8_CORES)
    plain = {
        name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
    } | {"PYTHONPATH": str(ROOT)}
    runs = {
        threads: subprocess.Popen(
            [sys.executable, *TORCHRUN, "--nproc_per_node=2", str(tmp_path / "script.py")],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=plain | ({"OMP_NUM_THREADS": threads} if threads else {}),
        )
        for threads in ("", "1", "3")
    }
    printed = {threads: process.communicate(timeout=200) for threads, process in runs.items()}
    assert {threads: out.splitlines() for threads, (out, _) in printed.items()} == {
        "": ["4", "4"],
        "1": ["1", "1"],
        "3": ["3", "3"],
    }, printed


@pytest.mark.parametrize(
    ("environment", "own", "of_all", "threads"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 8, 8, "4"),  # on two machines
        ({"WORLD_SIZE": "4"}, 8, 8, "2"),  # started by hand
        ({"WORLD_SIZE": "3"}, 8, 8, "2"),
        ({"WORLD_SIZE": "16"}, 8, 8, "1"),
        ({"WORLD_SIZE": "4"}, 1, 8, "1"),  # bound to a core of its own
        ({"WORLD_SIZE": "1"}, 8, 8, None),
        ({}, 8, 8, None),
    ],
)  # alone: PyTorch's own choice
def test_a_process_has_its_share_of_the_cores_of_its_machine(
    environment, own, of_all, threads, monkeypatch
):
    for name in (
        "OMP_NUM_THREADS",
        "TORCHELASTIC_RUN_ID",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
    ):
        monkeypatch.setenv(name, environment.get(name, ""))
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(runtime.start, "cores", lambda pid=0: of_all if pid else own)
    share_cores()
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"),
    reason="the system does not tell which cores a process has",
)
def test_two_threads_of_one_core_are_one_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 6})
    assert cores(system=tmp_path) == 4, "nothing is known of them"
    for cpu, siblings in enumerate(["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"]):
        place = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(siblings)
    assert cores(system=tmp_path) == 3
