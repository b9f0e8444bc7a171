"""Is the tree what the house says it is?"""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import sizes

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = ("recipe", "entrypoint", "prefill_lb", "decode_lb", "kvstore")
SERVICES = (*TORCH_FREE, "prefill", "decode", "vision")


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
        text = path.read_text(encoding="utf-8")
        if text.strip() and path.name != "__init__.py" and not ast.get_docstring(ast.parse(text)):
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torch_free_services_run_where_torch_is_absent(tmp_path):
    """Recipe, entrypoint, balancers and kvstore install and start in a clean environment without torch."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    wanted = f"{ROOT}[{','.join(TORCH_FREE)}]"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), wanted]
    subprocess.run(install, check=True, timeout=400)

    assert (
        0
        != subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False, timeout=60).returncode
    )
    env = {
        "FATHOM_ENTRYPOINT_CLUSTER_KEY": "00" * 32,
        "FATHOM_ENTRYPOINT_PREFILL_LB_ADDRESS": "127.0.0.1:1",
        "FATHOM_ENTRYPOINT_DECODE_LB_ADDRESS": "127.0.0.1:1",
        "FATHOM_KVSTORE_PATH": str(tmp_path / "kv"),
        "FATHOM_RECIPE_MODEL": str(tmp_path),
        "FATHOM_RECIPE_ENTRYPOINT_ADDRESS": "127.0.0.1:1",
    }
    for service in TORCH_FREE:
        command = [str(python), "-m", f"services.{service}", "--check-config"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
        assert 0 == done.returncode, f"{service}: {done.stdout}{done.stderr}"
        imported = (
            f"import sys, services.{service}.server, services.{service}.__main__; sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run(
            [str(python), "-c", imported], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
        )
        assert 0 == done.returncode, f"{service}: {done.stderr}"
