"""A service with nothing in it, for tests that need a process."""

import asyncio

from services.chassis.config import ServiceSettings, settings_config
from services.chassis.service import Service, run


class ProbeSettings(ServiceSettings):
    service = "vision"
    model_config = settings_config("vision")

    mode: str = ""
    """What goes wrong: "", "crash" (a background task), "refuse" (build), "hang" (a thread in build), "slow" (drain)."""


async def build(service: Service) -> None:
    """Do what `mode` says."""
    mode = service.settings.mode
    if mode == "crash":
        service.spawn(_crash(), "doomed")
    elif mode == "refuse":
        raise ValueError("this model cannot be loaded")
    elif mode == "hang":
        import time

        await asyncio.to_thread(time.sleep, 60)
    elif mode == "slow":

        async def forever() -> None:
            await asyncio.sleep(60)

        service.on_drain(forever)
    service.advertise()


async def _crash() -> None:
    await asyncio.sleep(0.05)
    raise ValueError("doomed")


if __name__ == "__main__":
    run(ProbeSettings, build)
