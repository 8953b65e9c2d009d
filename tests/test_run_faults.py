"""What goes wrong in the middle of a run, or before its first step: nothing is lost, and one line
says how to resume.
"""

import contextlib
import errno
import functools
import io
import itertools
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
import inference.evaluation
import runtime.runlog
import train as train_module
from checkpoint.files import CheckpointError
from checkpoint.save import emergency_save
from checkpoint.state import read_state
from config import Config, load_config
from data.token_file import TokenFileError
from inference.sampling import generate
from model import GPT, GPTConfig
from runtime.cli import ConfigError, parse
from runtime.errors import TrainingError, UserError, kind_of_failure, reported
from runtime.runlog import RunFolder, duration
from runtime.signals import Stopped, StopRequest
from runtime.world import World
from sample import SampleOptions
from tests.conftest import ALONE, COMPILED, CPU, ROOT, TINY, at_step, flags, run
from tests.test_resume import folder_of, log, newest, same_end
from train import train

needs_dev_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)


def console(config):
    return (folder_of(config) / "console.log").read_text()


def inject(monkeypatch, module, name, error, when=lambda *args: True):
    """Let a function raise an error, or call `error` if it is no exception, at the first call for
    which `when(*args)` is true.
    """
    real, faults = getattr(module, name), [error]

    def faulty(*args, **kwargs):
        if faults and when(*args):
            fault = faults.pop()
            if isinstance(fault, BaseException):
                raise fault
            fault()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, faulty)


def failing(monkeypatch, at, error):
    """Fail in the middle of the step `at`, after its backward; returns what ends this."""

    def fail(call, _):
        if call == at:
            raise error

    return at_step(monkeypatch, fail)


def main(config):
    """train.py's main as the command runs it; returns the status that it ends with."""
    with (
        pytest.raises(SystemExit) as stopped,
        reported(config.log_dir, advice=config.advice()),
    ):
        train_module.main(config)
    return stopped.value.code


def go_on(config):
    return train(config.model_copy(update={"resume": "auto"}), ALONE)


def to_go_on(folder):
    return f"to go on: the same command with --resume auto, or --resume {folder}"


FULL = OSError(errno.ENOSPC, "cannot be written: No space left on device", "a file")


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
    assert caught.value.__notes__ == [to_go_on(folder_of(config))]
    summary = go_on(config)
    assert (summary["resumed_after_step"], summary["steps"]) == (3, 6)
    train(straight, ALONE)
    same_end(config, straight)


@pytest.mark.parametrize("what", ["validation_loss", "sample_text", "append_row", "write_rows"])
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
    log_file = folder_of(config) / "log.csv"
    with monkeypatch.context() as patched:
        is_file = what.endswith(("row", "rows"))
        module = runtime.runlog if is_file else inference.evaluation
        error = FULL if is_file else RuntimeError("it failed")
        # after step 3: in log.csv are two rows while the third is written, then three
        lines = 3 if what == "append_row" else 4
        inject(
            patched,
            module,
            what,
            error,
            lambda *_: log_file.exists() and len(log_file.read_text().splitlines()) == lines,
        )
        with pytest.raises(type(error), match=r"failed|No space left"):
            train(config, ALONE)
    assert read_state(newest(config)).step == 3
    go_on(config)
    train(straight, ALONE)
    same_end(config, straight)
    evaluations = [(folder_of(each) / "eval.csv").read_text() for each in (config, straight)]
    assert evaluations[0] == evaluations[1]


def test_a_fault_in_the_middle_of_an_update_is_not_saved(tiny_config, monkeypatch):
    updates = itertools.count(1)
    inject(monkeypatch, torch.optim.AdamW, "step", MemoryError(), lambda *_: next(updates) == 5)
    config = tiny_config(checkpoint_every=2)
    with pytest.raises(MemoryError) as caught:
        train(config, ALONE)
    names = sorted(path.name for path in (folder_of(config) / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000004"]
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
    inject(monkeypatch, checkpoint.save, "save_checkpoint", lambda: held.append(held[0]()))
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

    def spoil(call, _):
        return torch.tensor(math.nan) if call == 2 else None

    at_step(monkeypatch, spoil)
    with monkeypatch.context() as patched:
        inject(patched, RunFolder, "message", FULL, lambda _, text: "left out" in text)
        with pytest.raises(OSError, match="cannot be written"):
            train(config, ALONE)
    assert (read_state(newest(config)).step, read_state(newest(config)).skipped_steps) == (2, 1)
    assert go_on(config)["skipped_steps"] == 1
    at_step(monkeypatch, spoil)
    assert train(straight, ALONE)["skipped_steps"] == 1
    weights = [load_file(newest(each) / "model.safetensors") for each in (config, straight)]
    for a, b in zip(*(each.values() for each in weights), strict=True):
        assert torch.equal(a, b)


def test_a_save_that_fails_as_well_does_not_hide_the_first_error(tiny_config, monkeypatch, capsys):
    failing(monkeypatch, 4, TokenFileError("a bad file"))
    inject(monkeypatch, checkpoint.save, "save_checkpoint", CheckpointError("logs: no space left"))
    main(tiny_config())
    assert capsys.readouterr().err == (
        "error: a bad file; the state after step 3 could not be saved: logs: no space left\n"
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
    assert main(config) == 1  # a run that failed, no mistake in its options
    assert capsys.readouterr().err.startswith("error: a bad file; to go on: ")
    assert read_state(newest(config)).step == 3


def test_the_error_line_says_how_to_resume_quoted_for_the_shell_and_console_log_has_it(
    tiny_config, monkeypatch, capsys
):
    config = tiny_config(run_name="it's mine")
    disarm = failing(monkeypatch, 3, TokenFileError("a bad file"))
    main(config)
    disarm()
    (line,) = capsys.readouterr().err.splitlines()
    assert console(config).splitlines()[-1] == line
    folder = str(folder_of(config))
    assert line == f"error: a bad file; {to_go_on(shlex.quote(folder))}"
    train(load_config(resume=folder), ALONE)
    last = capsys.readouterr().out.splitlines()[-1]
    command = shlex.split(last.partition("for text: ")[2])
    assert command == ["python", "sample.py", folder]


def test_one_of_several_ranks_saves_nothing_at_a_fault_and_says_how_to_resume(
    tiny_config, tmp_path
):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    saved = tmp_path / "checkpoints/step_000004"
    state = checkpoint.state.State(GPT(GPTConfig(**TINY)), [], scaler, step=5, checkpoint=saved)
    state.begin_step(CPU)
    two = World(CPU, rank=1, world_size=2)

    def fail():
        with emergency_save(RunFolder(tmp_path), state, tiny_config(), two):
            raise ValueError("anything")

    with pytest.raises(ValueError, match="anything") as caught:
        fail()
    assert caught.value.__notes__ == [to_go_on(tmp_path)]
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
    assert note.startswith(f"note: what is printed goes nowhere ({why}); the run goes on")
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


def test_commands_whose_output_nobody_reads_end_without_a_word(tmp_path):
    (tmp_path / "book.txt").write_text("It was a bright cold day in April.")
    assert ends_quietly(ROOT / "data/text.py", "book.txt", cwd=tmp_path)
    assert (tmp_path / "data/book").is_dir()
    assert ends_quietly(ROOT / "train.py", "--help", cwd=tmp_path, into="head -1")
    assert ends_quietly(ROOT / "train.py", "--print_config", cwd=tmp_path)


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


def test_a_closed_terminal_saves_and_ends_like_sigterm(tiny_config, monkeypatch):
    at_step(monkeypatch, lambda call, _: signal.raise_signal(signal.SIGHUP) if call == 3 else None)
    config = tiny_config()
    assert train(config, ALONE)["interrupted"]
    assert read_state(newest(config)).step == 3


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


def stopped_early(monkeypatch, place, config, number=signal.SIGTERM):
    """Begin a run, with a signal as it enters `place`."""
    module = inference.evaluation if place == "validation_loss" else train_module
    with monkeypatch.context() as patched, StopRequest() as stop:
        inject(patched, module, place, lambda: signal.raise_signal(number))
        with pytest.raises(Stopped) as ended:
            train(config, ALONE, stop=stop)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "place", ["find_checkpoint", "setup", "open_data", "open_run", "validation_loss"]
)
def test_a_signal_before_the_first_step_leaves_everything_as_it_was(
    place, tiny_config, monkeypatch, capfd
):
    options = {"eval_every": 2, "val_fraction": 0.1}
    config = tiny_config(**options, dropout=0.1)
    for number in (signal.SIGINT, signal.SIGTERM):  # a first run
        stopped_early(monkeypatch, place, config, number)
        assert not folder_of(config).exists()
        assert capfd.readouterr().err == EARLY
    train(tiny_config(**options, max_steps=4, dropout=0.1), ALONE)
    before = log(config), newest(config)
    stopped_early(monkeypatch, place, config)  # a new one of its name
    assert (log(config), newest(config)) == before
    assert [path.name for path in folder_of(config).parent.glob("[!.]*")] == ["train"]
    (folder_of(config) / "eval.csv").unlink()  # so it evaluates before its first step
    resumed = config.model_copy(update={"resume": "auto"})
    stopped_early(monkeypatch, place, resumed)  # one that resumes
    assert (log(config), newest(config)) == before
    assert train(resumed, ALONE)["resumed_after_step"] == 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_to_one_of_several_ranks_before_the_first_step_ends_all_together(
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


@pytest.mark.parametrize(
    "command", ["train.py --dataset none", "sample.py any", "bench.py", "evaluate.py any"]
)
def test_ctrl_c_during_the_import_of_torch_ends_a_command_in_one_line(command, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/torch.py").write_text(SLOW_IMPORT)
    script, *words = command.split()
    process = subprocess.Popen(
        [sys.executable, ROOT / script, *words],
        cwd=tmp_path,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "slow")},
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "\nerror: interrupted\n")
    assert not (tmp_path / "logs").exists()


# ---- numbers out of reach


def tokens(n=4):
    return torch.arange(n)[None]


@pytest.mark.parametrize("temperature", [1e-45, 1e-300, 1e-20, 1e-6])
def test_a_temperature_near_0_takes_the_likeliest_token(temperature, tiny_model):
    model = tiny_model()
    assert torch.equal(generate(model, tokens(), 8, temperature), generate(model, tokens(), 8, 0))


@pytest.mark.parametrize("temperature", [1e6, 1e300])
def test_a_temperature_without_end_draws_evenly_from_the_top_k(temperature, tiny_model):
    model = tiny_model()
    likeliest = model(tokens())[0, -1].topk(3).indices.tolist()
    generator = torch.Generator().manual_seed(1)
    drawn = [
        generate(model, tokens(), 1, temperature, top_k=3, generator=generator)[0, -1].item()
        for _ in range(60)
    ]
    assert set(drawn) == set(likeliest)


def test_logits_that_are_no_numbers_are_refused_and_the_model_goes_on_training(tiny_model):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[0] = math.nan
    with pytest.raises(UserError, match="logits are not finite"):
        generate(model, tokens(), 1)
    assert model.training


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("temperature", "nan", "finite"),
        ("temperature", "-1", "0"),
        ("num_samples", "100000000", "10000"),
        ("seed", "1" * 20, "less than 9223372036854775808"),
        ("max_new_tokens", "1" * 12, "1000000"),
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
    assert main(tiny_config(lr=1e30, betas=(1 - 2**-53, 0.9))) == 1
    assert "a number is too large for fp32: value cannot be converted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (59.6, "0:01:00"),
        (90_000, "1 day, 1:00:00"),
        (999 * 86400, "999 days, 0:00:00"),
        (1e12, "over 1,000 days"),
        (math.inf, "over 1,000 days"),
    ],
)
def test_a_long_time_is_shown_sensibly(seconds, shown):
    assert duration(seconds) == shown


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
    assert main(tiny_config()) == 1
    line = f"error: --compile failed: {reason}, or run without --compile\n"
    assert capsys.readouterr().err == line


def compiling_with(compiler):
    """As CXX says to a PyTorch that is not imported yet."""
    import torch._inductor.config

    torch._inductor.config.cpp.cxx = (None, str(compiler))


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


def test_a_config_made_in_python_names_its_run(tiny_config):
    config = Config(**tiny_config(max_steps=1).model_dump(exclude_unset=True))
    assert Config(n_layer=1).run_name == "train"
    train(config, ALONE)
    assert [path.name for path in Path(config.log_dir).glob("[!.]*")] == ["train"]


@pytest.mark.parametrize(
    "argv", [["--betas", "0.8,0.95"], ["--betas=0.8,0.95"], ["--betas", "0.8", "0.95"]]
)
def test_betas_are_taken_with_a_comma_too(argv):
    assert parse(Config, [*argv, "--lr", "0.1"]).betas == (0.8, 0.95)


def test_a_user_errors_notes_are_part_of_its_message():
    one, two = UserError("one"), UserError("one\ntwo")
    for error in (one, two):
        error.add_note("and more")
    assert (str(one), str(two)) == ("one; and more", "one\ntwo\nand more")
