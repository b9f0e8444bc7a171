"""Which parts make up the recipe, and in which order do they start and stop?"""

import asyncio
import ctypes

from services.chassis import telemetry
from services.chassis.service import Service
from services.recipe.answering import Front
from services.recipe.app import build_app
from services.recipe.config import RecipeSettings
from services.recipe.listener import Listener
from services.recipe.meters import Meters
from services.recipe.model_folder import load_model
from services.recipe.upstream import Upstream


async def build(service: Service) -> None:
    """Load the tokenizer, connect to the entrypoint, open the public port."""
    settings: RecipeSettings = service.settings
    service.progress("load tokenizer", 0, 1)
    model = await asyncio.to_thread(load_model, settings.model, settings.model_name)
    _return_freed_memory()
    service.progress("load tokenizer", 1, 1)

    channel = service.channel(settings.entrypoint_address, "entrypoint")
    upstream = Upstream(channel, service.boot_id, model.name)
    front = Front(model, upstream, Meters(service.metrics), settings.max_body_bytes)
    listener = Listener(build_app(front), settings.public_listen, settings.drain_seconds)

    service.spawn(upstream.follow_model(), "follow model")
    service.spawn(listener.serve(), "public HTTP")
    service.on_drain(listener.drain)
    service.on_stop(upstream.close)
    telemetry.log.info(
        "recipe.listening", address=listener.address, model=model.name, context_tokens=model.context_tokens
    )


def _return_freed_memory() -> None:
    """Hand back to the system what reading tokenizer.json needed for a moment: 16 MB of this process's 100, once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries do it by themselves or not at all
    if trim is not None:
        trim(0)
