"""measure/gpu.sh, rehearsed on the CPU with a tiny model: every part does its work and leaves
its results.
"""

import contextlib
import json
import os
import re
import select
import shlex
import socket
import subprocess
import sys
import tarfile
import threading

import pytest

from tests.conftest import ROOT, Forked

PARTS = ["tests", "gpu_ms", "peers", "memory", "profile", "speedup"]

# hands its command over to `python` below, and ends with its status
HAND_OVER = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(sys.argv[1])
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [request.encode()], [0, 1, 2])
    sys.exit(int(server.recv(10)))
"""


@pytest.fixture
def python(tmp_path):
    """A program that runs a command of Python in a process forked from this one's server: none
    imports PyTorch anew.
    """
    if sys.platform != "linux":
        return sys.executable
    address = str(tmp_path / "socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()

    def serve():
        while True:
            connection, _ = listener.accept()
            message, streams, *_ = socket.recv_fds(connection, 2**20, 3)
            command, cwd, env = json.loads(message)
            process = Forked([sys.executable, *command], -1, None, *streams, cwd=cwd, env=env)
            for stream in streams:
                os.close(stream)
            while process.poll() is None and not select.select([connection], [], [], 0.05)[0]:
                pass
            process.kill()  # the script's limit has come: who asked is gone
            with contextlib.suppress(OSError):
                connection.send(str(abs(process.wait())).encode())
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", "-c", HAND_OVER, address])} "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    return str(tmp_path / "python")


def gpu_script(*arguments, python=sys.executable):
    return subprocess.run(
        ["bash", str(ROOT / "measure/gpu.sh"), *arguments],
        text=True,
        capture_output=True,
        timeout=280,
        env={**os.environ, "TINY": "1", "PYTHON": python, "OMP_NUM_THREADS": "1"},
    )


def test_every_part_leaves_its_results_in_one_archive(python, tmp_path):
    done = gpu_script(str(tmp_path / "out"), python=python)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = "".join(path.read_text() for path in (tmp_path / "out").glob("*.txt"))
    ends = re.findall(
        r"^(\w+): ended with status (\d+) after \d+ s of at most (\d+)", done.stdout, re.MULTILINE
    )
    assert list(dict.fromkeys(name for name, *_ in ends)) == PARTS
    assert {status for _, status, _ in ends} == {"0"}, done.stdout + printed
    limits = {name: sum(int(limit) for other, _, limit in ends if other == name) for name in PARTS}
    assert limits["tests"] < 60  # seconds
    assert limits["speedup"] > 300  # what the others left
    with tarfile.open(tmp_path / "out/results.tgz") as archive:
        names = [name.removeprefix("logs/results/tiny/") for name in archive.getnames()]
    for wanted in (
        r"tests\.txt",
        r"ladder/report\.md",
        r"ladder/results\.csv",
        r"ladder/untied/interleaved\.json",
        r"b2/peers/report\.md",
        r"b2/peers/peers\.png",
        r"bench/[^/]+/report\.md",
    ):
        assert any(re.fullmatch(wanted, name) for name in names), (wanted, names)


def test_a_part_that_is_not_there_is_told_before_anything_runs(tmp_path):
    done = gpu_script(str(tmp_path / "out"), "peer")
    assert done.returncode == 2
    assert (
        done.stdout
        == "no part is called peer; there are: tests gpu_ms peers memory profile speedup\n"
    )
