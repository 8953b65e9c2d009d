"""Options: messages for mistakes, precedence, `--help`, and the YAML files in configs/."""

import itertools
import json
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml

from config import (
    OTHER_NAMES,
    Config,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SpeedConfig,
    load_config,
)
from model import GPTConfig
from options import ARCHITECTURE
from runtime.cli import CONFIG_DIR, parse, sections, show
from runtime.report import project_files
from runtime.start import parse_command_line
from tests.conftest import cases, flags

YAMLS = project_files("configs/**/*.yaml")
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
speed: {matmul_precision: highest, tf32: false, bf16: false, fp16: false, compile: false,
  compile_mode: default, flash: false, fused_adamw: false, fsdp: false, recompute: false,
  recompute_cheap: null, loss_chunks: 1}
run: {device: auto, seed: 1337, run_name: null, log_dir: logs, log_every: 1, eval_every: 0,
  eval_tokens: null, sample_every: 0, sample_prompt: "", checkpoint_every: 0}
""")
CHOICES = {
    name: "|".join(get_args(field.annotation))
    for name, field in Config.model_fields.items()
    if get_origin(field.annotation) is Literal
}


@pytest.fixture(autouse=True)
def in_an_empty_folder_without_torchrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mistakes(capsys):
    """The lines that a command line's mistakes print, without their `error: `."""

    def run(*argv):
        with pytest.raises(SystemExit, match="2"):
            parse_command_line(Config, argv, config_file=True)
        out, err = capsys.readouterr()
        assert out == ""
        assert all(line.startswith("error: ") for line in err.splitlines()), err
        return [line.removeprefix("error: ") for line in err.splitlines()]

    return run


@pytest.fixture
def printed(capsys):
    """What `--print_config` prints for a command line."""

    def run(*argv):
        with pytest.raises(SystemExit, match="0"):
            parse(Config, [*argv, "--print_config"], config_file=True)
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def write(name, text):
    Path(name).write_text(text, encoding="utf-8")
    return name


def loaded(text, **options):
    """The options of a YAML file with this text, and these flags."""
    return load_config(write("f.yaml", text), **options)


def missing(said, text):
    """The parts of `said`, which ` .. ` separates, that are not in a text."""
    return [part for part in said.split(" .. ") if part not in text]


def changes(config, base):
    ours, theirs = config.model_dump(), base.model_dump()
    return {
        name: value for name, value in ours.items() if value != theirs[name] and name != "run_name"
    }


# ---- mistakes: one line each, with the file or flag, the allowed values and the nearest name

FLAG_MISTAKES = """
--zzz 9 => --zzz: unknown option .. --help
--batchsize 4 => --batchsize: unknown option .. did you mean --batch_size?
--batch-size 4 => --batch-size: unknown option .. did you mean --batch_size?
--no-compil => --no-compil: unknown option .. did you mean --no-compile?
--batch_s 4 => --batch_s: unknown option .. did you mean --batch_size?
8 => 8: not understood .. --name VALUE
configs/speedup8.yaml => configs/speedup8.yaml: not understood .. YAML file of options --config FILE
config/train_gpt2.py => config/train_gpt2.py: not understood .. YAML file of options --config FILE
--max_iters 5 => --max_iters: unknown option; here it is --max_steps
--dtype=bfloat16 => --dtype: unknown option; here it is --bf16 or fp16; without them, float32
--lr => --lr: expected one argument
--compile yes => yes: not understood .. yes/no options --name or --no-name
--compile=yes => --compile/--no-compile: takes no value; type --compile or --no-compile alone
--print_config=1 => --print_config: takes no value; type --print_config alone
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
--n_layer 0 --print_config => --n_layer: .. greater than or equal to 1 .. '0'
--dropout 1 => --dropout: .. less than 1 .. '1'
--lr 0 => --lr: .. greater than 0 .. '0'
--lr -0.1 => --lr: .. greater than 0 .. '-0.1'
--lr nan => --lr: .. finite .. 'nan'
--lr inf => --lr: .. finite .. 'inf'
--betas 0.9 1.0 => --betas: .. less than 1 .. '1.0'
--eps 0 => --eps: .. greater than 0 .. '0'
--seed -1 => --seed: .. greater than or equal to 0 .. '-1'
--lr 1e40 => --lr: .. less than or equal to 1000000
--max_steps 10000000000 => --max_steps: .. less than or equal to 1000000000
--grad_clip -1 => --grad_clip: .. greater than or equal to 0
--val_fraction 1 => --val_fraction: .. less than 1
--log_every 0 => --log_every: .. greater than or equal to 1
--total_batch_tokens 0 => --total_batch_tokens: .. greater than or equal to 1
--n_head 7 => --n_head: .. n_embd 768 .. 7 heads .. must divide
--seq_len 2048 => --seq_len: .. 2048 .. block_size 1024
--rope --n_embd 36 => --rope: rope needs heads of an even size, not 3
--bf16 --fp16 => --fp16: .. bf16 and fp16 .. choose one
--optimizer muon --fp16 => --optimizer: muon excludes fp16 .. use bf16
--optimizer=muon --fsdp => --optimizer: muon excludes fsdp .. DDP, or adamw
--min_lr 1e-3 => --min_lr: .. 0.001 .. lr 0.0003
--real_vocab_size 60000 => --real_vocab_size: .. 60000 .. vocab_size 50257
--total_batch_tokens 10000 => --total_batch_tokens: .. 8,192 or 12,288
--total_batch_tokens 100 => --total_batch_tokens: .. that work: 4,096
--run_name a/b => --run_name: .. 'a/b' .. log_dir
--run_name . => --run_name: .. '.' .. log_dir
--run_name .. => --run_name: .. '..' .. log_dir
--run_name a\x07 => --run_name: .. 'a\\x07' .. log_dir
--config => --config: expected one argument
--config speedup99 => speedup99: no such config file .. did you mean speedup9?
--config zzz => zzz: no such config file, here or in configs/
--log_dir= => --log_dir: .. at least 1 character
--config= => (empty): no such config file
--run_name= => --run_name: .. at least 1 character
"""
YAML_MISTAKES = r"""
batchsize: 4 => f.yaml: batchsize: unknown option .. did you mean batch_size?
n_layer: [1] => f.yaml: n_layer: .. integer .. ['1']
n_layer: many => f.yaml: n_layer: .. integer .. 'many'
lr: fast => f.yaml: lr: .. number .. 'fast'
betas: 0.9, 0.95 => f.yaml: betas: .. tuple, not '0.9, 0.95'; write it like [0.9, 0.999]
betas: [0.9] => f.yaml: betas: takes 2 values, not ['0.9']
betas: [0.9, 0.95, 0.99] => f.yaml: betas: .. at most 2 items
compile: maybe => f.yaml: compile: .. boolean .. 'maybe'
compile: => f.yaml: compile: .. boolean
n_layer: none => f.yaml: n_layer: .. integer .. 'none'
norm: LayerNorm => f.yaml: norm: .. 'layernorm' or 'rmsnorm' .. did you mean layernorm?
dropout: 1.5 => f.yaml: dropout: .. less than 1 .. '1.5'
seq_len: 99\nblock_size: 64 => f.yaml: seq_len: .. 99 .. block_size 64
data_dir: => f.yaml: data_dir: .. at least 1 character
base: => f.yaml: base: (empty): no such config file
base: speedup77 => f.yaml: base: speedup77: no such .. did you mean speedup7?
base: zzz.yaml => f.yaml: base: zzz.yaml: no such config file
base: [a, b] => f.yaml: base: ['a', 'b']: no such config file
base: f.yaml => f.yaml: circular base: f.yaml -> f.yaml
n_layer: 2\nlr: 1: 2\nbias: no\n => f.yaml: not valid YAML .. line 2
n_layer: 2\n\tlr: 1 => f.yaml: not valid YAML .. line 2
lr: 1\n---\nlr: 2 => f.yaml: not valid YAML .. line 2
- lr\n- 1 => f.yaml: .. must hold lines of the form `option: value`
lr => f.yaml: .. must hold lines of the form `option: value`
lr: 1\nbias: no\nlr: 2 => f.yaml: not valid YAML: 'lr' is set twice .. line 3
lr: 1 # \xe9\n => f.yaml: .. utf-8
? [a, b]\n: 1 => f.yaml: not valid YAML .. unhashable key .. line 1
lr: \0 => f.yaml: .. #x0000
data_dir: "caf\\udce9" => f.yaml: data_dir: input should be a valid string
"""


@pytest.mark.parametrize(("given", "said"), cases(FLAG_MISTAKES))
def test_a_mistaken_flag_is_one_line_that_says_what_is_allowed(given, said, mistakes):
    (line,) = mistakes(*given.split())
    assert not missing(said, line), line


@pytest.mark.parametrize(("given", "said"), cases(YAML_MISTAKES))
def test_a_mistaken_yaml_is_one_line_that_names_the_file(given, said, mistakes):
    Path("f.yaml").write_bytes(given.encode().decode("unicode_escape").encode("latin-1"))
    (line,) = mistakes("--config", "f.yaml")
    assert not missing(said, line), line


@pytest.mark.parametrize(("name", "here"), OTHER_NAMES.items())
def test_an_option_named_as_in_another_trainer_is_answered_with_the_name_here(name, here, mistakes):
    assert name not in Config.model_fields
    assert re.match(r"\w+", here)[0] in Config.model_fields
    assert mistakes(f"--{name}", "5") == [f"--{name}: unknown option; here it is --{here}"]
    write("f.yaml", f"{name}: 5")
    assert mistakes("--config=f.yaml") == [f"f.yaml: {name}: unknown option; here it is {here}"]


BASE_MISTAKES = """
base: a.yaml => a.yaml: circular base: a.yaml -> b.yaml -> a.yaml
base: zzz.yaml => b.yaml: base: zzz.yaml: no such config file
n_layr: 1 => b.yaml: n_layr: unknown option
n_layer: [1 => b.yaml: not valid YAML
"""


@pytest.mark.parametrize(("given", "said"), cases(BASE_MISTAKES))
def test_a_mistake_in_a_base_names_the_file_that_makes_it(given, said, mistakes):
    write("a.yaml", "base: b.yaml\nlr: 1")
    write("b.yaml", given)
    (line,) = mistakes("--config", "a.yaml")
    assert line.startswith(said)


SEVERAL_MISTAKES = """
--config f.yaml --dropout 2 --norm none => --dropout --norm f.yaml f.yaml f.yaml f.yaml
--batchsize 4 --lr 1e-3 --n_layr 2 stray => --batchsize --n_layr stray
--batchsize 4 --n_layer 0 => --batchsize --n_layer
--n_head 7 --seq_len 2048 --bf16 --fp16 --total_batch_tokens 5 => --fp16 --n_head --seq_len \
--total_batch_tokens
"""


@pytest.mark.parametrize(("given", "blamed"), cases(SEVERAL_MISTAKES))
def test_all_mistakes_are_reported_at_once(given, blamed, mistakes):
    write("f.yaml", "batchsize: 4\nn_layer: 0\nbetas: [2, x]")
    assert sorted(line.partition(":")[0] for line in mistakes(*given.split())) == blamed.split()


# ---- what overrides what


def test_defaults_then_base_then_file_then_flags():
    write("base.yaml", "n_layer: 2\nn_head: 4\nn_embd: 64\nbias: false\ncompile: true")
    write("f.yaml", "base: base.yaml\nn_head: 8\nn_embd: 128")
    argv = "--n_embd 256 --config f.yaml --no-compile --bias"
    config = parse(Config, argv.split(), config_file=True)
    assert (config.n_layer, config.n_head, config.n_embd, config.batch_size) == (2, 8, 256, 4)
    assert (config.compile, config.bias) == (False, True)
    assert load_config("f.yaml", n_embd=256, compile=False, bias=True) == config
    assert load_config("f.yaml").compile


def test_a_base_is_found_beside_the_file_that_names_it():
    Path("sub/deep").mkdir(parents=True)
    write("sub/b.yaml", "n_layer: 3")
    write("sub/a.yaml", "base: b")
    write("sub/deep/c.yaml", "base: ../a.yaml")
    assert load_config("sub/deep/c.yaml").n_layer == 3


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n", "\ufeff"])
def test_an_empty_file_is_fine(text):
    assert changes(loaded(text), Config()) == {}


SCALARS = {
    "lr: 6e-4": 6e-4,
    "lr: 1": 1.0,
    "bias: no": False,
    "tf32: on": True,
    "n_layer: 007": 7,
    "betas: [.9, 95e-2]": (0.9, 0.95),
    "run_name: 123": "123",
    "sample_prompt: null": "null",
    "sample_prompt: 2026-01-01": "2026-01-01",
    'sample_prompt: ""': "",
}


@pytest.mark.parametrize(("line", "expected"), SCALARS.items())
def test_yaml_scalars_get_the_type_of_their_field_not_yamls_guess(line, expected):
    value = getattr(loaded(line), line.partition(":")[0])
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("none", ["none", "null", "None", "~", ""])
def test_none_unsets_an_optional(none):
    write("base.yaml", "min_lr: 1e-5\ntotal_batch_tokens: 8192\neval_tokens: 5")
    text = f"base: base.yaml\nmin_lr: {none}\neval_tokens: {none}"
    config = loaded(text, total_batch_tokens=none or None)
    assert (config.min_lr, config.eval_tokens, config.total_batch_tokens) == (None, None, None)


def test_config_is_a_path_or_a_name_with_or_without_yaml_and_a_file_here_goes_first():
    for folder, name in itertools.product(("", f"{CONFIG_DIR}/"), ("speedup8", "speedup8.yaml")):
        config = load_config(folder + name)
        assert (config.grad_clip, config.run_name) == (1.0, "speedup8")
    write("speedup8.yaml", "n_layer: 3")
    assert load_config("speedup8.yaml").n_layer == 3


def test_run_name_is_the_given_one_else_the_configs_stem_else_train():
    assert load_config().run_name == load_config(n_layer=1).run_name == "train"
    assert loaded("lr: 1").run_name == "f"
    assert load_config(write("child.yaml", "base: f.yaml")).run_name == "child"
    named = write("named.yaml", "run_name: given")
    names = [load_config(named, **flag).run_name for flag in ({}, {"run_name": "flag"})]
    assert names == ["given", "flag"]
    assert load_config(named, run_name="none").run_name == "named"


def test_a_decaying_schedule_ends_at_a_tenth_of_lr_by_default():
    assert load_config(lr_schedule="wsd", lr=5e-3).final_lr() == pytest.approx(5e-4)
    assert load_config(lr_schedule="wsd", min_lr=0).final_lr() == 0


ODD = {
    "run_name": "yes",
    "dataset": "null",
    "init_from": "~/run",
    "lr": 1 / 3,
    "min_lr": 1e-7,
    "eps": 1e-12,
    "betas": (0.1, 0.2),
    "bias": False,
    "eval_tokens": 10**12,
    "device": "cpu",
}


@pytest.mark.parametrize(
    "prompt", ["", "two\nlines", "# no comment", "x " * 200, 'a: "b"\n\té😀 #x']
)
def test_a_config_written_with_or_without_origins_loads_to_the_same(prompt, printed):
    config = load_config(**ODD | {"sample_prompt": prompt})
    for text in (config.to_yaml(), printed(*flags(config))):
        assert loaded(text) == config


ORIGINS = """
n_layer => mine.yaml
lr => mine.yaml
seed => --seed
flash => --flash
betas => --betas
dropout => default
warmup_steps => configs/speedup9.yaml
dataset => configs/baseline.yaml
vocab_size => configs/speedup7.yaml
"""


def test_print_config_shows_every_option_and_where_its_value_came_from(printed):
    write("mine.yaml", "base: speedup9\nn_layer: 3\nseed: 7\nlr: 1e-3")
    argv = "--config mine.yaml --seed 8 --no-flash --betas 0.8 0.9"
    text = printed(*argv.split())
    origins = {
        line.partition(":")[0]: line.partition("  # ")[2]
        for line in text.splitlines()
        if line and line[0] != "#"
    }
    assert list(origins) == [name for section in SECTIONS.values() for name in section.model_fields]
    assert dict(cases(ORIGINS)).items() <= origins.items()


NOTES = """
--warmup_steps 100 --max_steps 50 --lr 1e-3 => warmup_steps 100 .. max_steps 50 .. 0.0005
--min_lr 1e-5 => min_lr .. no effect .. constant
--compile_mode max-autotune => compile_mode .. no effect .. compile is off
--compile --compile_mode max-autotune --warmup_steps 50 => nothing
--lr_schedule cosine --min_lr 1e-5 => nothing
--no-recompute_cheap => nothing
--no-norm_weight => norm_weight .. no effect .. layernorm
"""


@pytest.mark.parametrize(("given", "said"), cases(NOTES))
def test_an_option_without_effect_is_noted_and_one_with_an_effect_is_not(given, said):
    notes = parse(Config, given.split()).notes() or ["nothing"]
    assert len(notes) == 1
    assert not missing(said, notes[0])


# ---- the options themselves


@pytest.mark.parametrize("section", SECTIONS)
def test_the_contracts_names_and_defaults_are_there(section):
    defaults = SECTIONS[section]().model_dump(mode="json")
    contract = CONTRACT[section]
    # JSON distinguishes 0, 0.0 and false
    assert json.dumps({name: defaults[name] for name in contract}) == json.dumps(contract)


def test_help_shows_every_option_under_its_sections_title_with_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(Config, ["--help"], config_file=True)
    text = capsys.readouterr().out
    assert sections(Config) == [*SECTIONS.values()]
    for title, section in SECTIONS.items():
        group = re.search(rf"^{title}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)[0]
        shown = re.findall(r"^  --(\w+)(.*?)(?=^  -|\Z)", group, re.MULTILINE | re.DOTALL)
        assert [name for name, _ in shown] == list(section.model_fields)
        for name, words in shown:
            field = section.model_fields[name]
            assert " ".join(words.split()).endswith(f"[{show(field.default)}]"), name
            assert field.description
            assert (f"--no-{name}" in words) == (field.annotation in (bool, bool | None))
            assert CHOICES.get(name, "") in words


def test_a_default_is_shown_as_it_is_typed():
    values = (True, False, None, (0.9, 0.95), 1e-8)
    assert [*map(show, values)] == ["on", "off", "none", "0.9 0.95", "1e-08"]


def test_the_models_own_defaults_are_those_of_the_command_line():
    assert vars(GPTConfig()).items() <= Config().model_dump().items()


# ---- configs/


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_yaml_begins_with_a_comment_and_changes_each_thing_it_says(path):
    config, text = load_config(str(path)), path.read_text(encoding="utf-8")
    assert config.run_name == path.stem
    assert re.match("# .{3}", text)
    says = yaml.safe_load(text)
    base = says.pop("base", None)
    assert says, "an empty stage"
    if base is not None:
        beside = path.parent / base
        assert changes(config, load_config(str(beside if beside.exists() else base))).keys() == (
            says.keys()
        )


def test_ddp_is_the_top_of_the_ladder_with_a_total_batch_that_any_power_of_two_of_gpus_divides(
    monkeypatch,
):
    config = load_config("ddp")
    changed = changes(config, load_config("speedup10"))
    assert {"dataset", "batch_size", "total_batch_tokens"} <= changed.keys()
    for world_size in (1, 2, 4, 8):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        micro_step = config.batch_size * config.seq_len * world_size
        assert load_config("ddp").accumulation_steps(world_size) * micro_step == 524288


# GPT-3's learning rates for such sizes
@pytest.mark.parametrize(
    ("recipe", "name", "lr", "steps"),
    [
        ("gpt2_124m", "gpt2", 6e-4, 19073),
        ("gpt2_350m", "gpt2-medium", 3e-4, 19073),
        ("gpt2_774m", "gpt2-large", 2.5e-4, 19073),
        ("gpt2_1558m", "gpt2-xl", 2e-4, 9536),
    ],
)
def test_a_recipe_has_the_shape_of_its_model_and_gpt3s_settings_over_ten_billion_tokens(
    recipe, name, lr, steps
):
    config, model = load_config(recipe), load_config(f"model/{name}")
    assert config.n_embd // config.n_head == 64  # parameter counts do not depend on it
    assert not changes(config, model).keys() & {*Config.names_marked(ARCHITECTURE)}
    assert (config.lr, config.final_lr(), config.max_steps) == (lr, lr / 10, steps)
    tokens = config.tokens_per_step(1)
    assert steps * tokens == pytest.approx(10e9, rel=1e-4)
    assert config.warmup_steps * tokens == pytest.approx(375e6, rel=2e-3)
    assert (config.lr_schedule, config.betas, config.weight_decay) == ("cosine", (0.9, 0.95), 0.1)
    assert config.describe_optimizations(1).partition("; off: ")[2] == "several ranks"
