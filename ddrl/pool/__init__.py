"""Several training tasks on fewer devices: leases, the queue for them, pre-warming of collectors, and the simulator.

Imports ddrl.core and ddrl.channels alone: no torch, no MPI. The queue (`policies`) and the pre-warming (`prewarm`)
are pure state machines; `leases` runs them between processes, `simulator` in simulated time."""
