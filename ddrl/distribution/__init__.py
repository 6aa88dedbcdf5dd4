"""How each published model reaches every host, and how experience reaches the trainer's.

A scheme (`schemes`) makes a `Plan`, the simulator runs it on a modeled network, and auto chooses the best; `executor`
runs it over MPI straight out of and into mailbox slots; `links` measures the network. `relay` composes one relay per
host of these and of its other duties (`flows`). MPI is imported when it is used: plans, costs and simulations work
where it is not installed. Must not import another stage, nor torch."""
