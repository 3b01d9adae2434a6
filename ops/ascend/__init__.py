"""Providers for Ascend NPUs: torch_npu's ops, and compositions of aten ops where there are none. Not run on hardware."""
