"""measure/gpu.sh: its commands are valid, and have the time to compile and to measure."""

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import ladder
from bench import BenchOptions, jobs_of
from config import Config, ModelConfig, SpeedConfig
from measure.interleaved.__main__ import InterleavedOptions, parse_side
from measure.interleaved.rounds import split_command_line
from measure.ladder import stages
from measure.ladder.device import Device
from measure.ladder.quick import quick_stages
from measure.peers import __main__ as peers
from runtime.cli import parse
from tests.conftest import ROOT

PARTS = ["tests", "gpu_ms", "quick", "peers", "memory", "profile", "fast", "modern", "modern_2"]
PARTS += ["speedup", "autotune"]
COLD = {"default": 60, "max-autotune": 240}  # seconds of a compile, as seen on GPUs
MEASURING = 20  # seconds that a command takes besides

# in place of timeout(1): the command is done at once, and writes nothing
AT_ONCE = """#!/bin/bash
shift 3
printf '%q ' "$@" >>"$COMMANDS"
echo >>"$COMMANDS"
"""


def gpu_script(*parts, out, **env):
    return subprocess.run(
        ["bash", str(ROOT / "measure/gpu.sh"), *parts],
        text=True,
        capture_output=True,
        env=os.environ | {"OUT": str(out), "PYTHON": sys.executable} | env,
    )


def configs_of(program, *words):
    """What a command trains."""
    own, of_runs = split_command_line(words)
    if program == "train.py":
        return [parse(Config, own, config_file=True)]
    if program == "bench.py":
        return [job.config for job in jobs_of(parse(BenchOptions, own))]
    if program == "ladder.py":
        options = parse(ladder.LadderOptions, own, positional="configs")
        if options.quick:
            runs = quick_stages(Path(options.log_dir), of_runs, Device())
            return [run.config for run in runs]
        runs = stages.plan(options.configs, options.log_dir, of_runs, Device())[1]
        return [] if options.report_only else [run.config for run in runs]
    if own[0] == "measure.interleaved":
        sides = parse(InterleavedOptions, own[1:], positional="sides").sides
        return [parse(Config, parse_side(side, of_runs)[0], config_file=True) for side in sides]
    if own[0] == "measure.peers":
        ours = peers.our_config(parse(peers.PeersOptions, own[1:]))
        return [ours, ours.model_copy(update={"norm": "of transformers"})]
    return []


def seconds_to_compile(config, known):
    """What a model takes to compile that is not among the known ones, to which it is added."""
    names = {*ModelConfig.model_fields, *SpeedConfig.model_fields, "batch_size", "seq_len"}
    model = config.model_dump_json(include=names - {"init", "dropout", "fused_adamw"})
    is_known = model in known or not config.compile
    known.add(model)
    return 0 if is_known else COLD[config.compile_mode]


@pytest.mark.parametrize("tiny", ["", "1"], ids=["on a GPU", "rehearsed on the CPU"])
@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_the_time_for_what_it_compiles(name, tiny, tmp_path):
    """And what it is to measure is compiled already."""
    commands, known = tmp_path / "commands", set()
    (tmp_path / "timeout").write_text(AT_ONCE)
    (tmp_path / "timeout").chmod(0o755)
    (tmp_path / "torch.py").write_text("class cuda: get_device_name = lambda: 'GPU'")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path), "TINY": tiny}
    done = gpu_script(name, out=tmp_path, COMMANDS=str(commands), **env)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "results.tgz") as archive:
        assert any(path.endswith(f"/{name}.txt") for path in archive.getnames())
    for line in commands.read_text().splitlines():
        seconds, _, *command = shlex.split(line)
        configs = configs_of(*command)
        compiling = sum(seconds_to_compile(config, known) for config in configs)
        assert compiling + MEASURING <= int(seconds), line


def test_a_part_that_is_not_there_is_told_before_anything_runs(tmp_path):
    done = gpu_script("peer", out=tmp_path / "out")
    assert done.returncode == 2
    assert done.stdout == f"no part is called peer; there are: {' '.join(PARTS)}\n"
    assert not (tmp_path / "out").exists()
