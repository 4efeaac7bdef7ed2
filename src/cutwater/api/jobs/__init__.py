"""Starting a job, the handle on it, forks, and the dry run of a restore."""
