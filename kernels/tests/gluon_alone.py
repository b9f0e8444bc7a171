"""What does a Gluon kernel compute whose programs do not meet? Its own source, in Python, one program after the other.

Tensors stand for tensors, and layouts mean nothing. Addresses are real ones, so that reading beside every argument is
found. Products are made when they are asked for, or when they are waited for: a kernel that is right is so with both.
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

UNSIGNED = torch.int64
"""What holds whole numbers of 32 bits without a sign."""
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Value(Tensor):
    """A tensor that is cast as kernels cast."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]  # a kernel's types, not torch's

    def __iadd__(self, more):  # type: ignore[misc]  # makes a new one, maybe of another shape
        return self + more

    def to(self, dtype, bitcast=False):  # type: ignore[override]  # a kernel's cast, not torch's
        if not bitcast:
            return super().to(dtype)
        plain = self
        if self.dtype == UNSIGNED:
            plain = torch.where(self > 0x7FFFFFFF, self - 2**32, self).as_subclass(Value)
            plain = plain.to(torch.int32)
        if dtype == UNSIGNED:
            return plain.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        return plain.view(dtype)


def valued(made: Any) -> Value:
    return torch.as_tensor(made).as_subclass(Value)


@dataclass(frozen=True)
class Pointer:
    """Addresses."""

    address: Tensor
    dtype: torch.dtype

    def __add__(self, more):
        return Pointer(self.address + torch.as_tensor(more).long() * self.dtype.itemsize, self.dtype)

    def __sub__(self, less):
        return self + -less

    def __getitem__(self, index):
        return Pointer(self.address[index], self.dtype)

    def to(self, dtype):
        return Pointer(self.address, dtype)


@dataclass
class Shared:
    """Shared memory."""

    data: Tensor

    def index(self, at):
        return Shared(self.data[int(at)])

    def slice(self, first, count, dim=0):
        return Shared(self.data.narrow(dim, first, count))

    @property
    def shape(self):
        return self.data.shape

    def permute(self, order):
        return Shared(self.data.permute(order))

    def store(self, value):
        assert value.shape == self.data.shape
        assert value.dtype == self.data.dtype
        self.data.copy_(value)

    def load(self, _layout):
        return valued(self.data.clone())

    def _reinterpret(self, dtype, shape, _layout):
        return Shared(self.data.view(dtype).view(shape))


class Pending:
    """A product that was asked for."""

    def __init__(self, a, b, acc) -> None:
        self._operands = (a, b, acc)

    def made(self):
        a, b, acc = (
            each.made() if isinstance(each, Pending) else getattr(each, "data", each) for each in self._operands
        )
        return valued(acc + a.float() @ b.float())


def e2m1_bytes(four, low, high):
    """As the kernels' PTX: e4m3 bytes that nibbles choose, those of values 0 to 3, then 4 to 7."""
    both = (low.long() & 0xFFFFFFFF) | (high.long() << 32)
    made = []
    for first in (0, 16):
        word = torch.zeros_like(both)
        for at in range(4):
            nibble = (four.long() >> (first + 4 * at)) & 15
            byte = ((both >> (8 * (nibble & 7))) & 255) | ((nibble & 8) << 4)
            word |= byte << (8 * at)
        made.append(valued(word.to(torch.int32)))
    return tuple(made)


def e2m1_halves(four, *tables):
    """Likewise, the bytes that low nibbles choose from the first two tables, and high ones from the others."""
    made = []
    for first, (low, high) in ((0, tables[:2]), (4, tables[2:])):
        both = (low.long() & 0xFFFFFFFF) | (high.long() << 32)
        word = torch.zeros_like(both)
        for at in range(4):
            nibble = (four.long() >> (8 * at + first)) & 15
            byte = ((both >> (8 * (nibble & 7))) & 255) | ((nibble & 8) << 4)
            word |= byte << (8 * at)
        made.append(valued(word.to(torch.int32)))
    return tuple(made)


def as_e4m3(low, high):
    """Two in an int16; what is beyond the largest becomes it."""
    low, high = (each.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int() for each in (low, high))
    return valued((low | (high << 8)).to(torch.int16))


def pair(low, high, scale):
    factor = (scale << 16).view(torch.float32).double()
    low, high = ((each.double() * factor).float().bfloat16().view(torch.int16).int() for each in (low, high))
    return valued((low & 0xFFFF) | (high << 16))


def e2m1_pairs(four, scale):
    """As the kernels' PTX: low nibbles of bytes 0, 1 and 2, 3, then the high ones, times a bf16 / 2 ** 126, two in a word."""
    values = [_E2M1[(four >> shift).long() & 15] * 2.0**-126 for shift in range(0, 32, 4)]
    return tuple(pair(values[low], values[low + 2], scale) for low in (0, 4, 1, 5))


def e4m3_pairs(four, scale):
    """Likewise: bytes 0 and 2, then 1 and 3, times a bf16 / 2 ** 120."""
    parts = [((four >> shift) & 255).to(torch.uint8).view(torch.float8_e4m3fn).double() for shift in range(0, 32, 8)]
    parts = [part * 2.0**-120 for part in parts]
    return pair(parts[0], parts[2], scale), pair(parts[1], parts[3], scale)


def swiglu_of(gate, up, limit):
    """As the kernels' PTX: of values rounded to bf16 first."""
    gate, up = (each.to(torch.bfloat16).float() for each in (gate, up))
    gate = gate.clamp(max=limit)
    return gate / (1.0 + torch.exp2(gate * -1.4426950408889634)) * up.clamp(-limit, limit)


@dataclass
class Flag:
    """A barrier: what it still waits for, and how often it has had all of it."""

    count: int
    arrived: int = 0
    num_bytes: int = 0
    completed: int = 0
    copies: list[Callable[[], None]] = field(default_factory=list)


class Engine:
    """The tensor engine's copies, the barriers that count their bytes, and partitions of warps that meet at them.

    Copies are made at once, or when somebody waits for them. A partition is a thread, and one runs at a time.
    """

    _PATIENCE_SECONDS = 20

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._flags: dict[int, Flag] = {}
        self._turn = threading.Condition()

    def init(self, flag, count):
        self._flags[flag.data.data_ptr()] = Flag(count)

    def expect(self, flag, num_bytes):
        known = self._flags[flag.data.data_ptr()]
        known.num_bytes += num_bytes
        self.arrive(flag, count=1)

    def arrive(self, flag, count):
        known = self._flags[flag.data.data_ptr()]
        known.arrived += count
        assert known.arrived <= known.count
        self._complete(known)

    def _complete(self, known: Flag) -> None:
        if known.arrived == known.count and not known.num_bytes:
            known.arrived, known.completed = 0, known.completed + 1
            self._turn.notify_all()

    def async_copy_global_to_shared(self, boxes, corner, flag, smem):
        known = self._flags[flag.data.data_ptr()]
        row, column = (int(each) for each in corner)
        assert list(smem.data.shape) == boxes.block_shape

        def copy() -> None:
            """What lies beside the matrix is zeros."""
            rows, columns = boxes.block_shape
            box = boxes.base[row : row + rows, column : column + columns]
            smem.data.zero_()
            smem.data[: box.shape[0], : box.shape[1]] = box
            known.num_bytes -= smem.data.nbytes
            assert known.num_bytes >= 0, "more bytes than were expected"
            self._complete(known)

        smem.data.fill_(float("nan") if smem.data.is_floating_point() else -1)
        known.copies.append(copy)
        if not self._is_late:
            known.copies.pop()()
        self._turn.notify_all()

    def arrive_after(self, flag, copies):
        """Of all threads that are counted: when these are made, which the others wait for."""
        known = self._flags[flag.data.data_ptr()]

        def copy() -> None:
            for each in copies:
                each()
            self.arrive(flag, count=known.count)

        known.copies.append(copy)
        if not self._is_late:
            known.copies.pop()()
        self._turn.notify_all()

    def wait(self, flag, phase):
        known = self._flags[flag.data.data_ptr()]
        while known.completed % 2 == int(phase):
            if known.copies:
                known.copies.pop(0)()
            elif not self._turn.wait(self._PATIENCE_SECONDS):
                raise AssertionError("nobody arrives at a barrier")

    def specialize(self, functions_and_args, _worker_warps, _worker_registers):
        """The others begin when this one waits."""
        failed: list[BaseException] = []

        def run(function, args) -> None:
            with self._turn:
                try:
                    function(*args)
                except BaseException as error:  # noqa: BLE001 - raised where all have ended
                    failed.append(error)

        workers = [threading.Thread(target=run, args=each, daemon=True) for each in functions_and_args[1:]]
        for worker in workers:
            worker.start()
        run(*functions_and_args[0])
        for worker in workers:
            worker.join()
        if failed:
            raise failed[0]


class Groups:
    """Copies that threads ask for themselves, in groups: made at once, or when the partition waits for their group."""

    def __init__(self, load: Callable[..., Tensor], engine: Engine, *, is_late: bool) -> None:
        self._load, self._engine, self._is_late = load, engine, is_late
        self._own = threading.local()

    def _asked(self) -> list[list[Callable[[], None]]]:
        """Groups of this partition, oldest first; the last one is still open."""
        asked: list[list[Callable[[], None]]] = self._own.__dict__.setdefault("asked", [[]])
        return asked

    def async_copy_global_to_shared(self, smem, at, mask=True):
        def copy() -> None:
            smem.data.copy_(self._load(at, mask))

        smem.data.fill_(-1)
        self._asked()[-1].append(copy)
        if not self._is_late:
            self._asked()[-1].pop()()

    def commit_group(self):
        self._asked().append([])

    def mbarrier_arrive(self, flag, *, increment_count):
        """Every thread of the partition arrives when its own copies are made."""
        assert not increment_count
        copies = [copy for group in self._asked() for copy in group]
        self._asked()[:] = [[]]
        self._engine.arrive_after(flag, copies)

    def wait_group(self, num_outstanding):
        while len(self._asked()) > num_outstanding + 1:
            for copy in self._asked().pop(0):
                copy()


BROUGHT: list[tuple[int, int, int]] = []
"""What was asked for to be in the L2: an address, how many bytes from there on, and the program that asked."""


class Machine:
    """What a kernel's source names, over the memory of one launch."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._program: tuple[int, ...] = ()
        self._programs: tuple[int, ...] = ()
        self._memory: list[Tensor] = []

    def _places(self, at, mask):
        """For each tensor of the launch: which elements of an access are in it, its bytes, and which of them they are."""
        address, mask = torch.broadcast_tensors(at.address, torch.as_tensor(mask))
        found = torch.zeros_like(mask)
        for memory in self._memory:
            start = memory.data_ptr()
            inside = mask & (address >= start) & (address < start + memory.nbytes)
            found |= inside
            if inside.any():
                assert not (address[inside] % at.dtype.itemsize).any()
                place = (address[inside] - start).as_subclass(Tensor)[:, None] + torch.arange(at.dtype.itemsize)
                yield inside, memory.view(-1).view(torch.uint8), place
        assert torch.equal(found, mask), "an access beside every argument"

    def load(self, at, mask=True, other=0):
        shape = torch.broadcast_shapes(at.address.shape, torch.as_tensor(mask).shape)
        got = (
            torch.full(shape, other, dtype=torch.float32).to(at.dtype)
            if at.dtype.itemsize == 1 and at.dtype.is_floating_point
            else torch.full(shape, other, dtype=at.dtype)
        )
        for inside, memory, place in self._places(at, mask):
            got[inside] = memory[place].view(at.dtype)[:, 0]
        return valued(got)

    def store(self, at, value, mask=True):
        assert value.dtype == at.dtype
        value = value.broadcast_to(at.address.shape)
        for inside, memory, place in self._places(at, mask):
            memory[place] = value[inside].as_subclass(Tensor).contiguous()[:, None].view(torch.uint8)

    def ask(self, at, sizes):
        """Nothing but that all of it is there."""
        asked = sizes > 0
        assert not (sizes[asked] % 16).any()
        list(self._places(Pointer(at.address, torch.uint8), asked))
        list(self._places(Pointer(at.address + sizes - 1, torch.uint8), asked))
        pieces = zip(at.address[asked].tolist(), sizes[asked].tolist(), strict=True)
        BROUGHT.extend((*piece, self._program[0]) for piece in pieces)

    def multiply(self, a, b, acc, *, use_acc=True, is_async):
        assert is_async
        pending = Pending(a, b, acc if use_acc else 0.0)
        return pending if self._is_late else pending.made()

    def wait(self, count, deps):
        assert count == 0
        made = [each.made() if isinstance(each, Pending) else each for each in deps]
        return made[0] if len(made) == 1 else made

    def allocate(self, dtype, shape, _layout):
        return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))

    def names(self) -> dict[str, Any]:
        def one(name: str) -> Callable[..., Any]:
            return lambda *args, axis=None: getattr(torch, name)(*args, **({} if axis is None else {"dim": axis}))

        def two(name: str) -> Callable[..., Any]:
            return lambda a, b: getattr(torch, name)(*(torch.as_tensor(each, dtype=_kind(a, b)) for each in (a, b)))

        def where(which, a, b):
            if isinstance(a, Pointer):
                return Pointer(torch.where(which, a.address, b.address), a.dtype)
            return valued(torch.where(torch.as_tensor(which), a, b))

        layouts = ("BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout",
                   "NVMMASharedLayout", "SliceLayout")  # fmt: skip
        language = SimpleNamespace(
            **dict.fromkeys(layouts, lambda *_: None),
            **{name: one(name) for name in ("abs", "exp2", "sum")},
            **{name: two(name) for name in ("maximum", "minimum")},
            bfloat16=torch.bfloat16, float32=torch.float32, float8e4nv=torch.float8_e4m3fn,
            int16=torch.int16, int32=torch.int32, int64=torch.int64, uint8=torch.uint8, uint32=UNSIGNED,
            pointer_type=lambda dtype: dtype,
            program_id=lambda axis: valued(torch.tensor(self._program[axis], dtype=torch.int32)),
            num_programs=lambda axis: valued(torch.tensor(self._programs[axis], dtype=torch.int32)),
            arange=lambda start, end, layout: valued(torch.arange(start, end, dtype=torch.int32)),
            zeros=lambda shape, dtype, _layout: valued(torch.zeros(shape, dtype=dtype)),
            full_like=torch.full_like, div_rn=torch.div, max=torch.amax, where=where,
            load=self.load, store=self.store,
            join=lambda a, b: torch.stack((a, b), dim=-1), split=lambda both: (both[..., 0], both[..., 1]),
            expand_dims=torch.unsqueeze,
            convert_layout=lambda value, _layout, assert_trivial=False: value,
            num_warps=lambda: 8, thread_barrier=lambda: None,
            associative_scan=lambda value, axis, _combine: value.cumsum(axis),
            static_range=range, static_assert=lambda _: None, allocate_shared_memory=self.allocate,
        )  # fmt: skip
        engine = Engine(is_late=self._is_late)
        language.warp_specialize = engine.specialize
        return {
            "gl": language,
            "mbarrier": engine,
            "tma": engine,
            "async_copy": Groups(self.load, engine, is_late=self._is_late),
            "fence_async_shared": lambda: None,
            "ask": self.ask,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait,
            "as_e4m3": as_e4m3,
            "e2m1_bytes": e2m1_bytes,
            "e2m1_halves": e2m1_halves,
            "e2m1_pairs": e2m1_pairs,
            "e4m3_pairs": e4m3_pairs,
            "swiglu_of": swiglu_of,
        }

    def function(self, kernel: JITFunction[Any]) -> FunctionType:
        """A kernel's source over this machine, and that of its parts, each over what its own module names."""
        return self._over(kernel, self.names(), {})

    def _over(self, kernel: JITFunction[Any], own: dict[str, Any], modules: dict[int, dict[str, Any]]) -> FunctionType:
        """own: what this machine names.  modules: those that were met."""
        named = kernel.fn.__globals__
        if (names := modules.get(id(named))) is None:
            names = modules[id(named)] = {}
            for name, value in named.items():
                if name in own:
                    names[name] = own[name]
                elif isinstance(value, JITFunction):
                    names[name] = self._over(value, own, modules)
                else:
                    names[name] = value.value if isinstance(value, gl.constexpr) else value
            names |= own
        return FunctionType(kernel.fn.__code__, names)

    def run(
        self, kernel: JITFunction[Any], grid: tuple[int, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """All programs."""
        for first in range(grid[0]):
            for second in range(grid[1] if len(grid) > 1 else 1):
                self.returned(kernel, (first, second), grid, args, named)

    def returned(
        self,
        function: JITFunction[Any],
        program: tuple[int, ...],
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """By one program, of a kernel or of a part of it."""
        self._memory = list({each.data_ptr(): each for each in args if isinstance(each, Tensor)}.values())
        self._program, self._programs = program, grid
        taken = [
            Pointer(valued(torch.tensor(each.data_ptr())), each.dtype) if isinstance(each, Tensor) else each
            for each in args
        ]
        return self.function(function)(*taken, **named)


def _kind(a: Any, b: Any) -> torch.dtype:
    """A number takes the type of the tensor beside it."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.promote_types(a.dtype, b.dtype)
    return next((each.dtype for each in (a, b) if isinstance(each, Tensor)), torch.int32)


class Launcher:
    """What is launched like a kernel, and runs its source here."""

    def __init__(self, kernel: JITFunction[Any], *, is_late: bool) -> None:
        self._kernel, self._is_late = kernel, is_late

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, num_stages: int = 1, **named: Any) -> None:
            Machine(is_late=self._is_late).run(self._kernel, grid, args, named)

        return launch
