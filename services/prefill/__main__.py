"""Start a prefill replica."""

from services.chassis.service import run
from services.prefill.config import PrefillSettings
from services.prefill.server import build

if __name__ == "__main__":
    run(PrefillSettings, build)
