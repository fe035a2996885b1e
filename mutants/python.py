"""The changes of a Python file: of comparisons, arithmetic, constants, conditions, statements and lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from mutants.mutant import Change, Edit
from mutants.source import Source

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
#: Statements that only inform people (logs and metrics): no guard depends on them.
_INFORMS = re.compile(
    r"(?:await )?(?:log|logger|metrics|structlog|warnings|outages)\."
    r"|(?:DATABASE|BROKER|STORE)\.record_"  # outages, for logs and metrics
    r"|.*\.(?:inc|observe|labels)\("
)
_HEADER = re.compile(r"If[A-Z]|If-|Idempotency|x-amz|Authorization|Content-Length", re.IGNORECASE)
_SCOPE = re.compile(r"(?:Audited)?Require\(([A-Z]+_(?:READ|WRITE)|OPERATE)\)")


def changes(source: Source) -> Iterator[Change]:
    """Every change of the file. Types, docstrings, logs, metrics and f-strings are not changed."""
    for node in _nodes(source.tree):
        yield from _changes_of_node(source, node)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    unread = [tree]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _informs(node)):
            continue
        if isinstance(node, ast.JoinedStr):  # before Python 3.12 the parts of an f-string have no places
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_params", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            unread += [child for child in children if isinstance(child, ast.AST)]


def _informs(node: ast.Expr) -> bool:
    return _INFORMS.match(ast.unparse(node)) is not None


def _changes_of_node(source: Source, node: ast.AST) -> Iterator[Change]:  # noqa: C901 - an operator for each kind of node
    """The changes of the node itself, without the changes of nodes inside it."""
    match node:
        case ast.Compare():
            yield from _comparison(source, node)
        case ast.BoolOp():
            yield from _boolean(source, node)
        case ast.UnaryOp(op=ast.Not()):
            yield _replace(source, "not taken away", node, source.text_of(node.operand))
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_text(node):
            yield from _replace_operator(source, "arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
        case ast.Constant():
            yield from _constant(source, node)
        case ast.If() | ast.While() | ast.IfExp():
            if isinstance(node.test, ast.Name | ast.Call | ast.Attribute | ast.Await | ast.NamedExpr):
                yield _replace(source, "condition turned", node.test, f"not ({source.text_of(node.test)})")
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield _replace(source, "act left out", node, "None")
        case ast.Raise():
            yield _replace(source, "raise left out", node, "pass")
        case ast.Call():
            yield from _call(source, node)
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
            yield from _elements(source, node)


def _replace(source: Source, kind: str, node: ast.expr | ast.stmt, text: str) -> Change:
    return Change(kind, source.text_of(node), (Edit(*source.place(node), text),))


def _boolean(source: Source, node: ast.BoolOp) -> Iterator[Change]:
    is_and = isinstance(node.op, ast.And)
    for value in node.values:
        if is_and:
            yield _replace(source, "conjunct dropped", value, "True")
        elif not (isinstance(value, ast.Constant) and value.value in (False, 0)):  # `x or False` is as good as `x or 0`
            yield _replace(source, "disjunct dropped", value, "False")


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in sides) or any(
        isinstance(side, ast.Constant) and isinstance(side.value, str | bytes) for side in sides
    )


def _comparison(source: Source, node: ast.Compare) -> Iterator[Change]:
    sides = [node.left, *node.comparators]
    for (left, right), op in zip(pairwise(sides), node.ops, strict=True):
        yield from _replace_operator(source, "comparison", left, right, *_COMPARISONS[type(op)])


def _replace_operator(
    source: Source, kind: str, left: ast.expr, right: ast.expr, old: str, new: str
) -> Iterator[Change]:
    """Change the operator between two operands, between which the text may also have brackets and comments."""
    start, end = source.place(left)[1], source.place(right)[0]
    operator = re.search(re.escape(old).replace(r"\ ", r"\s+"), source.text[start:end])
    if operator is not None:
        about = f"{source.text_of(left)} {old} {source.text_of(right)}"
        yield Change(kind, about, (Edit(start + operator.start(), start + operator.end(), new),))


def _constant(source: Source, node: ast.Constant) -> Iterator[Change]:
    near = source.code_around(node)
    match node.value:
        case bool():
            yield Change("constant", near, (Edit(*source.place(node), str(not node.value)),))
        case int():
            yield Change("constant", near, (Edit(*source.place(node), str(node.value + 1)),))
        case float():
            yield Change("constant", near, (Edit(*source.place(node), str(node.value * 2 or 1.0)),))


def _call(source: Source, node: ast.Call) -> Iterator[Change]:
    if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        other = "max" if node.func.id == "min" else "min"
        yield Change("min and max", source.text_of(node), (Edit(*source.place(node.func), other),))
    for keyword in node.keywords:
        if keyword.arg and _HEADER.match(keyword.arg):
            start, end = source.place(keyword)
            comma = re.match(r"\s*,", source.text[end:])
            yield Change(
                "header left out", source.text_of(keyword), (Edit(start, end + (comma.end() if comma else 0), ""),)
            )
    if scope := _SCOPE.fullmatch(source.text_of(node)):
        name = scope[1]
        weaker = '"runs:read"' if name == "OPERATE" else f'{name}.translate({{}}).replace("write", "read")'
        if name.endswith("_READ"):
            weaker = f'{name}.replace("read", "write")'
        yield Change("another scope", source.text_of(node), (Edit(*source.place(node.args[0]), weaker),))


def _elements(source: Source, node: ast.Tuple | ast.List | ast.Set | ast.Dict) -> Iterator[Change]:
    """Drop each element of a sequence of literals. Of a dictionary, drop only those HTTP headers that are guards."""
    if isinstance(node, ast.Dict):
        entries = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        entries = [
            (key, value)
            for key, value in entries
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and _HEADER.match(key.value)
        ]
    else:
        if len(node.elts) < 2 or not all(isinstance(element, ast.Constant) for element in node.elts):  # noqa: PLR2004
            return
        entries = [(element, element) for element in node.elts]
    for key, value in entries:
        start, end = source.place(key)[0], source.place(value)[1]
        comma = re.match(r"\s*,", source.text[end:])
        edit = Edit(start, end + (comma.end() if comma else 0), "")
        yield Change("element dropped", source.text[start:end], (edit,))
