"""Extend the Python reference: the comment after a field is its description."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Takes `# ...` after an annotated assignment of a class as its docstring."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the comment from the source."""
        is_field = isinstance(node, ast.AnnAssign) and attr.parent and attr.parent.is_class
        if not is_field or attr.docstring:
            return
        # the comment ends the last line of an assignment
        comment = attr.source.rstrip().rpartition("\n")[2].partition("  # ")[2]
        if comment:
            attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)
