"""benchmarks/gpu.sh, rehearsed on the CPU with a tiny model: every part does its work and leaves its results."""

import os
import re
import subprocess
import sys
import tarfile

from tests.conftest import ROOT

PARTS = ["tests", "gpu_ms", "peers", "memory", "profile", "speedup"]


def gpu_script(*arguments):
    return subprocess.run(["bash", str(ROOT / "benchmarks/gpu.sh"), *arguments], text=True, capture_output=True, timeout=280,
                          env={**os.environ, "TINY": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})


def test_every_part_leaves_its_results_in_one_archive(tmp_path):
    done = gpu_script(str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    printed = "".join(path.read_text() for path in (tmp_path / "out").glob("*.txt"))
    ends = re.findall(r"^(\w+): ended with status (\d+)", done.stdout, re.MULTILINE)
    assert list(dict.fromkeys(name for name, _ in ends)) == PARTS
    assert {status for _, status in ends} == {"0"}, done.stdout + printed
    with tarfile.open(tmp_path / "out/results.tgz") as archive:
        names = [name.removeprefix("logs/results/tiny/") for name in archive.getnames()]
    for wanted in (r"tests\.txt", r"ladder/report\.md", r"ladder/results\.csv", r"ladder/untied/in_turn\.json",
                   r"b2/peers/report\.md", r"b2/peers/peers\.png", r"bench/[^/]+/report\.md"):
        assert any(re.fullmatch(wanted, name) for name in names), (wanted, names)


def test_a_part_that_is_not_there_is_told_before_anything_runs(tmp_path):
    done = gpu_script(str(tmp_path / "out"), "peer")
    assert done.returncode == 2
    assert done.stdout == "no part is called peer; there are: tests gpu_ms peers memory profile speedup\n"
