"""What a user runs before a run: `ddrl.testing.conformance` holds an environment to ddrl's contract."""
