"""The gRPC service; the only package that knows the wire types."""
