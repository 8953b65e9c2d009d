"""The command line, as a user types it: from the first command to a sample, on two processes, and
with each kind of mistake.
"""

import json
import shlex
import signal
import subprocess
import sys

import pytest

from runtime.runlog import read_rows
from tests.conftest import (
    ROOT,
    TINY,
    TORCHRUN,
    ended,
    fast_precision,
    flags,
    forks,
    run,
    run_from_nothing,
    wait_for,
)

SMALL = shlex.split(
    "--n_layer 1 --n_head 2 --n_embd 16 --block_size 32 --seq_len 32 --batch_size 2 --max_steps 3 "
    "--device cpu"
)


def torchrun(*options, cwd):
    """train.py on two processes."""
    command = (*TORCHRUN, "--nproc_per_node=2", ROOT / "train.py", *options)
    return run(*command, cwd=cwd, before=forks, OMP_NUM_THREADS="1")


def losses(folder):
    return [row["loss"] for row in read_rows(folder / "log.csv").values()]


# ---- the main path


def test_a_newcomers_path_from_an_empty_folder_to_a_sample(tmp_path):
    more = (
        "--eval_every 3 --eval_tokens 640 --sample_every 3 --sample_tokens 4 --log_every 1 "
        "--warmup_steps 1"
    )
    precision = [f"--no-{name}" for name in fast_precision()]
    command = ["train.py", "--config", "quickstart.yaml", *SMALL, *more.split(), *precision]
    trained = run_from_nothing(*command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert trained.returncode == 0, trained.stderr
    for text in (
        "preparing data/pydocs",
        "step 3/3 | loss",
        "step 3/3 | validation loss",
        "sample after step 3: Returns",
        "saved logs/quickstart/checkpoints/step_000003",
        "done: 3 steps",
    ):
        assert text in trained.stdout, trained.stdout
    assert (tmp_path / "data/pydocs/pydocs_train_000000.bin").is_file()
    more = "--prompt Python --max_new_tokens 4 --temperature 0 --top_k none"
    for name in ("quickstart", "logs/quickstart"):
        done = run("sample.py", name, *more.split(), cwd=tmp_path)
        assert done.stdout.startswith("Python"), done.stderr


def test_torchrun_starts_ranks_of_which_one_prints_and_logs(tiny_config, tmp_path):
    """test_ddp.py compares their losses with one rank's."""
    config = tiny_config(batch_size=2, total_batch_tokens=8 * 32, tensorboard=True)
    done = torchrun(*flags(config), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1/6 | loss") == 1
    assert "2 ranks x 2 micro-steps" in done.stdout
    assert len(losses(tmp_path / "logs/train")) == 6
    assert len([*tmp_path.glob("logs/train/events.*")]) == 1


def test_ctrl_c_ends_the_run_cleanly_with_what_was_logged(tiny_config, tmp_path):
    log = tmp_path / "logs/train/log.csv"
    command = [sys.executable, ROOT / "train.py", *flags(tiny_config(max_steps=10**6))]
    # nothing forked: Python's own start
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe)
    with ended([process]):
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (
        0,
        "\nstopping after this step; once more to stop at once\n",
    )
    assert "interrupted: " in out
    assert json.loads(log.with_name("summary.json").read_text())["interrupted"] is True
    assert len(losses(log.parent)) >= 3


# ---- mistakes: one clear line, nothing lost


def failure(*command, cwd, **env):
    """The one error line of a command that must fail."""
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "Traceback" not in done.stderr
    assert not list(cwd.glob("logs/*")), "a run that could not start left a folder"
    return line


def test_a_corpus_that_is_not_there_names_the_nearest_and_what_to_run(tmp_path):
    line = failure("train.py", *SMALL, "--dataset", "shakespear", cwd=tmp_path)
    assert "did you mean shakespeare?" in line
    assert "python data/text.py FILE --name shakespear" in line


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        (
            {"batch_size": 200},
            {},
            "4,000 tokens make 124 sequences of 32, but one step takes 200, at least 6,401 tokens",
        ),
        (
            {"compile": True},
            {"PATH": "/nowhere", "CXX": "no-such-compiler"},
            "no C++ compiler found",
        ),
    ],
    ids=["small corpus", "no compiler"],
)
def test_a_run_that_cannot_start_here_says_why(options, env, message, tiny_config, tmp_path):
    command = ["train.py", *flags(tiny_config(**options))]
    assert message in failure(*command, cwd=tmp_path, **env)


def test_mistakes_under_torchrun_are_printed_once_and_nobody_hangs(tmp_path):
    """An indivisible batch counts the processes that torchrun started."""
    done = torchrun("--n_layr", "3", "--total_batch_tokens", "12288", cwd=tmp_path)
    assert done.returncode != 0
    printed = done.stderr.partition("Failures:")[0]  # torchrun's report repeats the errors
    assert printed.count("--n_layr: unknown option; did you mean --n_layer?") == 1
    assert printed.count("12,288 is not a multiple of the 8,192 tokens") == 1
    assert "nearest that work: 8,192 or 16,384" in printed


def test_sampling_from_a_model_of_another_vocabulary_is_refused(tiny_config, tmp_path):
    assert run("train.py", *flags(tiny_config(max_steps=1)), cwd=tmp_path).returncode == 0
    done = run("sample.py", "train", cwd=tmp_path)
    assert done.returncode == 2
    assert f"a vocabulary of {TINY['vocab_size']} is not that of GPT-2's tokenizer" in done.stderr
