"""What does a Gluon kernel compute? Its own source, run in Python: a thread for each program, tensors for tensors.

Gluon has no interpreter. Layouts mean nothing here and copies into shared memory happen either when they are asked for
or when they are waited for, as told: a kernel that is right must be right with both. Counters and barriers are real.
"""
# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

_PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class Pointer:
    """An address, or a tensor of them."""

    memory: Tensor
    offset: Any = 0

    def __add__(self, more):
        return Pointer(self.memory, self.offset + more)


@dataclass
class Flag:
    """A barrier in shared memory: counts the bytes of a phase, or is arrived at."""

    expected: int = 0
    come: int = 0
    phases: int = 0
    late: list[Callable[[], None]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def end_phase(self) -> None:
        for copy in self.late:
            copy()
        self.late.clear()
        self.expected = self.come = 0
        self.phases += 1
        self.changed.notify_all()


@dataclass
class Shared:
    """Shared memory."""

    data: Tensor

    def index(self, at):
        return Shared(self.data[int(at)])

    def permute(self, order):
        return Shared(self.data.permute(order))

    def store(self, value):
        assert value.shape == self.data.shape
        self.data.copy_(value)

    def _reinterpret(self, _dtype, shape, _layout):
        count = torch.Size(shape).numel()
        return Shared(self.data.view(-1)[:count].view(shape))


@dataclass
class Flags:
    """Some barriers, or one."""

    flags: list[Flag]

    def index(self, at):
        return Flags([self.flags[int(at)]])


class Machine:
    """Programs of one launch, and what they share."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._own = threading.local()
        self._counted = threading.Condition()

    def names(self) -> dict[str, Any]:
        """What stands for the modules that a kernel's source names."""
        language = SimpleNamespace(
            bfloat16=torch.bfloat16,
            float32=torch.float32,
            int32=torch.int32,
            int64=torch.int64,
            program_id=lambda _axis: self._own.program,
            arange=lambda start, end, _layout: torch.arange(start, end),
            zeros=lambda shape, dtype, _layout: torch.zeros(shape, dtype=dtype),
            load=self.load,
            store=self.store,
            atomic_add=self.atomic_add,
            where=lambda which, a, b: torch.where(*map(torch.as_tensor, (which, a, b))),
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            sum=torch.sum,
            max=torch.amax,
            exp=torch.exp,
            exp2=torch.exp2,
            rsqrt=torch.rsqrt,
            convert_layout=lambda value, _layout: value,
            SliceLayout=lambda *_: None,
            static_range=range,
            thread_barrier=lambda: None,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialise,
        )
        return {
            "gl": language,
            "mbarrier": SimpleNamespace(
                init=lambda *_, **__: None, expect=self.expect, wait=self.wait, arrive=self.arrive
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": lambda a, b, acc, is_async: acc + a.data.float() @ b.data.float(),
            "warpgroup_mma_wait": lambda _, deps: deps[0],
            "fence": lambda: None,
            "until": self.until,
        }

    def load(self, at, mask=None, other=0.0, cache_modifier=""):
        if mask is None:
            return at.memory[at.offset]
        mask = torch.as_tensor(mask)
        offset, mask = torch.broadcast_tensors(torch.as_tensor(at.offset), mask)
        got = at.memory[torch.where(mask, offset, 0)]
        return torch.where(mask, got, torch.tensor(other, dtype=got.dtype))

    def store(self, at, value, mask=True):
        offset, mask, value = torch.broadcast_tensors(*map(torch.as_tensor, (at.offset, mask, value)))
        assert value.dtype == at.memory.dtype
        at.memory[offset[mask]] = value[mask]

    def atomic_add(self, at, value, sem, scope):
        with self._counted:
            before = int(at.memory[at.offset])
            at.memory[at.offset] = before + value
            self._counted.notify_all()
        return before

    def until(self, at, target) -> None:
        with self._counted:
            assert self._counted.wait_for(lambda: at.memory[at.offset] >= target, _PATIENCE_SECONDS)

    def allocate(self, dtype, shape, _layout):
        if dtype == torch.int64:
            return Flags([Flag() for _ in range(shape[0])])
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def expect(self, flag, num_bytes) -> None:
        with flag.flags[0].changed:
            flag.flags[0].expected += num_bytes

    def arrive(self, flag, count) -> None:
        """At a barrier of one, whose phase ends with it."""
        assert count == 1
        with flag.flags[0].changed:
            flag.flags[0].end_phase()

    def copy(self, matrix, place, flag, into) -> None:
        (one,), (row, column) = flag.flags, place
        rows, columns = into.data.shape
        assert [rows, columns] == list(matrix.block_shape)
        assert row + rows <= matrix.base.shape[0]
        assert column + columns <= matrix.base.shape[1]

        def now() -> None:
            into.data.copy_(matrix.base[row : row + rows, column : column + columns])

        with one.changed:
            one.come += into.data.nbytes
            if self._is_late:
                one.late.append(now)
            else:
                now()
            one.changed.notify_all()

    def wait(self, flag, phase) -> None:
        """Until the phase of this parity has ended: at once where it is the other one's turn."""
        (one,) = flag.flags
        with one.changed:
            assert one.changed.wait_for(
                lambda: (one.phases & 1) != phase or one.expected == one.come > 0, _PATIENCE_SECONDS
            ), "what was expected never comes"
            if (one.phases & 1) == phase:
                one.end_phase()

    def specialise(self, partitions, worker_warps, worker_registers) -> None:
        """Workers in threads of their own, the first partition in the program's."""
        assert len(partitions) == 1 + len(worker_warps) == 1 + len(worker_registers)
        (function, taken), *workers = partitions
        program, failures = self._own.program, []

        def one(worker, args) -> None:
            self._own.program = program
            try:
                worker(*args)
            except BaseException as failure:  # noqa: BLE001 - raised below
                failures.append(failure)

        threads = [threading.Thread(target=one, args=worker, daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        function(*taken)
        for thread in threads:
            thread.join(_PATIENCE_SECONDS)
            assert not thread.is_alive(), "a worker does not end"
        if failures:
            raise failures[0]

    def run(self, kernel: JITFunction[Any], programs: int, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Every program in a thread; the first failure is raised."""
        source = _named_by(kernel)
        names: dict[str, Any] = {
            name: value.value if isinstance(value, gl.constexpr) else value for name, value in source.items()
        }
        names |= {
            name: FunctionType(value.fn.__code__, names, name)
            for name, value in source.items()
            if isinstance(value, JITFunction)
        }
        names |= self.names()
        taken = [Pointer(each.view(-1)) if isinstance(each, Tensor) else each for each in args]
        failures: list[BaseException] = []

        def one(program: int) -> None:
            self._own.program = program
            try:
                FunctionType(kernel.fn.__code__, names)(*taken, **named)
            except BaseException as failure:  # noqa: BLE001 - raised below, in the test's own thread
                failures.append(failure)

        threads = [threading.Thread(target=one, args=(program,), daemon=True) for program in range(programs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def _named_by(kernel: JITFunction[Any]) -> dict[str, Any]:
    """What the kernel's module names, and those of the functions it calls: a name means one thing in all of them."""
    found: dict[str, Any] = {}
    waiting = [kernel]
    while waiting:
        source = waiting.pop().fn.__globals__
        fresh = {name: value for name, value in source.items() if not name.startswith("__") and name not in found}
        found |= fresh
        waiting += [value for value in fresh.values() if isinstance(value, JITFunction)]
    return found
