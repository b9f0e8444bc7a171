"""Is the tree what the house says it is?"""

import importlib
import re
from pathlib import Path

import pytest

from tools import sizes

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("recipe", "entrypoint", "prefill_lb", "decode_lb", "kvstore", "prefill", "decode", "vision")


@pytest.mark.parametrize("root", ["proto", "kernels", "services"])
def test_import_roots_resolve_inside_the_repository(root):
    """No dependency may install a package under one of our generic names."""
    package = importlib.import_module(root)

    assert ROOT / root / "__init__.py" == Path(str(package.__file__))


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_its_rooms(service):
    """Someone new finds the same files in every service."""
    folder = ROOT / "services" / service

    missing = [n for n in ("__main__.py", "config.py", "server.py", "README.md", "tests") if not (folder / n).exists()]
    assert [] == missing


def test_a_file_over_its_limit_is_named(tmp_path, monkeypatch):
    """The ceiling is checked by lines, and the message says which file and which limit."""
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    long_file = tmp_path / "long.py"
    long_file.write_text("x = 1\n" * 401)

    assert ["long.py: 401 lines, limit 400"] == list(sizes.too_large(long_file))


def test_files_open_with_the_question_they_answer():
    """Every module says in its first line what it is for."""
    silent = []
    for path in sizes.sources():
        # The first line that is no comment; the lint knows a docstring from a string that only looks like one.
        begin = next((line for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"), "")
        if begin and path.name != "__init__.py" and not begin.startswith(('"""', 'r"""')):
            silent.append(str(path.relative_to(ROOT)))
    assert [] == silent


def test_no_drawer_for_leftovers():
    """Names that fit anything end up holding everything."""
    banned = {"utils", "common", "helper", "helpers", "manager", "base", "misc", "core", "impl", "v2"}
    assert [] == [str(p.relative_to(ROOT)) for p in sizes.sources() if p.stem in banned]


def test_links_in_the_docs_lead_somewhere():
    """A reader of docs/architecture.md finds each hop at the named file."""
    broken = []
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("services/*/README.md"),
    ]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
        for target in re.findall(r"`((?:services|kernels|proto|k8s|e2e|bench|tools|docs)/[\w./-]+\.\w+)`", text):
            if not (ROOT / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert [] == broken
