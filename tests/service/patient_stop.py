"""`python -m tests.service.patient_stop MODULE ARGUMENTS`: that module's server, which when it stops waits longer for its callers' next calls.

The service allows a client a tenth of a second to send the next call after an answer: one that comes when gRPC has stopped is
dropped. On a machine that is held up, a tenth of a second is nothing.
"""

from __future__ import annotations

import runpy
import sys

from xgr_runtime.service import server

HOLD_S = 1.0

if __name__ == "__main__":
    server.HOLD_S = HOLD_S
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
