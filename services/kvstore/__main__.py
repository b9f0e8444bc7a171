"""Start the KV store."""

from services.chassis.service import run
from services.kvstore.config import KvstoreSettings
from services.kvstore.server import build

if __name__ == "__main__":
    run(KvstoreSettings, build)
