"""The notebook is run unchanged: it clones this repository, climbs, and shows the page."""

import shutil

import nbclient
import nbformat
import pytest

from tests.conftest import ROOT

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --batch_size 1 --seq_len 32 --max_steps 2"


@pytest.fixture
def run_notebook(tmp_path, monkeypatch):
    """Return a function that runs the notebook in a folder of its own, with options of a ladder."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("needs git, and this repository with its history")

    def run(options):
        monkeypatch.setenv("REPOSITORY", str(ROOT))
        monkeypatch.setenv("LADDER_OPTIONS", options)
        notebook = nbformat.read(ROOT / "docs/ladder.ipynb", as_version=4)
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
        return [cell for cell in notebook.cells if cell.cell_type == "code"]

    return run


@pytest.mark.slow
def test_the_notebook_clones_climbs_and_shows_the_page(run_notebook, tmp_path):
    *_, shown = run_notebook(f"--stages baseline --rounds 0 -- {SMALL}")
    (output,) = shown.outputs
    assert "The speedup_quick ladder" in output.data["text/html"]
    assert (tmp_path / "gpt2/logs/speedup_quick/results.csv").is_file()


@pytest.mark.slow
def test_the_notebook_stops_at_an_error_of_the_ladder(run_notebook):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ended with status 2"):
        run_notebook("--rounds 2")


def test_the_notebook_has_the_output_of_the_committed_quick_ladder():
    notebook = nbformat.read(ROOT / "docs/ladder.ipynb", as_version=4)
    (shown,) = [cell.outputs[0].text for cell in notebook.cells if cell.get("outputs")]
    report = ROOT / "logs/results/epyc-avx512bf16-2cores/speedup_quick/report.md"
    headline = report.read_text().splitlines()[2].strip("*")
    assert shown.splitlines()[-1].startswith(f"{headline}: ")
