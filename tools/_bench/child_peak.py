"""Runs a command and prints its seconds and peak memory as one JSON object; a process of its own, and a small one.

The kernel counts the memory of the process that forks into the peak of its child, so a benchmark that holds arrays cannot
ask for its children itself.

    python child_peak.py COMMAND ...
"""

import json
import os
import subprocess
import sys
import time


def main() -> int:
    """The command's output goes to standard error; its exit code is this one's."""
    start = time.perf_counter()
    child = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    peak_mib = usage.ru_maxrss / 1024
    cpu_s = usage.ru_utime + usage.ru_stime
    facts = {"seconds": seconds, "cpu_seconds": cpu_s, "peak_rss_mib": peak_mib}
    print(json.dumps({name: round(value, 3) for name, value in facts.items()}))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    raise SystemExit(main())
