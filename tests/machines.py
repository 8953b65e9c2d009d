"""Take machines away from a run and bring them back, or let them differ: two of torchrun's agents
on this machine.

    python tests/machines.py --out logs/results/machines.txt

In each way the run has to go on by itself from its newest whole checkpoint, log each step once, and
end with the losses, norms and evaluations of an undisturbed run. What does not fit at the start has
to be told in one line, within 20 seconds. A tiny model on CPUs, whose steps wait at a gate, so that
each fault comes where it should.
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
from runtime.cli import Options, Positive, parse_command_line
from tests.conftest import children, ended, kill_all, start

# train.py whose steps wait until the file `limit` lets them through, or they are asked to stop; on
# a machine that may be different
GATED = f"""
import os, runpy, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
exec(os.environ.get("DIFFERENT", ""))
import optimizer
from runtime.signals import StopRequest
real = optimizer.learning_rate
def learning_rate(step, config):
    while step > int(Path("limit").read_text()) and not StopRequest.came:
        time.sleep(0.02)
    return real(step, config)
optimizer.learning_rate = learning_rate
sys.argv[0] = {str(ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# without it, a torchrun that comes later waits in vain for an address that the others told only in
# the first round
REJOIN: dict[str, Any] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FIGURES = ("step", "loss", "norm", "val_loss")
STEPS = 12


class Run:
    """A run on agents that stand for machines, in a folder of its own."""

    def __init__(self, place: Path, name: str, workers: int = 2, patience: float = 900):
        self.place, self.name, self.workers, self.patience = place, name, workers, patience
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
        """The command that one process trains by."""
        return [
            str(self.place / "gated.py"),
            *(
                f"--run_name {self.name} --dataset tiny --device cpu --n_layer 1 --n_head 2 "
                f"--n_embd 32 --block_size 32 --seq_len 32 "
                f"--vocab_size 128 --init gpt2 --batch_size 1 --total_batch_tokens 256 --shuffle "
                f"--val_fraction 0.1 --eval_every 4 "
                f"--checkpoint_every 2 --max_steps {STEPS} --timeout 60"
            ).split(),
        ]

    def start(
        self, agent: str, nnodes: str = "2", *options: str, max_restarts: int = 5, **env: Any
    ) -> None:
        """Start torchrun on the machine of this name; that of machine a keeps the rendezvous."""
        self.agents[agent] = start(
            "-m",
            "torch.distributed.run",
            f"--nnodes={nnodes}",
            f"--nproc_per_node={self.workers}",
            f"--max_restarts={max_restarts}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint=localhost:{self.port}",
            f"--rdzv_id={self.name}",
            f"--rdzv_conf=is_host={int(agent == 'a')},last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=6",
            *self.training(),
            *options,
            cwd=self.place,
            OMP_NUM_THREADS="1",
            **env,
        )

    def start_by_hand(self, rank: int, world_size: int, *options: str) -> None:
        """Start one process as torchrun would, at the run's port."""
        self.agents[f"{rank} {len(self.agents)}"] = start(
            *self.training(),
            *options,
            cwd=self.place,
            OMP_NUM_THREADS="1",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(self.port),
        )

    def kill(self, agent: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to an agent alone, and leave its processes the time to notice."""
        self.agents[agent].send_signal(number)
        time.sleep(1)

    def kill_processes(self, agent: str, count: int) -> None:
        """Kill so many of an agent's processes, its last ones."""
        kill_all(children(self.agents[agent])[-count:])

    def power_off(self, agent: str) -> None:
        """Kill a machine: its agent and all its processes."""
        kill_all([self.agents[agent].pid, *children(self.agents[agent])])

    def console(self) -> str:
        """What the run has printed; an earlier one of its name has been moved aside."""
        path = self.path / "console.log"
        return path.read_text() if path.exists() else ""

    def worlds(self) -> list[int]:
        """The number of processes of each attempt."""
        return [
            int(number)
            for number in re.findall(r"^device: .*processes: (\d+)", self.console(), re.MULTILINE)
        ]

    def until(self, step: int, *, attempts: int | None = None, world: int | None = None) -> None:
        """Let the run go on, and wait until this step is logged, by so many attempts and a last one
        of so many processes, if given.
        """
        self.let_through(step)
        until = time.monotonic() + self.patience
        while not (
            f"step {step:2d}/{STEPS} | loss" in self.console().rpartition("device: ")[2]
            and (attempts is None or len(self.worlds()) >= attempts)
            and (world is None or self.worlds()[-1] == world)
        ):
            assert time.monotonic() < until, f"step {step} was not reached:\n{self.printed()}"
            time.sleep(0.05)

    def until_joined(self, world: int) -> None:
        """Wait until the run is of so many processes, with the gate as it is."""
        until = time.monotonic() + self.patience
        while self.worlds()[-1] != world:
            assert time.monotonic() < until, (
                f"there never were {world} processes:\n{self.printed()}"
            )
            time.sleep(0.05)

    def end(self) -> None:
        """Let the run go to its end, and all agents that are left with it."""
        self.let_through(STEPS)
        for name, agent in self.agents.items():
            out, err = agent.communicate(timeout=self.patience)
            assert agent.returncode == 0, f"{name}: {agent.returncode}\n{out}\n{err}"

    def lose(self, agent: str) -> None:
        """Forget an agent that has been killed or told to leave, and wait for its end."""
        process = self.agents.pop(agent)
        process.communicate(timeout=self.patience)

    def printed(self) -> str:
        """What the agents have printed."""
        return "\n".join(
            f"{name}:\n{path.read_text()}"
            for name, agent in self.agents.items()
            for path in (agent.out, agent.err)
        )

    def figures(self) -> dict[str, list[tuple[str, ...]]]:
        """The rows of log.csv and eval.csv, without times."""
        found = {}
        for name in ("log.csv", "eval.csv"):
            with open(self.path / name, newline="") as file:
                found[name] = [
                    tuple(row[key] for key in FIGURES if key in row) for row in csv.DictReader(file)
                ]
        return found


def difference(ours: Run, theirs: Run) -> float:
    """The largest difference of any figure of two runs; infinite unless both have the same rows."""
    largest = 0.0
    for name, rows in ours.figures().items():
        others = theirs.figures()[name]
        if [row[0] for row in rows] != [row[0] for row in others]:
            return float("inf")
        largest = max(
            [
                largest,
                *(
                    abs(float(a) - float(b))
                    for row, other in zip(rows, others, strict=True)
                    for a, b in zip(row, other, strict=True)
                ),
            ]
        )
    return largest


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
    """two agents of two processes, undisturbed"""
    for name in "ab":
        run.start(name)
    run.end()


def one_process(run: Run) -> None:
    """kill -9 of one process of one agent"""
    for name in "ab":
        run.start(name)
    run.until(5)
    run.kill_processes("b", 1)
    run.until(9, attempts=2, world=4)
    run.end()


def all_processes(run: Run) -> None:
    """kill -9 of both processes of one agent, twice"""
    for name in "ab":
        run.start(name)
    run.until(3)
    run.kill_processes("b", 2)
    run.until(7, attempts=2, world=4)
    run.kill_processes("a", 2)
    run.until(11, attempts=3, world=4)
    run.end()


def comes_back(run: Run) -> None:
    """kill -9 of one agent, which comes back"""
    for name in "ab":
        run.start(name, **REJOIN)
    run.until(5)
    run.kill("b")
    run.let_through(6)  # its processes end as soon as a step does
    run.lose("b")
    run.start("b", **REJOIN)
    run.until(9, attempts=2, world=4)
    run.end()


def never_comes_back(run: Run) -> None:
    """--nnodes=1:2, kill -9 of one agent, which never comes back"""
    for name in "ab":
        run.start(name, "1:2", **REJOIN)
    run.until(5, world=4)
    run.kill("b")
    run.lose("b")
    run.until(9, world=2)
    run.end()


def leaves_and_comes_back(run: Run) -> None:
    """--nnodes=1:2, a machine loses its power; the other goes on alone, and then with a new one"""
    for name in "ab":
        run.start(name, "1:2", **REJOIN)
    run.until(5, world=4)
    run.power_off("b")
    run.lose("b")
    run.until(8, world=2)
    run.start("b", "1:2", **REJOIN)
    run.until_joined(4)
    run.end()


def is_preempted(run: Run) -> None:
    """SIGTERM to one agent, which comes back"""
    for name in "ab":
        run.start(name, **REJOIN)
    run.until(5)
    run.kill("b", signal.SIGTERM)
    run.let_through(6)
    run.lose("b")
    run.start("b", **REJOIN)
    run.until(9, attempts=2, world=4)
    run.end()


def host_is_lost(run: Run) -> None:
    """kill -9 of the agent that keeps the rendezvous: all end, and go on by the same commands with
    --resume auto
    """
    for name in "ab":
        run.start(name, "2", "--resume", "auto")
    run.until(5)
    run.power_off("a")
    for name in "ab":
        run.lose(name)
    for name in "ab":
        run.start(name, "2", "--resume", "auto")
    run.until(9, attempts=2, world=4)
    run.end()


WAYS: list[Callable[[Run], None]] = [
    undisturbed,
    one_process,
    all_processes,
    comes_back,
    never_comes_back,
    leaves_and_comes_back,
    is_preempted,
    host_is_lost,
]


# ---- what does not fit at the start

# what is wrong, what it adds on both machines and on the second, and the one line that says so; by
# the ranks 0-1 and 2-3
FAULTS: list[tuple[str, list[str], list[str], str, str]] = [
    (
        "another option",
        [],
        ["--lr", "0.1"],
        "",
        r"error: lr: all ranks need the same, but it is \S+ on rank 0 and 0.1 on ranks 2-3",
    ),
    (
        "another PyTorch",
        [],
        [],
        "import torch; torch.__version__ = '2.11.0'",
        r"error: PyTorch: all ranks need the same, but it is \S+ on rank 0 and 2.11.0 on ranks 2-3",
    ),
    (
        "another kind of device",
        [],
        [],
        "import runtime.world as w; own_of = w._own; w._own = lambda *args: (own := own_of(*args), "
        "own['need'].update({'kind of device': 'cuda'}))[0]",
        r"error: kind of device: all ranks need the same, but it is cpu on rank 0 and cuda on ranks 2-3",
    ),
    (
        "other tokens",
        [],
        ["--data_dir", "other"],
        "",
        r"error: .*/tiny: ranks 2-3 did not find the same tokens there as rank 0",
    ),
    (
        "no corpus",
        [],
        ["--data_dir", "nowhere"],
        "",
        r"error: rank 2: nowhere/tiny: no token files",
    ),
    (
        "more ranks than windows",
        ["--val_fraction", "0.98"],
        [],
        "",
        r"error: .* make 3 sequences of 32, but one step takes 8",
    ),
    (
        "indivisible",
        ["--total_batch_tokens", "160"],
        [],
        "",
        r"error: .*total_batch_tokens 160 is not a multiple of the 128",
    ),
    (
        "other code (a note)",
        ["--max_steps", "1"],
        [],
        "import runtime.report; runtime.report.code_version = lambda: 'other'",
        r"note: code: all ranks should have the same, but it is .* on rank 0 and other on ranks 2-3",
    ),
]


def tell(run: Run, pattern: str) -> tuple[float, list[str]]:
    """Seconds until one of the agents has printed such a line, and all lines of faults, once all
    have ended.
    """
    begun, told = time.monotonic(), None
    while told is None:
        has_ended = all(agent.poll() is not None for agent in run.agents.values())
        told = re.search(pattern, run.printed())
        assert told or not (has_ended or time.monotonic() > begun + run.patience), run.printed()
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    for agent in run.agents.values():
        agent.communicate(timeout=run.patience)
    return seconds, [
        line
        for line in run.printed().splitlines()
        if line.startswith(("error: ", "note: code", "rank "))
    ]


def told_by_torchrun(place: Path) -> Iterator[str]:
    """The outcome of each of FAULTS, on two agents of two processes."""
    for what, both, second, code, pattern in FAULTS:
        with run_in(place / re.sub(r"\W", "_", what), "run") as run:
            write_corpus(
                run.place / "other" / "tiny",
                [[(i * i + i // 7 + (i == 9)) % 100 for i in range(5000)]],
            )
            run.let_through(STEPS)
            run.start("a", "2", *both, max_restarts=0)
            run.start("b", "2", *both, *second, max_restarts=0, DIFFERENT=code)
            seconds, lines = tell(run, pattern)
            yield f"{what}: told after {seconds:.1f} s, {len(lines)} line(s): {' | '.join(lines)}"


def told_by_hand(place: Path) -> Iterator[str]:
    """The outcome of ranks that are missing or come twice, started without torchrun."""
    with run_in(place / "missing", "run") as run:
        for rank in (0, 2):
            run.start_by_hand(rank, 4, "--timeout", "30")
        seconds, lines = tell(run, "for ranks 1 and 3 of the 4 processes")
        yield f"missing ranks: told after {seconds:.1f} s, {len(lines)} line(s): {' | '.join(lines)}"
    with run_in(place / "twice", "run") as run:
        for rank in (0, 1, 0, 1):
            run.start_by_hand(rank, 4, "--timeout", "30")
        seconds, lines = tell(run, "two runs on one port")
        yield f"two runs on one port: told after {seconds:.1f} s, {len(lines)} line(s): {' | '.join(lines)}"


class MachinesOptions(Options):
    """options"""

    out: str | None = None
    """file to write the outcome to as well"""
    rounds: Positive = 1
    """how often each way is tried"""


def main(options: MachinesOptions) -> int:
    """Returns the exit status: 1 if any number differs by more than 1e-5."""
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
                differs = difference(run, straight)
                status |= differs > 1e-5
                lines.append(
                    f"{way.__doc__}: {' -> '.join(map(str, run.worlds()))} processes, {STEPS} "
                    f"steps, largest difference "
                    f"of any figure from one agent of 4 processes {differs:.2g}, "
                    f"{time.monotonic() - begun:.0f} s"
                )
                print(lines[-1], flush=True)
        for line in itertools.chain(told_by_torchrun(Path(place)), told_by_hand(Path(place))):
            lines.append(line)
            print(line, flush=True)
    if options.out:
        Path(options.out).write_text("\n".join(lines) + "\n")
    return status


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)  # where the fork server finds the tests
    raise SystemExit(main(parse_command_line(MachinesOptions, description=__doc__)))
