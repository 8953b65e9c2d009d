"""A checkout in a user's hands: files of their own in it, uv and pip, another PyTorch."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from runtime import report
from runtime.device import PINNED_TORCH
from tests.conftest import ROOT

REQUIREMENTS = (ROOT / "requirements.txt").read_text()


@pytest.fixture
def checkout(tmp_path):
    """A folder with some of this project's files."""
    for name in (".gitignore", "pyproject.toml", "requirements.txt", "model.py", "data/text.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_users_own_files_are_not_hashed_and_gitignore_names_usual_folders(checkout, monkeypatch):
    monkeypatch.setattr(report, "ROOT", checkout)

    def git(command):
        # without GIT_DIR, which a git hook sets
        return subprocess.check_output(f"git {command}", shell=True, cwd=checkout, env={})

    unpacked = report.code_hash()  # as an archive, without git
    git("init -q")
    git("add .")
    assert report.code_hash() == unpacked
    for folder in ("venv", "env", "build", "dist", "data/raw", "."):
        (checkout / folder).mkdir(exist_ok=True)
        (checkout / folder / "own.py").touch()
    assert report.code_hash() == unpacked
    assert git("ls-files --others --exclude-standard") == b"own.py\n"
    (checkout / "data/text.py").write_text("1")
    assert report.code_hash() != unpacked


def test_installing_the_project_installs_its_requirements_and_no_modules(checkout):
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    made = subprocess.check_output([sys.executable, "-c", code], cwd=checkout, text=True)
    folder = checkout / made.splitlines()[-1]
    needed = re.findall(r"^Requires-Dist: (\S+)$", (folder / "METADATA").read_text(), re.MULTILINE)
    assert needed == re.findall(r"^[\w-]+==[\w.]+", REQUIREMENTS, re.MULTILINE)
    assert (folder / "top_level.txt").read_text().strip() == ""


def test_the_workflow_runs_ci_run_on_a_cpu_for_every_push_and_pull_request_and_slow_at_night():
    (path,) = (ROOT / ".github/workflows").iterdir()
    workflow = yaml.safe_load(path.read_text())
    assert {"push", "pull_request", "schedule"} == workflow[True].keys()  # YAML 1.1 reads `on` so
    (job,) = workflow["jobs"].values()
    python, *commands = (step for step in job["steps"] if step.get("with") or step.get("run"))
    assert job["runs-on"].startswith("ubuntu-")
    assert python["with"]["python-version"] in (ROOT / "pyproject.toml").read_text()
    assert [(step.get("if"), *step["run"].split()) for step in commands] == [
        (None, ".ci/run"),
        ("github.event_name == 'schedule'", ".ci/run", "--slow"),
    ]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_citation_has_what_its_format_requires():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert f'version = "{cited["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert (ROOT / "LICENSE").read_text().startswith(f"{cited['license']} License")


@pytest.mark.parametrize(("version", "notes"), [("2.11.0+cu126", 1), (f"{PINNED_TORCH}+cu130", 0)])
def test_another_pytorch_than_the_pinned_one_trains_with_a_note(
    version, notes, go, here, monkeypatch
):
    assert f"torch=={PINNED_TORCH}\n" in REQUIREMENTS
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert go()["steps"] == 6
    said = f"note: PyTorch {version} instead of {PINNED_TORCH}, which requirements.txt pins: "
    assert (here / "console.log").read_text().count(said) == notes
