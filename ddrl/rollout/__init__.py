"""Rolling out: exploration schedules, and the worker that plays and records.

Rollouts run this stage; it acts through `ddrl.acting`, reads a mailbox and writes a lane. Torch is never
imported here nor by what this imports."""
