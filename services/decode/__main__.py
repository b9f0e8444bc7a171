"""Start a decode replica."""

from services.chassis.service import run
from services.decode.config import DecodeSettings
from services.decode.server import build

if __name__ == "__main__":
    run(DecodeSettings, build)
