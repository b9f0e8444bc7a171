"""What of a device's memory goes where, and how many KV blocks does that leave?

Everything that is planned is allocated while a replica starts, so a plan that fits is never out of memory later. Plain
numbers: the caller measures the free bytes, and writes `describe()` or `fields()` to its own log.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

STEP_TOKENS = 16384
"""Most tokens of a step, unless told."""
LEAST_BLOCKS = 2
"""One is the null block."""
_LEAST_MARGIN_BYTES = 1 << 30
_MARGIN_SHARE = 1 / 64


class NoRoom(ValueError):  # noqa: N818 - named by meaning, like the service errors
    """The device has less free memory than the model and its blocks need. Says what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that a model takes on its device beside its KV blocks, all of them from the start on."""

    weights: int
    """With tables that last as long: rotations, block tables, a sampler's own."""
    workspace: int
    """What the largest step makes beyond them, at its peak."""
    graphs: int = 0
    """Memory of captured steps: their results and what lies between their kernels."""
    windows: int = 0
    """Window states of all slots, the null window included."""

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.graphs + self.windows


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device: `free` before anything is loaded is the sum of the others and of `left`."""

    free: int
    weights: int
    workspace: int
    graphs: int
    windows: int
    margin: int
    """For what nobody counts: the library's own workspaces, kernels' code, the allocator's slack."""
    blocks: int
    num_blocks: int
    """KV blocks, the null block included."""

    @property
    def left(self) -> int:
        """What nobody is given: less than a block if the blocks were to take what there is."""
        used = self.weights + self.workspace + self.graphs + self.windows + self.margin + self.blocks
        return self.free - used

    def describe(self) -> str:
        """One line for whoever starts a replica."""
        parts = [(self.weights, "weights"), (self.workspace, "workspace of a step"), (self.graphs, "graphs")]
        parts += [(self.windows, "windows"), (self.margin, "margin")]
        parts += [(self.blocks, f"for {self.num_blocks} KV blocks")]
        listed = " + ".join(f"{gib(num_bytes)} {name}" for num_bytes, name in parts if num_bytes)
        rest = f" + {gib(self.left)} left" if self.left >= 0 else f" - {gib(-self.left)} missing"
        return f"device memory: {gib(self.free)} free = {listed}{rest}"

    def fields(self) -> dict[str, int]:
        """The same for a log that takes data: sizes as `*_bytes`, and `num_blocks`."""
        sizes = {f"{name}_bytes": value for name, value in asdict(self).items() if name != "num_blocks"}
        return sizes | {"left_bytes": self.left, "num_blocks": self.num_blocks}


def margin_bytes(free: int) -> int:
    """What is left to those who do not say what they take, of a device with so many free bytes."""
    return max(_LEAST_MARGIN_BYTES, int(free * _MARGIN_SHARE))


def plan_blocks(
    need: Need, *, free: int, block_bytes: int, num_blocks: int | None = None, margin: int | None = None
) -> MemoryPlan:
    """How the free bytes of a device are used.

    num_blocks: null block included; None takes as many as fit.  margin: bytes; None is `margin_bytes(free)`.
    Raises NoRoom, naming what takes the room and what would help.
    """
    margin = margin_bytes(free) if margin is None else margin
    fitting = max((free - need.total - margin) // block_bytes, 0)
    count = max(fitting, LEAST_BLOCKS) if num_blocks is None else num_blocks
    plan = MemoryPlan(
        free=free,
        weights=need.weights,
        workspace=need.workspace,
        graphs=need.graphs,
        windows=need.windows,
        margin=margin,
        blocks=count * block_bytes,
        num_blocks=count,
    )
    if fitting < max(count, LEAST_BLOCKS):
        raise NoRoom(f"{plan.describe()}. {_advice(need, plan, fitting, block_bytes)}")
    return plan


def check_host(needed: int, *, available: int, what: str) -> None:
    """Raise NoRoom when the host cannot pin what a device reads from its memory.  what: names it, in the plural."""
    if needed > available:
        raise NoRoom(
            f"{what} take {gib(needed)} of the host's memory, pinned so that the device can read them;"
            f" {gib(available)} are available, {gib(needed - available)} missing."
            f" Give this process {gib(needed)} (a container's memory limit counts), end what else takes the host's"
            " memory, or run on the CPU, which reads them from their files"
        )


def _advice(need: Need, plan: MemoryPlan, fitting: int, block_bytes: int) -> str:
    if fitting >= LEAST_BLOCKS:
        return (
            f"At most {fitting} blocks fit: set kv_bytes to {fitting * block_bytes} or less,"
            " or leave it unset to take what there is"
        )
    if need.weights + plan.margin > plan.free:
        return (
            "The weights alone do not fit: end what else uses this device, take one with more memory,"
            " or weights of fewer bytes"
        )
    spare = plan.free - plan.margin - LEAST_BLOCKS * block_bytes
    cures = [
        ("take fewer tokens per step", need.workspace),
        ("take fewer sequences at a time", need.windows),
        ("end what else uses this device, or take one with more memory", 0),
    ]
    helping = [cure for cure, freed in cures if not freed or need.total - freed <= spare]
    return "No KV block fits beside them: " + ", or ".join(helping)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
