"""Start the entrypoint."""

from services.chassis.service import run
from services.entrypoint.config import EntrypointSettings
from services.entrypoint.server import build

if __name__ == "__main__":
    run(EntrypointSettings, build)
