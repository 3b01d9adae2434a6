"""Hardware abstraction: devices, the op registry, provider tables, tolerances."""
