"""Do the services that compute nothing run with what they declare, where torch is absent?"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = ("recipe", "entrypoint", "prefill_lb", "decode_lb", "kvstore")

# Everything a service imports when it starts, and its settings checked; torch, and whatever imports it, must be absent.
STARTING = """
import importlib.util, runpy, sys
service = sys.argv.pop(1)
for absent in ("torch", "triton", "transformers"):
    assert importlib.util.find_spec(absent) is None, absent
importlib.import_module(f"services.{service}.server")
sys.argv[1:] = ["--check-config"]
runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
"""


def required(name: str, extras: frozenset[str], found: set[tuple[str, str]]) -> None:
    """Add (distribution, extra) of all that `name` requires, and of what that requires; "" is no extra."""
    for extra in {"", *extras}:
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for line in distribution(name).requires or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                required(wanted.name.lower(), frozenset(wanted.extras), found)


def link_files(name: str, folder: Path) -> None:
    """Put a distribution's files where an installer would; several share folders such as google/."""
    for file in distribution(name).files or ():
        target = folder / file
        if ".." in file.parts or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(Path(str(file.locate())).resolve())


def start_all(command: list[str], folder: Path, **environment: str) -> None:
    """Check every service's settings in an environment; `command` is its Python."""
    env = environment | {
        "FATHOM_ENTRYPOINT_CLUSTER_KEY": "00" * 32,
        "FATHOM_ENTRYPOINT_PREFILL_LB_ADDRESS": "127.0.0.1:1",
        "FATHOM_ENTRYPOINT_DECODE_LB_ADDRESS": "127.0.0.1:1",
        "FATHOM_KVSTORE_PATH": str(folder / "kv"),
        "FATHOM_RECIPE_MODEL": str(folder),
        "FATHOM_RECIPE_ENTRYPOINT_ADDRESS": "127.0.0.1:1",
    }
    for service in TORCH_FREE:
        words = [*command, "-c", STARTING, service]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=120, cwd=folder)
        assert 0 == done.returncode, f"{service}: {done.stdout}{done.stderr}"


def test_declared_dependencies_suffice(tmp_path: Path) -> None:
    """Only our services, proto and the closure of their extras, laid out as an installer would; no kernels, no torch."""
    found: set[tuple[str, str]] = set()
    try:
        required("fathom", frozenset(TORCH_FREE), found)
    except PackageNotFoundError as missing:
        pytest.fail(f"{missing} is required and not installed")
    names = {name for name, _ in found} - {"fathom"}
    assert "torch" not in names
    for name in sorted(names):
        link_files(name, tmp_path / "site")
    for package in ("services", "proto"):
        (tmp_path / "site" / package).symlink_to(ROOT / package)

    # -S leaves out the environment that runs this test.
    start_all([sys.executable, "-S"], tmp_path, PYTHONPATH=str(tmp_path / "site"), PYTHONDONTWRITEBYTECODE="1")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_clean_environment_installs_and_starts(tmp_path: Path) -> None:
    """The same by the real installer, with the pinned versions; needs a package index."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=240)
    wanted = f"{ROOT}[{','.join(TORCH_FREE)}]"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), wanted]
    subprocess.run(install, check=True, timeout=600)

    start_all([str(python)], tmp_path)
