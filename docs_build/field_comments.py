"""Extend the Python reference: the comment on a field's line, or above it, is its description."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import griffe

from docs_build.comments import read_field_comment


class FieldComments(griffe.Extension):
    """Takes `# ...` of an annotated assignment of a class as its docstring."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the comment from the source."""
        is_field = isinstance(node, ast.AnnAssign) and attr.parent and attr.parent.is_class
        if not is_field or attr.docstring:
            return
        assert isinstance(attr.filepath, Path)
        lines = attr.filepath.read_text().splitlines()
        comment = read_field_comment(lines, node.lineno, node.end_lineno)
        if comment:
            attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)
