"""The ladder: what can be shown about the Ascend backend on a machine without an NPU, rung by rung."""
