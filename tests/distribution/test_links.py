"""What measured links mean to the simulator, and the watch over the pace of models."""

import math

from ddrl.distribution.transport.links import SHARED_CPU, Links, PaceWatch


def send(watch, clock, seconds, models):
    for sequence in range(models):
        watch.began(sequence)
        clock[0] += seconds
        watch.ended(sequence)


def test_models_that_become_slow_are_noticed_after_a_rest_and_less_often_each_time():
    clock = [0.0]
    watch = PaceWatch(10.0, clock=lambda: clock[0])
    send(watch, clock, 1.0, 30)
    assert not watch.suspicious
    send(watch, clock, 2.0, 5)
    assert watch.suspicious
    watch.restart()
    send(watch, clock, 1.0, 5)
    send(watch, clock, 2.0, 5)
    assert not watch.suspicious  # 15 s after the last look, 20 must pass
    send(watch, clock, 2.0, 5)
    assert watch.suspicious


def test_hosts_on_one_machine_share_its_cores_in_the_model():
    assert Links([1.0, 1.0], [1.0, 1.0], 0.0, 1e-4, 1, 2, 1e-9).network().cores == 2
    assert Links([1.0, 1.0], [1.0, 1.0], 0.0, 1e-4, 2, 2, 1e-9).network().cores == 0
    assert Links([math.inf], [math.inf], 0.0, 0.0, 1, 2, 0.0).network().cores == 0


def test_one_model_that_takes_several_times_as_long_is_enough_while_it_is_under_way():
    clock = [0.0]
    watch, patient = (PaceWatch(10.0, stuck, clock=lambda: clock[0]) for stuck in (3.0, math.inf))
    for one in (watch, patient):
        send(one, clock, 1.0, 12)
    watch.began(100)
    patient.began(100)
    clock[0] += 2.9
    assert not watch.suspicious
    clock[0] += 0.2
    assert watch.suspicious
    assert not patient.suspicious


def test_measured_costs_of_the_processor_are_used_and_count_more_on_a_shared_machine():
    measured = Links([1.0, 1.0], [1.0, 1.0], 0.0, 3e-5, 2, 2, 4e-9).network()
    assert (measured.send_cpu, measured.receive_cpu, measured.cpu_byte) == (1.5e-5, 1.5e-5, 2e-9)
    shared = Links([1.0, 1.0], [1.0, 1.0], 0.0, 3e-5, 1, 2, 4e-9).network()
    assert (shared.send_cpu, shared.cpu_byte) == (1.5e-5 * SHARED_CPU, 2e-9)
