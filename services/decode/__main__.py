"""Start a decode replica."""

import asyncio
from importlib import import_module

from kernels.models.weights import BadWeights, gguf_file
from services.chassis.config import BadSettings
from services.chassis.service import Service, run
from services.decode.config import DecodeSettings


async def build(service: Service) -> None:
    """Look for the weights, then import the engine: torch takes seconds, and a folder without weights needs none of it.

    In a thread, so that probes and signals are answered meanwhile.  Raises BadSettings.
    """
    try:
        gguf_file(service.settings.model)
    except BadWeights as error:
        raise BadSettings(f"FATHOM_DECODE_MODEL: {error}") from error
    server = await asyncio.to_thread(import_module, "services.decode.server")
    await server.build(service)


if __name__ == "__main__":
    run(DecodeSettings, build)
