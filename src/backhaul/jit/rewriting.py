"""Replaces torch's RPC operators by Backhaul's, in graphs that have just been compiled."""

from __future__ import annotations

from backhaul.jit import results, torch_compiler
from backhaul.jit.names import CALL_FORMS, ApiNames
from backhaul.jit.references import classes
from backhaul.jit.torch_compiler import types_of

_REFERENCE_METHODS = ("to_here", "local_value", "is_owner", "owner", "owner_name", "confirmed_by_owner")
_ANY = types_of.AnyType.get()
_KEYWORDS_TYPE = types_of.DictType(types_of.StringType.get(), _ANY)


def rewrite(graph: torch_compiler.Graph, api_names: ApiNames) -> None:
    """Replace the calls in a graph that were written with a known API. A graph without such calls is not changed."""
    any_replaced = False
    for form in CALL_FORMS:
        for node in graph.findAllNodes(f"prim::{'rpc_' * (form == 'remote')}{form}", True):
            api = api_names.api_at(node.sourceRange())
            if api is not None:
                _replace_call(graph, node, form, api.name)
                any_replaced = True
    if any_replaced:
        for method in _REFERENCE_METHODS:
            for node in graph.findAllNodes(f"aten::{method}", True):
                if isinstance(node.inputsAt(0).type(), types_of.RRefType):
                    _replace_method(graph, node, method)


def _replace_call(graph: torch_compiler.Graph, node: torch_compiler.Node, form: str, api: str) -> None:
    """Replace one call. Its inputs are: to, function[, args[, kwargs[, timeout]]]."""
    with torch_compiler.inserting(graph, node):
        to, function, *rest = node.inputs()
        if not rest:
            rest.append(_insert(graph, node, "prim::TupleConstruct", [], types_of.TupleType([])))
        if len(rest) == 1:
            rest.append(_insert(graph, node, "prim::DictConstruct", [], _KEYWORDS_TYPE))
        if len(rest) == 2:
            rest.append(graph.insertConstant(-1.0))
        inputs = [graph.insertConstant(api), to, function, *rest]
        output_type = node.output().type()
        if form == "rpc_async":
            output = _insert(graph, node, "backhaul::rpc_async", inputs, output_type)
        else:
            output = _insert_and_wait(graph, node, form, inputs, output_type)
    node.output().replaceAllUsesWith(output)
    node.destroy()


def _replace_method(graph: torch_compiler.Graph, node: torch_compiler.Node, method: str) -> None:
    """Replace a method call of a reference that was made in script."""
    with torch_compiler.inserting(graph, node):
        reference, *rest = node.inputs()  # to_here always has its timeout here
        output_type = node.output().type()
        if method in ("to_here", "local_value"):
            output = _insert_and_wait(graph, node, method, [reference, *rest], output_type)
        else:
            operator = "owner_name" if method == "owner" else method  # calls accept the owner's name, too
            output = _insert(graph, node, f"backhaul::{operator}", [reference], output_type)
    node.output().replaceAllUsesWith(output)
    node.destroy()


def _insert_and_wait(
    graph: torch_compiler.Graph,
    source: torch_compiler.Node,
    operator: str,
    inputs: list[torch_compiler.Value],
    output_type: torch_compiler.Type,
) -> torch_compiler.Value:
    """Insert an operator, the wait for its future, and the conversion of the outcome to a value; see ``results``."""
    future = _insert(graph, source, f"backhaul::{operator}", inputs, types_of.FutureType(_ANY))
    outcome = _insert(graph, source, "aten::wait", [future], _ANY)
    is_reference = isinstance(output_type, types_of.RRefType)
    value_type = classes.class_of(output_type.getElementType()) if is_reference else output_type
    (value,) = graph.insertGraph(results.converter(value_type), [outcome])
    value.node().copyMetadata(source)
    return _insert(graph, source, "prim::unchecked_cast", [value], output_type) if is_reference else value


def _insert(
    graph: torch_compiler.Graph,
    source: torch_compiler.Node,
    operator: str,
    inputs: list[torch_compiler.Value],
    output_type: torch_compiler.Type,
) -> torch_compiler.Value:
    """Insert a node. ``source`` is the node it replaces, whose place in the source it gets."""
    node = graph.create(operator, inputs)
    node.copyMetadata(source)
    node.output().setType(output_type)
    graph.insertNode(node)
    return node.output()
