"""Hosts PySpark's ``StatefulProcessor`` classes, unmodified."""
