"""Check a run before it takes days: `python check.py --config gpt2_124m.yaml`.

It takes train.py's options, alone or under torchrun, and prints the run's hours and disk. Then it
checks data, gradients and exact resume by real steps, in about a minute, and keeps nothing; status
1 if a check finds a problem. `--fit` tries which batch_size fits this device and is fastest.
"""

from config import Config
from runtime.cli import load
from runtime.start import start


class CheckOptions(Config):
    """check"""

    config: str | None = None
    """the YAML file"""
    estimate: bool = False
    """stop after hours and disk, before the first step"""
    fit: bool = False
    """instead double batch_size until it does not fit in memory, with real steps; write the fastest
    one, for the same tokens a step, into <run_name>_fit.yaml
    """


if __name__ == "__main__":
    OPTIONS = start(CheckOptions, config_file=True)

from checkpoint.weights import adopt_architecture
from measure.preflight.checks import check
from measure.preflight.estimate import estimate
from measure.preflight.fit import fit
from runtime.device import choose_device
from runtime.errors import UserError, reported
from runtime.world import joined_world


def main(options: CheckOptions) -> None:
    """Print the estimate and the findings. Raises SystemExit(1) after a problem, and UserError."""
    if options.resume:
        raise UserError("--resume: check.py is for a run from its first step; leave it out")
    own = {*CheckOptions.__annotations__}
    config = load(Config, options.model_dump(exclude_unset=True, exclude=own))
    if options.fit:
        fit(config, options.config)
        return
    with joined_world(choose_device(config.device), config.timeout, config.must_match()) as world:
        config = world.raise_on_all(lambda: adopt_architecture(config))
        estimated = world.on_rank0(lambda: estimate(config, world))
        if not (options.estimate or check(config, world, estimated)):
            raise SystemExit(1)


if __name__ == "__main__":
    with reported(OPTIONS.log_dir, advice=OPTIONS.advice()):
        main(OPTIONS)
