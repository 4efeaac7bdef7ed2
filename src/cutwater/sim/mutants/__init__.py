"""Mutants: the core or its host with one mistake each, which simulation must find."""
