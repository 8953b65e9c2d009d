"""What goes wrong in the middle of a run, or before its first step: nothing is lost, and one line
says how to go on.
"""

import contextlib
import errno
import functools
import io
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._inductor.exc import CppCompileError, InductorError

import checkpoint.save
import checkpoint.state
import runtime.runlog
import train as train_module
from checkpoint.files import CheckpointError
from checkpoint.save import emergency_save
from checkpoint.state import read_state
from config import Config, load_config
from data.token_file import TokenFileError
from model import GPT, GPTConfig, ModelError
from runtime.cli import ConfigError, parse
from runtime.errors import TrainingError, UserError, kind_of_failure, reported
from runtime.runlog import RunFolder, duration
from runtime.signals import Stopped, StopRequest, end_at_ctrl_c, raise_at_ctrl_c
from runtime.world import World
from sample import SampleOptions
from tests.conftest import ALONE, COMPILED, CPU, ROOT, TINY, at_step, flags, run
from tests.test_resume import folder_of, log, newest, same_end
from train import train

needs_dev_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)
needs_sighup = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="has no SIGHUP")


def console(config):
    return (folder_of(config) / "console.log").read_text()


def failing(monkeypatch, at, error):
    """Fail in the middle of the step `at`, after its forward and backward; returns what ends this."""

    def fail(call, _):
        if call == at:
            raise error

    return at_step(monkeypatch, fail)


# ---- a fault in the middle of a run


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (RuntimeError, {"dropout": 0.3}),
        (MemoryError, {"dropout": 0.3}),
        (TokenFileError, {"fp16": True}),
        (ValueError, {"batch_size": 2, "total_batch_tokens": 256, "dropout": 0.1}),
    ],
    ids=["dropout", "memory", "fp16", "accumulation"],
)
def test_a_fault_in_a_step_saves_the_step_before_and_the_run_goes_on_exactly(
    fault, options, tiny_config, monkeypatch
):
    config, straight = (tiny_config(**options, run_name=name) for name in ("faulty", "straight"))
    disarm = failing(monkeypatch, 4, fault("it failed"))
    with pytest.raises(fault) as caught:
        train(config, ALONE)
    disarm()
    assert read_state(newest(config)).step == 3
    assert caught.value.__notes__ == [
        f"to go on: the same command with --resume auto, or --resume {folder_of(config)}"
    ]
    assert train(config.model_copy(update={"resume": "auto"}), ALONE)["resumed_after_step"] == 3
    train(straight, ALONE)
    same_end(config, straight)


@pytest.mark.parametrize("what", ["validation_loss", "sample_text", "log.csv", "eval.csv"])
def test_a_fault_after_a_step_saves_that_step_and_the_run_goes_on_exactly(
    what, tiny_config, monkeypatch
):
    options = {
        "vocab_size": 50257,
        "n_layer": 1,
        "dropout": 0.2,
        "eval_every": 3,
        "eval_tokens": 64,
        "val_fraction": 0.1,
        "sample_every": 3,
        "sample_tokens": 2,
    }
    config, straight = (tiny_config(**options, run_name=name) for name in ("faulty", "straight"))
    with monkeypatch.context() as patched:
        if what.endswith(".csv"):
            real = runtime.runlog.append_row

            def fail(path, columns, row):
                if (path.name, row["step"]) == (what, 3):
                    raise OSError(
                        errno.ENOSPC, "cannot be written: No space left on device", str(path)
                    )
                real(path, columns, row)

            patched.setattr(runtime.runlog, "append_row", fail)
        else:
            function, calls = (
                getattr(train_module, what),
                itertools.count(2 if what == "sample_text" else 1),
            )  # not after step 0

            def fail_once(*args, **kwargs):
                if next(calls) == 2:
                    raise RuntimeError("it failed")
                return function(*args, **kwargs)

            patched.setattr(train_module, what, fail_once)
        with pytest.raises((OSError, RuntimeError), match=r"failed|No space left"):
            train(config, ALONE)
    assert read_state(newest(config)).step == 3
    train(config.model_copy(update={"resume": "auto"}), ALONE)
    train(straight, ALONE)
    same_end(config, straight)
    evaluations = [(folder_of(each) / "eval.csv").read_text() for each in (config, straight)]
    assert evaluations[0] == evaluations[1]


def test_a_fault_in_the_middle_of_an_update_is_not_saved(tiny_config, monkeypatch):
    real, calls = torch.optim.AdamW.step, itertools.count(1)

    def fail(*args, **kwargs):
        if next(calls) == 5:
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    config = tiny_config(checkpoint_every=2)
    with pytest.raises(MemoryError) as caught:
        train(config, ALONE)
    assert sorted(path.name for path in (folder_of(config) / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000004",
    ]
    assert "--resume" in caught.value.__notes__[0]


def test_what_training_has_spoiled_or_the_user_stops_at_once_is_not_saved(tiny_config, monkeypatch):
    for error in (TrainingError("too steep"), KeyboardInterrupt(), CheckpointError("no disk")):
        disarm = failing(monkeypatch, 4, error)
        with pytest.raises(type(error)) as caught:
            train(tiny_config(), ALONE)
        disarm()
        assert not (folder_of(tiny_config()) / "checkpoints").exists()
        assert not hasattr(caught.value, "__notes__")


def test_what_the_failed_step_held_is_freed_before_its_state_is_saved(tiny_config, monkeypatch):
    held = []

    def fail(call, _):
        activations = torch.zeros(3)
        if call == 4:
            held.append(weakref.ref(activations))
            raise MemoryError

    at_step(monkeypatch, fail)
    real = checkpoint.save.save_checkpoint
    monkeypatch.setattr(
        checkpoint.save,
        "save_checkpoint",
        lambda *args, **kwargs: held.append(held[0]()) or real(*args, **kwargs),
    )
    with pytest.raises(MemoryError):
        train(tiny_config(), ALONE)
    assert held[1:] == [None]
    assert read_state(newest(tiny_config())).step == 3


def test_a_fault_in_the_first_step_has_nothing_to_save_or_to_go_on_from(tiny_config, monkeypatch):
    failing(monkeypatch, 1, ValueError("anything"))
    with pytest.raises(ValueError, match="anything") as caught:
        train(tiny_config(), ALONE)
    assert not hasattr(caught.value, "__notes__")


def test_a_skipped_step_is_counted_once_if_saying_so_fails(tiny_config, monkeypatch):
    options = {"skip_nonfinite": 2, "dropout": 0.2}
    config, straight = (tiny_config(**options, run_name=name) for name in ("faulty", "straight"))
    spoil = {2: lambda: torch.tensor(math.nan)}
    at_step(monkeypatch, lambda call, _: spoil.get(call, lambda: None)())
    with monkeypatch.context() as patched:
        real = RunFolder.say

        def say(folder, text):
            if "left out" in text:
                raise OSError(errno.ENOSPC, "cannot be written", "console.log")
            real(folder, text)

        patched.setattr(RunFolder, "say", say)
        with pytest.raises(OSError, match="cannot be written"):
            train(config, ALONE)
    assert (read_state(newest(config)).step, read_state(newest(config)).skipped_steps) == (2, 1)
    assert train(config.model_copy(update={"resume": "auto"}), ALONE)["skipped_steps"] == 1
    at_step(monkeypatch, lambda call, _: spoil.get(call, lambda: None)())
    assert train(straight, ALONE)["skipped_steps"] == 1
    for a, b in zip(
        *(load_file(newest(each) / "model.safetensors").values() for each in (config, straight)),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_save_that_fails_as_well_does_not_hide_the_first_error(tiny_config, monkeypatch, capsys):
    failing(monkeypatch, 4, TokenFileError("a bad file"))

    def full(*_, **__):
        raise CheckpointError("logs: cannot be written: No space left on device")

    monkeypatch.setattr(checkpoint.save, "save_checkpoint", full)
    with pytest.raises(SystemExit):
        train_module.main(tiny_config())
    assert capsys.readouterr().err == (
        "error: a bad file; the state after step 3 could not be saved: logs: cannot be written: "
        "No space left on device\n"
    )


@needs_dev_full
def test_a_console_log_that_cannot_be_written_does_not_hide_the_first_error_nor_the_save(
    tiny_config, monkeypatch, capsys
):
    config = tiny_config()

    def fill_up_and_fail(call, _):
        if call == 4:
            (descriptor,) = (
                int(link.name)
                for link in Path("/proc/self/fd").iterdir()
                if link.exists() and link.resolve() == (folder_of(config) / "console.log").resolve()
            )
            with open("/dev/full", "w") as full:
                os.dup2(full.fileno(), descriptor)
            raise TokenFileError("a bad file")

    at_step(monkeypatch, fill_up_and_fail)
    with pytest.raises(SystemExit) as stopped:
        train_module.main(config)
    assert stopped.value.code == 1  # a run that failed, no mistake in its options
    assert capsys.readouterr().err.startswith("error: a bad file; to go on: ")
    assert read_state(newest(config)).step == 3


def test_the_error_line_says_how_to_go_on_quoted_for_the_shell_and_console_log_has_it(
    tiny_config, monkeypatch, capsys
):
    config = tiny_config(run_name="it's mine")
    disarm = failing(monkeypatch, 3, TokenFileError("a bad file"))
    with pytest.raises(SystemExit):
        train_module.main(config)
    disarm()
    (line,) = capsys.readouterr().err.splitlines()
    assert console(config).splitlines()[-1] == line
    assert line.startswith(
        "error: a bad file; to go on: the same command with --resume auto, or --resume "
    )
    assert shlex.split(line.rpartition("or ")[2]) == ["--resume", str(folder_of(config))]
    train(load_config(resume=str(folder_of(config))), ALONE)
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last.partition("for text: ")[2]) == [
        "python",
        "sample.py",
        str(folder_of(config)),
    ]


def test_one_of_several_processes_saves_nothing_at_a_fault_and_says_how_to_go_on(
    tiny_config, tmp_path
):
    state = checkpoint.state.State(
        GPT(GPTConfig(**TINY)),
        [],
        torch.amp.GradScaler("cpu", enabled=False),
        step=5,
        checkpoint=tmp_path / "checkpoints/step_000004",
    )
    state.begin_step(CPU)

    def fail():
        with emergency_save(
            RunFolder(tmp_path), state, tiny_config(), World(CPU, rank=1, world_size=2)
        ):
            raise ValueError("anything")

    with pytest.raises(ValueError, match="anything") as caught:
        fail()
    assert caught.value.__notes__ == [
        f"to go on: the same command with --resume auto, or --resume {tmp_path}"
    ]
    assert not (tmp_path / "checkpoints").exists()


# ---- output that nobody reads


def stdout_is(descriptor):
    os.dup2(descriptor, 1)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))


def broken_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    stdout_is(writing)


def full_disk():
    stdout_is(os.open("/dev/full", os.O_WRONLY))


@needs_dev_full
@pytest.mark.parametrize(
    ("unread", "why"), [(broken_pipe, "Broken pipe"), (full_disk, "No space left on device")]
)
def test_output_that_nobody_reads_does_not_end_a_run(unread, why, tiny_config, tmp_path):
    config = tiny_config()
    done = run("train.py", *flags(config), cwd=tmp_path, before=unread)
    assert (done.returncode, done.stderr) == (0, "")
    (note,) = (line for line in console(config).splitlines() if line.startswith("note: "))
    assert (
        note
        == f"note: what is printed goes nowhere ({why}); the run goes on, and console.log has it all"
    )
    assert "done: 6 steps" in console(config)
    assert read_state(newest(config)).step == 6


def ends_quietly(*command, cwd, into="true"):
    """Whether a command whose output is piped into another, as in a shell, ends as Unix commands
    do, and without a word.
    """
    pipeline = (
        f"{shlex.join([sys.executable, *map(str, command)])} | {into}; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", pipeline], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("tokeniz")]  # progress
    return (done.returncode, said) in ((0, []), (128 + signal.SIGPIPE, []))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
def test_commands_whose_output_nobody_reads_end_without_a_word(tmp_path):
    (tmp_path / "book.txt").write_text("It was a bright cold day in April.")
    assert ends_quietly(ROOT / "data/text.py", "book.txt", cwd=tmp_path)
    assert (tmp_path / "data/book").is_dir()
    assert ends_quietly(ROOT / "train.py", "--help", cwd=tmp_path, into="head -1")
    assert ends_quietly(ROOT / "train.py", "--print_config", cwd=tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
def test_a_sample_that_nobody_reads_ends_without_a_word(tiny_config, tmp_path):
    train(tiny_config(vocab_size=50257, n_layer=1, max_steps=1), ALONE)
    assert ends_quietly(ROOT / "sample.py", "train", "--max_new_tokens", "4", cwd=tmp_path)


@needs_dev_full
def test_a_result_that_cannot_be_written_is_an_error_that_names_stdout(capfd):
    def print_on_a_full_disk():
        with open("/dev/full", "w") as full, contextlib.redirect_stdout(full), reported("logs"):
            print("a result")

    with pytest.raises(SystemExit) as stopped:
        print_on_a_full_disk()
    assert stopped.value.code == 1
    assert capfd.readouterr().err == "error: stdout: cannot be written: No space left on device\n"


# ---- signals


@needs_sighup
def test_a_closed_terminal_saves_and_ends_like_sigterm(tiny_config, monkeypatch):
    at_step(monkeypatch, lambda call, _: signal.raise_signal(signal.SIGHUP) if call == 3 else None)
    config = tiny_config()
    assert train(config, ALONE)["interrupted"]
    assert read_state(newest(config)).step == 3


@needs_sighup
def test_under_nohup_a_closed_terminal_changes_nothing(tiny_config, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(
            monkeypatch, lambda call, _: signal.raise_signal(signal.SIGHUP) if call == 3 else None
        )
        assert train(tiny_config(), ALONE)["steps"] == 6
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


EARLY = "\nstopped before its first step: nothing is lost, the same command starts again\n"


def stopped_early(monkeypatch, place, config, name=signal.SIGTERM):
    """Run train.py's main, with a signal as it enters `place`: a function of train.py."""
    real = getattr(train_module, place)

    def interrupted(*args, **kwargs):
        signal.raise_signal(name)
        return real(*args, **kwargs)

    with monkeypatch.context() as patched, StopRequest() as stop:
        patched.setattr(train_module, place, interrupted)
        with pytest.raises(SystemExit) as ended:
            train_module.main(config, stop)
    assert isinstance(ended.value, Stopped)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "place", ["find_checkpoint", "build", "open_data", "open_run", "validation_loss"]
)
def test_a_signal_before_the_first_step_leaves_everything_as_it_was(
    place, tiny_config, monkeypatch, capfd
):
    options = {"eval_every": 2, "val_fraction": 0.1}
    config = tiny_config(**options, dropout=0.1)
    names = (signal.SIGINT, signal.SIGTERM) if place == "build" else (signal.SIGTERM,)
    for name in names:  # a first run
        stopped_early(monkeypatch, place, config, name)
        assert not folder_of(config).exists()
        assert capfd.readouterr().err == EARLY
    train(tiny_config(**options, max_steps=4, dropout=0.1), ALONE)
    before = log(config), newest(config)
    stopped_early(monkeypatch, place, config)  # a new one of its name
    assert (log(config), newest(config)) == before
    assert [
        path.name for path in folder_of(config).parent.iterdir() if not path.name.startswith(".")
    ] == ["train"]
    resumed = config.model_copy(update={"resume": "auto"})
    (folder_of(config) / "eval.csv").unlink()  # so it evaluates before its first step
    stopped_early(monkeypatch, place, resumed)  # one that goes on
    assert (log(config), newest(config)) == before
    assert train(resumed, ALONE)["resumed_after_step"] == 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_to_one_of_several_processes_before_the_first_step_ends_all_together(
    monkeypatch, capfd
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)  # goes on: the others wait for this one
        stop.end_early(0)
        with pytest.raises(Stopped):
            stop.end_early(1)
    assert capfd.readouterr().err == EARLY


# Many short sleeps: a signal that arrives just before one begins is handled after it.
SLOW_IMPORT = (
    "print('importing', flush=True)\nimport time\nfor _ in range(600):\n    time.sleep(0.1)\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("slow", ["pydantic", "torch"])
@pytest.mark.parametrize(
    ("command", "name", "status", "said"),
    [
        (["train.py", "--dataset", "none"], "SIGINT", 0, EARLY),
        (["train.py", "--dataset", "none"], "SIGTERM", 0, EARLY),
        (["train.py", "--dataset", "none"], "SIGHUP", 0, EARLY),
        (["sample.py", "any"], "SIGINT", 130, "\nerror: interrupted\n"),
        (["bench.py"], "SIGINT", 130, "\nerror: interrupted\n"),
        (["evaluate.py", "any"], "SIGINT", 130, "\nerror: interrupted\n"),
        (["ladder.py", "none"], "SIGINT", 130, "\nerror: interrupted\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_signal_during_imports_ends_a_command_in_one_line(
    command, name, status, said, slow, tmp_path
):
    (tmp_path / "slow" / slow).mkdir(parents=True)
    (tmp_path / "slow" / slow / "__init__.py").write_text(SLOW_IMPORT)
    if (command[0], slow) == ("ladder.py", "torch"):
        pytest.skip("a ladder needs no torch")
    process = subprocess.Popen(
        [sys.executable, ROOT / command[0], *command[1:]],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "slow")},
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (status, said)
    assert not (tmp_path / "logs").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize(
    ("command", "module"),
    [
        *(
            (f"data/{corpus}.py", "argparse")
            for corpus in ("text", "pydocs", "shakespeare", "fineweb", "hellaswag")
        ),
        ("sample.py", "typing"),
        ("evaluate.py", "json"),
    ],
)
def test_ctrl_c_while_the_first_module_is_imported_ends_a_command_in_one_line(
    command, module, tmp_path
):
    (tmp_path / f"{module}.py").write_text(SLOW_IMPORT)
    process = subprocess.Popen(
        [sys.executable, ROOT / command, "any"],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "\nerror: interrupted\n")


def test_ctrl_c_raises_again_once_the_imports_are_done():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    end_at_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    raise_at_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- numbers out of reach


def tokens(n=4):
    return torch.arange(n)[None]


@pytest.mark.parametrize("temperature", [1e-45, 1e-300, 1e-20, 1e-6])
def test_a_temperature_near_0_takes_the_likeliest_token(temperature, tiny_model):
    model = tiny_model()
    assert torch.equal(model.generate(tokens(), 8, temperature), model.generate(tokens(), 8, 0))


@pytest.mark.parametrize("temperature", [1e6, 1e300])
def test_a_temperature_without_end_draws_evenly_from_the_top_k(temperature, tiny_model):
    model = tiny_model()
    likeliest = model(tokens())[0, -1].topk(3).indices.tolist()
    generator = torch.Generator().manual_seed(1)
    drawn = [
        model.generate(tokens(), 1, temperature, top_k=3, generator=generator)[0, -1].item()
        for _ in range(60)
    ]
    assert set(drawn) == set(likeliest)


def test_a_temperature_that_is_no_number_is_refused_and_the_model_goes_on_training(tiny_model):
    model = tiny_model()
    for temperature in (math.nan, math.inf, -1):
        with pytest.raises(ValueError, match=r"temperature .* must be at least 0 and finite"):
            model.generate(tokens(), 1, temperature)
    with torch.no_grad():
        model.lm_head.weight[0] = math.nan
    with pytest.raises(ModelError, match="logits are not finite"):
        model.generate(tokens(), 1)
    assert model.training


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("temperature", "nan", "finite"),
        ("temperature", "-1", "0"),
        ("num_samples", "100000000", "10000"),
        ("seed", "1" * 20, "less than 9.22337e+18"),
        ("max_new_tokens", "1" * 12, "1,000,000"),
    ],
)
def test_sampling_numbers_out_of_reach_are_refused_in_one_line(option, value, allowed):
    with pytest.raises(ConfigError) as caught:
        parse(SampleOptions, ["run", f"--{option}={value}"], positional="run")
    assert str(caught.value).startswith(f"--{option}: ")
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


NUMBERS = [
    name
    for name, field in Config.model_fields.items()
    if not isinstance(field.default, bool | str)
    and name not in ("betas", "run_name", "resume", "hellaswag_file", "recompute_cheap")
]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_an_upper_bound_that_is_told(name):
    with pytest.raises(
        ConfigError, match=rf"--{name}: input should be less than (or equal to )?[\d,.e+]+, not "
    ):
        load_config(**{name: "1" + "0" * 40})


def test_bounds_are_generous(tiny_config):
    load_config(max_steps=10**9, lr=1e30, eval_tokens=10**15, total_batch_tokens=4 * 1024 * 10**8)
    for options in (
        {"n_embd": 10**15, "n_head": 1, "vocab_size": 10**15},
        {"block_size": 10**15},
        {"vocab_size": 10**15},
    ):
        with pytest.raises(RuntimeError) as caught:
            train(tiny_config(**options), ALONE)
        assert kind_of_failure(caught.value)[0] == "memory"


def test_numbers_that_overflow_together_are_one_error_line(tiny_config, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_module.main(tiny_config(lr=1e30, betas=(1 - 2**-53, 0.9)))
    assert stopped.value.code == 1
    assert "a number is too large for fp32: value cannot be converted" in capsys.readouterr().err


def test_a_long_time_is_shown_sensibly():
    assert [duration(seconds) for seconds in (59.6, 90_000, 999 * 86400, 1e12, math.inf)] == [
        "0:01:00",
        "1 day, 1:00:00",
        "999 days, 0:00:00",
        "over 1,000 days",
        "over 1,000 days",
    ]


def test_without_docstrings_the_options_are_the_same():
    printed = [
        subprocess.run(
            [sys.executable, *flag, ROOT / "train.py", *options],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.splitlines()
        for options in (["--help"], ["--print_config"])
        for flag in ([], ["-OO"])
    ]
    for normal, stripped in (
        itertools.batched(printed, 2) if sys.version_info >= (3, 12) else [printed[:2], printed[2:]]
    ):
        assert "None" not in " ".join(stripped)
        assert [line for line in normal if line.startswith(("  --", "seed:", "betas:"))] == [
            line for line in stripped if line.startswith(("  --", "seed:", "betas:"))
        ]


@pytest.mark.parametrize("corpus", ["text", "pydocs", "shakespeare", "fineweb"])
def test_without_docstrings_the_scripts_of_corpora_work(corpus):
    subprocess.run(
        [sys.executable, "-OO", ROOT / f"data/{corpus}.py", "--help"],
        capture_output=True,
        check=True,
        timeout=60,
    )


# ---- compilers and other processes


GCC = """/tmp/torchinductor/header.h:9:10: fatal error: Python.h: No such file or directory
    9 | #include <Python.h>
      |          ^~~~~~~~~~
compilation terminated."""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            GCC,
            "fatal error: Python.h: No such file or directory; install Python's headers "
            "(python3-dev on Debian and Ubuntu, "
            "python3-devel on Fedora)",
        ),
        (
            "x.cpp:2:1: error: unknown type name 'foo'\nx.cpp:3:1: error: more",
            "error: unknown type name 'foo'; install g++ (or set CXX to a C++ compiler that works)",
        ),
        (
            "/usr/bin/ld: cannot find -lgomp\ncollect2: error: ld returned 1 exit status",
            "cannot find -lgomp; install g++ (or set CXX to a C++ compiler that works)",
        ),
        ("Killed", "Killed; install g++ (or set CXX to a C++ compiler that works)"),
    ],
)
def test_a_compile_error_shows_the_compilers_own_line_and_what_to_install(
    output, reason, tiny_config, monkeypatch, capsys
):
    error = InductorError(CppCompileError(["g++", "main.cpp"], output), None)
    assert kind_of_failure(error) == ("C++", reason)
    failing(monkeypatch, 1, error)
    with pytest.raises(SystemExit) as stopped:
        train_module.main(tiny_config())
    assert stopped.value.code == 1
    assert (
        capsys.readouterr().err == f"error: --compile failed: {reason}, or run without --compile\n"
    )


def compiling_with(compiler):
    """As CXX says to a PyTorch that is not imported yet."""
    import torch._inductor.config

    torch._inductor.config.cpp.cxx = (None, str(compiler))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a Unix shell")
def test_a_compiler_without_pythons_headers_is_told_from_a_real_compilation(tiny_config, tmp_path):
    fake = tmp_path / "fake-g++"
    fake.write_text(
        "#!/bin/sh\ncase \"$*\" in *--version*|*-dumpversion*) echo 'g++ (Debian) 12.2.0'; exit "
        "0;; esac\n"
        "echo 'main.h:9:10: fatal error: Python.h: No such file or directory' >&2; exit 1\n"
    )
    fake.chmod(0o755)
    done = run(
        "train.py",
        *flags(tiny_config(**COMPILED, max_steps=1)),
        cwd=tmp_path,
        before=functools.partial(compiling_with, fake),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(
        "error: --compile failed: fatal error: Python.h: No such file or directory; install "
        "Python's headers"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by "
            "peer [127.0.0.1]:31415. This may indicate a "
            "possible application crash on rank 0 or a network set up issue.",
            "Connection closed by peer [127.0.0.1]:31415",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
            "5000ms for recv operation to complete",
            "Timed out waiting 5000ms for recv operation to complete",
        ),
        (
            "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != "
            "nullptr. Unable to find address for: eth7",
            "Unable to find address for: eth7",
        ),
        ("gloo: " + "a word " * 60, "gloo: " + "a word " * 27 + "a ..."),
    ],
)
def test_why_another_process_did_not_answer_is_told_in_a_whole_sentence(text, told):
    assert kind_of_failure(RuntimeError(text if "gloo" in text else f"gloo {text}")) == (
        "lost rank",
        told,
    )


# ---- what comes from Python rather than from the command line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "batch"}, "norm 'batch' is not layernorm or rmsnorm"),
        ({"activation": "relu"}, "activation 'relu' is not"),
        ({"init": "xavier"}, "init 'xavier' is not torch or gpt2"),
        ({"dropout": math.nan}, "dropout nan is not"),
        ({"dropout": "0.1"}, "dropout '0.1' is not"),
        ({"dropout": True}, "dropout True is not"),
        ({"real_vocab_size": 1.5}, "real_vocab_size 1.5 is not"),
        ({"real_vocab_size": "9"}, "real_vocab_size '9' is not"),
        ({"real_vocab_size": True}, "real_vocab_size True is not"),
        ({"n_layer": True}, "n_layer True is not a positive whole number"),
        ({"vocab_size": 128.0}, "vocab_size 128.0 is not a positive whole number"),
        ({"flash": "no"}, "flash 'no' is not True or"),
    ],
)
def test_a_models_options_are_checked_where_it_is_made(options, message):
    with pytest.raises(ModelError) as caught:
        GPTConfig(**(TINY | options))
    assert str(caught.value).startswith(message)


def test_a_config_made_in_python_names_its_run(tiny_config):
    config = Config(**tiny_config(max_steps=1).model_dump(exclude_unset=True))
    assert Config(n_layer=1).run_name == "train"
    train(config, ALONE)
    assert [
        path.name for path in Path(config.log_dir).iterdir() if not path.name.startswith(".")
    ] == ["train"]


@pytest.mark.parametrize(
    "argv", [["--betas", "0.8,0.95"], ["--betas=0.8,0.95"], ["--betas", "0.8", "0.95"]]
)
def test_betas_are_taken_with_a_comma_too(argv):
    assert parse(Config, [*argv, "--lr", "0.1"]).betas == (0.8, 0.95)


def test_a_summary_of_a_run_that_was_stopped_and_went_on_is_whole(tiny_config, monkeypatch):
    config = tiny_config()
    disarm = failing(monkeypatch, 3, ValueError("anything"))
    with pytest.raises(ValueError, match="anything"):
        train(config, ALONE)
    disarm()
    train(config.model_copy(update={"resume": "auto"}), ALONE)
    assert json.loads((folder_of(config) / "summary.json").read_text())["steps"] == 6


def test_a_user_errors_notes_are_part_of_its_message():
    one, two = UserError("one"), UserError("one\ntwo")
    for error in (one, two):
        error.add_note("and more")
    assert (str(one), str(two)) == ("one; and more", "one\ntwo\nand more")
