"""Sockets: reading, writing, dialling, and the door where strangers prove the job's secret."""
