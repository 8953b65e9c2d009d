"""Kill a run with kill -9 again and again, at random moments, and let it resume each time: it has
to end like an undisturbed one.

    python tests/soak.py --kills 100
    python tests/soak.py --kills 50 --ranks 2 --fsdp

A tiny model, shuffled data, dropout, and a checkpoint after every step, so that many kills fall
into a write. Several ranks are torchrun's, which starts all of them again when one dies. If
torchrun is killed, the same command is started again.
"""

import contextlib
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

from checkpoint.names import all_checkpoints
from config import Config
from runtime.cli import Options, Positive, ZeroIsOff
from runtime.start import parse_command_line
from tests.conftest import (
    TORCHRUN,
    children,
    end_of,
    flags,
    kill_all,
    start,
    tiny_run,
    write_tiny_corpus,
)

STEPS_PER_KILL = 12
# share of several ranks' lives that are counted from their start: most of these end while the ranks
# import
EARLY = 0.25
# seconds without a step after which a run hangs; fewer than the 600 of a rank that waits for
# another
PATIENCE = 500.0
# victims among several ranks: how many ranks, and whether torchrun is killed
KINDS = {
    "one rank": (1, False),
    "all ranks": (sys.maxsize, False),
    "torchrun alone": (0, True),  # or the only process
    "torchrun and all ranks": (sys.maxsize, True),
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
    """seed of the moments and of the victims"""
    longest_life: float = 2.0
    """seconds after which each process is killed at the latest; several ranks mostly count them
    from their first step on
    """


class Run:
    """A run that is started again however often it is killed. Its methods raise RuntimeError if it
    fails or hangs.
    """

    def __init__(self, config: Config, options: SoakOptions):
        self.path = Path(config.log_dir) / str(config.run_name)
        self.n_ranks = (
            options.ranks if options.ranks > 1 else 0
        )  # ranks of torchrun; 0 without torchrun
        torchrun = [*TORCHRUN, f"--nproc_per_node={options.ranks}"]
        torchrun += [f"--max_restarts={options.kills}", str(ROOT / "train.py")]
        self.command = [*(torchrun if self.n_ranks else ["train.py"]), *flags(config)]
        self.process: Any = None  # torchrun's, or the only one
        # since the last start: process ids of torchrun's ranks; half-written checkpoints found then
        self.ranks, self.left = list[int](), set[Path]()

    def begin(self) -> bool:
        """Start a life, unless torchrun does, and wait for its processes; returns whether the run
        has not ended.
        """
        before = {*self.ranks}
        if self.process is None:
            self.process = start(*self.command, cwd=self.path.parent.parent, OMP_NUM_THREADS="1")
        is_running = self.wait(
            lambda: len(self.alive()) == self.n_ranks and before.isdisjoint(self.alive())
        )
        self.ranks, self.left = self.alive(), self.unfinished()
        return is_running

    def alive(self) -> list[int]:
        """Return the numbers of torchrun's ranks that are there now."""
        with contextlib.suppress(FileNotFoundError):  # torchrun has just ended
            return children(self.process) if self.n_ranks else []
        return []

    def unfinished(self) -> set[Path]:
        """Return the checkpoints that are half written."""
        return {*self.path.glob("checkpoints/.*.unfinished")}

    def newest(self) -> list[Path]:
        """Return the newest checkpoint; empty before the first."""
        return all_checkpoints(self.path)[-1:]

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds or the run has ended; returns whether it has not ended."""
        newest, until = list[Path](), time.monotonic() + PATIENCE
        while not condition() and self.process.poll() is None:
            if newest != (now := self.newest()):
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
        """Wait until the run has ended."""
        if self.wait(lambda: not {*self.alive()} <= {*self.ranks}):
            self.fail("was started again by torchrun, and nothing had been killed")

    def kill(self, ranks: list[int], process: bool) -> bool:
        """Kill ranks at once, and the process, before whose next life they all have to be gone;
        returns whether a checkpoint was being written.
        """
        written = self.unfinished() - self.left
        kill_all([self.process.pid] * process + ranks)
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
        """Raise RuntimeError, with all that has been printed; nothing of the run is left."""
        kill_all([self.process.pid, *self.ranks, *self.alive()])
        raise RuntimeError("\n".join([f"{self.path} {what}", *self.process.communicate()]))


def main(options: SoakOptions) -> int:
    """Return the exit status: 1 if any number differs. Raises RuntimeError if a run fails or
    hangs.
    """
    moments, place = random.Random(options.seed), Path(tempfile.mkdtemp())
    write_tiny_corpus(place)
    values: dict[str, Any] = {
        "dropout": 0.1,
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
    straight = Run(tiny_run(place, **values, run_name="straight"), options)
    straight.begin()
    straight.wait_for_its_end()
    kills: Counter[str] = Counter()
    in_a_write = rounds = differ = 0
    while kills.total() < options.kills:
        rounds += 1
        run = Run(tiny_run(place, **values, run_name=f"killed_{rounds}"), options)
        while run.begin():
            saved = run.newest()
            if options.ranks > 1 and moments.random() >= EARLY:
                run.wait(lambda run=run, saved=saved: run.newest() != saved)  # type: ignore[misc]
            seconds = moments.uniform(0, options.longest_life)
            if kills.total() == options.kills or not run.lives_for(seconds):
                run.wait_for_its_end()
                break
            kind = moments.choice([*KINDS]) if options.ranks > 1 else "torchrun alone"
            ranks, process = KINDS[kind]
            in_a_write += run.kill(moments.sample(run.ranks, min(ranks, len(run.ranks))), process)
            kills[kind] += 1
        differ += end_of(run.path) != end_of(straight.path)
    print(
        f"{options.kills} kills {dict(kills)} in {rounds} run(s) of {values['max_steps']} steps, "
        f"{in_a_write} of them while a checkpoint was being written; {differ} run(s) ended with "
        f"other weights, optimizer state, losses or evaluations"
    )
    if differ:
        print(f"the runs are in {place}")
    else:
        shutil.rmtree(place)
    return 1 if differ else 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)  # the fork server imports the tests
    begun = time.monotonic()
    OPTIONS = parse_command_line(SoakOptions)
    status = main(OPTIONS)
    print(f"{time.monotonic() - begun:.0f} s")
    raise SystemExit(status)
