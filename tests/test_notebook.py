"""The notebook is run unchanged: it clones this repository, climbs, and shows the page."""

import shutil

import nbclient
import nbformat
import pytest

from tests.conftest import ROOT

SMALL = "--n_layer 1 --n_head 1 --n_embd 16 --batch_size 1 --seq_len 32 --max_steps 2"


@pytest.mark.slow
def test_the_notebook_clones_climbs_and_shows_the_page(tmp_path, monkeypatch):
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("needs git, and this repository with its history")
    notebook = nbformat.read(ROOT / "docs/ladder.ipynb", as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
    monkeypatch.setenv("REPOSITORY", str(ROOT))
    monkeypatch.setenv("LADDER_OPTIONS", f"--stages baseline --rounds 0 -- {SMALL}")
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    *_, shown = (cell for cell in notebook.cells if cell.cell_type == "code")
    (output,) = shown.outputs
    page = output.data["text/html"]
    assert "The quick speedup ladder" in page
    assert (tmp_path / "gpt2/logs/speedup_quick/results.csv").is_file()
