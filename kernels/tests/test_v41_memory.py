"""Loading a V4.1 checkpoint needs little more memory than what stays of it."""

import json
import subprocess
import sys

import pytest

from kernels.models.v41.tiny import write_tiny_model
from kernels.tests.golden_files import tiny_v41

# 110 MB: 39 MB of fp4 experts, which are 300 MB in fp32, and 59 MB of n-gram tables.
SIZES = {"moe_intermediate_size": 512, "n_routed_experts": 32, "engram_vocab_size": 37500}

LOADING = """
import ctypes, json, sys
from pathlib import Path
import torch
from kernels.models.load import open_model
from kernels.models.v41.checkpoint import Checkpoint
from kernels.models.v41.config import read_v41_config
from kernels.ops.allocator import keep_freed_memory

def memory():
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0] in {"VmHWM:", "VmRSS:", "RssAnon:", "RssFile:"}}

torch.set_num_threads(1)
keep_freed_memory()  # as every engine does
folder, cpu = Path(sys.argv[1]), torch.device("cpu")
before = memory()
opened = open_model(folder, dtype="fp32", block_tokens=None, replay="off", device=cpu, progress=lambda *_: None)
model = opened.build(num_blocks=4, num_windows=2)
peak = memory()["VmHWM"]
ctypes.CDLL(None).malloc_trim(0)
after = memory()
checkpoint = Checkpoint(folder, read_v41_config(folder))
checkpoint.engram_rows(4, torch.tensor([0]))
warm = memory()
checkpoint.engram_rows(1, torch.tensor([1000, 100000, 200000]))
print(json.dumps({"before": before, "peak": peak, "after": after, "warm": warm, "gathered": memory()}))
"""


@pytest.mark.slow
def test_loading_peaks_little_above_what_stays(tmp_path) -> None:
    """At most 1.15 times, on a checkpoint of 110 MB; n-gram tables are mapped, and a few rows read a few pages."""
    tokenizer = {"tokenizer.json": (tiny_v41() / "tokenizer.json").read_text(encoding="utf-8")}
    write_tiny_model(tmp_path, seed=1, tokenizer=tokenizer, text=SIZES, num_shards=3)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "" == done.stderr
    measured = json.loads(done.stdout)
    before, after, warm, gathered = (measured[name] for name in ("before", "after", "warm", "gathered"))
    stays = after["VmRSS"] - before["VmRSS"]

    assert 100e6 < size < 120e6
    assert 300e6 < stays < 400e6, "302 MB of experts stay, some small matrices, and no table"
    assert 1.15 * stays > measured["peak"] - before["VmRSS"]
    assert 1e6 > gathered["RssAnon"] - warm["RssAnon"]
    # A row and its scale may map a large page each: far less than the table's 29 MB.
    assert 3 * 2 * 2.1e6 > gathered["RssFile"] - warm["RssFile"]
