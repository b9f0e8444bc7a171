"""Is the memory of a large message used again for the next one?"""

import subprocess
import sys

import pytest

from services.chassis.memory import keep_freed_memory

_PROGRAM = """
import resource, sys
from services.chassis.memory import keep_freed_memory
assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def message():
    data = b"x" * (2 << 20)
    return [data, data + b"y"]
message()
before = faults()
for _ in range(20):
    message()
print(faults() - before)
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library has no mallopt")
def test_messages_cost_no_page_faults():
    """Twenty of 4 MiB: without it each costs a thousand, and a stream of them more time than it takes to send it."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=30)
    assert int(done.stdout) < 2000
