"""Event time as a number: microseconds since the epoch, its ends, and the longest stretch of it."""

MIN_WATERMARK = -(2**63)
"""No watermark yet."""
MAX_WATERMARK = 2**63 - 1
"""End of time: no more rows."""
MAX_SPAN_US = 2**60
"""Longest window and lateness: 36,000 years; sums of them with event times cannot overflow."""
