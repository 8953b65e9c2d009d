"""The scripts in tests/evidence/, each in its smallest form."""

import pytest

from tests.conftest import ROOT, run

pytestmark = pytest.mark.slow


def test_a_planted_mistake_trains(tmp_path):
    words = ("--mistake", "targets shifted", "--steps", "1", "--log_dir", "logs")
    done = run("tests/evidence/planted_mistakes.py", *words, cwd=tmp_path)
    assert "step   1/400 | loss" in done.stdout


def test_an_a100_is_predicted():
    done = run("-m", "tests.evidence.predict_a100", "gpu_ms", cwd=ROOT)
    assert "3 of the 3 published factors beyond 15% are predicted within 25% (always 1: 0)." in (
        done.stdout
    )


def test_a_comparison_with_nanochat_asks_for_its_file():
    done = run("-m", "tests.evidence.against_nanochat", "none.py", cwd=ROOT, status=2)
    assert done.stderr == "error: none.py: no such file; give nanochat's gpt.py\n"
