"""Stores: their names, seals and safe ways to open what lies in them."""
