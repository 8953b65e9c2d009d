"""Options: what a mistake prints, what overrides what, `--help`, and the YAML files in configs/."""

import dataclasses
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from pydantic import Field

from config import (
    FIXED,
    Config,
    DataConfig,
    ModelConfig,
    Needs,
    OptimizationConfig,
    RunConfig,
    Rung,
    SpeedConfig,
    load_config,
)
from model import GPTConfig
from runtime.cli import (
    CONFIG_DIR,
    ConfigError,
    ContradictionError,
    Options,
    Positive,
    load,
    parse,
    sections,
    show,
    to_yaml,
)
from runtime.start import parse_command_line

ROOT = Path(__file__).resolve().parent.parent
YAMLS = sorted(CONFIG_DIR.rglob("*.yaml"))
SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimization": OptimizationConfig,
    "speed": SpeedConfig,
    "run": RunConfig,
}

# the contract of the command line: these names and defaults do not change
CONTRACT = yaml.safe_load("""
model: {n_layer: 12, n_head: 12, n_embd: 768, block_size: 1024, vocab_size: 50257, bias: true,
  dropout: 0.0, norm: layernorm, activation: gelu_tanh, tie_weights: false, init: torch,
  residual_scaling: false, init_from: scratch}
data: {dataset: pydocs, batch_size: 4, seq_len: 1024, total_batch_tokens: null, shuffle: false,
  overfit_batch: false, val_fraction: 0.0, data_dir: data}
optimization: {optimizer: adamw, lr: 3.0e-4, min_lr: null, warmup_steps: 0, lr_schedule: constant,
  betas: [0.9, 0.999], eps: 1.0e-8, weight_decay: 0.01, decay_matrices_only: false, grad_clip: 0.0,
  max_steps: 50}
speed: {tf32: false, bf16: false, fp16: false, compile: false, compile_mode: default, flash: false,
  fused_adamw: false, fsdp: false, recompute: false, recompute_cheap: null, loss_chunks: 1}
run: {device: auto, seed: 1337, run_name: null, log_dir: logs, log_every: 1, eval_every: 0,
  eval_tokens: null, sample_every: 0, sample_prompt: The, checkpoint_every: 0}
""")
CHOICES = yaml.safe_load("""
norm: layernorm|rmsnorm
activation: gelu_tanh|gelu
init: torch|gpt2
optimizer: adamw|muon
lr_schedule: constant|cosine|wsd
compile_mode: default|reduce-overhead|max-autotune|max-autotune-no-cudagraphs
device: auto|cuda|mps|cpu
""")
# what each stage of the speedup ladder changes, and relative to which
LADDER = {
    "speedup1": ("baseline", {"tie_weights": True}),
    "speedup2": ("speedup1", {"tf32": True}),
    "speedup3": ("speedup2", {"bf16": True, "batch_size": 3}),
    "speedup4": ("speedup3", {"init": "gpt2", "residual_scaling": True}),
    "speedup5": ("speedup4", {"compile": True}),
    "speedup5_max_autotune": ("speedup5", {"compile_mode": "max-autotune"}),
    "speedup6": ("speedup5_max_autotune", {"flash": True, "batch_size": 6}),
    "speedup7": ("speedup6", {"vocab_size": 50304}),
    "speedup8": ("speedup7", {"betas": (0.9, 0.95), "grad_clip": 1.0}),
    "speedup9": (
        "speedup8",
        {"lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 10, "lr_schedule": "cosine"},
    ),
    "speedup10": (
        "speedup9",
        {"weight_decay": 0.1, "decay_matrices_only": True, "fused_adamw": True},
    ),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder_without_torchrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mistakes(capsys):
    """The lines that a command line's mistakes print, without their `error: `."""

    def run(*argv: str) -> list[str]:
        with pytest.raises(SystemExit) as stopped:
            parse_command_line(Config, argv, config_file=True)
        assert stopped.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert all(line.startswith("error: ") for line in err.splitlines()), err
        return [line.removeprefix("error: ") for line in err.splitlines()]

    return run


def write(name: str, text: str | bytes) -> str:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def changes(config: Config, base: Config) -> dict[str, object]:
    ours, theirs = config.model_dump(), base.model_dump()
    return {
        name: value for name, value in ours.items() if value != theirs[name] and name != "run_name"
    }


# ---- mistakes: one line each, with where it came from, what is allowed and the nearest name

FLAG_MISTAKES = """
--zzz 9 => --zzz: unknown option .. --help
--batchsize 4 => --batchsize: unknown option .. did you mean --batch_size?
--batch-size 4 => --batch-size: unknown option .. did you mean --batch_size?
--no-compil => --no-compil: unknown option .. did you mean --no-compile?
--batch_s 4 => --batch_s: unknown option .. did you mean --batch_size?
8 => 8: not understood .. --name VALUE
--lr => --lr: expected one argument
--compile yes => yes: not understood .. yes/no options --name or --no-name
--compile=yes => --compile/--no-compile: ignored explicit argument 'yes'
--n_layer 1.5 => --n_layer: .. integer .. '1.5'
--batch_size two => --batch_size: .. integer .. 'two'
--lr fast => --lr: .. number .. 'fast'
--lr= => --lr: .. number .. ''
--betas 0.9 x => --betas: .. number .. 'x'
--betas 0.9 => --betas: takes 2 values, not ['0.9']
--betas 0.9 0.95 0.99 => --betas: tuple should have at most 2 items
--norm layer_norm => --norm: .. 'layernorm' or 'rmsnorm' .. 'layer_norm' .. did you mean layernorm?
--lr_schedule=cos => --lr_schedule: .. 'constant', 'cosine' or 'wsd' .. did you mean cosine?
--device gpu => --device: .. 'cuda' .. 'cpu' .. 'gpu'
--n_layer 0 => --n_layer: .. greater than or equal to 1 .. '0'
--dropout 1 => --dropout: .. less than 1 .. '1'
--lr 0 => --lr: .. greater than 0 .. '0'
--lr -0.1 => --lr: .. greater than 0 .. '-0.1'
--lr nan => --lr: .. finite .. 'nan'
--lr inf => --lr: .. finite .. 'inf'
--betas 0.9 1.0 => --betas: .. less than 1 .. '1.0'
--eps 0 => --eps: .. greater than 0 .. '0'
--seed -1 => --seed: .. greater than or equal to 0 .. '-1'
--grad_clip -1 => --grad_clip: .. greater than or equal to 0
--val_fraction 1 => --val_fraction: .. less than 1
--log_every 0 => --log_every: .. greater than or equal to 1
--total_batch_tokens 0 => --total_batch_tokens: .. greater than or equal to 1
--n_head 7 => --n_head: .. n_embd 768 .. 7 heads .. must divide
--seq_len 2048 => --seq_len: .. 2048 .. block_size 1024
--bf16 --fp16 => --fp16: .. bf16 and fp16 .. choose one
--min_lr 1e-3 => --min_lr: .. 0.001 .. lr 0.0003
--real_vocab_size 60000 => --real_vocab_size: .. 60000 .. vocab_size 50257
--total_batch_tokens 10000 => --total_batch_tokens: .. 8,192 or 12,288
--total_batch_tokens 100 => --total_batch_tokens: .. that work: 4,096
--run_name a/b => --run_name: .. 'a/b' .. log_dir
--run_name . => --run_name: .. '.' .. log_dir
--run_name .. => --run_name: .. '..' .. log_dir
--sample_every 5 --vocab_size 256 => --sample_every: .. vocab_size .. 50257
--config => --config: expected one argument
--config speedup99 => speedup99: no such config file .. did you mean speedup9?
--config zzz => zzz: no such config file .. configs/, which has .. baseline, .. quickstart
--config . => no such config file
--log_dir= => --log_dir: .. at least 1 character
--config= => (empty): no such config file
--run_name= => --run_name: .. at least 1 character
"""


@pytest.mark.parametrize("case", FLAG_MISTAKES.strip().splitlines())
def test_a_mistaken_flag_is_one_line_that_says_what_is_allowed(case, mistakes):
    argv, _, parts = case.partition(" => ")
    (line,) = mistakes(*argv.split())
    assert [part for part in parts.split(" .. ") if part not in line] == [], line


YAML_MISTAKES = r"""
batchsize: 4 => f.yaml: batchsize: unknown option .. did you mean batch_size?
n_layer: [1] => f.yaml: n_layer: .. integer .. ['1']
n_layer: many => f.yaml: n_layer: .. integer .. 'many'
lr: fast => f.yaml: lr: .. number .. 'fast'
betas: 0.9 => f.yaml: betas: .. tuple, not '0.9'
betas: [0.9] => f.yaml: betas: takes 2 values, not ['0.9']
betas: [0.9, 0.95, 0.99] => f.yaml: betas: .. at most 2 items
compile: maybe => f.yaml: compile: .. boolean .. 'maybe'
compile: => f.yaml: compile: .. boolean
n_layer: none => f.yaml: n_layer: .. integer .. 'none'
norm: LayerNorm => f.yaml: norm: .. 'layernorm' or 'rmsnorm' .. did you mean layernorm?
dropout: 1.5 => f.yaml: dropout: .. less than 1 .. '1.5'
seq_len: 99\nblock_size: 64 => f.yaml: seq_len: .. 99 .. block_size 64
data_dir: => f.yaml: data_dir: .. at least 1 character
base: => f.yaml: base: must name one config file
base: speedup77 => f.yaml: base: speedup77: no such .. did you mean speedup7?
base: zzz.yaml => f.yaml: base: zzz.yaml: no such config file
base: [a, b] => f.yaml: base: must name one config file
base: f.yaml => f.yaml: base: .. circle .. f.yaml -> f.yaml
n_layer: 2\nlr: 1: 2\nbias: no\n => f.yaml: not valid YAML .. line 2
n_layer: 2\n\tlr: 1 => f.yaml: not valid YAML .. line 2
lr: 1\n---\nlr: 2 => f.yaml: not valid YAML .. line 2
- lr\n- 1 => f.yaml: .. must hold lines of the form `option: value`
lr => f.yaml: .. must hold lines of the form `option: value`
lr: 1\nbias: no\nlr: 2 => f.yaml: not valid YAML: 'lr' is set twice .. line 3
"""
ODD_BYTES = {
    b"lr: 1 # \xe9\n": "utf-8",
    b"lr: \0": "#x0000",
    b'data_dir: "caf\\udce9"': "data_dir: input should be a valid string",
}


@pytest.mark.parametrize("case", YAML_MISTAKES.strip().splitlines())
def test_a_mistaken_yaml_is_one_line_that_names_the_file(case, mistakes):
    text, _, parts = case.partition(" => ")
    (line,) = mistakes("--config", write("f.yaml", text.encode().decode("unicode_escape")))
    assert [part for part in parts.split(" .. ") if part not in line] == [], line


@pytest.mark.parametrize("content", ODD_BYTES)
def test_a_yaml_of_odd_bytes_is_one_line_that_names_the_file(content, mistakes):
    (line,) = mistakes("--config", write("f.yaml", content))
    assert line.startswith("f.yaml: ")
    assert ODD_BYTES[content] in line


def test_a_value_that_grows_by_aliases_is_shown_in_part(mistakes):
    levels = ", ".join(f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))
    (line,) = mistakes("--config", write("f.yaml", f"lr: [&a0 [x], {levels}]"))
    assert line.startswith("f.yaml: lr: input should be a valid number, not [['x'], [")
    assert len(line) < 2000


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("", "base: a.yaml", "a.yaml: base: goes round in a circle: a.yaml -> b.yaml -> a.yaml"),
        ("", "base: zzz.yaml", "b.yaml: base: zzz.yaml: no such config file"),
        ("lr: 1", "n_layr: 1", "b.yaml: n_layr: unknown option"),
        ("lr: 1", "n_layer: [1\n", "b.yaml: not valid YAML: "),
    ],
    ids=["cycle", "missing base of a base", "unknown option", "syntax"],
)
def test_a_mistake_in_a_base_names_the_file_that_makes_it(a, b, expected, mistakes):
    write("a.yaml", f"base: b.yaml\n{a}")
    write("b.yaml", b)
    (line,) = mistakes("--config", "a.yaml")
    assert line.startswith(expected)


def test_a_contradiction_names_the_place_its_option_came_from(mistakes):
    write("f.yaml", "n_embd: 100\nn_head: 5")
    (line,) = mistakes("--config", "f.yaml", "--n_embd", "99")
    assert line.startswith("f.yaml: n_head: n_embd 99 does not divide into 5 heads")


@pytest.mark.parametrize(
    ("argv", "blamed"),
    [
        ("--config f.yaml --dropout 2 --norm none", ["--dropout", "--norm", *["f.yaml"] * 4]),
        ("--batchsize 4 --lr 1e-3 --n_layr 2 stray", ["--batchsize", "--n_layr", "stray"]),
        ("--batchsize 4 --n_layer 0", ["--batchsize", "--n_layer"]),
        (
            "--n_head 7 --seq_len 2048 --bf16 --fp16 --total_batch_tokens 5",
            ["--fp16", "--n_head", "--seq_len", "--total_batch_tokens"],
        ),
    ],
    ids=["wrong values", "unknown flags", "both", "contradictions"],
)
def test_all_mistakes_are_reported_at_once(argv, blamed, mistakes):
    write("f.yaml", "batchsize: 4\nn_layer: 0\nbetas: [2, x]")
    assert sorted(line.partition(":")[0] for line in mistakes(*argv.split())) == blamed


def test_contradictions_can_be_sent_to_another_process():
    error = ContradictionError([("lr", "too high"), ("min_lr", "too low")])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == ("too high; too low", error.problems)


def test_indivisible_total_batch_counts_the_processes_that_torchrun_started(mistakes, monkeypatch):
    argv = ["--batch_size", "1", "--seq_len", "8", "--total_batch_tokens", "40"]
    assert parse(Config, argv).accumulation_steps(1) == 5
    monkeypatch.setenv("WORLD_SIZE", "2")
    (line,) = mistakes(*argv)
    assert "2 processes" in line
    assert line.endswith("nearest that work: 32 or 48")


def test_load_config_raises_rather_than_exits():
    with pytest.raises(
        ConfigError, match=r"--n_layer: .*\n--lrr: unknown option; did you mean lr\?"
    ):
        load_config(n_layer=0, lrr=1)


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *argv], env=env, text=True, capture_output=True, timeout=60
    )


@pytest.mark.parametrize(
    "argv", ["--batchsize 4", "--config f.yaml", "--config zzz", "--seq_len 2048 --n_head 7"]
)
def test_the_real_command_line_prints_no_traceback_and_exits_with_2(argv):
    write("f.yaml", "lr: [\n")
    ran = python(str(ROOT / "train.py"), *argv.split())
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr
    assert all(line.startswith("error: ") for line in ran.stderr.splitlines()), ran.stderr


def test_importing_config_and_asking_for_help_never_import_torch():
    code = """if True:
        import runpy, sys
        import config
        from runtime.cli import CONFIG_DIR
        config.load_config("baseline")
        assert not {"torch", "numpy"} & set(sys.modules), "config.py"
        for command in (["--help"], ["--config", "speedup8", "--print_config"]):
            sys.argv = ["train.py", *command]
            try:
                runpy.run_path(CONFIG_DIR.parent / "train.py", run_name="__main__")
            except SystemExit as stopped:
                assert stopped.code == 0
            assert "torch" not in sys.modules, f"train.py {command}"
    """
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stderr
    assert "--n_layer" in ran.stdout
    assert "grad_clip: 1.0" in ran.stdout


# ---- what overrides what


def test_defaults_then_base_then_file_then_flags():
    write("base.yaml", "n_layer: 2\nn_head: 4\nn_embd: 64")
    write("f.yaml", "base: base.yaml\nn_head: 8\nn_embd: 128")
    config = parse(Config, ["--n_embd", "256", "--config", "f.yaml"], config_file=True)
    assert (config.n_layer, config.n_head, config.n_embd, config.batch_size) == (2, 8, 256, 4)
    assert load_config("f.yaml", n_embd=256) == config


def test_a_base_is_found_beside_the_file_that_names_it():
    Path("sub/deep").mkdir(parents=True)
    write("sub/b.yaml", "n_layer: 3")
    write("sub/a.yaml", "base: b")
    write("sub/deep/c.yaml", "base: ../a.yaml")
    assert load_config("sub/deep/c.yaml").n_layer == 3


def test_the_same_base_along_two_ways_is_no_cycle():
    write("root.yaml", "n_layer: 3")
    write("a.yaml", "base: root.yaml")
    write("b.yaml", "base: a.yaml")
    assert load_config("b.yaml").n_layer == 3


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n", "\ufeff"])
def test_an_empty_file_is_fine(text):
    write("f.yaml", text)
    assert changes(load_config("f.yaml"), Config()) == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lr: 6e-4", 6e-4),
        ("lr: 1e-3", 1e-3),
        ("lr: 1", 1.0),
        ("bias: no", False),
        ("bias: false", False),
        ("tf32: yes", True),
        ("tf32: on", True),
        ("n_layer: 007", 7),
        ("betas: [0.9, 0.95]", (0.9, 0.95)),
        ("betas: [.9, 95e-2]", (0.9, 0.95)),
        ("run_name: 123", "123"),
        ("run_name: no", "no"),
        ("sample_prompt: yes", "yes"),
        ("sample_prompt: null", "null"),
        ("sample_prompt: 2026-01-01", "2026-01-01"),
        ('sample_prompt: ""', ""),
        ("dataset: 1e3", "1e3"),
    ],
)
def test_yaml_scalars_get_the_type_of_their_field_not_yamls_guess(line, expected):
    write("f.yaml", line)
    value = getattr(load_config("f.yaml"), line.partition(":")[0])
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("none", ["none", "null", "None", "~", ""])
def test_none_unsets_an_optional(none):
    write("base.yaml", "min_lr: 1e-5\ntotal_batch_tokens: 8192\neval_tokens: 5")
    write("f.yaml", f"base: base.yaml\nmin_lr: {none}\neval_tokens: {none}")
    config = load_config("f.yaml", total_batch_tokens=none or None)
    assert (config.min_lr, config.eval_tokens, config.total_batch_tokens) == (None, None, None)


def test_no_compile_overrides_a_yaml_that_compiles():
    write("f.yaml", "compile: true\nbias: false")
    assert load_config("f.yaml").compile
    config = parse(Config, ["--config", "f.yaml", "--no-compile", "--bias"], config_file=True)
    assert not config.compile
    assert config.bias


@pytest.mark.parametrize(
    "name",
    ["speedup8", "speedup8.yaml", str(CONFIG_DIR / "speedup8"), str(CONFIG_DIR / "speedup8.yaml")],
)
def test_config_is_a_path_or_a_name_with_or_without_yaml(name):
    config = load_config(name)
    assert (config.grad_clip, config.run_name) == (1.0, "speedup8")


def test_a_file_here_goes_before_a_name_in_configs():
    write("speedup8.yaml", "n_layer: 3")
    assert load_config("speedup8.yaml").n_layer == 3


def test_run_name_is_the_given_one_else_the_configs_stem_else_train():
    write("f.yaml", "lr: 1")
    write("named.yaml", "run_name: given")
    assert load_config().run_name == "train"
    assert load_config("f.yaml").run_name == "f"
    assert load_config("named.yaml").run_name == "given"
    assert load_config("named.yaml", run_name="flag").run_name == "flag"
    assert load_config("named.yaml", run_name="none").run_name == "named"
    write("child.yaml", "base: f.yaml")
    assert load_config("child.yaml").run_name == "child"


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_decaying_schedule_ends_at_a_tenth_of_lr_and_the_written_config_says_so(schedule):
    config = load_config(lr_schedule=schedule, lr=5e-3)
    assert config.min_lr is None
    assert config.final_lr() == pytest.approx(5e-4)
    write("f.yaml", config.to_yaml())
    assert load_config("f.yaml").min_lr == pytest.approx(5e-4)
    assert load_config(lr_schedule=schedule, min_lr=0).final_lr() == 0


def test_to_yaml_leaves_min_lr_unset_where_the_rate_is_constant():
    write("f.yaml", load_config().to_yaml())
    assert load_config("f.yaml").min_lr is None


ODD = {
    "sample_prompt": 'a: "b"\n\té😀 #x',
    "run_name": "yes",
    "dataset": "null",
    "init_from": "~/run",
    "lr": 1 / 3,
    "eps": 1e-12,
    "betas": (0.1, 0.2),
    "bias": False,
    "eval_tokens": 10**12,
    "device": "cpu",
}


@pytest.mark.parametrize(
    "values",
    [{}, ODD, {"min_lr": 1e-7}, {"sample_prompt": ""}],
    ids=["defaults", "odd", "min_lr", "empty"],
)
def test_to_yaml_is_a_config_that_loads_to_the_same(values):
    config = load_config(**values)
    write("f.yaml", config.to_yaml())
    assert load_config("f.yaml", run_name=config.run_name) == config
    assert load_config("f.yaml").run_name == config.run_name


# ---- --print_config


@pytest.fixture
def printed(capsys):
    """What `--print_config` prints for a command line."""

    def run(*argv: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            parse(Config, [*argv, "--print_config"], config_file=True)
        assert stopped.value.code == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def test_print_config_shows_every_option_and_where_its_value_came_from(printed):
    write("mine.yaml", "base: speedup9\nn_layer: 3\nseed: 7")
    text = printed("--config", "mine.yaml", "--seed", "8", "--no-flash", "--betas", "0.8", "0.9")
    origins = {
        line.partition(":")[0]: line.partition("  # ")[2]
        for line in text.splitlines()
        if line and line[0] != "#"
    }
    assert list(origins) == [name for section in SECTIONS.values() for name in section.model_fields]
    expected = {
        "n_layer": "mine.yaml",
        "seed": "--seed",
        "flash": "--flash",
        "betas": "--betas",
        "dropout": "default",
        "warmup_steps": "configs/speedup9.yaml",
        "dataset": "configs/baseline.yaml",
        "vocab_size": "configs/speedup7.yaml",
    }
    assert {name: origins[name] for name in expected} == expected
    assert set(origins.values()) <= {
        "default",
        *expected.values(),
        *(f"configs/{stage}.yaml" for stage in LADDER),
    }
    write("again.yaml", text)
    assert (
        changes(
            load_config("again.yaml"),
            load_config("mine.yaml", seed=8, flash=False, betas=(0.8, 0.9)),
        )
        == {}
    )


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_what_print_config_prints_of_every_yaml_loads_to_the_same(path, printed):
    write("f.yaml", printed("--config", str(path)))
    assert load_config("f.yaml") == load_config(str(path))


def test_print_config_does_not_hide_a_mistake(mistakes):
    (line,) = mistakes("--n_layer", "0", "--print_config")
    assert line.startswith("--n_layer: ")


@pytest.mark.parametrize(
    "prompt", ["The", "two\nlines", "# no comment", "x " * 200, ODD["sample_prompt"]]
)
def test_a_config_with_its_origins_loads_to_the_same(prompt):
    config = load_config(**ODD | {"sample_prompt": prompt})
    write("f.yaml", to_yaml(config, origin={name: f"--{name}" for name in ODD}))
    assert load_config("f.yaml") == config


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_the_written_config_of_every_yaml_loads_to_the_same(path):
    config = load_config(str(path))
    write("f.yaml", config.to_yaml())
    assert changes(load_config("f.yaml", min_lr=config.min_lr), config) == {}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"warmup_steps": 100, "max_steps": 50, "lr": 1e-3},
            ["warmup_steps 100", "max_steps 50", "0.0005"],
        ),
        ({"min_lr": 1e-5}, ["min_lr", "no effect", "constant"]),
        (
            {"compile_mode": "max-autotune"},
            ["compile_mode", "no effect", "compile is off"],
        ),
    ],
)
def test_an_option_without_effect_is_noted_not_ignored(options, parts):
    (note,) = load_config(**options).notes()
    assert [part for part in parts if part not in note] == []


def test_options_that_take_effect_are_not_noted():
    assert load_config().notes() == []
    options = {
        "warmup_steps": 50,
        "lr_schedule": "cosine",
        "min_lr": 1e-5,
        "compile": True,
        "compile_mode": "max-autotune",
    }
    assert load_config(**options).notes() == []


# ---- the options themselves


@pytest.mark.parametrize(
    ("section", "name"),
    [(section, name) for section, fields in CONTRACT.items() for name in fields],
)
def test_the_contracts_names_and_defaults_are_there(section, name):
    default = CONTRACT[section][name]
    value = SECTIONS[section].model_fields[name].default
    assert value == (tuple(default) if isinstance(default, list) else default)
    assert type(value) in (type(default), tuple)


def test_help_shows_every_option_under_its_sections_title_with_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(Config, ["--help"], config_file=True)
    groups, group = {}, ""
    for line in capsys.readouterr().out.splitlines():
        if line and not line.startswith(" "):
            group = groups[line.split()[0].rstrip(":")] = {}
        elif line.startswith("  -"):
            name = line.split()[0].rstrip(",").lstrip("-")
            group[name] = line
        elif line.strip():
            group[name] += f" {line.strip()}"
    for title, section in SECTIONS.items():
        assert list(groups[title]) == list(section.model_fields)
        for name, field in section.model_fields.items():
            shown = groups[title][name]
            assert shown.endswith(f"[{show(field.default)}]"), name
            assert (f"--no-{name}" in shown) == (field.annotation in (bool, bool | None))
            assert CHOICES.get(name, "") in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(True, "on"), (False, "off"), (None, "none"), ((0.9, 0.95), "0.9 0.95"), (1e-8, "1e-08")],
)
def test_a_default_is_shown_as_it_is_typed(value, shown):
    assert show(value) == shown


def test_marks_on_fields_tell_which_options_they_are_true_of():
    @dataclasses.dataclass(frozen=True)
    class Needs:
        name: str

    class Shape(Options):
        """shape"""

        depth: Annotated[int, "fixed"] = Field(3, ge=1)
        width: Annotated[Positive, Needs("depth"), "fixed"] = 4
        height: Annotated[Positive | None, Needs("width")] = None
        label: str = ""

    assert Shape.names_marked("fixed") == ("depth", "width")
    assert Shape.names_marked(Needs) == ("width", "height")
    assert Shape.names_marked(Needs("depth")) == ("width",)
    assert Shape.marks("height", Needs) == [Needs("width")]
    with pytest.raises(ConfigError, match=r"--depth: .*\n--width: "):
        load(Shape, {"depth": 0, "width": 0})  # marks leave the bounds as they are


def test_every_option_belongs_to_one_section_and_has_help():
    assert sections(Config) == list(SECTIONS.values())
    names = [name for section in SECTIONS.values() for name in section.model_fields]
    assert sorted(names) == sorted(Config.model_fields)
    assert all(field.description for field in Config.model_fields.values())


def test_the_models_own_options_are_those_of_the_command_line_so_the_two_lists_cannot_drift():
    ours = ModelConfig.model_fields | {
        name: SpeedConfig.model_fields[name] for name in ("flash", "loss_chunks", "recompute")
    }
    ours.pop("init_from")  # where weights come from, not what the model is
    assert {field.name: field.default for field in dataclasses.fields(GPTConfig)} == {
        name: field.default for name, field in ours.items()
    }


# ---- configs/


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_yaml_loads_and_begins_with_a_comment(path):
    assert load_config(str(path)).run_name == path.stem
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith("# ")
    assert len(first) > 20


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_stage_changes_each_thing_it_says_relative_to_its_base(path):
    says = yaml.safe_load(path.read_text(encoding="utf-8"))
    base = says.pop("base", None)
    assert says, "an empty stage"
    if base is not None:
        base_path = path.parent / base if (path.parent / base).exists() else CONFIG_DIR / base
        assert set(changes(load_config(str(path)), load_config(str(base_path)))) == set(says)


@pytest.mark.parametrize("stage", LADDER)
def test_each_rung_of_the_speedup_ladder_adds_its_own_optimization_and_nothing_else(stage):
    base, added = LADDER[stage]
    assert changes(load_config(stage), load_config(base)) == added


def test_the_baseline_has_everything_off():
    config = load_config("baseline")
    assert changes(config, Config()) == {"dataset": "shakespeare", "batch_size": 2}
    assert not any(
        getattr(config, name)
        for name, field in SpeedConfig.model_fields.items()
        if field.annotation is bool
    )
    assert not config.tie_weights
    assert not config.decay_matrices_only
    assert not config.grad_clip


def test_the_top_of_the_ladder_has_everything_on():
    config = load_config("speedup10")
    assert all(
        (
            config.tf32,
            config.bf16,
            config.compile,
            config.flash,
            config.fused_adamw,
            config.tie_weights,
        )
    )
    assert (config.vocab_size, config.batch_size, config.betas, config.lr, config.final_lr()) == (
        50304,
        6,
        (0.9, 0.95),
        6e-4,
        6e-5,
    )
    assert config.notes() == []


def test_ddp_is_the_top_of_the_ladder_with_a_total_batch_that_any_power_of_two_of_gpus_divides(
    monkeypatch,
):
    config = load_config("ddp")
    assert config.total_batch_tokens == 524288
    assert changes(config, load_config("speedup10")).keys() >= {
        "dataset",
        "batch_size",
        "total_batch_tokens",
    }
    for world_size in (1, 2, 4, 8):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        micro_step = config.batch_size * config.seq_len * world_size
        assert load_config("ddp").accumulation_steps(world_size) * micro_step == 524288


@pytest.mark.parametrize(
    ("name", "n_layer", "n_head", "n_embd"),
    [
        ("gpt2", 12, 12, 768),
        ("gpt2-medium", 24, 16, 1024),
        ("gpt2-large", 36, 20, 1280),
        ("gpt2-xl", 48, 25, 1600),
    ],
)
def test_the_model_configs_have_gpt2s_published_shapes(name, n_layer, n_head, n_embd):
    config = load_config(f"model/{name}")
    assert (config.n_layer, config.n_head, config.n_embd) == (n_layer, n_head, n_embd)
    assert config.tie_weights
    assert config.residual_scaling
    assert config.init == "gpt2"


# ---- the recipes


@pytest.mark.parametrize(
    ("recipe", "shape", "parameters", "lr", "steps"),
    [
        ("gpt2_124m", "gpt2", 124, 6e-4, 19073),
        ("gpt2_350m", "gpt2-medium", 355, 3e-4, 19073),
        ("gpt2_774m", "gpt2-large", 774, 2.5e-4, 19073),
        ("gpt2_1558m", "gpt2-xl", 1558, 2e-4, 9536),
    ],
)
def test_a_recipe_has_the_shape_of_its_model_and_gpt3s_settings_over_ten_billion_tokens(
    recipe, shape, parameters, lr, steps
):
    config, model = load_config(recipe), load_config(f"model/{shape}")
    for name in (
        "n_layer",
        "n_head",
        "n_embd",
        "block_size",
        "tie_weights",
        "init",
        "residual_scaling",
    ):
        assert getattr(config, name) == getattr(model, name), name
    size = (
        config.n_layer * (12 * config.n_embd**2 + 13 * config.n_embd)
        + (50257 + 1024 + 2) * config.n_embd
    )
    assert round(size / 1e6) == parameters
    assert (config.lr, config.final_lr(), config.max_steps) == (lr, lr / 10, steps)
    tokens = config.tokens_per_step(1)
    assert steps * tokens == pytest.approx(10e9, rel=1e-4)
    assert config.warmup_steps * tokens == pytest.approx(375e6, rel=2e-3)
    assert (config.lr_schedule, config.betas, config.weight_decay, config.grad_clip) == (
        "cosine",
        (0.9, 0.95),
        0.1,
        1.0,
    )
    assert (config.shuffle, config.decay_matrices_only) == (True, True)
    off = config.describe_optimizations(1).partition("; off: ")[2].split(", ")
    assert off == [
        *("optimizer", "fp16", "fsdp", "recompute", "recompute_cheap", "loss_chunks"),
        "several ranks",
    ]
    for world_size in (1, 2, 4, 8):
        assert config.accumulation_steps(world_size) >= 1
    assert (
        config.compile_mode == "max-autotune-no-cudagraphs"
    )  # with micro-steps, graphs would be refused


def test_the_recipe_of_124m_is_the_one_that_is_known():
    config = load_config("gpt2_124m")
    assert (config.max_steps, config.total_batch_tokens, config.batch_size, config.seq_len) == (
        19073,
        524288,
        64,
        1024,
    )
    assert (config.lr, config.warmup_steps, config.eval_every, config.checkpoint_every) == (
        6e-4,
        715,
        250,
        1000,
    )


# ---- what is derived from the marks on fields


class Extended(Config):
    """The options of a run and one flag more."""

    twice_as_fast: Annotated[bool, Rung(), Needs("compile"), FIXED] = False
    """trains in half the time"""


def test_a_flag_that_is_added_to_the_class_is_seen_everywhere():
    off = load(Extended, {})
    assert "twice_as_fast" in off.describe_optimizations(1).partition("; off: ")[2]
    on = load(Extended, {"twice_as_fast": True, "compile": True})
    assert "twice_as_fast" in on.describe_optimizations(1).partition("; off: ")[0]
    assert on.switched_off()["twice_as_fast"] == ["--no-twice_as_fast"]
    assert "--no-twice_as_fast" in on.switched_off()["compile"], "it has no effect alone"
    assert load(Extended, {"twice_as_fast": True}).notes() == [
        "twice_as_fast has no effect: compile is off"
    ]
    assert "twice_as_fast" in Extended.names_marked(FIXED)


@pytest.mark.parametrize("name", Config.names_marked(Rung))
def test_each_optimization_acts_in_one_place_that_a_search_for_its_name_finds(name):
    """A reader finds config.py, where it acts, and YAMLs: no more hops."""
    heart = ("train.py", "model.py", "optimizer.py", "dataloader.py")
    acts = [file for file in heart if re.search(rf"[.]{name}\b", (ROOT / file).read_text())]
    assert acts, f"{name} acts in none of {', '.join(heart)}"
    assert any(re.search(rf"^{name}:", path.read_text(), re.MULTILINE) for path in YAMLS) or (
        name in ("recompute", "recompute_cheap", "fsdp", "fp16", "loss_chunks")
    ), "a YAML introduces it"
