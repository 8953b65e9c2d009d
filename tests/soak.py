"""Kill a run with kill -9 again and again, at random moments, and let it resume each time: it has to end like an undisturbed one.

    python tests/soak.py --kills 100

A tiny model, shuffled data, dropout, and a checkpoint after every step, so that many kills fall into a write.
"""

import csv
import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import Config, load_config
from data.token_file import write_corpus
from runtime.cli import Options, Positive, ZeroIsOff, parse_command_line

STEPS_PER_KILL = 12


class SoakOptions(Options):
    """options"""

    kills: Positive = 100
    """kills, at least"""
    seed: ZeroIsOff = 0
    """seed of the moments"""
    longest_life: float = 2.0
    """seconds after which each process is killed at the latest"""


def life(config: Config) -> None:
    """One process: the run from its newest checkpoint on, or from the start."""
    import torch

    from runtime.world import World
    from train import train

    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    torch.set_num_threads(1)
    train(config, World(torch.device("cpu")))


def end_of(run: Path) -> tuple[Any, ...]:
    """The hash of a run's last weights and optimizer state, its log without the times, its evaluations, and its best."""
    last = max((run / "checkpoints").glob("step_*"))
    digest = hashlib.sha256(b"".join((last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")))
    with open(run / "log.csv", newline="") as file:
        log = [row[:4] for row in csv.reader(file)]
    return digest.hexdigest(), log, (run / "eval.csv").read_text(), [path.name for path in (run / "checkpoints").glob("best_*")]


def main(options: SoakOptions) -> int:
    """Returns the exit status: 1 if any number differs."""
    moments = random.Random(options.seed)
    context = multiprocessing.get_context("forkserver")  # imports once, and forks a clean process for each life
    context.set_forkserver_preload(["train", "torch._dynamo", "torch._inductor.compile_fx"])
    with tempfile.TemporaryDirectory() as place:
        write_corpus(Path(place) / "data" / "tiny", [[(i * i + i // 7) % 100 for i in range(20_000)]])
        values: dict[str, Any] = {
            "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "seq_len": 32, "vocab_size": 128, "dropout": 0.1,
            "dataset": "tiny", "data_dir": f"{place}/data", "log_dir": f"{place}/logs", "device": "cpu", "shuffle": True,
            "checkpoint_every": 1, "eval_every": 10, "val_fraction": 0.1, "lr_schedule": "cosine", "warmup_steps": 5,
            "max_steps": STEPS_PER_KILL * options.kills, "resume": "auto"}
        straight, killed = (load_config(**values, run_name=name) for name in ("straight", "killed"))
        undisturbed = context.Process(target=life, args=(straight,))
        undisturbed.start()
        undisturbed.join()
        kills = in_a_write = rounds = lives = differ = 0
        while kills < options.kills:
            rounds += 1
            config = killed.model_copy(update={"run_name": f"killed_{rounds}"})
            run = Path(config.log_dir) / str(config.run_name)
            while True:
                before = {*run.glob("checkpoints/*.tmp")}
                process = context.Process(target=life, args=(config,))
                process.start()
                lives += 1
                process.join(moments.uniform(0, options.longest_life) if kills < options.kills else None)
                if process.exitcode is None:
                    process.kill()
                    process.join()
                    kills += 1
                    in_a_write += bool({*run.glob("checkpoints/*.tmp")} - before)
                elif process.exitcode:
                    print(f"a life ended with status {process.exitcode}")
                    return 1
                else:
                    break
            if end_of(run) != end_of(Path(straight.log_dir) / "straight"):
                differ += 1
        print(f"{kills} kills of {lives} processes in {rounds} run(s) of {straight.max_steps} steps, {in_a_write} of them while "
              f"a checkpoint was being written; {differ} run(s) ended with other weights, optimizer state, losses or evaluations")
        return 1 if differ else 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)  # where the fork server finds train
    begun = time.monotonic()
    status = main(parse_command_line(SoakOptions, description=__doc__))
    print(f"{time.monotonic() - begun:.0f} s")
    raise SystemExit(status)
