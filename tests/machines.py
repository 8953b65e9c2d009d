"""Take machines away from a run and bring them back: two of torchrun's agents on this machine.

    python tests/machines.py --out logs/results/machines.txt

Each time the run has to go on by itself from its newest whole checkpoint, log each step once, and
end with the losses, norms and evaluations of an undisturbed run. It is a tiny model on CPUs, whose
steps wait at a gate, so that each fault comes where it should.
"""

import contextlib
import csv
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.token_file import write_corpus
from runtime.cli import Options, Positive
from runtime.start import parse_command_line
from tests.conftest import children, ended, kill_all, start

# train.py whose steps wait until the file `limit` lets them through, or they are asked to stop
GATED = f"""
import runpy, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import optimizer
import runtime.signals

stops = []

class StopRequest(runtime.signals.StopRequest):
    def __init__(self):
        super().__init__()
        stops.append(self)

real = optimizer.learning_rate

def learning_rate(step, config):
    while step > int(Path("limit").read_text()) and not any(stop.received for stop in stops):
        time.sleep(0.02)
    return real(step, config)

optimizer.learning_rate = learning_rate
runtime.signals.StopRequest = StopRequest
sys.argv[0] = {str(ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEPS = 12
PATIENCE = 900  # seconds


class Run:
    """A run on agents that stand for machines, in a folder of its own."""

    def __init__(self, place: Path, name: str, workers: int = 2):
        self.place, self.name, self.workers = place, name, workers
        self.path = place / "logs" / name
        self.agents: dict[str, Any] = {}
        with socket.socket() as any_free:
            any_free.bind(("localhost", 0))
            self.port = any_free.getsockname()[1]
        write_corpus(place / "data" / "tiny", [[(i * i + i // 7) % 100 for i in range(5000)]])
        (place / "gated.py").write_text(GATED)
        self.let_through(0)

    def let_through(self, step: int) -> None:
        """Open the gate for the steps up to this one."""
        (self.place / "limit.tmp").write_text(str(step))
        os.replace(self.place / "limit.tmp", self.place / "limit")

    def training(self) -> list[str]:
        """Return the command that one rank trains by."""
        options = f"""
            --run_name {self.name} --dataset tiny --device cpu --n_layer 1 --n_head 2 --n_embd 32
            --block_size 32 --seq_len 32 --vocab_size 128 --init gpt2 --batch_size 1
            --total_batch_tokens 256 --shuffle --val_fraction 0.1 --eval_every 4
            --checkpoint_every 2 --max_steps {STEPS} --timeout 60
        """
        return [str(self.place / "gated.py"), *options.split()]

    def start(self, agents: str, nnodes: str = "2", *options: str) -> None:
        """Start torchrun on the machines of these names; that on `a` keeps the rendezvous."""
        for agent in agents:
            self.agents[agent] = start(
                "-m",
                "torch.distributed.run",
                f"--nnodes={nnodes}",
                f"--nproc_per_node={self.workers}",
                "--max_restarts=5",
                "--rdzv_backend=c10d",
                f"--rdzv_endpoint=localhost:{self.port}",
                f"--rdzv_id={self.name}",
                f"--rdzv_conf=is_host={int(agent == 'a')},last_call_timeout=5,"
                "keep_alive_interval=2,keep_alive_max_attempt=6",
                *self.training(),
                *options,
                cwd=self.place,
                OMP_NUM_THREADS="1",
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # see docs/cluster.md
            )

    def kill(self, agent: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to an agent alone, let its ranks end after a step, and forget it."""
        self.agents[agent].send_signal(number)
        time.sleep(1)  # until its ranks have noticed
        self.let_through(int((self.place / "limit").read_text()) + 1)
        self.agents.pop(agent).communicate(timeout=PATIENCE)

    def kill_ranks(self, agent: str, count: int) -> None:
        """Kill so many of an agent's ranks, its last ones."""
        kill_all(children(self.agents[agent])[-count:])

    def power_off(self, agent: str) -> None:
        """Kill a machine: its agent and all its ranks."""
        kill_all([self.agents[agent].pid, *children(self.agents[agent])])
        self.agents.pop(agent).communicate(timeout=PATIENCE)

    def console(self) -> str:
        """Return what the run has printed; an earlier one of its name has been moved aside."""
        path = self.path / "console.log"
        return path.read_text() if path.exists() else ""

    def worlds(self) -> list[int]:
        """Return the number of ranks of each attempt."""
        return [
            int(n) for n in re.findall(r"^device: .*ranks: (\d+)", self.console(), re.MULTILINE)
        ]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, f"{self.worlds()} ranks:\n{self.printed()}"
            time.sleep(0.05)

    def until(self, step: int, *, attempts: int = 1, world: int | None = None) -> None:
        """Let the run go on, and wait until this step is logged.

        By so many attempts and, if given, a last one of so many ranks.
        """
        self.let_through(step)

        def is_there() -> bool:
            worlds = self.worlds()
            return (
                f"step {step:2d}/{STEPS} | loss" in self.console().rpartition("device: ")[2]
                and len(worlds) >= attempts
                and world in (None, worlds[-1])
            )

        self.wait_until(is_there)

    def end(self) -> None:
        """Let the run go to its end, and all agents that are left with it."""
        self.let_through(STEPS)
        for name, agent in self.agents.items():
            out, err = agent.communicate(timeout=PATIENCE)
            assert agent.returncode == 0, f"{name}: {agent.returncode}\n{out}\n{err}"

    def printed(self) -> str:
        """Return what the agents have printed."""
        paths = [path for agent in self.agents.values() for path in (agent.out, agent.err)]
        return "\n".join(path.read_text() for path in paths)

    def figures(self) -> list[tuple[str, str, float]]:
        """Return the rows of log.csv and eval.csv without times: step, column and value."""
        figures = []
        for name in ("log.csv", "eval.csv"):
            with open(self.path / name, newline="") as file:
                for row in csv.DictReader(file):
                    columns = [column for column in ("loss", "norm", "val_loss") if column in row]
                    figures += [(row["step"], column, float(row[column])) for column in columns]
        return figures


def difference(ours: Run, theirs: Run) -> float:
    """Return the largest difference of any figure; infinity unless both have the same rows."""
    pairs = [*itertools.zip_longest(ours.figures(), theirs.figures(), fillvalue=("", "", 0.0))]
    if any(mine[:2] != other[:2] for mine, other in pairs):
        return float("inf")
    return max(abs(mine[2] - other[2]) for mine, other in pairs)


@contextlib.contextmanager
def run_in(place: Path, name: str, workers: int = 2) -> Iterator[Run]:
    """A run whose agents and processes are gone at the end, whatever happens."""
    run = Run(place, name, workers)
    try:
        yield run
    finally:
        pids = [
            pid for agent in run.agents.values() if agent.poll() is None for pid in children(agent)
        ]
        with ended([*run.agents.values()]):
            pass
        kill_all(pids)


# ---- the ways


def undisturbed(run: Run) -> None:
    """two agents of two ranks, undisturbed"""
    run.start("ab")


def one_rank(run: Run) -> None:
    """kill -9 of one rank of one agent"""
    run.start("ab")
    run.until(5)
    run.kill_ranks("b", 1)
    run.until(9, attempts=2, world=2 * run.workers)


def all_ranks(run: Run) -> None:
    """kill -9 of both ranks of one agent, twice"""
    run.start("ab")
    run.until(3)
    run.kill_ranks("b", 2)
    run.until(7, attempts=2, world=4)
    run.kill_ranks("a", 2)
    run.until(11, attempts=3, world=4)


def comes_back(run: Run, number: int = signal.SIGKILL) -> None:
    """kill -9 of one agent, which comes back"""
    run.start("ab")
    run.until(5)
    run.kill("b", number)
    run.start("b")
    run.until(9, attempts=2, world=4)


def is_preempted(run: Run) -> None:
    """SIGTERM to one agent, which comes back"""
    comes_back(run, signal.SIGTERM)


def never_comes_back(run: Run) -> None:
    """--nnodes=1:2, kill -9 of one agent, which never comes back"""
    run.start("ab", "1:2")
    run.until(5, world=4)
    run.kill("b")
    run.until(9, world=2)


def leaves_and_comes_back(run: Run) -> None:
    """--nnodes=1:2, a machine loses its power; the other goes on alone, and then with a new one"""
    run.start("ab", "1:2")
    run.until(5, world=2 * run.workers)
    run.power_off("b")
    run.until(8, world=run.workers)
    run.start("b", "1:2")
    run.wait_until(lambda: run.worlds()[-1] == 2 * run.workers)


def host_is_lost(run: Run) -> None:
    """kill -9 of the agent that keeps the rendezvous: the same commands with --resume auto go on"""
    run.start("ab", "2", "--resume", "auto")
    run.until(5)
    run.power_off("a")
    run.agents.pop("b").communicate(timeout=PATIENCE)
    run.start("ab", "2", "--resume", "auto")
    run.until(9, attempts=2, world=4)


WAYS: list[Callable[[Run], None]] = [
    undisturbed,
    one_rank,
    all_ranks,
    comes_back,
    is_preempted,
    never_comes_back,
    leaves_and_comes_back,
    host_is_lost,
]


class MachinesOptions(Options):
    """options"""

    out: str | None = None
    """file to write the outcome to as well"""
    rounds: Positive = 1
    """how often each way is tried"""


def main(options: MachinesOptions) -> int:
    """Return the exit status: 1 if any number differs by more than 1e-5."""
    lines: list[str] = []
    status = 0
    with (
        tempfile.TemporaryDirectory() as place,
        run_in(Path(place) / "straight", "straight", workers=4) as straight,
    ):
        straight.start("a", "1")
        straight.end()
        for way in WAYS * options.rounds:
            begun = time.monotonic()
            with run_in(Path(place) / f"{way.__name__}{len(lines)}", "run") as run:
                way(run)
                run.end()
                differs = difference(run, straight)
                status |= differs > 1e-5
                worlds = " -> ".join(map(str, run.worlds()))
                lines.append(
                    f"{way.__doc__}: {worlds} ranks, {STEPS} steps, largest difference of any "
                    f"figure from one agent of 4 ranks {differs:.2g}, "
                    f"{time.monotonic() - begun:.0f} s"
                )
                print(lines[-1], flush=True)
    if options.out:
        Path(options.out).write_text("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)  # where the fork server finds the tests
    raise SystemExit(main(parse_command_line(MachinesOptions, description=__doc__)))
