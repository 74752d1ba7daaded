"""Puts Backhaul's operators in the place of the reference's, in graphs that have just been compiled."""

from __future__ import annotations

from backhaul.jit import results, torch_compiler
from backhaul.jit.names import FORMS, Names
from backhaul.jit.references import classes
from backhaul.jit.torch_compiler import types_of

_METHODS = ("to_here", "local_value", "is_owner", "owner", "owner_name", "confirmed_by_owner")
_ANY = types_of.AnyType.get()
_KEYWORDS = types_of.DictType(types_of.StringType.get(), _ANY)


def rewrite(graph: torch_compiler.Graph, names: Names) -> None:
    """Make a graph's calls Backhaul's, where they are. Graphs without any stay as they are."""
    ours = False
    for form in FORMS:
        for node in graph.findAllNodes(f"prim::{'rpc_' * (form == 'remote')}{form}", True):
            api = names.api_at(node.sourceRange())
            if api is not None:
                _replace_call(graph, node, form, api.name)
                ours = True
    if ours:
        for method in _METHODS:
            for node in graph.findAllNodes(f"aten::{method}", True):
                if isinstance(node.inputsAt(0).type(), types_of.RRefType):
                    _replace_method(graph, node, method)


def _replace_call(graph: torch_compiler.Graph, node: torch_compiler.Node, form: str, api: str) -> None:
    """to, function[, args[, kwargs[, timeout]]] -> ours."""
    with torch_compiler.inserting(graph, node):
        to, function, *rest = node.inputs()
        if not rest:
            rest.append(_insert(graph, node, "prim::TupleConstruct", [], types_of.TupleType([])))
        if len(rest) == 1:
            rest.append(_insert(graph, node, "prim::DictConstruct", [], _KEYWORDS))
        if len(rest) == 2:
            rest.append(graph.insertConstant(-1.0))
        inputs = [graph.insertConstant(api), to, function, *rest]
        kind = node.output().type()
        if form == "rpc_async":
            made = _insert(graph, node, "backhaul::rpc_async", inputs, kind)
        else:
            made = _insert_settled(graph, node, form, inputs, kind)
    node.output().replaceAllUsesWith(made)
    node.destroy()


def _replace_method(graph: torch_compiler.Graph, node: torch_compiler.Node, method: str) -> None:
    """A method of a reference that was made in script."""
    with torch_compiler.inserting(graph, node):
        reference, *rest = node.inputs()  # to_here has its timeout always
        kind = node.output().type()
        if method in ("to_here", "local_value"):
            made = _insert_settled(graph, node, method, [reference, *rest], kind)
        else:
            operator = "owner_name" if method == "owner" else method  # the name serves as well
            made = _insert(graph, node, f"backhaul::{operator}", [reference], kind)
    node.output().replaceAllUsesWith(made)
    node.destroy()


def _insert_settled(
    graph: torch_compiler.Graph,
    place: torch_compiler.Node,
    operator: str,
    inputs: list[torch_compiler.Value],
    made: torch_compiler.Type,
) -> torch_compiler.Value:
    """An operator, the wait for its future, and what makes a value of what comes; see ``results``."""
    future = _insert(graph, place, f"backhaul::{operator}", inputs, types_of.FutureType(_ANY))
    outcome = _insert(graph, place, "aten::wait", [future], _ANY)
    ours = isinstance(made, types_of.RRefType)
    kind = classes.class_of(made.getElementType()) if ours else made
    (value,) = graph.insertGraph(results.converter(kind), [outcome])
    value.node().copyMetadata(place)
    return _insert(graph, place, "prim::unchecked_cast", [value], made) if ours else value


def _insert(
    graph: torch_compiler.Graph,
    place: torch_compiler.Node,
    kind: str,
    inputs: list[torch_compiler.Value],
    made: torch_compiler.Type,
) -> torch_compiler.Value:
    node = graph.create(kind, inputs)
    node.copyMetadata(place)
    node.output().setType(made)
    graph.insertNode(node)
    return node.output()
