"""How options are declared, and the options of the model.

An option is a field with a type, bounds, marks, a default, and a docstring, which is its help.
config.py has the options of training, and makes flags and YAML keys of all. Nothing here imports
torch or pydantic, so that both config.py and model.py can.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Interval

GPT2_TOKENS = 50257  # size of GPT-2's byte-pair vocabulary: 256 bytes, 50,000 merges, <|endoftext|>


class Optimization(NamedTuple):
    """Mark an option as an optimization. It is on if its value is not the default.

    A run lists the ones that are on at its start; `ladder.py --ablate` switches them off.
    """

    label: str = ""  # name in that list (default: the option's name)
    listed: bool = False  # part of the published ladders: a run lists it if it is off, too


OPTIMIZATION = Optimization()
LISTED = Optimization(listed=True)


class Needs(NamedTuple):
    """Mark an option that has an effect only if another option has one of some values."""

    name: str
    values: tuple[Any, ...] = ()  # values of that option (default: any truthy value)


# Marks for checkpoint/. A resumed run keeps the fixed options, which decide its model and the
# tokens of each step, and may change all others. Weights have to fit the architecture.
FIXED, ARCHITECTURE = "fixed", "architecture"
INITIAL = "initial weights"  # used only to initialize weights; ignored on resume
THIS_CALL = "this call"  # never taken from a checkpoint
PATH = "path"  # an input of the run, stored as an absolute path
FROM_SCRATCH = Needs("init_from", ("scratch",))
OF_MUON = Needs("optimizer", ("muon",))

# Bounds far beyond any run: a number outside them is a typo, and would overflow or run forever.
Size = Annotated[int, Interval(ge=1, le=10**15)]  # tokens, sequences, units of a layer
Count = Annotated[int, Interval(ge=1, le=10**9)]  # steps, seconds
Fraction = Annotated[float, Interval(ge=0, lt=1)]
NotNegative = Annotated[float, Interval(ge=0, le=1e30)]
Rate = Annotated[float, Interval(gt=0, le=1e30)]
RateOfKind = Annotated[Rate | None, OPTIMIZATION]  # of one kind of parameters
Shape = Annotated[Size, ARCHITECTURE]
Switch = Annotated[bool, OPTIMIZATION]
ModelSwitch = Annotated[Switch, ARCHITECTURE]
ListedSwitch = Annotated[bool, LISTED]


@dataclass
class ModelOptions:
    """The options of the model. The defaults are the plain GPT-2 (124M)."""

    n_layer: Annotated[int, Interval(ge=1, le=10_000), ARCHITECTURE] = 12
    """transformer blocks"""
    n_head: Shape = 12
    """attention heads per block"""
    n_embd: Shape = 768
    """width of the residual stream"""
    block_size: Shape = 1024
    """longest context, in tokens, and without rope the number of learned positions; if it is
    smaller than in init_from, the first positions are kept
    """
    vocab_size: Annotated[Size, Optimization("padded vocabulary", listed=True), FIXED] = GPT2_TOKENS
    """rows of the embedding and of the output head; 50304 pads GPT-2's 50257 to a multiple of 128,
    which is faster
    """
    real_vocab_size: Annotated[Size | None, FIXED] = None
    """tokens that exist; the rows above are padding and take no part in loss or sampling (default:
    vocab_size, at most 50257)
    """
    bias: Annotated[bool, ARCHITECTURE] = True
    """biases in linear layers and norms"""
    dropout: Fraction = 0.0
    """dropout probability"""
    norm: Annotated[Literal["layernorm", "rmsnorm"], OPTIMIZATION, ARCHITECTURE] = "layernorm"
    """normalization before attention, MLP and output head"""
    norm_weight: Annotated[bool, Needs("norm", ("rmsnorm",)), ARCHITECTURE] = True
    """learned weights in norms"""
    activation: Annotated[Literal["gelu_tanh", "gelu", "relu2"], OPTIMIZATION, ARCHITECTURE] = (
        "gelu_tanh"
    )
    """the MLP's activation; GPT-2 has the tanh approximation; relu2: relu(x)^2"""
    rope: ModelSwitch = False
    """rotary positions: rotate queries and keys by their position, instead of learned positions"""
    qk_norm: ModelSwitch = False
    """normalize queries and keys of each head (RMSNorm without weights)"""
    value_residual: ModelSwitch = False
    """mix the first layer's values into the values of each later layer, by a learned share"""
    embed_shortcut: ModelSwitch = False
    """normalize the embedded tokens, and add a learned share of them before every block"""
    value_embeds: ModelSwitch = False
    """add an embedding of each token to the values of every other layer, by a gate per head"""
    bigram_embed: ModelSwitch = False
    """add an embedding of each token with the one before, by hash, before every block, by a learned
    share
    """
    logit_softcap: Annotated[NotNegative, OPTIMIZATION, ARCHITECTURE] = 0.0
    """soft-cap the logits to plus or minus this value, by tanh; 0 is off"""
    tie_weights: ModelSwitch = False
    """share one matrix between the token embedding and the output head"""
    init: Annotated[Literal["torch", "gpt2"], OPTIMIZATION, FROM_SCRATCH, INITIAL] = "torch"
    """initial weights: PyTorch's defaults, or GPT-2's N(0, 0.02)"""
    residual_scaling: Annotated[Switch, FROM_SCRATCH, Needs("zero_init", (False,)), INITIAL] = False
    """divide the initial std of the residual projections by sqrt(2 n_layer)"""
    zero_init: Annotated[Switch, FROM_SCRATCH, INITIAL] = False
    """initialize residual projections to 0, so that each block starts as the identity"""

    @property
    def n_vocab(self) -> int:
        """Number of real tokens: by default at most GPT-2's 50,257. Later rows are padding."""
        return self.real_vocab_size or min(self.vocab_size, GPT2_TOKENS)
