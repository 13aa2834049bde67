"""Maps the names of a server's models to their services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.errors import VkbackendError
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.front import Config, Endpoint, Front
from vkbackend.tools.server.model import in_thread
from vkbackend.tools.server.router.downloads import Downloads
from vkbackend.tools.server.router.pool import Pool
from vkbackend.tools.server.router.registry import Entry, Notes
from vkbackend.tools.server.router.tenant import Tenant
from vkbackend.tools.server.service import Service

log = logging.getLogger("vkbackend.serve")
RELIST_S = 30.0  # Deadline for reading the list of models.
UNREADABLE = "the list of models cannot be read and is unchanged; the server's log says why"


class Catalog(Front):
    """`relist` reads the list of models again. If `takes_any_name` is set, unknown names select the only
    model. If `downloads` is set, clients may add models of the Hugging Face Hub, and delete them."""

    def __init__(
        self,
        config: Config,
        pool: Pool,
        relist: Callable[[], tuple[Sequence[Entry], Notes]],
        takes_any_name: bool = False,
        downloads: bool = False,
    ) -> None:
        super().__init__(config)
        self.downloads = Downloads(self.reload) if downloads else None
        self.pool, self.relist, self._takes_any_name = pool, relist, takes_any_name
        # A network folder may block its reader forever, so later calls wait for the same reader.
        self._reading: asyncio.Future[tuple[Sequence[Entry], Notes]] | None = None
        self._services: WeakKeyDictionary[Tenant, Service] = WeakKeyDictionary()

    @property
    def n_running(self) -> int:
        return sum(service.n_running for service in self._services.values())

    async def run(self) -> None:
        await self.pool.run()

    def close(self) -> None:
        if self.downloads is not None:
            self.downloads.close()
        self.pool.close()

    async def reload(self) -> None:
        """Read the list of models again. If that fails, the list does not change. Raises Refusal (503)."""
        try:
            async with asyncio.timeout(RELIST_S):
                if self._reading is not None:
                    await asyncio.shield(self._reading)
                self._reading = asyncio.ensure_future(in_thread(self.relist))
                entries, _ = await asyncio.shield(self._reading)
        except TimeoutError:
            log.error("the list of models could not be read within %g s", RELIST_S)
            raise Refusal(503, UNREADABLE, code="models_unreadable", retry_s=60) from None
        except (VkbackendError, OSError) as error:
            log.error("the list of models cannot be read: %s", error)
            raise Refusal(503, UNREADABLE, code="models_unreadable", retry_s=5) from None
        finally:
            if self._reading is not None and self._reading.done():
                self._reading = None
        self.pool.relist(entries)

    def find(self, name: str) -> Tenant:
        """Raises Refusal (400 without a name, 404 for an unknown name)."""
        tenants = list(self.pool.tenants.values())
        tenant = self.pool.find(name) if name else None
        if tenant is None and len(tenants) == 1 and (self._takes_any_name or not name):
            return tenants[0]
        if not name:
            text = "name a model; /v1/models lists the available ones"
            raise Refusal(400, text, param="model", code="model_missing")
        if tenant is None:
            text = f"there is no model {name[:200]!r}; /v1/models lists the available ones"
            raise Refusal(404, text, param="model", code="model_not_found")
        return tenant

    def service_of(self, tenant: Tenant) -> Service | None:
        service = self._services.get(tenant)
        if tenant.model is not None:
            if service is None:
                service = self._services[tenant] = Service(tenant.entry.config, tenant.model)
            service.model, service.is_draining = tenant.model, self.is_draining
        return service

    async def forward(self, endpoint: Endpoint, request: Request) -> Response:
        raise NotImplementedError
