"""Is every file, function and class within the limits of the house?"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIP = {".venv", "build", ".git", ".fathom", "node_modules"}
_MAX_FUNCTION_LINES = 60
_MAX_CLASS_LINES = 300
_MAX_INIT_LINES = 30
_MAX_SERVICE_README_LINES = 40
_MAX_ADR_LINES = 60
_KERNEL_DECORATORS = "triton.jit", "gluon.jit"


def sources() -> Iterator[Path]:
    """Every hand-written Python file of the repository."""
    # Folders are skipped before they are entered: a virtual environment has a hundred times our files.
    for folder, inner, names in os.walk(ROOT):
        inner[:] = sorted(set(inner) - SKIP)
        for name in sorted(names):
            if name.endswith(".py") and "_pb2" not in name:
                yield Path(folder, name)


def file_limit(path: Path) -> int:
    """Most lines this file may have."""
    relative = path.relative_to(ROOT)
    if path.name == "__init__.py":
        return _MAX_INIT_LINES
    if "tests" in relative.parts or relative.parts[0] == "e2e":
        return 500
    return 600 if relative.parts[:2] == ("kernels", "ops") else 400


def _is_gpu_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith(_KERNEL_DECORATORS) for decorator in node.decorator_list)


def too_large(path: Path) -> Iterator[str]:
    """Name what in `path` is over its limit."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    num_lines = text.count("\n")
    if num_lines > (limit := file_limit(path)):
        yield f"{name}: {num_lines} lines, limit {limit}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = _MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else _MAX_FUNCTION_LINES
            if length > limit and not (isinstance(node, ast.FunctionDef) and _is_gpu_kernel(node)):
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, limit {limit}"


def too_long_pages() -> Iterator[str]:
    """Name each service README and ADR that is over its limit."""
    pages = [(p, _MAX_SERVICE_README_LINES) for p in ROOT.glob("services/*/README.md")]
    pages += [(p, _MAX_ADR_LINES) for p in ROOT.glob("docs/adr/*.md")]
    for path, limit in pages:
        if (num_lines := path.read_text(encoding="utf-8").count("\n")) > limit:
            yield f"{path.relative_to(ROOT)}: {num_lines} lines, limit {limit}"


def main() -> None:
    wrong = [line for path in sources() for line in too_large(path)] + list(too_long_pages())
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
