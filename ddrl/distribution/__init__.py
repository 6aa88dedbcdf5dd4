"""Bringing each published model to every host at the speed of the wire, and experience back.

`plans`: a scheme (pure function) makes a `Plan`, the simulator runs it on a modeled network, the planner chooses.
`transport`: the executor runs a plan over MPI straight out of and into mailbox slots, and links are measured. `relay`:
one relay a host, which uses both. MPI is imported when it is used: plans, costs and simulations work where it is not
installed. Must not import another stage, nor torch."""
