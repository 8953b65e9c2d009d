"""Rooms: the imports that each may have."""

import ast
import functools
import graphlib
import re

import pytest

from runtime.report import project_files
from tests.conftest import ROOT, cases

# Imports of each file or folder from this project; third-party packages are not listed.
RECIPE = "checkpoint config data dataloader inference kernels model optimizer options runtime"
TABLE = f"""
options.py => options
model.py => kernels options
dataloader.py => data runtime.console
optimizer.py => config kernels runtime.console
config.py => options runtime.cli
kernels => kernels
runtime => runtime
data => data runtime
checkpoint => checkpoint config data model options runtime
inference => checkpoint config data dataloader inference model runtime
run => {RECIPE} run
sample.py => {RECIPE} run
evaluate.py => {RECIPE} run
export.py => {RECIPE} run
train.py => {RECIPE} run
check.py => checkpoint config measure.preflight runtime
ladder.py => config measure.interleaved measure.ladder measure.report runtime
bench.py => config measure.interleaved measure.profile measure.report runtime
measure/__init__.py => measure
measure/report => measure.report runtime
measure/interleaved => config measure.interleaved measure.report runtime train
measure/ladder => {RECIPE} run train measure.interleaved measure.ladder measure.report
measure/preflight => {RECIPE} run train measure.interleaved measure.preflight
measure/peer.py => {RECIPE} run train measure.interleaved
measure/profile.py => {RECIPE} run train measure.interleaved measure.report
logs => {RECIPE} measure tests train
"""
MAY_IMPORT = dict(cases(TABLE))


FILES = [path.relative_to(ROOT).as_posix() for path in project_files("**/*.py")]
PACKAGES = [n.removesuffix("/__init__.py").replace("/", ".") for n in FILES if "/__init__" in n]
OURS = {name.removesuffix(".py").partition("/")[0] for name in FILES}


@functools.cache
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
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names += inside if node.module in PACKAGES else [str(node.module)]
    return [module for module in names if module.partition(".")[0] in OURS]


def room(name):
    """The file or folder of the table that a file belongs to."""
    return next((place for place in MAY_IMPORT if f"{name}/".startswith(f"{place}/")), name)


OURS_BUT_TESTS = [name for name in FILES if not name.startswith("tests/")]


@pytest.mark.parametrize("name", OURS_BUT_TESTS)
def test_each_file_has_a_room_and_imports_only_what_that_room_may(name):
    assert room(name) in MAY_IMPORT, f"{name} has no room yet: choose what it may import"
    allowed = tuple(f"{may}." for may in MAY_IMPORT[room(name)].split())
    assert [module for module in imports(name) if not f"{module}.".startswith(allowed)] == []


def test_the_table_of_rooms_names_nothing_that_is_gone():
    assert [name for name in MAY_IMPORT if not (ROOT / name).exists()] == []


def test_no_imports_go_round_in_a_circle_inside_functions_neither():
    modules = {name.removesuffix(".py").replace("/", "."): name for name in FILES}
    graph = {module: modules.keys() & imports(name) for module, name in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_only_one_module_reads_torchruns_environment():
    variable = re.compile(r"(LOCAL_)?RANK|((GROUP|LOCAL)_)?WORLD_SIZE|TORCHELASTIC_.*")

    def reads(name):
        texts = [getattr(node, "value", None) for node in ast.walk(tree(name))]
        return any(isinstance(text, str) and variable.fullmatch(text) for text in texts)

    assert [*filter(reads, OURS_BUT_TESTS)] == ["runtime/launch.py"]
