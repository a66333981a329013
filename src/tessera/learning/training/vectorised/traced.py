"""Traced: a step as a flat list of torch's own operations, recorded once per set of shapes.

`torch.func` goes through several layers of Python for every operation of a step, which on small
matrices is most of the time. What it does is the same in every step, so it is recorded once, and
what is recorded is simplified:

    - views that change nothing, transposes that cancel and factors of 1 are left out
    - what depends on no tensor is made once
    - a gradient that is a product of matrices is added to the parameter as it is computed
    - the gradient of a look-up goes to the rows that were looked up, and to no others

Nothing here knows the module. Every recording is held against the step as it was, on its first real
batch and with the same random numbers; one that differs is not used. Compiling (`step.Compiled`) is
faster still, but takes a minute where this takes a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tessera.learning.training.vectorised.step import REFUSALS, Step, Tensors, one_line, quietly

TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference after one step, as a share of the largest change."""

Arguments: TypeAlias = tuple[Tensors, Tensors, Tensors, Tensors, Tensor, Tensor]

aten: Final = torch.ops.aten

SAME_VALUES: Final = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
VIEWS: Final = frozenset(
    {
        *SAME_VALUES,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.dims,
        aten.squeeze.dim,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.detach.default,
        aten.alias.default,
    }
)
MADE: Final = frozenset(
    {aten.arange.start_step, aten.arange.default, aten.scalar_tensor.default, aten.zeros.default}
)
"""What depends on no tensor, and is the same in every step."""


class Traced:
    """A step for one set of shapes, recorded when it is first called.

    What cannot be recorded, or then computes something else, is run as it is, and `refused` is
    called with the reason once.
    """

    def __init__(self, step: Step, refused: Callable[[str], None]) -> None:
        self._plain = step
        self._refused = refused
        self._recorded: fx.GraphModule | None = None
        self._names: Sequence[str] = ()
        self._tried = False

    def __call__(
        self,
        dense: Tensors,
        rows: Tensors,
        batch: Tensors,
        touched: Tensors,
        weights: Tensor,
        rate: Tensor,
    ) -> tuple[Tensor, Tensors]:
        arguments: Arguments = (dense, rows, batch, touched, weights, rate)
        if not self._tried:
            self._tried = True
            try:
                with quietly(), torch.random.fork_rng(devices=[]):
                    self._record(arguments)
            except REFUSALS as error:
                self._recorded = None
                self._refused(one_line(error))
        if self._recorded is None:
            return self._plain(*arguments)
        return self._run(self._recorded, arguments)

    def _run(self, recorded: fx.GraphModule, arguments: Arguments) -> tuple[Tensor, Tensors]:
        losses, *new = recorded.forward(*_flat(arguments))
        return losses, dict(zip(self._names, new, strict=True))

    def _record(self, arguments: Arguments) -> None:
        """Record the step on a copy of its arguments, and compare both on further copies."""

        def flat(*tensors: Tensor) -> list[Tensor]:
            losses, new = self._plain(*_as(arguments, tensors))
            self._names = tuple(new)
            return [losses, *new.values()]

        recorded = make_fx(flat)(*(x.clone() for x in _flat(arguments)))
        simplify(recorded)
        state = torch.get_rng_state()
        plain, quick = (_as(arguments, [x.clone() for x in _flat(arguments)]) for _ in range(2))
        losses, new = self._plain(*plain)
        torch.set_rng_state(state)
        other_losses, other_new = self._run(recorded, quick)
        before = [*_flat(arguments[:2]), *(arguments[1][name] for name in new)]
        after = [*_flat(plain[:2]), *new.values()]
        found = [*_flat(quick[:2]), *(other_new[name] for name in new)]
        pairs = [(losses, other_losses), *zip(after, found, strict=True)]
        largest = max((_largest(x, y) for x, y in zip(after, before, strict=True)), default=0.0)
        off = max(_largest(x, y) for x, y in pairs)
        alike = all(torch.equal(x.isfinite(), y.isfinite()) for x, y in pairs)
        if not alike or off > TOLERANCE[losses.dtype] * max(largest, 1e-6):
            raise ValueError(f"recorded, it trains differently: by {off:.1g} of {largest:.1g}")
        self._recorded = recorded


def _flat(arguments: Sequence[Tensors | Tensor]) -> list[Tensor]:
    return [x for part in arguments for x in (part.values() if isinstance(part, dict) else (part,))]


def _as(arguments: Arguments, tensors: Sequence[Tensor]) -> Arguments:
    """The tensors in the order of `_flat`, named as the arguments are."""
    left = iter(tensors)
    dense, rows, batch, touched, weights, rate = (
        {name: next(left) for name in part} if isinstance(part, dict) else next(left)
        for part in arguments
    )
    return dense, rows, batch, touched, weights, rate  # type: ignore[return-value]


def _largest(one: Tensor, other: Tensor) -> float:
    """The largest difference; what is not finite is compared by itself."""
    difference = (one - other).abs().nan_to_num(0.0, 0.0)
    return float(difference.max()) if difference.numel() else 0.0


# --- what is recorded, made simpler ---------------------------------------------------------------


def simplify(recorded: fx.GraphModule) -> None:
    """Fewer operations that do the same; in place."""
    graph = recorded.graph
    changed = frozenset(_root(n.args[0]) for n in graph.nodes if _writes(n))
    for node in list(graph.nodes):
        if node.op == "call_function" and (same := _same_as(node, changed)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    _make_once(recorded, changed)
    _drop_unused(graph)
    for node in list(graph.nodes):
        if (update := _update(node)) is not None:
            _add_products(graph, node, *update, changed) or _add_lookups(
                graph, node, *update, changed
            )
    _drop_unused(graph)
    graph.lint()
    recorded.recompile()


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        called = node.op == "call_function"
        if called and not node.users and not _writes(node) and not _random(node):
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _shape(node: Any) -> tuple[int, ...] | None:
    """The shape of a node's tensor; None where it is not one tensor."""
    if not isinstance(node, fx.Node) or "tensor_meta" not in node.meta:
        return None
    return tuple(getattr(node.meta["tensor_meta"], "shape", ()))


def _root(node: Any) -> Any:
    """The tensor that a node is a view of."""
    while isinstance(node, fx.Node) and (node.target in VIEWS or _writes(node)):
        node = node.args[0]
    return node


def _same_as(node: fx.Node, changed: frozenset[Any]) -> fx.Node | None:
    """An earlier node with the same values in the same order; None if there is none."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in SAME_VALUES:
        return source if _shape(node) == _shape(source) else None
    if (order := _order(node)) is not None:
        base: fx.Node = source
        while (inner := _order(base)) is not None:
            order = [inner[at] for at in order]
            base = base.args[0]  # type: ignore[assignment]
        return base if order == sorted(order) else None
    if node.target in (aten.mul.Scalar, aten.mul.Tensor) and node.args[1] in (1, 1.0):
        # A copy: of what is changed later it is another thing.
        kept = _root(source) not in changed and _root(node) not in changed
        meta, own = source.meta.get("tensor_meta"), node.meta.get("tensor_meta")
        alike = meta is not None and own is not None and meta.dtype == own.dtype
        return source if alike and (kept or _early(node)) else None
    return None


def _early(node: fx.Node) -> bool:
    """Whether everything made from a node is made before the first parameter is changed."""
    first = next((n for n in node.graph.nodes if _writes(n) and _root(n).op == "placeholder"), None)
    seen, ends = {node}, [node]
    while ends:
        for user in ends.pop().users:
            if first is not None and not user < first:
                return False
            if user.target in VIEWS and user not in seen:
                seen.add(user)
                ends.append(user)
    return True


def _order(node: fx.Node) -> list[int] | None:
    """The order in which a transpose puts the dimensions; None for other operations."""
    shape = _shape(node)
    if shape is None:
        return None
    n = len(shape)
    if node.target is aten.permute.default:
        given: Any = node.args[1]
        return [at % n for at in given]
    if node.target is aten.transpose.int:
        pair: Any = node.args[1:3]
        one, other = (at % n for at in pair)
        order = list(range(n))
        order[one], order[other] = order[other], order[one]
        return order
    return None


def _make_once(recorded: fx.GraphModule, changed: frozenset[Any]) -> None:
    """Constants, and views of them, become attributes."""
    known: dict[fx.Node, Tensor] = {}
    for node in list(recorded.graph.nodes):
        inputs = node.all_input_nodes
        made = node.target in MADE and not inputs
        if not (made or (node.target in VIEWS and inputs and known.keys() >= set(inputs))):
            continue
        if _root(node) in changed:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
        known[node] = node.target(*args, **kwargs)
    for at, (node, value) in enumerate(known.items()):
        if all(user in known for user in node.users):
            continue
        name = f"made_{at}"
        recorded.register_buffer(name, value)
        with recorded.graph.inserting_before(node):
            held = recorded.graph.get_attr(name)
        held.meta.update(node.meta)
        node.replace_all_uses_with(held)


def _update(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(parameter, gradient, rate) of an operation that takes rate * gradient off a parameter."""
    if node.target is aten.sub_.Tensor and not node.kwargs:
        parameter, product = node.args
        if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
            return None
        gradient, rate = product.args
        if len(product.users) != 1:
            return None
    elif node.target is aten.addcmul_.default and node.kwargs == {"value": -1}:
        parameter, gradient, rate = node.args
    else:
        return None
    nodes = (parameter, gradient, rate)
    if not all(isinstance(each, fx.Node) for each in nodes) or _shape(rate) != ():
        return None
    meta = parameter.meta.get("tensor_meta")  # type: ignore[union-attr]
    whole = meta is not None and meta.memory_format is torch.contiguous_format
    return nodes if whole and parameter.op == "placeholder" else None  # type: ignore[union-attr, return-value]


def _add_products(
    graph: fx.Graph,
    node: fx.Node,
    parameter: fx.Node,
    gradient: fx.Node,
    rate: fx.Node,
    changed: frozenset[Any],
) -> bool:
    """parameter -= rate * (a @ b), in one operation."""
    product, turned = gradient, False
    if _order(product) == [0, 2, 1]:
        product, turned = product.args[0], True  # type: ignore[assignment]
    if product.target is not aten.bmm.default or len(product.users) != 1:
        return False
    a, b = product.args
    if len(gradient.users) != 1 or _root(a) in changed or _root(b) in changed:
        return False
    with graph.inserting_before(node):
        if turned:
            a, b = (graph.call_function(aten.transpose.int, (x, 1, 2)) for x in (b, a))
        sizes = [math.prod(_shape(x) or ()) for x in product.args]
        small = int(sizes[1] < sizes[0]) ^ int(turned)
        pair = [a, b]
        pair[small] = graph.call_function(aten.mul.Tensor, (pair[small], rate))
        added = graph.call_function(aten.baddbmm_.default, (parameter, *pair), {"alpha": -1})
    node.replace_all_uses_with(added)
    graph.erase_node(node)
    return True


def _add_lookups(
    graph: fx.Graph,
    node: fx.Node,
    parameter: fx.Node,
    gradient: fx.Node,
    rate: fx.Node,
    changed: frozenset[Any],
) -> bool:
    """parameter -= rate * the gradient of looking some of its rows up: only these rows."""
    found = gradient
    while found.target in SAME_VALUES and len(found.users) == 1:
        found = found.args[0]  # type: ignore[assignment]
    if found.target is not aten.embedding_dense_backward.default or len(found.users) != 1:
        return False
    up, ids, rows, padding, by_frequency = found.args
    if by_frequency or padding >= 0 or _root(up) in changed or _root(ids) in changed:  # type: ignore[operator]
        return False
    width = (_shape(found) or (0,))[-1]
    many = math.prod(_shape(ids) or (0,))
    with graph.inserting_before(node):
        off = graph.call_function(aten.neg.default, (rate,))
        flat = graph.call_function(aten.view.default, (parameter, [rows, width]))
        each = graph.call_function(aten.reshape.default, (up, [many, width]))
        step = graph.call_function(aten.mul.Tensor, (each, off))
        one = graph.call_function(aten.reshape.default, (ids, [many, 1]))
        where = graph.call_function(aten.expand.default, (one, [many, width]))
        added = graph.call_function(aten.scatter_add_.default, (flat, 0, where, step))
    node.replace_all_uses_with(added)
    graph.erase_node(node)
    return True
