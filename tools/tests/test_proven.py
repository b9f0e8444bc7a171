"""Does `make check` run a test again whenever something changed that it can depend on, and only then?"""

from pathlib import Path

import pytest

from tools import proven

FILES = {
    "pyproject.toml": "",
    "kernels/ops/norm.py": "import math\n",
    "kernels/ops/rope.py": "from kernels.ops import norm\n",
    "kernels/tests/conftest.py": "",
    "kernels/tests/test_norm.py": "from kernels.ops.norm import scale\n",
    "kernels/tests/test_rope.py": "import kernels.ops.rope\n",
    "services/decode/__main__.py": "from services.decode import server\n",
    "services/decode/server.py": "",
    "services/decode/tests/test_start.py": "RUN = ('-m', 'services.decode')\n",
    "services/recipe/tests/test_page.py": "PAGE = 'docs/api.md'\n",
    "docs/api.md": "",
    "tools/tests/test_all.py": "",
}
TESTS = [name for name in FILES if "/test_" in name]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository whose tests have all passed."""
    monkeypatch.setattr(proven, "LEDGER", tmp_path / "ledger.json")
    for name, text in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tree = proven.Tree(tmp_path / "tree")
    assert TESTS == proven.unproven(tree, TESTS)
    proven.passed(tree, TESTS)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("kernels/ops/norm.py", ["norm", "rope", "all"]),  # rope imports it
        ("kernels/ops/rope.py", ["rope", "all"]),
        ("kernels/tests/conftest.py", ["norm", "rope", "all"]),
        ("kernels/tests/test_norm.py", ["norm", "all"]),
        ("services/decode/server.py", ["start", "all"]),  # started by name
        ("docs/api.md", ["page", "all"]),
        ("pyproject.toml", ["norm", "rope", "start", "page", "all"]),
    ],
)
def test_what_depends_on_a_change_runs_again(root: Path, changed: str, again: list[str]) -> None:
    """Nothing else does."""
    (root / changed).write_text("# changed\n")

    assert again == [Path(name).stem.removeprefix("test_") for name in proven.unproven(proven.Tree(root), TESTS)]


def test_a_new_and_an_unchanged_test(root: Path) -> None:
    """A test that was never seen runs; nothing runs when nothing changed."""
    (root / "kernels/tests/test_new.py").write_text("")
    tree = proven.Tree(root)

    assert ["kernels/tests/test_new.py"] == proven.unproven(tree, tree.tests(["kernels", "services"]))
    assert ["services/recipe/tests/test_page.py"] == tree.tests(["services", "--ignore=services/decode"])


def test_what_a_test_leaves_beside_weights_runs_nothing_again(root: Path) -> None:
    """A model's digest is written by whoever reads the model first."""
    (root / "kernels/tests/.fathom-digest.json").write_text("{}")

    assert [] == proven.unproven(proven.Tree(root), TESTS)


def test_a_damaged_ledger_proves_nothing(root: Path) -> None:
    """All tests run."""
    proven.LEDGER.write_text("{")

    assert TESTS == proven.unproven(proven.Tree(root), TESTS)
