"""The history of a run as data, a checker that trusts nobody, and pictures."""
