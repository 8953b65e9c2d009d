"""Kill a run with kill -9 again and again, at random moments, and let it resume each time: it has
to end like an undisturbed one.

    python tests/soak.py --kills 100
    python tests/soak.py --kills 50 --ranks 2 --fsdp

A tiny model, shuffled data, dropout, and a checkpoint after every step, so that many kills fall
into a write. Several ranks are torchrun's, which starts all of them again when one dies. Where
torchrun is killed, the same command goes on.
"""

import contextlib
import csv
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from checkpoint.files import MODEL, OPTIMIZER, STATE, read_json
from checkpoint.shards import read_part
from config import Config, load_config
from data.token_file import write_corpus
from runtime.cli import Options, Positive, ZeroIsOff
from runtime.runlog import all_checkpoints
from runtime.start import parse_command_line
from tests.conftest import TINY, children, flags, kill_all, start

STEPS_PER_KILL = 12
# share of several ranks' lives that are counted from their start: most of these end while the ranks
# import
EARLY = 0.25
# seconds without a step after which a run hangs; fewer than the 600 of a rank that waits for
# another
PATIENCE = 500.0
ALL = sys.maxsize
# what is killed of several ranks: so many of them, and whether torchrun is
KINDS = {
    "one rank": (1, False),
    "all ranks": (ALL, False),
    "torchrun alone": (0, True),
    "torchrun and all ranks": (ALL, True),
}


class SoakOptions(Options):
    """options"""

    kills: Positive = 100
    """kills, at least"""
    ranks: Positive = 1
    """processes of each run; several are torchrun's"""
    fsdp: bool = False
    """shard the model over the ranks"""
    seed: ZeroIsOff = 0
    """seed of the moments, and of what is killed"""
    longest_life: float = 2.0
    """seconds after which each process is killed at the latest; several ranks mostly count them
    from their first step on
    """


class Run:
    """A run that goes on however often it is killed. Its methods raise RuntimeError if it fails or
    hangs.
    """

    def __init__(self, config: Config, options: SoakOptions):
        self.path, self.several = Path(config.log_dir) / str(config.run_name), options.ranks > 1
        self.n_ranks = options.ranks if self.several else 0  # that torchrun starts
        torchrun = (
            f"-m torch.distributed.run --standalone --nproc_per_node={options.ranks} "
            f"--max_restarts={options.kills} {ROOT}/train.py"
        )
        self.command = [*(torchrun.split() if self.several else ["train.py"]), *flags(config)]
        self.process: Any = None  # torchrun's, or the only one
        # of this life: the numbers of torchrun's ranks; the checkpoints, and those half written or
        # deleted, that it has found
        self.ranks, self.saved, self.left = list[int](), list[Path](), set[Path]()

    def begin(self) -> bool:
        """Start a life, unless torchrun does, and wait for its processes; returns whether the run
        has not ended.
        """
        before = {*self.ranks}
        if self.process is None:
            self.process = start(*self.command, cwd=self.path.parent.parent, OMP_NUM_THREADS="1")
        goes_on = self.wait(
            lambda: len(self.alive()) == self.n_ranks and not before & {*self.alive()}
        )
        self.ranks, self.saved, self.left = (
            self.alive(),
            all_checkpoints(self.path),
            self.unfinished(),
        )
        return goes_on

    def alive(self) -> list[int]:
        """The numbers of torchrun's ranks that are there now."""
        with contextlib.suppress(FileNotFoundError):  # torchrun has just ended
            return children(self.process) if self.several else []
        return []

    def unfinished(self) -> set[Path]:
        """The checkpoints that are half written or half deleted."""
        return {*self.path.glob("checkpoints/*.tmp")}

    def has_stepped(self) -> bool:
        """Whether a step of this life has been saved."""
        return all_checkpoints(self.path)[-1:] != self.saved[-1:]

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds or the run has ended; returns whether it has not ended."""
        newest, until = list[Path](), time.monotonic() + PATIENCE
        while not condition() and self.process.poll() is None:
            if newest != (now := all_checkpoints(self.path)[-1:]):
                newest, until = now, time.monotonic() + PATIENCE
            elif time.monotonic() > until:
                self.fail("hangs")
            time.sleep(0.005)
        if self.process.poll():
            self.fail(f"ended with status {self.process.returncode}")
        return self.process.poll() is None

    def lives_for(self, seconds: float) -> bool:
        """Wait so long; returns whether all processes are still there."""
        until = time.monotonic() + seconds
        return self.wait(lambda: time.monotonic() > until) and self.alive() == self.ranks

    def wait_for_its_end(self) -> None:
        """Wait until the run has ended by itself."""
        if self.wait(lambda: bool({*self.alive()} - {*self.ranks})):
            self.fail("was started again by torchrun, and nothing had been killed")

    def kill(self, ranks: int, process: bool, moments: random.Random) -> bool:
        """Kill so many ranks at once, and the process, before whose next life they all have to be
        gone; returns whether a checkpoint was being written.
        """
        killed = [self.process.pid] * process + moments.sample(
            self.ranks, min(ranks, len(self.ranks))
        )
        written = self.unfinished() - self.left
        kill_all(killed)
        written &= self.unfinished()
        if process:
            self.process.wait()
            until = time.monotonic() + PATIENCE
            while any(Path(f"/proc/{rank}").exists() for rank in self.ranks):
                if time.monotonic() > until:
                    self.fail("outlives its torchrun")
                time.sleep(0.005)
            self.process = None
        return bool(written)

    def fail(self, what: str) -> NoReturn:
        """Raises RuntimeError, with all that has been printed; nothing of the run is left."""
        kill_all([self.process.pid, *self.ranks, *self.alive()])
        raise RuntimeError("\n".join([f"{self.path} {what}", *self.process.communicate()]))

    def end(self) -> tuple[Any, ...]:
        """The hash of the last weights and optimizer state, the random state of each rank's
        dropout, the log without the times, the evaluations, and the best checkpoint.
        """
        last, digest = all_checkpoints(self.path)[-1], hashlib.sha256()
        for name, tensor in sorted((read_part(last, MODEL) | read_part(last, OPTIMIZER)).items()):
            digest.update(
                name.encode() + tensor.numpy().tobytes()
            )  # not of the files: in which shard a number stands may differ
        dropout = [rank["torch_cpu"] for rank in read_json(last / STATE)["random"]]
        with open(self.path / "log.csv", newline="") as file:
            log = [row[:4] for row in csv.reader(file)]
        best = [path.name for path in all_checkpoints(self.path, "best")]
        return digest.hexdigest(), dropout, log, (self.path / "eval.csv").read_text(), best


def main(options: SoakOptions) -> int:
    """Returns the exit status: 1 if any number differs. Raises RuntimeError if a run fails or
    hangs.
    """
    moments, place, several = (
        random.Random(options.seed),
        Path(tempfile.mkdtemp()),
        options.ranks > 1,
    )
    write_corpus(place / "data" / "tiny", [[(i * i + i // 7) % 100 for i in range(20_000)]])
    values: dict[str, Any] = TINY | {
        "seq_len": 32,
        "dropout": 0.1,
        "dataset": "tiny",
        "data_dir": f"{place}/data",
        "log_dir": f"{place}/logs",
        "device": "cpu",
        "shuffle": True,
        "checkpoint_every": 1,
        "eval_every": 10,
        "val_fraction": 0.1,
        "lr_schedule": "cosine",
        "warmup_steps": 5,
        "max_steps": STEPS_PER_KILL * options.kills,
        "resume": "auto",
        "fsdp": options.fsdp,
    }
    straight = Run(load_config(**values, run_name="straight"), options)
    straight.begin()
    straight.wait_for_its_end()
    kills: Counter[str] = Counter()
    in_a_write = early = rounds = lives = differ = 0
    while kills.total() < options.kills:
        rounds += 1
        run = Run(load_config(**values, run_name=f"killed_{rounds}"), options)
        while run.begin():
            lives += 1
            if several and moments.random() >= EARLY:
                run.wait(run.has_stepped)
            seconds = moments.uniform(0, options.longest_life)
            if kills.total() == options.kills or not run.lives_for(seconds):
                run.wait_for_its_end()
                break
            what, (ranks, process) = (
                moments.choice([*KINDS.items()]) if several else ("the process", (0, True))
            )
            early += not run.has_stepped()
            in_a_write += run.kill(ranks, process, moments)
            kills[what] += 1
        differ += run.end() != straight.end()
    of_kinds = ", ".join(f"{n} of {what}" for what, n in kills.items())
    print(
        f"{options.kills} kills ({of_kinds}) in {lives} lives of {rounds} run(s) of "
        f"{values['max_steps']} steps: {in_a_write} of them while a checkpoint was being written, "
        f"{early} before its first step was saved; {differ} run(s) ended with other weights, "
        f"optimizer state, losses or evaluations"
    )
    if differ:
        print(f"the runs are in {place}")
    else:
        shutil.rmtree(place)
    return 1 if differ else 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)  # where the fork server finds the tests
    begun = time.monotonic()
    status = main(parse_command_line(SoakOptions, description=__doc__))
    print(f"{time.monotonic() - begun:.0f} s")
    raise SystemExit(status)
