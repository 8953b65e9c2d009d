"""A checkout in a user's hands: files of their own in it, uv and pip, another PyTorch."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from runtime import report
from runtime.device import PINNED_TORCH
from runtime.report import project_files
from tests.conftest import ROOT, run_from_nothing

REQUIREMENTS = (ROOT / "requirements.txt").read_text()
# A user's own: environments with files that no linter likes, data, a script, configs, a curve
SCRIPT = "from pathlib import Path\n\nif __name__ == '__main__':\n    Path('ran').touch()\n"
LITTER = {
    "venv/lib/litter.py": "import torch, (",
    "env/litter.py": "(",
    "build/lib/litter.py": "(",
    "dist/litter.py": "(",
    "data/raw/litter.py": "(",
    "data/litter.py/litter.bin": "",
    "uv.lock": "",
    "litter.py": SCRIPT,
    "configs/litter.yaml": "lr: 1e-3\n",
    "configs/speedup99_litter.yaml": "",
    "configs/reference/litter.csv": "",
}
# Every test that goes over files, and every test that a litter file becomes a case of
OVER_FILES = "test_rooms or every_yaml or answers_help or litter"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of this project's files, tracked by git."""
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("needs git, and a checkout")
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # set in a git hook
        monkeypatch.delenv(name)
    for path in project_files("**/*"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    subprocess.run("git init -q && git add .", shell=True, cwd=tmp_path, check=True)
    return tmp_path


def litter(checkout):
    for name, text in LITTER.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    (checkout / "data/raw/broken_link.py").symlink_to("nowhere")


def test_a_users_own_files_in_the_checkout_are_not_hashed_and_gitignore_names_usual_folders(
    checkout, monkeypatch
):
    monkeypatch.setattr(report, "ROOT", checkout)
    version, files = report.code_hash(), project_files("**/*.py", "configs/**/*.yaml")
    assert len(files) > 150
    assert max(len(path.relative_to(checkout).parts) for path in files) == 3, "as code_hash looks"
    litter(checkout)
    assert report.code_hash() == version
    (checkout / "runtime/cli.py").write_text("1")
    assert report.code_hash() != version
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)

    status = ["git", "status", "--porcelain"]
    lines = subprocess.check_output(status, cwd=checkout, text=True).splitlines()
    untracked = [line.removeprefix("?? ") for line in lines if line.startswith("?? ")]
    assert untracked == sorted(list(LITTER)[7:]), ".gitignore names the other ones"


@pytest.mark.slow
def test_a_users_own_files_in_the_checkout_are_neither_tested_nor_run(checkout):
    litter(checkout)
    tests = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", OVER_FILES)
    done = run_from_nothing(*tests, cwd=checkout)
    assert len(re.findall(r"^tests/.* PASSED", done.stdout, re.MULTILINE)) > 150
    assert "litter" not in done.stdout
    assert not [*checkout.rglob("ran")]


def test_a_downloaded_archive_without_git_has_the_same_files(checkout, monkeypatch):
    monkeypatch.setattr(report, "ROOT", checkout)
    patterns = ("**/*.py", "configs/**/*.yaml")
    files, version = project_files(*patterns), report.code_hash()
    litter(checkout)
    for name in ("litter.py", "configs/litter.yaml", "configs/speedup99_litter.yaml"):
        (checkout / name).unlink()  # nothing tells these from the project's
    shutil.rmtree(checkout / ".git")
    assert project_files(*patterns) == files
    assert report.code_hash() == version
    (checkout / "measure/ladder/new.py").touch()
    assert report.code_hash() != version


def test_installing_the_project_installs_its_requirements_and_no_modules(checkout):
    code = "import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    made = subprocess.check_output([sys.executable, "-c", code], cwd=checkout, text=True)
    folder = checkout / made.splitlines()[-1]
    needed = re.findall(r"^Requires-Dist: (\S+)$", (folder / "METADATA").read_text(), re.MULTILINE)
    assert needed == re.findall(r"^[\w-]+==[\w.]+", REQUIREMENTS, re.MULTILINE)
    assert (folder / "top_level.txt").read_text().strip() == ""


@pytest.mark.parametrize(("version", "notes"), [("2.11.0+cu126", 1), (f"{PINNED_TORCH}+cu130", 0)])
def test_another_pytorch_than_the_pinned_one_trains_with_a_note(
    version, notes, go, here, monkeypatch
):
    assert f"torch=={PINNED_TORCH}\n" in REQUIREMENTS
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert go()["steps"] == 6
    said = f"note: PyTorch {version} instead of {PINNED_TORCH}, which requirements.txt pins: "
    assert (here / "console.log").read_text().count(said) == notes
