"""Estimate a run, then check it, before it takes days: `python check.py --config gpt2_124m.yaml`.

It takes train.py's options, alone or under torchrun. The estimate has hours, memory, disk and the
largest batch size that fits. The checks cover data, gradients and exact resume, take about a
minute, and keep nothing; status 1 if one finds a problem.
"""

from config import Config
from runtime.cli import load
from runtime.start import start


class CheckOptions(Config):
    """check"""

    estimate: bool = False
    """stop after the estimate, before the first step"""


if __name__ == "__main__":
    OPTIONS = start(CheckOptions, config_file=True)

from checkpoint.weights import adopt_architecture
from measure.preflight.checks import check
from measure.preflight.estimate import estimate
from runtime.device import choose_device
from runtime.errors import UserError, reported
from runtime.world import joined_world


def main(options: CheckOptions) -> None:
    """Print the estimate and the findings. Raises SystemExit(1) after a problem, and UserError."""
    if options.resume:
        raise UserError("--resume: check.py is for a run from its first step; leave it out")
    config = load(Config, options.model_dump(exclude_unset=True, exclude={"estimate"}))
    with joined_world(choose_device(config.device), config.timeout, config.must_match()) as world:
        config = world.raise_on_all(lambda: adopt_architecture(config))
        estimated = world.on_rank0(lambda: estimate(config, world))
        if not (options.estimate or check(config, world, estimated)):
            raise SystemExit(1)


if __name__ == "__main__":
    with reported(OPTIONS.log_dir, advice=OPTIONS.advice()):
        main(OPTIONS)
