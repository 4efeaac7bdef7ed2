"""What travels between processes, without any I/O: frames, control messages, the handshake."""
