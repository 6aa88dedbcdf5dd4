"""The dashboard: `python -m ddrl.dashboard [FOLDER]`, where FOLDER holds runs, or is one.

`app` lays the frame, `watch` reads runs safely for every page, and each file in `subjects/` is one page. Reads run
directories alone: a run never waits for it, and a run that ended reads as well as one that is at work."""
