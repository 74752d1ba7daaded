"""Puts Backhaul's operators in the place of the reference's, in graphs that have just been compiled."""

from __future__ import annotations

from backhaul.jit import compiler, results
from backhaul.jit.compiler import types_of
from backhaul.jit.names import FORMS, Names

_METHODS = ("to_here", "local_value", "is_owner", "owner", "owner_name", "confirmed_by_owner")
_KEYWORDS = types_of.DictType(types_of.StringType.get(), types_of.AnyType.get())


def rewrite(graph: compiler.Graph, names: Names) -> None:
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


def _replace_call(graph: compiler.Graph, node: compiler.Node, form: str, api: str) -> None:
    """to, function[, args[, kwargs[, timeout]]] -> ours."""
    with compiler.inserting(graph, node):
        to, function, *rest = node.inputs()
        if not rest:
            rest.append(_insert(graph, node, "prim::TupleConstruct", [], types_of.TupleType([])))
        if len(rest) == 1:
            rest.append(_insert(graph, node, "prim::DictConstruct", [], _KEYWORDS))
        if len(rest) == 2:
            rest.append(graph.insertConstant(-1.0))
        inputs = [graph.insertConstant(api), to, function, *rest]
        kind = node.output().type()
        operator = "remote" if form == "remote" else "rpc_async"
        future = kind if form == "rpc_async" else types_of.FutureType(kind)
        made = _insert(graph, node, f"backhaul::{operator}", inputs, future)
        if form != "rpc_async":
            made = _insert(graph, node, "aten::wait", [made], kind)
    node.output().replaceAllUsesWith(made)
    node.destroy()


def _replace_method(graph: compiler.Graph, node: compiler.Node, method: str) -> None:
    """A method of a reference that was made in script."""
    with compiler.inserting(graph, node):
        reference, *rest = node.inputs()  # to_here has its timeout always
        kind = node.output().type()
        if method in ("to_here", "local_value"):
            inputs = [reference, *rest, graph.insertConstant(results.key_of(kind))]
            future = _insert(graph, node, f"backhaul::{method}", inputs, types_of.FutureType(kind))
            made = _insert(graph, node, "aten::wait", [future], kind)
        else:
            operator = "owner_name" if method == "owner" else method  # the name serves as well
            made = _insert(graph, node, f"backhaul::{operator}", [reference], kind)
    node.output().replaceAllUsesWith(made)
    node.destroy()


def _insert(
    graph: compiler.Graph, place: compiler.Node, kind: str, inputs: list[compiler.Value], made: compiler.Type
) -> compiler.Value:
    node = graph.create(kind, inputs)
    node.copyMetadata(place)
    node.output().setType(made)
    graph.insertNode(node)
    return node.output()
