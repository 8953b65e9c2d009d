"""The memory that a computation takes, found without doing it: PyTorch's fake tensors have shapes
and dtypes, but no numbers.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """While entered, counts the bytes of all buffers that operators make, each from when it is made
    until it is freed.

    `now` is what there is, `most` the most that there was at once in each phase that was begun.
    `instead` has functions to call in place of operators, such as the code of one that PyTorch
    cannot look into. Sizes are rounded up to a multiple of `rounded_to`.
    """

    def __init__(self, instead: dict[Any, Callable[..., Any]] | None = None, rounded_to: int = 1):
        super().__init__()
        # the optimizers read the number of their steps
        self.instead = {torch.ops.aten._local_scalar_dense.default: lambda _: 2.0} | (instead or {})
        self.rounded_to = rounded_to
        self.now, self.phase, self.most = 0, "", defaultdict[str, int](int)
        self.sizes: dict[int, int] = {}  # of the buffers that there are, by their numbers
        self.number, self.counts = 0, True
        self.storages: dict[int, weakref.ref] = {}  # by their address

    def begin(self, phase: str) -> None:
        """What comes now is counted as this phase too."""
        self.phase = phase
        self.most[phase] = max(self.most[phase], self.now)

    def allocate(self, size: int) -> int:
        """Count a buffer of so many bytes; returns its number."""
        self.number += 1
        self.sizes[self.number] = -(-size // self.rounded_to) * self.rounded_to
        self.now += self.sizes[self.number]
        self.most[self.phase] = max(self.most[self.phase], self.now)
        return self.number

    def free(self, number: int) -> None:
        """The buffer of this number is no more."""
        self.now -= self.sizes.pop(number)

    def stand_in(self, value: Any) -> Any:
        """For a tensor one of its shape that is not counted; for anything else itself."""
        if not isinstance(value, Tensor):
            return value
        self.counts = False
        try:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        finally:
            self.counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self.instead.get(func, func)(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if not self.counts:
            self.storages[address] = weakref.ref(storage, lambda _: self.storages.pop(address))
        elif address not in self.storages and storage.nbytes():
            number = self.allocate(storage.nbytes())

            def freed(_: object) -> None:
                del self.storages[address]
                self.free(number)

            self.storages[address] = weakref.ref(storage, freed)


# ---- torch.compile


class _FoundError(Exception):
    """The graphs are there: nothing needs to be compiled."""


def compiled_graphs(model: torch.nn.Module, run: Callable[[Any], Any]) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of forward and backward that torch.compile would compile for `run(compiled
    model)`, which fake tensors can do.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    found: list[tuple[fx.Graph, fx.Graph]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        forward, backward = compile_fx.partition_fn(joint, inputs, **options)
        found.append((forward.graph, backward.graph))
        raise _FoundError

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch.compiler.reset()  # what is compiled already would not come by again
    try:
        run(torch.compile(model, backend=backend))
    except Exception:  # PyTorch wraps it in one of its own
        if not found:
            raise
    finally:
        torch.compiler.reset()
    return found[0]


REDUCTIONS = (
    "sum",
    "amax",
    "amin",
    "mean",
    "var_mean",
    "any",
    "index_put",
    "_unsafe_index_put",
    "cumsum",
)
GATHERS = (
    "embedding",
    "gather",
    "index",
    "_unsafe_index",
    "clone",
    "_to_copy",
    "convert_element_type",
    "full",
    "iota",
    "arange",
    "scalar_tensor",
    "inductor_lookup_seed",
    "inductor_seeds",
    "inductor_random",
    "masked_fill",
    "where",
    "zeros_like",
)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        _name(node) == "getitem" or bool(getattr(node.target, "is_view", False))
    )


def _is_fused(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        torch.Tag.pointwise in getattr(node.target, "tags", ())
        or _name(node) in (*GATHERS, "getitem")
    )


def _sizes(node: fx.Node) -> list[int]:
    return [
        value.numel() * value.element_size()
        for value in tree_leaves(node.meta.get("val"))
        if isinstance(value, Tensor)
    ]


def count_graph(
    graph: fx.Graph,
    recorder: Recorder,
    given: dict[str, list[int]],
    halfway: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Let the recorder count the buffers of a compiled graph; returns the numbers of those that are
    its results, by name.

    `given` are those that it takes over, by its inputs' names; several may lie in one buffer. What
    is computed number by number is fused into what reads it, and is written to a buffer only where
    an operator that is not compiled, such as a matrix product, reads it, or where it is a result. A
    buffer is freed after its last use, or taken over by a result of its size.
    """
    nodes = list(graph.nodes)
    results = nodes[-1].all_input_nodes
    reads: dict[
        fx.Node, frozenset[fx.Node]
    ] = {}  # the buffers that hold a node's value, or that it is computed from

    def leads_to_operator(node: fx.Node) -> bool:
        return any(
            leads_to_operator(user)
            if _is_view(user)
            else not _is_fused(user) and _name(user) not in REDUCTIONS
            for user in node.users
        )  # the graph's output is none of either

    written: dict[fx.Node, frozenset[fx.Node]] = {}  # buffers, and those that making them reads
    last_use: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        sources = frozenset[fx.Node]().union(*(reads[source] for source in node.all_input_nodes))
        if node.op == "placeholder":
            reads[node] = frozenset((node,))
        elif _is_view(node) or (_is_fused(node) and not leads_to_operator(node)):
            reads[node] = sources
        else:
            reads[node], written[node] = frozenset((node,)), sources
            last_use |= dict.fromkeys(sources, node)

    buffers = {
        node: given[node.name] for node in nodes if node.op == "placeholder" and node.name in given
    }
    holders = Counter(number for numbers in given.values() for number in numbers)

    def release(numbers: list[int]) -> None:
        for number in numbers:
            holders[number] -= 1
            if holders[number] == 0:
                recorder.free(number)

    for name in given.keys() - {node.name for node in buffers}:
        release(given[name])
    *made, _ = written.items()  # the last one is the output
    for i, (node, sources) in enumerate(made):
        if i == len(written) // 2:
            halfway()
        if node.target in recorder.instead:  # what it makes and frees by itself
            recorder.instead[node.target](
                *(
                    recorder.stand_in(value.meta["val"] if isinstance(value, fx.Node) else value)
                    for value in node.args
                )
            )
        sizes = _sizes(node)
        dying = [source for source in sources if last_use[source] is node and source in buffers]
        for source in dying if _is_fused(node) and len(sizes) == 1 else ():
            if [recorder.sizes[number] for number in buffers[source]] == sizes and holders[
                buffers[source][0]
            ] == 1:
                buffers[node] = buffers.pop(source)
                dying.remove(source)
                break
        else:
            buffers[node] = [recorder.allocate(size) for size in sizes if size]
            holders.update(buffers[node])
        for source in dying:
            release(buffers.pop(source))
        if node not in last_use:
            release(buffers.pop(node))
    kept: dict[str, list[int]] = {}
    for result in results:
        kept[result.name] = [
            number for buffer in reads[result] for number in buffers.get(buffer, [])
        ]
    held = {number for numbers in kept.values() for number in numbers}
    for numbers in buffers.values():
        for number in numbers:
            if number not in held and number in recorder.sizes:
                recorder.free(number)
    return kept
