"""`python -m tests.service.serve_stand_in DRAIN_S [HOLD_S]`: the serving process around the stand-in engine, for tests of signals.

HOLD_S: as long as a client may take to receive an answer and send its next call.
"""

import asyncio
import sys

from tests.service.servers import with_free_port
from tests.service.stand_in import StandInEngine
from xgr_runtime.service import server
from xgr_runtime.service.address import announce

if __name__ == "__main__":
    config = with_free_port(drain_s=float(sys.argv[1]))
    if len(sys.argv) > 2:
        server.HOLD_S = float(sys.argv[2])
    sys.stdout.write(asyncio.run(server.serve(StandInEngine(), config, announce)).name)
