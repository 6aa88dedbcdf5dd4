"""The nouns every stage shares: config, layouts of rows and parameters, roles, the environment protocol, errors.
Imports numpy and msgspec only."""
