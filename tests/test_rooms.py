"""Where things live: what each room of the project may import, and who alone reads torchrun's
environment.
"""

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

HEART = ["model", "dataloader", "optimizer"]
# A file or folder, and what of this project it may import; third-party packages are not listed.
MAY_IMPORT = {
    "model.py": ["kernels"],
    "dataloader.py": ["data"],
    "optimizer.py": ["config"],
    "config.py": ["runtime.cli"],
    "weights.py": ["model", "runtime"],
    "checkpoint.py": ["model", "config", "weights", "runtime"],
    "evaluate.py": ["model", "dataloader", "weights", "data", "runtime"],
    "sample.py": ["model", "weights", "data", "runtime"],
    "export.py": ["model", "dataloader", "weights", "checkpoint", "config", "data", "runtime"],
    "estimate.py": [*HEART, "kernels", "config", "weights", "data", "runtime"],
    "train.py": [
        *HEART,
        "kernels",
        "estimate",
        "config",
        "weights",
        "checkpoint",
        "evaluate",
        "sample",
        "data",
        "runtime",
    ],
    "ladder.py": ["config", "runtime"],
    "bench.py": [
        *HEART,
        "config",
        "weights",
        "checkpoint",
        "evaluate",
        "data",
        "runtime",
        "benchmarks",
    ],
    "runtime": ["runtime"],
    "kernels": [],
    "data": ["data", "runtime"],
}
ANYTHING = ("benchmarks", "tests")
COMMANDS = ("train.py", "ladder.py", "bench.py", "sample.py", "evaluate.py", "export.py")
WITHOUT_TORCH = (
    "config",
    "ladder",
    "runtime.cli",
    "runtime.errors",
    "runtime.files",
    "runtime.report",
    "runtime.runlog",
    "runtime.signals",
    "runtime.launch",
)


def files():
    """Every Python file that git knows, and every one in the rooms above."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, text=True, capture_output=True
    )  # none without git
    names = {
        *tracked.stdout.split(),
        *(
            path.relative_to(ROOT).as_posix()
            for name in (*MAY_IMPORT, *ANYTHING)
            for path in ((ROOT / name).glob("*.py") if "." not in name else [ROOT / name])
        ),
    }
    return sorted(name for name in names if (ROOT / name).exists())


FILES = files()
OURS = {name.removesuffix(".py").partition("/")[0] for name in FILES}


def tree(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def imports(name):
    """The modules of this project that a file imports, wherever in it: `runtime.cli`, `model`."""
    names = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute here"
            from_a_package = node.module in ("runtime", "data", "benchmarks", "tests")
            names += (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if from_a_package
                else [str(node.module)]
            )
    return [module for module in names if module.partition(".")[0] in OURS]


def room(name):
    return name if "/" not in name else name.partition("/")[0]


@pytest.mark.parametrize("name", [name for name in FILES if room(name) not in ANYTHING])
def test_each_file_has_a_room_and_imports_only_what_that_room_may(name):
    assert room(name) in MAY_IMPORT, (
        f"{name} has no room yet: choose what it may import, and say so above"
    )
    allowed = MAY_IMPORT[room(name)]
    assert [
        module
        for module in imports(name)
        if not any(module == may or module.startswith(f"{may}.") for may in allowed)
    ] == []


def test_the_table_of_rooms_names_nothing_that_is_gone():
    assert [name for name in (*MAY_IMPORT, *ANYTHING) if not (ROOT / name).exists()] == []
    assert {module for may in MAY_IMPORT.values() for module in may} - {"runtime.cli"} <= OURS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_imports_no_command_but_training_its_sampler_and_evaluation(name):
    commands = {command.removesuffix(".py") for command in COMMANDS}
    assert commands & set(imports(name)) == (
        {"sample", "evaluate"} if name == "train.py" else set()
    )


def test_one_module_alone_reads_torchruns_environment():
    def reads(name):
        texts = [
            node.value
            for node in ast.walk(tree(name))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        return any(
            text
            in (
                "RANK",
                "LOCAL_RANK",
                "WORLD_SIZE",
                "GROUP_WORLD_SIZE",
                "LOCAL_WORLD_SIZE",
                "GROUP_RANK",
            )
            or text.startswith("TORCHELASTIC_")
            for text in texts
        )

    assert [name for name in FILES if room(name) != "tests" and reads(name)] == ["runtime/launch.py"]


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


def test_training_is_one_scroll():
    assert len((ROOT / "train.py").read_text(encoding="utf-8").splitlines()) <= 230
    (train,) = (
        node
        for node in tree("train.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    assert train.end_lineno - train.lineno + 1 <= 110
