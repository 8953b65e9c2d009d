"""docs/cluster: its scripts and YAMLs are whole, and every option in them is one of train.py's or
torchrun's.
"""

import os
import re
import shlex
import signal
import subprocess

import pytest
import yaml
from torch.distributed.run import get_args_parser

from config import Config
from runtime.cli import parse
from tests.conftest import ROOT, ended, wait_for

PAGE, SLURM = ((ROOT / f"docs/{name}").read_text() for name in ("cluster.md", "cluster/slurm.sh"))
SHELL = [*re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL), SLURM]
JOB, SKY = (
    yaml.safe_load((ROOT / f"docs/cluster/{name}.yaml").read_text())
    for name in ("kubernetes", "skypilot")
)
CONTAINER = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def commands():
    """Return the words of every call of torchrun; each shell variable is 2."""
    found = []
    for text in [*SHELL, SKY["run"]]:
        calls = re.findall(r"torchrun (--.*)", text.replace("\\\n", " "))
        inserted = r'"?\$\(\(?.*?\)\)?"?(?= |$)|\$\w+|"\$\{?\w+\}?"'
        found += [shlex.split(re.sub(inserted, "2", call).removesuffix("&")) for call in calls]
    assert CONTAINER["command"][0] == "torchrun"
    return [*found, CONTAINER["command"][1:]]


@pytest.mark.parametrize("text", [*SHELL, SKY["setup"], SKY["run"]])
def test_scripts_are_shell(text):
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("command", commands(), ids=["by hand", "slurm", "skypilot", "kubernetes"])
def test_options_are_those_of_torchrun_and_of_training_on_sixteen_gpus(command, monkeypatch):
    words = get_args_parser().parse_args(command)
    assert words.training_script == "train.py"
    assert words.rdzv_backend == "c10d" or command == CONTAINER["command"][1:]
    monkeypatch.setenv("WORLD_SIZE", "16")
    config = parse(Config, words.training_script_args, config_file=True)
    assert (config.accumulation_steps(16), config.resume) == (1, "auto")


@pytest.mark.parametrize("text", [*SHELL, str(JOB), str(SKY)])
def test_machines_can_come_back(text):
    """torchrun's store is a new one for each attempt, which runtime/launch.py relies on."""
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in text


def test_the_slurm_script_saves_and_requeues_at_the_signal(tmp_path):
    """srun, torchrun and scontrol are faked here; srun becomes its command."""
    for name, script in {
        "srun": 'exec "$@"',
        "scontrol": 'echo "$@" >> requeued; [ "$1" = show ] && echo node-a || true',
        "torchrun": 'trap "echo saved > saved; exit 0" USR1\necho "$@" > called\n'
        "while true; do sleep 0.05; done",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "gpt2.sh").write_text(SLURM)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
    }
    called, requeued = tmp_path / "called", tmp_path / "requeued"
    with ended([subprocess.Popen(["bash", "gpt2.sh"], cwd=tmp_path, env=env)]) as (job,):
        wait_for(lambda: called.exists() and called.read_text(), job)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 0
    assert (tmp_path / "saved").exists()
    assert requeued.read_text().splitlines() == ["show hostnames node-[a-b]", "requeue 12345"]
    assert "--nnodes=2 --nproc_per_node=8" in called.read_text()
    assert "--rdzv_endpoint=node-a:22345" in called.read_text()
