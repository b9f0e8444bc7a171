"""Is rich kept out of a service, and from nobody else?"""

import subprocess
import sys

ALONE = """
import sys
from services.chassis.plain_structlog import structlog
assert structlog.get_logger() is not None
assert "rich" not in sys.modules
import rich.console
"""
MEANWHILE = """
import importlib, sys, threading
heard = []

def import_rich():
    try:
        heard.append(importlib.import_module("rich"))
    except ImportError as error:
        heard.append(error)

def watch(event, words):
    # Rich is hidden now, and the import has taken no lock yet.
    if event == "import" and words[0] == "structlog":
        beside = threading.Thread(target=import_rich)
        beside.start()
        beside.join(20)

sys.addaudithook(watch)
from services.chassis.plain_structlog import structlog
assert [sys.modules.get("rich")] == heard, heard
"""


def run(script: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


def test_structlog_brings_no_rich_and_rich_can_be_loaded_later() -> None:
    """A service has neither its memory nor its start."""
    assert (0, "") == run(ALONE)


def test_another_thread_may_import_rich_meanwhile() -> None:
    """It gets rich, and keeps it."""
    assert (0, "") == run(MEANWHILE)
