"""Acting: a policy in ONNX Runtime, exploration, the worker that plays and records, and greedy evaluation.

Rollouts and evaluators run this stage; it reads a mailbox and writes a lane. Torch is never imported here nor by what
this imports: hundreds of rollout processes share a machine, and torch costs 145 MiB of private memory in each."""
