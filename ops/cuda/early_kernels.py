"""How a kernel of `xgr_ops.triton` starts before the kernel in front of it has ended (programmatic dependent launch)."""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_kernel_in_front():
    """Let the next kernel come, then wait until the one in front has ended and what it wrote can be read.

    The next one may come at once: it waits likewise before it touches memory. A kernel that was started in the ordinary way
    finds nothing to wait for.
    """
    gdc_launch_dependents()
    gdc_wait()
