"""What messages hold: bytes to columns, and back, whatever brought them."""
