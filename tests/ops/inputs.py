"""The input generators of the parity suite; they live in the package, which also runs them where no checkout is."""

from xgr_runtime.conformance.op_cases import GENERATORS, OpCase, results_only

__all__ = ["GENERATORS", "OpCase", "results_only"]
