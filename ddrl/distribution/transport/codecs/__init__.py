"""The built-in codecs, one file each, found by name (`transport.codec`)."""
