"""The command line, as a user types it: from the first command to a sample, on two processes, and
with each kind of mistake.
"""

import json
import shlex
import signal

from run.log import read_rows
from tests.conftest import (
    ROOT,
    ended,
    flags,
    run,
    run_from_nothing,
    start,
    torchrun,
    wait_for,
)

SMALL = shlex.split(
    "--n_layer 1 --n_head 2 --n_embd 16 --block_size 32 --seq_len 32 --batch_size 2 --max_steps 3 "
    "--device cpu"
)


# ---- the main path


def test_a_newcomers_path_from_an_empty_folder_to_a_sample(tmp_path):
    more = (
        "--eval_every 3 --eval_tokens 640 --sample_every 3 --sample_tokens 4 --log_every 1 "
        "--warmup_steps 1"
    )
    command = ["train.py", "--config", "quickstart.yaml", *SMALL, *more.split()]
    trained = run_from_nothing(*command, cwd=tmp_path, OMP_NUM_THREADS="1")
    for text in (
        "preparing data/pydocs4096",
        "step 3/3 | loss",
        "step 3/3 | validation loss",
        "sample after step 3: Returns",
        "saved logs/quickstart/checkpoints/step_000003",
        "done: 3 steps",
    ):
        assert text in trained.stdout, trained.stdout
    assert (tmp_path / "data/pydocs4096/pydocs4096_train_000000.bin").is_file()
    more = "--prompt Python --max_new_tokens 4 --temperature 0 --top_k none"
    done = run("sample.py", "logs/quickstart", *more.split(), cwd=tmp_path)
    assert done.stdout.startswith("Python"), done.stderr


def test_ctrl_c_ends_the_run_cleanly_with_what_was_logged(tiny_config, tmp_path):
    log = tmp_path / "logs/train/log.csv"
    command = ["train.py", *flags(tiny_config(max_steps=10**6))]
    with ended([start(*command, cwd=tmp_path)]) as (process,):
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    said = "\nstopping after this step; once more to stop at once\n"
    assert (process.returncode, err) == (0, said)
    assert "interrupted: " in out
    assert json.loads(log.with_name("summary.json").read_text())["interrupted"] is True
    assert len(read_rows(log)) >= 3


# ---- mistakes: one clear line, nothing lost


def test_a_run_without_a_compiler_here_says_so(tiny_config, tmp_path):
    env = {"PATH": "/nowhere", "CXX": "no-such-compiler"}
    done = run("train.py", *flags(tiny_config(compile=True)), cwd=tmp_path, status=2, **env)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "no C++ compiler found" in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("logs/*")), "a run that could not start left a folder"


def test_mistakes_under_torchrun_are_printed_once_and_nobody_hangs(tmp_path):
    """An indivisible batch counts the processes that torchrun started."""
    options = ("--n_layr", "3", "--total_batch_tokens", "12288")
    done = torchrun(ROOT / "train.py", *options, cwd=tmp_path, status=1)
    printed = done.stderr.partition("Failures:")[0]  # torchrun's report repeats the errors
    assert printed.count("--n_layr: unknown option; did you mean --n_layer?") == 1
    assert printed.count("12,288 is not a multiple of the 8,192 tokens") == 1
    assert "nearest that work: 8,192 or 16,384" in printed
