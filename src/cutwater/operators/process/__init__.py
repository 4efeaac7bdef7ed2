"""Process functions: a user's logic with states and timers."""
