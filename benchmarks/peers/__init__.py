"""Scripts that run a peer library under its own interpreter; none imports ddrl."""
