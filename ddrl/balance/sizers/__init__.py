"""Sizers, one a file; `ddrl.balance.sizer.make_sizer` loads them by name."""
