"""Providers for NVIDIA GPUs: the Triton kernels of `xgr_ops.triton` under CUDA launch rules."""
