"""An extension of the Python reference: the comment behind a field is its description."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Takes `# ...` behind an annotated assignment of a class as its docstring."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the comment from the source."""
        if isinstance(node, ast.AnnAssign) and attr.parent and attr.parent.is_class and not attr.docstring:
            line = (attr.source.splitlines() or [""])[-1]
            if comment := line.partition("  # ")[2]:
                attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)
