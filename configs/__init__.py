"""The configurations that come with the runtime (import name xgr_runtime.configs, so that they are found when installed)."""
