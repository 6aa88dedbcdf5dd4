"""Choosers: each file holds the class of its name (`core.plugins`), which turns an acting model's outputs into actions
(`ddrl.acting.chooser.Chooser`)."""
