"""Benchmarks, in folders by subject: each is `python -m benchmarks.FOLDER.NAME [--short] [--json FILE]` and saves its
figures in benchmarks/results by default. `harness` has what all of them share; `peers` is what the interpreters of
other libraries run."""
