"""A checkpoint directory on a local (or mounted) file system."""
