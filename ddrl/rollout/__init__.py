"""Rolling out: exploration schedules, the worker that plays and records, and greedy evaluation.

Rollouts and evaluators run this stage; it acts through `ddrl.acting`, reads a mailbox and writes a lane. Torch is never
imported here nor by what this imports."""
