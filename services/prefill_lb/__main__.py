"""Start the prefill balancer."""

from services.chassis.service import run
from services.prefill_lb.config import PrefillLbSettings
from services.prefill_lb.server import build

if __name__ == "__main__":
    run(PrefillLbSettings, build)
