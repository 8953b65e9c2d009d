"""Training configs for measuring."""

from collections.abc import Mapping
from typing import Any

from config import Config


def without_end(config: Config) -> Config:
    """Return the config without its last step, at learning rates that barely change the weights."""
    names = [name for name in Config.model_fields if name.endswith("lr")]
    rates = {name: 1e-6 for name in names if getattr(config, name)}
    return config.model_copy(update={"max_steps": 10**9, "max_minutes": None, **rates})


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return options as flags of train.py."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            parts = value if isinstance(value, list | tuple) else [value]
            flags.append(f"--{name}={','.join(map(str, parts))}")
    return flags
