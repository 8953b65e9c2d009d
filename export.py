"""A model as a folder that Hugging Face's transformers loads: `python export.py quickstart
my-gpt2`.
"""

from runtime.cli import Name, Options
from runtime.errors import reported
from runtime.start import start


class ExportOptions(Options):
    """options"""

    run: Name
    """a run's name or folder, one of its checkpoints, gpt2 .. gpt2-xl, a Hugging Face folder, or a
    .pt file of nanoGPT
    """
    folder: Name
    """the new folder"""
    log_dir: Name = "logs"
    """folder that holds the runs"""


if __name__ == "__main__":
    # Before torch is imported, which takes seconds: --help and mistakes answer at once.
    OPTIONS = start(ExportOptions, description=__doc__, positional="run folder")

from pathlib import Path

from inference.export_folder import export


def main(options: ExportOptions) -> None:
    """Export, and say what to do with the folder. Raises UserError."""
    folder = Path(options.folder)
    notes = export(options.run, folder, options.log_dir)
    with reported("stdout"):
        for note in notes:
            print(f"note: {note}")
        print(f"wrote {folder}; read its model card, README.md, and choose a license")
        print(f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


if __name__ == "__main__":
    advice = {"memory": "out of memory: the model takes three times the size of its weights"}
    with reported(OPTIONS.folder, advice=advice):
        main(OPTIONS)
