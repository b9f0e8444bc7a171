"""Start the vision service."""

from services.chassis.service import run
from services.vision.config import VisionSettings
from services.vision.server import build

if __name__ == "__main__":
    run(VisionSettings, build)
