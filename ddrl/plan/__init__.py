"""Predicts what other numbers of tasks, devices, hosts and rollouts would do, from recorded runs.

Above the stages: it joins what telemetry recorded, the pool's simulator and the distribution's planner.
Nothing in ddrl imports it."""

from ddrl.plan.costs import Costs, fit
from ddrl.plan.model import Case, Prediction, predict
from ddrl.plan.recordings import Recording, read_recordings

__all__ = ["Case", "Costs", "Prediction", "Recording", "fit", "predict", "read_recordings"]
