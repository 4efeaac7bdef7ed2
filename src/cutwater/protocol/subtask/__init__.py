"""The machine of one subtask: barriers, freezes, the choice of its next input, its event time."""
