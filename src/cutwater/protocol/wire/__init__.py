"""Bytes that travel between processes, without any I/O: frames, control messages, the handshake."""
