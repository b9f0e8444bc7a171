"""Start the decode balancer."""

from services.chassis.service import run
from services.decode_lb.config import DecodeLbSettings
from services.decode_lb.server import build

if __name__ == "__main__":
    run(DecodeLbSettings, build)
