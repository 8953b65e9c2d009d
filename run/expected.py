"""The losses to expect of a model that has learned nothing, or only how frequent each token is."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from dataloader import TokenStream

COUNTED = 10_000_000  # tokens whose frequencies are counted, within about 0.1 s
WINDOW = 5  # logged losses whose mean is compared: one loss varies with its batch


@dataclass
class ExpectedLosses:
    """Losses in nats per token that a run from scratch passes early, by name."""

    losses: dict[str, float]
    description: str = ""
    _logged: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @classmethod
    def of(cls, stream: TokenStream, n_vocab: int) -> "ExpectedLosses":
        """Count the tokens of a training split. Raises TokenFileError for a file that went bad."""
        untrained, entropy = math.log(n_vocab), stream.entropy(COUNTED)
        cut = f" (of the first {COUNTED:,} tokens)" if stream.tokens > COUNTED else ""
        return cls(
            {"untrained": untrained, "token frequencies alone": entropy},
            f"loss to expect: {untrained:.2f} untrained (ln {n_vocab}), {entropy:.2f} from token "
            f"frequencies alone{cut}",
        )

    def add(self, step: int, loss: float) -> list[str]:
        """Add the next logged loss; return a line for each expected loss that it has passed.

        A loss has passed when the mean of the last WINDOW is lower. No line comes twice, and none
        if the first logged loss was lower already, as in fine-tuning.
        """
        if not self._logged:
            self.losses = {name: value for name, value in self.losses.items() if value <= loss}
        self._logged.append(loss)
        if len(self._logged) < WINDOW:
            return []
        mean, lines = statistics.fmean(self._logged), []
        for name, value in [*self.losses.items()]:
            if mean < value:
                del self.losses[name]
                lines.append(
                    f"step {step}: the mean of the last {WINDOW} logged losses is below "
                    f"{value:.2f} ({name})"
                )
        return lines
