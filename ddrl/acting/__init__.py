"""Acting: one model, its policy in ONNX Runtime, choosers of actions, and the policy on disk.

Below the stages: rollouts, evaluators, `ddrl.evaluate` and programs that serve a policy act through it; the learner
makes the model. Torch is never imported here nor by what this imports: hundreds of rollout processes share a machine,
and torch costs 145 MiB of private memory in each."""
