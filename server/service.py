"""The parts of a running router, their start and their end."""

from __future__ import annotations

import structlog

from tpla.core.config.router import RouterConfig, WorkerAddress
from tpla.router.admission import Admission
from tpla.router.dispatch import Dispatcher
from tpla.router.health import HealthMonitor
from tpla.router.metrics import RouterMetrics
from tpla.router.registry import Registry, Worker
from tpla.server.record import InFlight

log = structlog.get_logger("tpla.server")

GIVE_UP_SECONDS = 5.0
"""After the grace period: how long error events, closing and aborts may take."""


class Service:
    """Everything that one app serves from."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = RouterMetrics()
        self.registry = Registry(config)
        self.dispatcher = Dispatcher(self.registry, config, self.metrics)
        self.monitor = HealthMonitor(
            self.registry, config.health, on_lost=self.dispatcher.worker_lost
        )
        self.admission = Admission(config.admission)
        self.in_flight = InFlight()
        self.draining = False
        self.metrics.watch("active_requests", "Samples being served", lambda: self.admission.active)
        self.metrics.watch("queued_requests", "Requests waiting", lambda: self.admission.queued)
        self.metrics.watch("in_flight_requests", "Requests open", lambda: self.in_flight.count)
        self.metrics.watch_workers(self.registry.report)

    async def start(self) -> None:
        """Begin to check the configured workers; serving need not wait for the first answers."""
        for address in (*self.config.prefill, *self.config.decode):
            self.add_worker(address)

    def add_worker(self, address: WorkerAddress) -> Worker:
        """Know a worker from now on.

        Raises:
            BadRequest: it is known already.
        """
        worker = self.registry.add(address)
        self.monitor.watch(worker)
        return worker

    @property
    def ready(self) -> bool:
        """Whether requests can be served."""
        return self.registry.ready and not self.draining

    async def drain(self) -> None:
        """Refuse new requests and let those in flight finish, within the grace period."""
        self.draining = True
        grace = self.config.shutdown_grace_period_secs
        log.info("draining", in_flight=self.in_flight.count, grace_seconds=grace)
        if await self.in_flight.idle(grace):
            return
        log.warning("grace_period_over", in_flight=self.in_flight.count)
        self.admission.refuse_waiting()
        await self.dispatcher.give_up("The router is shutting down.")
        await self.in_flight.idle(GIVE_UP_SECONDS)

    async def stop(self) -> None:
        """Leave no task, connection or leg behind."""
        self.draining = True
        self.admission.refuse_waiting()
        await self.dispatcher.give_up("The router is shutting down.")
        await self.in_flight.idle(GIVE_UP_SECONDS)
        await self.dispatcher.close(GIVE_UP_SECONDS)
        await self.monitor.close()
        await self.registry.close()
