"""Where things live: what each room may import, and what the recipe looks like."""

import ast
import io
import subprocess
import sys
import tokenize

import pytest

from tests.conftest import ROOT

# What each file or folder may import of this project; third-party packages are not listed.
PARTS = ["checkpoint", "config", "data", "dataloader", "kernels", "model", "optimizer", "runtime"]
MAY_IMPORT = {
    "model.py": ["kernels"],
    "dataloader.py": ["data"],
    "optimizer.py": ["config", "kernels"],
    "config.py": ["runtime.cli"],
    "kernels": ["kernels"],
    "runtime": ["runtime"],
    "data": ["data", "runtime"],
    "checkpoint": ["checkpoint", "config", "model", "runtime"],
    "inference": ["inference", *PARTS],
    "sample.py": ["inference", *PARTS],
    "evaluate.py": ["inference", *PARTS],
    "export.py": ["inference", *PARTS],
    "train.py": ["inference", "measure", *PARTS],
    "ladder.py": ["config", "measure", "runtime"],
    "bench.py": ["config", "measure", "runtime"],
    "measure": ["inference", "measure", "train", *PARTS],
}
COMMANDS = ("train.py", "ladder.py", "bench.py", "sample.py", "evaluate.py", "export.py")
PACKAGES = ("checkpoint", "data", "inference", "kernels", "measure", "runtime", "tests")
WITHOUT_TORCH = (
    *("config", "ladder", "runtime.cli", "runtime.errors", "runtime.files", "runtime.report"),
    *("runtime.runlog", "runtime.signals", "runtime.start", "runtime.launch"),
)


def files():
    """Every Python file that git knows, and every one in the rooms above."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, text=True, capture_output=True)
    names = {*listed.stdout.split()}  # none without git
    for room in (*MAY_IMPORT, "tests"):
        paths = [ROOT / room] if room.endswith(".py") else (ROOT / room).glob("*.py")
        names |= {path.relative_to(ROOT).as_posix() for path in paths}
    return sorted(name for name in names if (ROOT / name).exists())


FILES = files()
OURS = {name.removesuffix(".py").partition("/")[0] for name in FILES}


def tree(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def imports(name, nodes=None):
    """The modules of this project that a file imports, wherever in it: `runtime.cli`, `model`."""
    names = []
    for node in ast.walk(tree(name)) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute here"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names += inside if node.module in PACKAGES else [str(node.module)]
    return [module for module in names if module.partition(".")[0] in OURS]


def room(name):
    return name if "/" not in name else name.partition("/")[0]


@pytest.mark.parametrize("name", [name for name in FILES if room(name) != "tests"])
def test_each_file_has_a_room_and_imports_only_what_that_room_may(name):
    assert room(name) in MAY_IMPORT, f"{name} has no room yet: choose what it may import"
    allowed = MAY_IMPORT[room(name)]
    assert [
        module
        for module in imports(name)
        if not any(module == may or module.startswith(f"{may}.") for may in allowed)
    ] == []


def test_the_table_of_rooms_names_nothing_that_is_gone():
    assert [name for name in MAY_IMPORT if not (ROOT / name).exists()] == []


def test_no_imports_go_round_in_a_circle():
    modules = {name.removesuffix(".py").replace("/", "."): name for name in FILES}
    edges = {
        module: {target for target in imports(name, tree(name).body) if target in modules}
        for module, name in modules.items()
    }
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            path.append(module)
            for target in sorted(edges[module]):
                visit(target)
            done.add(path.pop())

    for module in edges:
        visit(module)


def test_only_one_module_reads_torchruns_environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def reads(name):
        for node in ast.walk(tree(name)):
            text = getattr(node, "value", None)
            if isinstance(text, str) and (text in names or text.startswith("TORCHELASTIC_")):
                return True
        return False

    assert [name for name in FILES if room(name) != "tests" and reads(name)] == [
        "runtime/launch.py"
    ]


def test_options_errors_reports_and_the_ladder_do_without_torch():
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r}); assert 'torch' not in sys.modules, {name!r}\n"
        for name in WITHOUT_TORCH
    )
    ran = subprocess.run(
        [sys.executable, "-c", code + "assert 'matplotlib' not in sys.modules"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", ["train.py", "model.py"])
def test_one_line_in_eight_of_the_recipe_is_a_comment(name):
    lines = [line.strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line]
    assert sum(line.startswith("#") for line in lines) >= 0.12 * len(lines)


def test_the_recipes_functions_are_short():
    """In Python tokens, which no way of laying lines out changes."""
    text = (ROOT / "train.py").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    free = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = "".join(lines[node.lineno - 1 : node.end_lineno])
            tokens = tokenize.generate_tokens(io.StringIO(body).readline)
            count = sum(token.type not in free for token in tokens)
            assert count <= 455, f"{node.name}: {count} tokens"


# The torch call of each optimization, where a reader of nanoGPT looks for it.
RUNGS = {
    "train.py": [
        "torch.set_float32_matmul_precision(",
        "torch.autocast",
        "torch.compile(",
        "DistributedDataParallel(",
        "fully_shard(",
        "torch.amp.GradScaler(",
        "fused",
    ],
    "model.py": ["F.scaled_dot_product_attention(", "padding"],
    "optimizer.py": ["torch.optim.AdamW(", "clip_grads_with_norm_(", "math.cos(", "weight_decay"],
}


@pytest.mark.parametrize(("name", "calls"), RUNGS.items())
def test_the_recipe_shows_each_optimizations_torch_call(name, calls):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [call for call in calls if call not in text] == []
