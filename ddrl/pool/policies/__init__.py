"""Queue policies: one file each, named by its file (ddrl.core.plugins). `ddrl.pool.policy` says what they must do."""
