"""Every value of every choice in config.py, and every optimization switched on: each trains, saves,
resumes, and passes both halves of check.py.

Values that do not contradict each other share a run. A new value or optimization joins one, or
begins a run of its own, without an edit here. `fsdp` shards nothing on the one rank of these runs;
tests/test_fsdp.py has more. compile_mode decides little on a CPU; tests/test_cuda.py needs a GPU.
"""

import re
import shutil
from typing import Literal, get_args, get_origin

import pytest
import torch

from config import THIS_CALL, Config, Needs, Optimization
from measure.preflight import estimate
from measure.preflight.checks import check
from runtime.cli import ConfigError, _value_type, load
from tests.conftest import ALONE, COMPILED, TINY, TINY_RUN, end_of, log, tiny_run
from train import main, train

Values = dict[str, object]  # keys are names of options
# A learning rate at which no optimizer overflows fp16, one that updates by the gradient's sign
# included.
BASE = TINY | TINY_RUN | {"real_vocab_size": 128, "max_steps": 3, "lr": 1e-3}


def value_on(options, name):
    """Return a value that switches an optimization on."""
    off, kind = load(options, BASE).off_value(name), _value_type(options.model_fields[name])
    if kind is bool:
        return True
    if kind is int:
        return 2 * off or 2  # steps, chunks, or rows of the vocabulary
    return 2e-3 if off is None else 0.5  # a learning rate, or a bound or share


def choices(options):
    """List each value of each Literal, and a value that switches each other optimization on.

    Each with the options that it needs. The device is left out: a test below has it.
    """
    base, found = load(options, BASE), []
    for name, field in options.model_fields.items():
        kind, values = _value_type(field), tuple[object, ...]()
        if get_origin(kind) is Literal and not options.marks(name, THIS_CALL):
            values = get_args(kind)
        elif options.marks(name, Optimization):
            values = (value_on(options, name),)
        needed = {
            needs.name: needs.values[0] if needs.values else value_on(options, needs.name)
            for needs in options.marks(name, Needs)
            if values and needs.name == base.lacks(name)
        }
        found += [needed | {name: value} for value in values]
    return found


def all_act(options, values):
    """Return True if the values do not contradict each other and all have an effect."""
    try:
        config = load(options, BASE | values)
    except ConfigError:
        return False
    return not any(config.lacks(name) for name in values)


def runs(options):
    """Put all choices into few runs. Compiling is slow, so a compiled run has no other choices."""
    packed: list[Values] = []
    for choice in choices(options):
        for run in packed:
            agree = all(run.get(name, value) == value for name, value in choice.items())
            alike = ("compile" in run) == ("compile" in choice)
            if agree and alike and all_act(options, run | choice):
                run.update(choice)
                break
        else:
            assert all_act(options, choice), f"{choice} has no effect: mark the option with Needs"
            packed.append(choice)
    return packed


@pytest.mark.parametrize("options", runs(Config))
def test_each_choice_trains_saves_resumes_bit_for_bit_and_passes_estimate_and_check(
    options, corpus, tmp_path, here, capsys
):
    shape = COMPILED if "compile" in options else {}
    config = tiny_run(tmp_path, **BASE | shape | options, checkpoint_every=2)
    last = here / "checkpoints/step_000003"
    train(config, ALONE)
    straight = end_of(here)
    shutil.rmtree(last)
    again = train(config.model_copy(update={"resume": "auto"}), ALONE)
    assert (again["resumed_after_step"], again["skipped_steps"]) == (2, 0)
    assert end_of(here) == straight

    estimated = estimate.estimate(config, ALONE)
    said = re.search(r"^disk: +(\S+) GB a checkpoint", capsys.readouterr().out, re.MULTILINE)
    size = sum(path.stat().st_size for path in last.glob("*.safetensors"))
    assert 1e9 * float(said[1]) == pytest.approx(size, rel=0.05)

    assert check(config, ALONE, estimated)


@pytest.mark.parametrize("device", get_args(Config.model_fields["device"].annotation))
def test_each_device_trains_or_is_refused_by_name(device, tiny_config, here, capsys):
    gpu = torch.accelerator.current_accelerator(check_available=True)
    if device in ("auto", "cpu", gpu and gpu.type):
        main(tiny_config(device=device))
        assert len(log(here)) == 6
    else:
        with pytest.raises(SystemExit) as ended:
            main(tiny_config(device=device))
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: --device {device}: not available")
