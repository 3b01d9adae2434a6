"""Triton kernels in the language of release 3.2, which both Triton compilers accept, with plain launchers.

No vendor is named here: who registers a launcher for a device passes that device's `LaunchRules`. A kernel has a
one-dimensional grid of as many programs as the device works on at once and loops inside; rows are moved whole; sums
are in fp32; int64 appears in addresses only.
"""
