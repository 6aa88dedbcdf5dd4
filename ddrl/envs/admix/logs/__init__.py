"""Logs of ad mixing: track_log (what each request could show) and joined_exposure (what was shown and billed).

A log is a folder with contracts.json and the two Parquet files, joined on request_id. `docs/admix.md` describes them.
"""
