"""Which parts make up the recipe, and in which order do they start and stop?"""

import asyncio
import ctypes

from starlette.types import ASGIApp

from services.chassis import telemetry
from services.chassis.service import Service
from services.recipe.app import build_app
from services.recipe.config import RecipeSettings
from services.recipe.generating import Front
from services.recipe.grammars import GrammarCompiler
from services.recipe.idempotency import Idempotency
from services.recipe.image_fetch import ImageFetcher
from services.recipe.image_urls import read_rules
from services.recipe.keys_gate import Gate
from services.recipe.keys_watch import open_keys
from services.recipe.listener import Listener
from services.recipe.meters import Meters
from services.recipe.model_folder import load_model
from services.recipe.responses_background import Background
from services.recipe.upstream import Upstream


async def build(service: Service) -> None:
    """Load the tokenizer, connect to the entrypoint, open the public port."""
    settings: RecipeSettings = service.settings
    keyring = open_keys(service, settings.keys_file)
    service.progress("load tokenizer", 0, 1)
    model = await asyncio.to_thread(load_model, settings.model)
    _return_freed_memory()
    service.progress("load tokenizer", 1, 1)

    channel = service.channel(settings.entrypoint_address, "entrypoint")
    upstream = Upstream(channel, service.boot_id, model.name)
    compiler = GrammarCompiler(model.tokenizer_digest)
    fetcher = ImageFetcher(read_rules(settings.image_urls))
    front = Front(model, upstream, Meters(service.metrics), settings.max_body_bytes, compiler, fetcher)

    def guarded(app: ASGIApp) -> ASGIApp:
        return Gate(Idempotency(app, settings.max_body_bytes), keyring, service.metrics)

    background = _open_state(service, settings.state_url.get_secret_value())
    listener = Listener(build_app(front, guarded, background), settings.public_listen, settings.drain_seconds)

    service.spawn(upstream.follow_model(), "follow model")
    service.spawn(listener.serve(), "public HTTP")
    service.on_drain(listener.drain)
    service.on_stop(upstream.close)
    if background is not None:
        service.spawn(background.tend(), "background responses")
        service.on_drain(background.drain)
        service.on_stop(background.end)
    service.on_stop(compiler.close)
    service.on_stop(fetcher.close)
    telemetry.log.info(
        "recipe.listening", address=listener.address, model=model.name, context_tokens=model.context_tokens
    )


def _open_state(service: Service, state_url: str) -> Background | None:
    """Return what keeps responses and goes on with them in the background; None when nothing is to be kept."""
    if not state_url:
        return None
    # Late: the database library is 14 MB of memory, and a recipe without state does without.
    from services.recipe.response_store import ResponseStore

    store = ResponseStore(state_url)
    service.spawn(store.tend(), "tend state")
    service.on_stop(store.close)
    return Background(store, service.boot_id)


def _return_freed_memory() -> None:
    """Hand back to the system what reading tokenizer.json needed for a moment: 16 MB of this process's 100, once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other libraries do it by themselves or not at all
    if trim is not None:
        trim(0)
