"""Rules to compare a policy with, each one class in one file (`ddrl.core.plugins`); `replay.Baseline` is what they are.

All see the same delayed counts. Only `hindsight` knows the day itself.
"""
