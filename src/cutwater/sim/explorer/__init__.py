"""All interleavings of small worlds."""
