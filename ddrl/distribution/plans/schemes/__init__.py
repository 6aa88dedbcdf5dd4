"""The built-in schemes, one file each, found by name (`plans.scheme`)."""
