"""Bringing each published model to every host at the speed of the wire, and experience back.

A scheme (pure function) makes a `Plan`; the executor runs it over MPI straight out of and into mailbox slots; the
simulator runs the same plan on a modeled network; the planner measures the links and chooses. Only `executor`,
`uplink`, `relay` and `links` touch MPI, and they import it when they are used: plans, costs and simulations work where
MPI is not installed. Must not import another stage, nor torch."""
