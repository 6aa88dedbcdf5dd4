"""What breaks a run on purpose."""
