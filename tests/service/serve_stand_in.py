"""`python -m tests.service.serve_stand_in DRAIN_S`: the serving process around the stand-in engine, for tests of signals."""

import asyncio
import sys

from tests.service.servers import with_free_port
from tests.service.stand_in import StandInEngine
from xgr_runtime.service.address import announce
from xgr_runtime.service.server import serve

if __name__ == "__main__":
    config = with_free_port(drain_s=float(sys.argv[1]))
    sys.stdout.write(asyncio.run(serve(StandInEngine(), config, announce)).name)
