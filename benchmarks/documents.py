"""How fast data/documents.py tokenizes, beside one thread of tiktoken, and the memory that it
takes.

    python -m benchmarks.documents

Writes parquet files of documents of a few thousand characters, cut from the sources and the
documentation that ship with Python. Then, in turn and several times: one thread of tiktoken encodes
the documents of a part of them, and data/documents.py writes the corpus, from start to end, start
of its processes and reading included. A second part compares the memory that it takes with one
parquet file written in row groups of 1,000 rows, and with the same documents in a single row group.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow
from pyarrow import parquet

from data.manifest import read_manifest
from data.tokenizer import get_encoding
from runtime.report import git_commit, machine

ROOT = Path(__file__).resolve().parent.parent


def make_documents(megabytes: float) -> list[str]:
    """Documents of about so many megabytes in all, the same ones each time, of a length as web
    pages have.
    """
    from pydoc_data.topics import topics

    texts = [*topics.values()]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    text, rng, documents, size = "\n\n".join(texts), random.Random(0), [], 0.0
    while size < megabytes * 1e6:
        start, length = (
            rng.randrange(len(text)),
            int(rng.lognormvariate(8, 0.9)),
        )  # 3,000 characters; 4,500 on average
        documents.append(text[start : start + length])
        size += len(documents[-1])
    return documents


class Figures(NamedTuple):
    """What tokenizing took."""

    tokens: int
    seconds: float
    cpu_seconds: float
    memory: int = 0  # peak, in kB, of the process that reads and writes
    memory_of_worker: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return f"{self.rate / 1e6:.2f} million tokens/s, {self.cpu_seconds / self.tokens * 1e9:.0f} CPU ns each"


def one_thread(documents: list[str]) -> Figures:
    """One thread of tiktoken, which has the documents in memory."""
    encoding, start, cpu = get_encoding(), time.perf_counter(), time.process_time()
    tokens = sum(len(encoding.encode_ordinary(text)) for text in documents)
    return Figures(tokens, time.perf_counter() - start, time.process_time() - cpu)


def whole_command(source: Path, workers: int) -> Figures:
    """The command from start to end."""
    with tempfile.TemporaryDirectory(dir=source.parent) as place:
        start, cpu = time.perf_counter(), cpu_of_children()
        process = subprocess.Popen(
            [
                sys.executable,
                ROOT / "data" / "documents.py",
                source,
                "--name",
                "it",
                "--data_dir",
                place,
                "--workers",
                str(workers),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        own = of_workers = 0
        while process.poll() is None:
            own = max(own, peak(process.pid))
            of_workers = max([of_workers, *map(peak, children(process.pid))])
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        assert process.returncode == 0, process.stderr and process.stderr.read()
        manifest = read_manifest(Path(place) / "it")
        assert manifest
        return Figures(manifest.tokens, seconds, cpu_of_children() - cpu, own, of_workers)


def cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def peak(process: int) -> int:
    """The most memory that a process has had so far, in kB; 0 where the system does not tell, or
    once it has ended.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def children(process: int) -> list[int]:
    try:  # of all threads, as each starts one
        return [
            int(child)
            for path in Path(f"/proc/{process}/task").glob("*/children")
            for child in path.read_text().split()
        ]
    except OSError:
        return []


def main() -> None:
    """Print a rate for each turn, their ratio, and the memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=300, help="of text [300]")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each [3]")
    parser.add_argument(
        "--place", help="folder for the files, on a disk with some GB [that for temporary files]"
    )
    args = parser.parse_args()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    print(f"{machine()}; Python {sys.version.split()[0]}; commit {git_commit()}")
    place = Path(tempfile.mkdtemp(dir=args.place))
    try:
        documents = make_documents(args.megabytes)
        table = pyarrow.table({"text": documents})
        kinds = {
            "row groups of 1,000 rows": place / "small.parquet",
            "one row group": place / "large.parquet",
        }
        for path, rows in zip(kinds.values(), (1000, len(documents)), strict=True):
            parquet.write_table(table, path, row_group_size=rows)
        few = documents[:: max(1, round(args.megabytes / 40))]
        print(
            f"{len(documents):,} documents, {sum(map(len, documents)) / 1e6:,.0f} million "
            f"characters, "
            f"{kinds['one row group'].stat().st_size / 1e6:,.0f} MB of parquet (snappy); "
            f"one thread encodes {sum(map(len, few)) / 1e6:,.0f} million of the characters\n"
        )
        del table, documents
        get_encoding().encode_ordinary_batch(few[:100])
        ratios = []
        for turn in range(1, args.rounds + 1):
            alone = one_thread(few)
            whole = whole_command(kinds["row groups of 1,000 rows"], cores)
            ratios.append(whole.rate / alone.rate / cores)
            print(
                f"turn {turn}: one thread of tiktoken: {alone}; data/documents.py, {cores} "
                f"workers, {whole.tokens:,} tokens: "
                f"{whole}; rate over cores x one thread: {ratios[-1]:.2f}",
                flush=True,
            )
        print(f"median: {statistics.median(ratios):.2f} x cores x one thread\n")
        for name, path in kinds.items():
            whole = whole_command(path, cores)
            print(
                f"peak memory, {name}: {whole.memory / 1e3:,.0f} MB in the process that reads "
                f"and writes, "
                f"{whole.memory_of_worker / 1e3:,.0f} MB in a worker",
                flush=True,
            )
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
