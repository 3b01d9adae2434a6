"""`python -m tests.ascend COMMAND ...`: the command `xgr` with the fake NPU and the vendor's ops as the tests read them.

`demo` is the exception: its service is a process of its own, `xgr serve`, which knows nothing of the fake.
"""

from __future__ import annotations

import sys

from tests.ascend import backend, vendor_attention, vendor_ops
from xgr_runtime.cli import main

if __name__ == "__main__":
    sys.stderr.write("npu is the fake of the tests: it computes on host memory\n")
    backend.install()
    vendor_ops.define()
    vendor_attention.define()
    sys.exit(main())
