"""Forks of a job: following the leader, comparing, and handing the job over."""
