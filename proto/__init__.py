"""The wire as .proto files (import name xgr_runtime.proto, so that they are found when installed); `xgr proto` prints where."""
