"""docs/cluster.md: its scripts and YAMLs are whole, and every option in them is one of train.py's
or torchrun's.
"""

import os
import re
import shlex
import signal
import subprocess
import time

import pytest
import yaml
from torch.distributed.run import get_args_parser

from config import Config
from runtime.cli import parse
from tests.conftest import ROOT

BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE | re.DOTALL
)
SHELL = [text for language, text in BLOCKS if language == "bash"]
SLURM = next(text for text in SHELL if "#SBATCH" in text)
JOB, SKY = (yaml.safe_load(text) for language, text in BLOCKS if language == "yaml")
CONTAINER = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def commands():
    """Every call of torchrun, in words; what the shell puts in is 2."""
    for text in [*SHELL, SKY["run"]]:
        for line in text.replace("\\\n", " ").splitlines():
            if "torchrun --" in line:
                filled = re.sub(
                    r'"?\$\(\(?.*?\)\)?"?(?= |$)|\$\w+|"\$\{?\w+\}?"',
                    "2",
                    line.partition("torchrun ")[2],
                )
                yield shlex.split(filled.removesuffix("&"))
    assert CONTAINER["command"][0] == "torchrun"
    yield CONTAINER["command"][1:]


def test_the_page_has_a_script_for_each_way():
    assert len(SHELL) == 2
    assert JOB["kind"] == "PyTorchJob"
    assert len([*commands()]) == 4


@pytest.mark.parametrize("text", [*SHELL, SKY["setup"], SKY["run"]])
def test_scripts_are_shell(text):
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    "command", [*commands()], ids=["by hand", "slurm", "skypilot", "kubernetes"]
)
def test_options_are_those_of_torchrun_and_of_training_on_sixteen_gpus(command, monkeypatch):
    words = get_args_parser().parse_args(command)
    assert words.training_script == "train.py"
    assert words.rdzv_backend == "c10d" or command == CONTAINER["command"][1:]
    monkeypatch.setenv("WORLD_SIZE", "16")
    config = parse(Config, words.training_script_args, config_file=True)
    assert config.accumulation_steps(16) == 1
    assert config.resume == "auto"


def test_the_slurm_script_saves_and_requeues_at_the_signal(tmp_path):
    """srun, torchrun and scontrol are stand-ins here, srun one that becomes its command."""
    for name, script in {
        "srun": 'exec "$@"',
        "scontrol": 'echo "$@" >> requeued; [ "$1" = show ] && echo node-a || true',
        "torchrun": 'trap "echo saved > saved; exit 0" USR1\necho "$@" > called\nwhile true; do sleep 0.05; done',
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
    job = subprocess.Popen(["bash", "gpt2.sh"], cwd=tmp_path, env=env)
    until = time.monotonic() + 60
    while not (tmp_path / "called").exists() or not (tmp_path / "called").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 0
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "requeued").read_text().splitlines() == [
        "show hostnames node-[a-b]",
        "requeue 12345",
    ]
    assert "--nnodes=2 --nproc_per_node=8" in (tmp_path / "called").read_text()
    assert "--rdzv_endpoint=node-a:22345" in (tmp_path / "called").read_text()


def faults(value, schema, where=""):
    """What is wrong with a value by a schema of Kubernetes, which knows every field."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema.get(
        "x-kubernetes-int-or-string"
    ):
        return []
    kind = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "boolean": bool,
        "number": (int, float),
    }[schema["type"]]
    if not isinstance(value, kind):
        return [f"{where}: {value!r} is no {schema['type']}"]
    found = (
        [f"{where}: {value!r} is not one of {schema['enum']}"]
        if value not in schema.get("enum", [value])
        else []
    )
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        found += [
            f"{where}: lacks {name}" for name in schema.get("required", []) if name not in value
        ]
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            found += (
                faults(inner, known, f"{where}.{name}") if known else [f"{where}: no field {name}"]
            )
    elif isinstance(value, list):
        found += [
            fault
            for i, item in enumerate(value)
            for fault in faults(item, schema["items"], f"{where}[{i}]")
        ]
    return found


@pytest.mark.skipif(
    "PYTORCHJOB_CRD" not in os.environ,
    reason="needs the training operator's CustomResourceDefinition",
)
def test_the_pytorchjob_is_valid_by_its_schema():
    """PYTORCHJOB_CRD: manifests/base/crds/kubeflow.org_pytorchjobs.yaml of the operator's
    repository.
    """
    with open(os.environ["PYTORCHJOB_CRD"]) as file:
        (version,) = yaml.load(file, yaml.CSafeLoader)["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    assert JOB["apiVersion"] == f"kubeflow.org/{version['name']}"
    assert faults(JOB, schema) == []
    wrong = {**JOB, "spec": {**JOB["spec"], "nprocPerNode": 8, "worker": 1}}
    assert faults(wrong, schema) == [".spec.nprocPerNode: 8 is no string", ".spec: no field worker"]


def test_the_pytorchjob_is_whole():
    spec = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert CONTAINER["name"] == "pytorch"  # by which the operator finds it
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }
    patience = next(
        int(pair["value"])
        for pair in CONTAINER["env"]
        if pair["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    )
    assert patience < spec["terminationGracePeriodSeconds"]
    assert int(JOB["spec"]["nprocPerNode"]) == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
