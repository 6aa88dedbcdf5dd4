"""Running plans over MPI: the executor and what it moves, codecs, experience and tables upwards, measuring of links."""
