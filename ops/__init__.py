"""Providers of the ops declared in xgr_runtime.hal.ops, by vendor. Installs as `xgr_ops`."""
